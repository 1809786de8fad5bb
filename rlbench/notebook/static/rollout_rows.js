// One line of the rollout viewer: a prompt, a completion, or completions side by side.
// Reads the view's `heads`, `rows`, `prompts`, `open`, `full`, `spelt`; text goes through textContent alone.

class Rows {
  node(item) {
    const node = document.createElement("div");
    node.className = `item ${item.kind}`;
    node.id = `${this.name}-${item.key}`;
    if (item.head !== undefined) this.fillHead(node, item.head);
    else if (item.kind === "cards") {
      node.setAttribute("role", "presentation");
      node.style.gridTemplateColumns = `repeat(${this.across}, minmax(0, 1fr))`;
      item.samples.forEach((i) => {
        const card = document.createElement("div");
        card.className = "card";
        card.id = `${this.name}-c${i}`;
        this.fillRow(card, i);
        node.append(card);
      });
    } else this.fillRow(node, item.samples[0]);
    return node;
  }

  fillHead(node, p) {
    const head = this.heads.get(p), open = this.open.has(p);
    node.setAttribute("role", "treeitem");
    node.setAttribute("aria-level", "1");
    node.setAttribute("aria-expanded", String(open));
    const line = part(node, "line");
    part(line, "twist", open ? "▾" : "▸").setAttribute("aria-hidden", "true");
    part(line, "number", `prompt ${p}`);
    const text = part(line, "prompt", head ? head.text.replaceAll("\n", "⏎") : "…");
    if (!head) return;
    node.setAttribute("aria-label", `prompt ${p}: ${head.text.slice(0, 200)}; ${headFacts(head).join(", ")}`);
    if (head.more) {
      const spelt = this.spelt.has(p);
      button(line, "spell", spelt ? "less" : "whole prompt", spelt ? "show one line of the prompt" : "show all messages of the prompt");
    }
    part(line, "facts", headFacts(head).join("   "));
    if (this.spelt.has(p)) this.fillPrompt(node, p);
    else if (head.images.length) {
      const strip = part(node, "images");
      head.images.forEach((image) => picture(strip, image.src, image.alt, () => this.drawSoon()));
    }
    text.title = head.more ? "" : head.text;
  }

  fillPrompt(node, p) {
    const whole = part(node, "whole");
    const parts = this.prompts.get(p);
    if (!parts) {
      whole.textContent = "…";
      return;
    }
    let role = null;
    for (const one of parts) {
      if (one.role && one.role !== role) part(whole, "role", one.role);
      role = one.role;
      if (one.image) picture(whole, one.image, one.text, () => this.drawSoon());
      else part(whole, "said", one.text);
    }
  }

  fillRow(node, i) {
    const row = this.rows.get(i), scored = row && row.reward !== null;
    node.dataset.i = i;
    node.setAttribute("role", "treeitem");
    node.setAttribute("aria-level", "2");
    if (!row) {
      part(node, "mark", "");
      part(node, "tokens wait", "…");
      part(node, "meta", "");
      return;
    }
    const full = this.full.has(i), whitespace = this.model.get("whitespace");
    const mark = part(node, `mark ${scored ? (row.right ? "right" : "wrong") : ""}`, scored ? `${row.right ? "✓" : "✗"} ${signed(row.reward)}` : "");
    mark.title = scored ? `reward ${number(row.reward)}, completion ${row.k} of prompt ${row.p}` : `completion ${row.k} of prompt ${row.p}`;
    const tokens = part(node, `tokens${full ? " full" : ""}`);
    tokens.dataset.i = i;
    if (row.text !== undefined) part(tokens, "plain", full ? row.text : row.text.replaceAll("\n", "⏎"));
    row.pieces.forEach((piece, t) => tokens.append(tokenSpan(piece, row.kinds[t], t, whitespace, full)));
    this.paint(tokens);
    if (!full && row.pieces.length < row.n) part(tokens, "rest", ` … +${(row.n - row.pieces.length).toLocaleString("en")} tok`);
    tokens.title = full ? "" : "click between the tokens, or Enter: the whole text";
    const meta = part(node, "meta");
    const cut = row.finish === "length" || row.finish === "abort";
    part(meta, "length", `${row.n.toLocaleString("en")} tok`);
    part(meta, cut ? "warn" : "finish", { length: "✂ length", abort: "■ aborted" }[row.finish] ?? row.finish);
    if (full && row.pieces.length < row.wanted) part(node, "more", "…"); // on its way
    else if (full && row.pieces.length < row.n) button(node, "more", `next ${Math.min(this.model.get("facts").openTokens, row.n - row.pieces.length).toLocaleString("en")} of ${row.n.toLocaleString("en")} tokens`, "show more of this completion");
    const said = row.text ?? row.pieces.map((piece, t) => (row.kinds[t] === "t" ? piece : "")).join("");
    node.setAttribute("aria-expanded", String(full));
    node.setAttribute("aria-label", `completion ${row.k}, ${scored ? `${row.right ? "right" : "wrong"}, reward ${number(row.reward)}, ` : ""}${row.n} tokens, ended by ${row.finish}: ${said.slice(0, 200)}`);
  }
}

// -- small helpers

function part(parent, className, text) {
  const node = document.createElement(className === "line" || className === "whole" || className === "images" ? "div" : "span");
  node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function button(parent, className, text, title) {
  const node = document.createElement("button");
  Object.assign(node, { className, textContent: text, title, type: "button", tabIndex: -1 });
  parent.append(node);
}

// An image that Python encoded; once it has its size the list has to make room for it.
function picture(parent, src, alt, sized) {
  const image = document.createElement("img");
  image.addEventListener("load", sized);
  if (src.startsWith("data:image/png;") || src.startsWith("data:image/jpeg;")) image.src = src;
  image.alt = alt;
  image.title = alt;
  parent.append(image);
}

function signed(value) {
  return value > 0 ? `+${value.toFixed(2)}` : value < 0 ? `−${(-value).toFixed(2)}` : "0.00";
}

function headFacts(head) {
  if (!head.n) return ["not started"];
  const facts = [];
  if (head.mean !== undefined) {
    facts.push(head.two ? `${head.right}/${head.n} right` : `reward ${number(head.mean)}`);
    facts.push(`spread ${head.spread.toFixed(2)}`);
  } else facts.push(`${head.n} completions`);
  const [low, high] = head.lengths;
  facts.push(low === high ? `${low.toLocaleString("en")} tok` : `${low.toLocaleString("en")}–${high.toLocaleString("en")} tok`);
  return facts;
}
