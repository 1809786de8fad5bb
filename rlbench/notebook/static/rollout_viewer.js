// The list of the rollout viewer: prompts and their completions, only as many rows as are in view.
// Python's half is rollout_viewer.py; what it is asked and what it answers is described at RolloutDrawing.answer. Before
// this text stand rollout_tokens.js, rollout_rows.js and rollout_acting.js: a widget's module cannot import another file.

const ESTIMATE = { head: 30, row: 26, cards: 150 }; // pixels, until a row was measured
const OVERSCAN = 240; // pixels drawn beyond the view
const ASK_AFTER = 60, ARRANGE_AFTER = 250, BUSY_AFTER = 1000; // milliseconds
const CARD_WIDTH = 280;
let views = 0;

class View extends Acting {
  constructor(model, el) {
    super();
    this.model = model;
    this.name = `rlbv${Date.now().toString(36)}${views++}`;
    this.heads = new Map(); // prompt -> its line
    this.rows = new Map(); // completion -> facts, pieces, ids, values per channel
    this.prompts = new Map(); // prompt -> all its messages, once asked for
    this.open = new Set(); // prompts whose completions are shown
    this.full = new Set(); // completions shown whole
    this.spelt = new Set(); // prompts shown whole
    this.nodes = new Map();
    this.heights = new Map();
    this.asked = new Map(); // message id -> keys
    this.waiting = new Set(); // keys asked for
    this.serial = 0;
    this.cursor = { item: 0, column: 0, token: null };
    this.build(el);
    this.listen();
    this.take(model.get("first"), model.get("first").ids, model.get("first").values);
    this.arrange(model.get("order"), model.get("order"));
    if (!this.isCurrent(model.get("order"))) this.askOrder();
  }

  // -- the frame

  build(el) {
    const make = (tag, className, role) => {
      const node = document.createElement(tag);
      node.className = className;
      if (role) node.setAttribute("role", role);
      return node;
    };
    el.classList.add("rlbv", "rlb-live");
    this.legend = make("div", "legend");
    this.notice = make("div", "notice", "status");
    const top = make("div", "top");
    top.append(this.legend, this.notice);
    this.list = make("div", "list", "tree");
    this.list.tabIndex = 0;
    this.list.setAttribute("aria-label", "Rollouts by prompt. Up and down: rows. Right: open, then the tokens. Enter: whole text.");
    this.list.dataset.lmSuppressShortcuts = "true"; // JupyterLab's own keys (arrows, enter) stay out of the list
    this.space = make("div", "space", "presentation");
    this.list.append(this.space);
    this.readout = make("div", "readout", "status");
    this.readout.setAttribute("aria-live", "polite");
    el.append(top, this.list, this.readout);
    this.el = el;
    this.drawLegend();
    this.say("");
  }

