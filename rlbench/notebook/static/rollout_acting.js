// What pointer and keys do in the rollout viewer. The cursor is an item of the list, which of its completions where
// several stand side by side, and a token of that, or none.

class Acting extends Rows {
  toggleHead(p) {
    if (!this.open.delete(p)) this.open.add(p);
    this.heights.delete(`h${p}`);
    this.relist();
  }

  toggleFull(i) {
    const row = this.rows.get(i);
    if (!row) return;
    if (this.full.delete(i)) row.wanted = 0;
    else {
      this.full.add(i);
      row.wanted = Math.min(row.n, this.model.get("facts").openTokens);
    }
    this.redraw([`r${i}`]);
  }

  more(i) {
    const row = this.rows.get(i);
    row.wanted = Math.min(row.n, row.pieces.length + this.model.get("facts").openTokens);
    this.askRows();
  }

  spell(p) {
    if (!this.spelt.delete(p)) {
      this.spelt.add(p);
      if (!this.prompts.has(p)) this.send({ kind: "prompt", p }, []);
    }
    this.redraw([`h${p}`]);
  }

  click(event) {
    const place = this.placeOf(event.target);
    if (!place) return;
    const { item, i } = place, asked = event.target.closest("button")?.className;
    this.cursor = { item: item.at, column: Math.max(0, item.samples?.indexOf(i) ?? 0), token: null };
    if (asked === "spell") this.spell(item.head);
    else if (asked === "more") this.more(i);
    else if (item.head !== undefined) {
      if (!event.target.closest(".whole")) this.toggleHead(item.head);
    } else if (event.target.dataset.t !== undefined) this.cursor.token = Number(event.target.dataset.t);
    else if (window.getSelection().isCollapsed) this.toggleFull(i);
    this.showCursor();
    this.sayCursor();
  }

  hover(event) {
    const span = event.target.closest?.("[data-t]");
    if (span) this.sayToken(Number(span.parentElement.dataset.i), Number(span.dataset.t));
    else this.sayCursor();
  }

  placeOf(target) {
    const node = target.closest?.(".item");
    if (!node?.rlb) return null;
    const one = target.closest("[data-i]");
    return { item: node.rlb, i: one ? Number(one.dataset.i) : node.rlb.samples?.[0] };
  }

  key(event) {
    if (event.target !== this.list || event.ctrlKey || event.metaKey || event.altKey) return;
    const item = this.items[this.cursor.item];
    if (!item) return;
    const i = item.samples?.[this.cursor.column], row = this.rows.get(i), { token } = this.cursor;
    const acts = {
      ArrowDown: () => this.move(1),
      ArrowUp: () => this.move(-1),
      PageDown: () => this.move(10),
      PageUp: () => this.move(-10),
      ArrowRight: () => {
        if (item.head !== undefined) return this.open.has(item.head) ? this.move(1) : this.toggleHead(item.head);
        if (row?.pieces.length) this.toToken(row, token === null ? 0 : token + 1);
      },
      ArrowLeft: () => {
        if (item.head !== undefined) return this.open.has(item.head) && this.toggleHead(item.head);
        if (token === null) return this.toHead();
        if (token === 0) this.cursor.token = null;
        else this.toToken(row, token - 1);
      },
      Home: () => (token === null ? this.goTo(0) : this.toToken(row, 0)),
      End: () => (token === null ? this.goTo(this.items.length - 1) : this.toToken(row, row.pieces.length - 1)),
      Escape: () => (this.cursor.token = null),
      Enter: () => (item.head !== undefined ? this.toggleHead(item.head) : this.toggleFull(i)),
    };
    acts[" "] = acts.Enter;
    if (!acts[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
    this.reveal();
    this.showCursor();
    this.sayCursor();
  }

  move(by) {
    for (let step = Math.abs(by); step > 0; step--) {
      const columns = this.items[this.cursor.item].samples?.length ?? 1;
      const column = this.cursor.column + Math.sign(by);
      if (column >= 0 && column < columns) this.cursor.column = column;
      else if (this.items[this.cursor.item + Math.sign(by)]) {
        this.cursor.item += Math.sign(by);
        this.cursor.column = by > 0 ? 0 : (this.items[this.cursor.item].samples?.length ?? 1) - 1;
      }
    }
    this.cursor.token = null;
  }

  goTo(item) {
    this.cursor = { item, column: 0, token: null };
  }

  toHead() {
    let at = this.cursor.item;
    while (at > 0 && this.items[at].head === undefined) at--;
    this.goTo(at);
  }

  toToken(row, at) {
    if (!this.full.has(row.i) && at >= row.pieces.length && row.pieces.length < row.n) this.toggleFull(row.i);
    else if (at >= row.pieces.length && row.pieces.length < row.n) this.more(row.i);
    this.cursor.token = Math.min(at, row.pieces.length - 1);
  }

  // Scroll so that the row, then the token, can be seen.
  reveal() {
    const top = this.tops[this.cursor.item], bottom = this.tops[this.cursor.item + 1], height = this.list.clientHeight;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (bottom > this.list.scrollTop + height) this.list.scrollTop = Math.min(top, bottom - height);
    this.draw();
  }

  cursorNode() {
    const item = this.items[this.cursor.item], node = item && this.nodes.get(item.key);
    return node?.querySelectorAll(".card")[this.cursor.column] ?? node;
  }

  showCursor() {
    for (const old of this.space.querySelectorAll(".here, .cursor")) old.classList.remove("here", "cursor");
    const node = this.cursorNode();
    if (!node) return;
    const focused = document.activeElement === this.list || this.list.contains(document.activeElement);
    if (focused) node.classList.add("here");
    this.list.setAttribute("aria-activedescendant", node.id);
    if (this.cursor.token === null) return;
    const span = node.querySelector(`[data-t="${this.cursor.token}"]`);
    if (!span) return;
    span.classList.add("cursor");
    const tokens = span.closest(".tokens");
    if (!tokens.classList.contains("full")) tokens.classList.add("uncut");
    const box = span.getBoundingClientRect(), list = this.list.getBoundingClientRect();
    if (box.bottom > list.bottom) this.list.scrollTop += box.bottom - list.bottom + 8;
    else if (box.top < list.top) this.list.scrollTop -= list.top - box.top + 8;
    if (this.measure()) this.drawSoon();
  }

  sayCursor() {
    const item = this.items?.[this.cursor.item];
    if (this.cursor.token === null || !item?.samples) this.say("");
    else this.sayToken(item.samples[this.cursor.column], this.cursor.token);
  }

  sayToken(i, t) {
    const row = this.rows.get(i);
    if (row?.pieces[t] === undefined) return;
    this.say(describeToken(t, row.pieces[t], row.kinds[t], row.ids[t], this.scales, (c) => row.values[c][t]));
  }

  say(text) {
    this.readout.textContent = text || "Point at a token, or use the arrow keys, to read its numbers.";
    this.readout.classList.toggle("hint", !text);
  }
}