  listen() {
    const changed = (name, act) => {
      const handler = act.bind(this);
      this.model.on(`change:${name}`, handler);
      this.handlers.push([`change:${name}`, handler]);
    };
    this.handlers = [];
    changed("colour", this.recolour);
    changed("whitespace", this.redrawAll);
    changed("columns", this.relist);
    for (const name of ["sort", "filter", "search"]) changed(name, this.askOrderSoon);
    const heard = (content, buffers) => this.hear(content, buffers);
    this.model.on("msg:custom", heard);
    this.handlers.push(["msg:custom", heard]);
    this.list.addEventListener("scroll", () => this.drawSoon(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("click", (event) => this.click(event));
    this.list.addEventListener("mouseover", (event) => this.hover(event));
    this.list.addEventListener("mouseleave", () => this.sayCursor());
    this.list.addEventListener("focus", () => this.showCursor());
    this.list.addEventListener("blur", () => this.showCursor());
    this.watch = new ResizeObserver(() => this.resized());
    this.watch.observe(this.list);
  }

  close() {
    this.watch.disconnect();
    clearTimeout(this.askTimer);
    clearTimeout(this.orderTimer);
    cancelAnimationFrame(this.frame);
    for (const [event, handler] of this.handlers) this.model.off(event, handler);
  }

  get scales() {
    return this.model.get("facts").channels;
  }

  // -- messages

  send(content, keys) {
    const id = `${this.name}.${this.serial++}`;
    this.asked.set(id, keys);
    keys.forEach((key) => this.waiting.add(key));
    setTimeout(() => this.asked.has(id) && this.notify("waiting for the kernel (busy)"), BUSY_AFTER);
    try {
      this.model.send({ id, ...content });
    } catch (error) {
      this.notify("no kernel: only what was sent before can be shown");
    }
    return id;
  }

  hear(content, buffers) {
    if (!this.asked.has(content.id)) return; // another view's
    this.asked.get(content.id).forEach((key) => this.waiting.delete(key));
    this.asked.delete(content.id);
    if (!this.asked.size) this.notify(content.error ?? "");
    if (content.error) return;
    if (content.kind === "order") {
      if (content.id !== this.orderId) return;
      const [groups, counts, samples] = buffers;
      this.arrange({ ...content, groups, counts, samples });
      if (!this.isCurrent(content)) this.askOrder();
    } else if (content.kind === "prompt") {
      this.prompts.set(content.p, content.parts);
      this.redraw([`h${content.p}`]);
    } else {
      this.take(content, buffers[0], buffers[1]);
    }
  }

  notify(text) {
    this.notice.textContent = text;
  }

  // Lines and rows that came, with their numbers.
  take(content, ids, values) {
    ids = typed(Int32Array, ids);
    values = typed(Float32Array, values);
    const changed = [];
    for (const head of content.heads) {
      this.heads.set(head.p, head);
      changed.push(`h${head.p}`);
    }
    let at = 0;
    for (const row of content.rows) {
      const count = row.pieces.length;
      row.ids = ids.subarray(at, at + count);
      row.values = this.scales.map((_, c) => values.subarray(c * ids.length + at, c * ids.length + at + count));
      at += count;
      this.rows.set(row.i, joined(this.rows.get(row.i), row));
      changed.push(`r${row.i}`);
    }
    if (this.items) this.redraw(changed);
  }

  isCurrent(order) {
    return ["sort", "filter", "search"].every((name) => order[name] === this.model.get(name));
  }

  askOrderSoon() {
    clearTimeout(this.orderTimer);
    this.orderTimer = setTimeout(() => this.askOrder(), ARRANGE_AFTER);
  }

  askOrder() {
    const wanted = Object.fromEntries(["sort", "filter", "search"].map((name) => [name, this.model.get(name)]));
    this.orderId = this.send({ kind: "order", ...wanted }, []);
  }

  askRows() {
    const heads = [], rows = [], keys = [];
    for (const item of this.visible ?? []) {
      if (item.head !== undefined) {
        if (!this.heads.has(item.head) && !this.waiting.has(item.key)) heads.push(item.head), keys.push(item.key);
        continue;
      }
      for (const i of item.samples) {
        const key = `r${i}`, row = this.rows.get(i);
        if (this.waiting.has(key)) continue;
        if (!row) rows.push([i, 0, null]), keys.push(key);
        else if (row.wanted > row.pieces.length && row.pieces.length < row.n) {
          rows.push([i, row.pieces.length, row.wanted - row.pieces.length]), keys.push(key);
        }
      }
    }
    const most = this.model.get("facts").rowsAtOnce;
    if (heads.length || rows.length) this.send({ kind: "rows", heads, rows: rows.slice(0, most) }, keys);
  }

  // -- the order of prompts and completions

  arrange(order) {
    this.groups = typed(Int32Array, order.groups);
    this.counts = typed(Int32Array, order.counts);
    this.samples = typed(Int32Array, order.samples);
    this.open.clear();
    const enough = this.model.get("facts").openAtFirst;
    for (let g = 0, rows = 0; g < this.groups.length && rows < enough; g++) {
      this.open.add(this.groups[g]);
      rows += this.counts[g];
    }
    this.list.scrollTop = 0;
    this.cursor = { item: 0, column: 0, token: null };
    this.relist();
  }

  // One item per line: a prompt, a completion, or as many completions as stand side by side.
  relist() {
    const kept = this.items?.[this.cursor.item];
    const across = this.model.get("columns") ? Math.max(2, Math.floor((this.list.clientWidth - 24) / CARD_WIDTH)) : 1;
    this.across = across;
    this.items = [];
    for (let g = 0, at = 0; g < this.groups.length; g++) {
      const p = this.groups[g], end = at + this.counts[g];
      this.items.push({ key: `h${p}`, head: p, kind: "head" });
      if (this.open.has(p)) {
        for (let k = at; k < end; k += across) {
          const samples = [...this.samples.subarray(k, Math.min(end, k + across))];
          this.items.push({ key: `${across}r${samples[0]}`, samples, kind: across > 1 ? "cards" : "row" });
        }
      }
      at = end;
    }
    if (kept) this.cursor.item = Math.max(0, this.items.findIndex((item) => item.key === kept.key));
    this.cursor.column = 0;
    this.nodes.forEach((node) => node.remove());
    this.nodes.clear();
    this.draw();
  }

  // -- drawing what is in view

  place() {
    this.tops = new Float64Array(this.items.length + 1);
    for (let i = 0; i < this.items.length; i++) {
      const item = this.items[i];
      this.tops[i + 1] = this.tops[i] + (this.heights.get(item.key) ?? ESTIMATE[item.kind]);
    }
    this.space.style.height = `${this.tops[this.items.length]}px`;
  }

  drawSoon() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.place();
    for (let again = 0; again < 3; again++) {
      this.drawInView();
      if (!this.measure()) break;
    }
    clearTimeout(this.askTimer);
    this.askTimer = setTimeout(() => this.askRows(), ASK_AFTER);
    this.el.classList.toggle("nothing", !this.items.length);
    this.showCursor();
  }

  drawInView() {
    const from = this.list.scrollTop - OVERSCAN, to = this.list.scrollTop + (this.list.clientHeight || 480) + OVERSCAN;
    let i = firstAfter(this.tops, from);
    this.visible = [];
    const wanted = new Set();
    for (; i < this.items.length && this.tops[i] < to; i++) {
      const item = this.items[i];
      item.at = i;
      wanted.add(item.key);
      this.visible.push(item);
    }
    for (const [key, node] of this.nodes) {
      if (!wanted.has(key)) node.remove(), this.nodes.delete(key);
    }
    let before = null;
    for (const item of this.visible) { // in the order of the list, for those who hear it read
      let node = this.nodes.get(item.key);
      if (!node) this.nodes.set(item.key, (node = this.node(item)));
      if ((before ? before.nextSibling : this.space.firstChild) !== node) this.space.insertBefore(node, before ? before.nextSibling : this.space.firstChild);
      node.style.top = `${this.tops[item.at]}px`;
      node.rlb = item;
      before = node;
    }
  }

  // Whether some row is not as high as was thought; what is in view stays where it is.
  measure() {
    if (!this.list.clientWidth) return false;
    let changed = false, above = 0;
    for (const item of this.visible) {
      const height = this.nodes.get(item.key).offsetHeight;
      const old = this.tops[item.at + 1] - this.tops[item.at];
      if (height && Math.abs(height - old) > 0.5) {
        if (this.tops[item.at + 1] <= this.list.scrollTop) above += height - old;
        this.heights.set(item.key, height);
        changed = true;
      }
    }
    if (changed) {
      this.place();
      if (above) this.list.scrollTop += above;
    }
    return changed;
  }

  resized() {
    if (this.width === this.list.clientWidth) return;
    this.width = this.list.clientWidth;
    this.heights.clear();
    if (this.model.get("columns")) this.relist();
    else this.drawSoon();
  }

  redraw(keys) {
    const stale = new Set(keys);
    for (const [key, node] of this.nodes) {
      const item = node.rlb;
      if (stale.has(key) || item?.samples?.some((i) => stale.has(`r${i}`))) node.remove(), this.nodes.delete(key);
    }
    this.draw();
  }

  redrawAll() {
    this.nodes.forEach((node) => node.remove());
    this.nodes.clear();
    this.draw();
  }

  recolour() {
    this.drawLegend();
    for (const element of this.space.querySelectorAll(".tokens")) this.paint(element);
  }

  drawLegend() {
    drawLegend(this.legend, this.scales[this.model.get("colour")], this.scales);
  }

  paint(element) {
    const row = this.rows.get(Number(element.dataset.i)), scales = this.scales, chosen = this.model.get("colour");
    for (const span of element.querySelectorAll(".t")) {
      const at = Number(span.dataset.t);
      paintToken(span, scales, chosen, (c) => row.values[c][at]);
    }
  }
}

// -- small helpers

function typed(kind, data) {
  if (!data) return new kind(0);
  const view = data.buffer ? data : new DataView(data);
  return new kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

// A row with what came after its tokens, or instead of them.
function joined(old, row) {
  if (!old || row.from === 0) return { wanted: old?.wanted ?? 0, ...row };
  if (row.from !== old.pieces.length) return old;
  const join = (a, b) => {
    const both = new a.constructor(a.length + b.length);
    both.set(a);
    both.set(b, a.length);
    return both;
  };
  return {
    ...old,
    pieces: old.pieces.concat(row.pieces),
    kinds: old.kinds + row.kinds,
    ids: join(old.ids, row.ids),
    values: old.values.map((values, c) => join(values, row.values[c])),
  };
}

function firstAfter(tops, from) {
  let low = 0, high = tops.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tops[middle + 1] <= from) low = middle + 1;
    else high = middle;
  }
  return low;
}

function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
