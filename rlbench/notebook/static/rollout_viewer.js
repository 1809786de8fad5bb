// Built from extension/src/widgets by extension/bundle.mjs: change those.

// src/format.ts
var KIB = 2 ** 10;
var MIB = 2 ** 20;
var GIB = 2 ** 30;
function digits(value) {
  return Math.abs(value) >= 1e3 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

// src/widgets/dom.ts
var MIB2 = 2 ** 20;
var COPIED_MS = 1500;
function add(parent, tag, className = "", text) {
  const node = document.createElement(tag);
  if (className) {
    node.className = className;
  }
  if (text !== void 0) {
    node.textContent = text;
  }
  parent.append(node);
  return node;
}
function setText(node, text) {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}
async function copyText(node, button) {
  try {
    await navigator.clipboard.writeText(node.textContent ?? "");
  } catch {
    window.getSelection()?.selectAllChildren(node);
    return;
  }
  setText(button, "copied");
  setTimeout(() => setText(button, "copy"), COPIED_MS);
}

// src/widgets/tokens.ts
var STRONGEST = 0.62;
var STOPS = 13;
var LONGEST = 60;
var KIND_CLASS = { t: "t", s: "t pill", b: "t byte", i: "t byte" };
var KIND_TITLE = {
  t: "",
  s: "special token",
  b: "byte of a character that a later token completes",
  i: "token id"
};
function number(value) {
  if (value === null || value === void 0 || Number.isNaN(value)) {
    return "–";
  }
  if (!Number.isFinite(value)) {
    return value > 0 ? "∞" : "−∞";
  }
  const size = Math.abs(value);
  const text = size && size < 1e-4 ? size.toExponential(1) : digits(size);
  return (value < 0 ? "−" : "") + text;
}
function share({ kind, bound }, value) {
  if (!Number.isFinite(value) || !bound) {
    return 0;
  }
  const log = value > 0 ? Math.log(value) : -bound;
  const off = kind === "signed" ? value : kind === "ratio" ? log : Math.abs(value);
  return Math.max(-1, Math.min(1, off / bound));
}
function colour(scale, value) {
  const part = share(scale, value);
  if (Math.abs(part) < 0.02) {
    return "";
  }
  const unsigned = scale.kind === "size" || scale.kind === "flag";
  const hue = unsigned ? "magnitude" : part < 0 ? "negative" : "positive";
  const strength = (Math.abs(part) * STRONGEST * 100).toFixed(0);
  return `color-mix(in srgb, var(--rlb-${hue}) ${strength}%, transparent)`;
}
function drawnText(piece, kind, whitespace, breakLines) {
  if (kind !== "t") {
    return piece;
  }
  if (piece === "") {
    return "∅";
  }
  const ends = piece.replaceAll("\n", breakLines ? "⏎\n" : "⏎");
  return whitespace ? ends.replaceAll(" ", "·").replaceAll("	", "→	") : ends;
}
function addToken(parent, piece, kind, at, whitespace, breakLines) {
  const text = drawnText(piece, kind, whitespace, breakLines);
  add(parent, "span", KIND_CLASS[kind], text).dataset["t"] = String(at);
}
function paintToken(span, scales, chosen, value) {
  const scale = scales[chosen];
  span.style.background = scale ? colour(scale, value(chosen)) : "";
  scales.forEach(({ name }, c) => {
    if (name === "clipped") {
      span.classList.toggle("clip", value(c) > 0);
    }
    if (name === "mask") {
      span.classList.toggle("off", value(c) === 0);
    }
  });
}
function describeToken(at, piece, kind, id, scales, value) {
  const shown = piece.length > LONGEST ? `${piece.slice(0, LONGEST)}…` : piece;
  const quoted = `'${shown.replaceAll("\n", "\\n").replaceAll("	", "\\t")}'`;
  const parts = [`token ${at}`, quoted, `id ${id ?? "–"}`];
  if (KIND_TITLE[kind]) {
    parts.push(`(${KIND_TITLE[kind]})`);
  }
  const flag = (label, one) => one > 0 ? label : one === 0 ? `not ${label}` : `${label} –`;
  const said = scales.map(
    (scale, c) => scale.kind === "flag" ? flag(scale.label, value(c)) : `${scale.label} ${number(value(c))}`
  );
  return [...parts, ...said].join("  ");
}
function drawLegend(element, scales, chosen) {
  element.replaceChildren();
  const scale = scales[chosen];
  if (!scale) {
    return;
  }
  const { low, high } = scale;
  const unit = scale.unit ? ` (${scale.unit})` : "";
  add(element, "span", "name", scale.name.replaceAll("_", " ") + unit).title = scale.about;
  if (low === high) {
    add(element, "span", "figure", `${number(low)} everywhere`);
  } else {
    add(element, "span", "figure", number(low));
    const bar = add(element, "span", "bar");
    const stops = stopsOf(scale).map((value) => colour(scale, value) || "transparent");
    bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(",")})`;
    add(element, "span", "figure", number(high));
    if (scale.saturated) {
      add(element, "span", "note", `full colour from ${boundOf(scale)}`);
    }
  }
  if (scales.some((one) => one.name === "clipped")) {
    add(add(element, "span", "note"), "span", "t clip", "clipped");
  }
  if (scales.some((one) => one.name === "mask" && one.low === 0)) {
    add(add(element, "span", "note"), "span", "t off", "not trained");
  }
}
function stopsOf({ kind, low, high }) {
  return Array.from({ length: STOPS }, (_, k) => {
    const part = k / (STOPS - 1);
    return kind === "ratio" && low > 0 ? low * (high / low) ** part : low + part * (high - low);
  });
}
function boundOf({ kind, bound }) {
  switch (kind) {
    case "ratio":
      return `×${number(Math.exp(bound))}`;
    case "signed":
      return `±${number(bound)}`;
    default:
      return number(bound);
  }
}

// src/widgets/item.ts
var CUT = { length: "✂ length", abort: "■ aborted" };
var READ_ALOUD = 200;
var SHARED_SHOWN = 8;
var LARGER = "larger, or small again";
function nodeOf(item, rows, look) {
  const node = document.createElement("div");
  node.className = `item ${item.kind}`;
  node.id = `${look.name}-${item.key}`;
  node.style.setProperty("--depth", String(item.depth));
  const [first] = item.samples;
  if (item.head !== null) {
    fillHead(node, item.head, rows, look);
  } else if (item.branch !== null) {
    fillBranch(node, item, rows);
  } else if (item.kind === "cards") {
    node.setAttribute("role", "presentation");
    node.style.gridTemplateColumns = `repeat(${look.across}, minmax(0, 1fr))`;
    for (const i of item.samples) {
      const card = add(node, "div", "card");
      card.id = `${look.name}-c${i}`;
      fillRow(card, i, item.depth, rows, look);
    }
  } else if (first !== void 0) {
    fillRow(node, first, item.depth, rows, look);
  }
  return node;
}
function fillHead(node, p, rows, look) {
  const head = rows.heads.get(p);
  const open = rows.open.has(p);
  node.setAttribute("role", "treeitem");
  node.setAttribute("aria-level", "1");
  node.setAttribute("aria-expanded", String(open));
  const line = add(node, "div", "line");
  add(line, "span", "twist", open ? "▾" : "▸").setAttribute("aria-hidden", "true");
  add(line, "span", "number", `prompt ${p}`);
  const text = add(line, "span", "prompt", head?.text.replaceAll("\n", "⏎") ?? "…");
  if (!head) {
    return;
  }
  const facts = headFacts(head);
  const said = head.text.slice(0, READ_ALOUD);
  node.setAttribute("aria-label", `prompt ${p}: ${said}; ${facts.join(", ")}`);
  if (head.more) {
    const [label, title] = rows.spelt.has(p) ? ["less", "show one line of the prompt"] : ["whole prompt", "show all messages of the prompt"];
    addButton(line, "spell", label, title);
  }
  add(line, "span", "facts", facts.join("   "));
  text.title = head.more ? "" : head.text;
  if (rows.spelt.has(p)) {
    fillPrompt(node, p, rows, look);
  } else if (head.images.length) {
    const strip = add(node, "div", "images");
    head.images.forEach((image) => addPicture(strip, image, "the whole prompt", look.sized));
  }
}
function fillPrompt(node, p, rows, look) {
  const whole = add(node, "div", "whole");
  const messages = rows.prompts.get(p);
  if (!messages) {
    whole.textContent = "…";
    return;
  }
  let before = "";
  for (const { role, text, image, tokens, sound } of messages) {
    if (role && role !== before) {
      add(whole, "span", "role", role);
    }
    before = role;
    if (image) {
      const shown = { src: image, alt: text, tokens };
      enlarges(addPicture(whole, shown, LARGER, look.sized), look);
    } else {
      add(whole, "span", "said", text);
    }
    if (sound?.startsWith("data:audio/mpeg;")) {
      const player = add(whole, "audio", "sound");
      Object.assign(player, { controls: true, preload: "metadata", title: text, src: sound });
    }
  }
}
function enlarges(picture, look) {
  picture.addEventListener("click", () => {
    picture.classList.toggle("large");
    look.sized();
  });
}
function fillBranch(node, { branch: key, depth }, rows) {
  const branch = rows.tree.named(key ?? "");
  if (!branch) {
    return;
  }
  const open = !rows.tree.closed.has(branch.key);
  node.setAttribute("role", "treeitem");
  node.setAttribute("aria-level", String(1 + 2 * depth));
  node.setAttribute("aria-expanded", String(open));
  const line = add(node, "div", "line");
  add(line, "span", "twist", open ? "▾" : "▸").setAttribute("aria-hidden", "true");
  const place = placeOf(branch, rows);
  add(line, "span", "place", `↳ ${place}`);
  if (branch.text) {
    add(line, "span", "written", JSON.stringify(branch.text)).title = `written there: ${branch.text}`;
  }
  const facts = branchFacts(branch).join("   ");
  add(line, "span", "facts", facts).title = "mean reward of what continues there, and its standard error";
  node.setAttribute("aria-label", `${place}: ${facts}`);
}
function placeOf({ of, kept }, rows) {
  const row = rows.rows.get(of);
  const completion = of < 0 ? "a completion that is not shown" : `completion ${row?.k ?? of}`;
  return `from token ${kept} of ${completion}`;
}
function branchFacts({ samples, under, said }) {
  const several = `${samples.length} continuation${samples.length === 1 ? "" : "s"}`;
  return [several, ...under ? [`under ${under}`] : [], said];
}
function fillRow(node, i, depth, rows, look) {
  const row = rows.rows.get(i);
  node.dataset["i"] = String(i);
  node.setAttribute("role", "treeitem");
  node.setAttribute("aria-level", String(2 + 2 * depth));
  if (!row) {
    add(node, "span", "mark", "");
    add(node, "span", "tokens wait", "…");
    add(node, "span", "meta", "");
    return;
  }
  const full = rows.full.has(i);
  addMark(node, row);
  addTokens(node, row, full, rows, look);
  addMeta(node, row, full, rows.openTokens);
  node.setAttribute("aria-expanded", String(full));
  node.setAttribute("aria-label", aloud(row));
}
function addMark(node, { reward, right, k, p }) {
  const place = `completion ${k} of prompt ${p}`;
  if (reward === null) {
    add(node, "span", "mark", "").title = place;
    return;
  }
  const text = `${right ? "✓" : "✗"} ${signed(reward)}`;
  const mark = add(node, "span", `mark ${right ? "right" : "wrong"}`, text);
  mark.title = `reward ${number(reward)}, ${place}`;
}
function addTokens(node, row, full, rows, look) {
  const tokens = add(node, "span", `tokens${full ? " full" : ""}`);
  tokens.dataset["i"] = String(row.i);
  const begin = full ? 0 : Math.max(0, row.born - SHARED_SHOWN);
  if (begin) {
    add(tokens, "span", "rest", `${thousands(begin)} tok … `);
  }
  if (row.text !== void 0) {
    add(tokens, "span", "plain", full ? row.text : row.text.replaceAll("\n", "⏎"));
  }
  const images = new Map(row.images.map((image) => [image.t, image]));
  let end = 0;
  row.pieces.forEach((piece, t) => {
    const image = images.get(t);
    if (t < begin) {
      return;
    }
    if (image) {
      const pressed = full ? LARGER : "the whole text";
      const picture = addPicture(tokens, { ...image, tokens: 0 }, pressed, look.sized);
      if (full) {
        enlarges(picture, look);
      }
      end = t + image.tokens;
    }
    if (image || t >= end) {
      addToken(tokens, piece, kindOf(row, t), t, look.whitespace, full);
    }
  });
  look.paint(tokens);
  markPlaces(tokens, row, rows);
  if (!full && row.pieces.length < row.n) {
    add(tokens, "span", "rest", ` … +${thousands(row.n - row.pieces.length)} tok`);
  }
  tokens.title = full ? "" : "click between the tokens, or Enter: the whole text";
}
function markPlaces(tokens, { i, born }, rows) {
  for (const token of tokens.querySelectorAll(".t")) {
    token.classList.toggle("shared", Number(token.dataset["t"]) < born);
  }
  for (const branch of rows.tree.from(i)) {
    const token = tokens.querySelector(`[data-t="${branch.kept}"]`);
    if (token) {
      token.classList.add("forked");
      token.title = branchFacts(branch).join(", ");
    }
  }
}
function addMeta(node, row, full, openTokens) {
  const { finish, n, pieces, wanted } = row;
  const meta = add(node, "span", "meta");
  add(meta, "span", "length", `${thousands(n)} tok`);
  const cut = Object.hasOwn(CUT, finish);
  add(meta, "span", cut ? "warn" : "finish", cut ? CUT[finish] : finish);
  if (full && pieces.length < wanted) {
    add(node, "span", "more", "…");
  } else if (full && pieces.length < n) {
    const next = `next ${thousands(Math.min(openTokens, n - pieces.length))} of ${thousands(n)} tokens`;
    addButton(node, "more", next, "show more of this completion");
  }
}
function aloud(row) {
  const said = row.text ?? row.pieces.filter((_, t) => kindOf(row, t) === "t").join("");
  const scored = row.reward === null ? "" : `${row.right ? "right" : "wrong"}, reward ${number(row.reward)}, `;
  const ended = `${scored}${row.n} tokens, ended by ${row.finish}`;
  return `completion ${row.k}, ${ended}: ${said.slice(0, READ_ALOUD)}`;
}
function kindOf(row, t) {
  return row.kinds[t];
}
function headFacts(head) {
  if (!head.n || !head.lengths) {
    return ["not started"];
  }
  const [low, high] = head.lengths.map(thousands);
  const range = low === high ? `${low} tok` : `${low}–${high} tok`;
  const tokens = head.continuations ? `${range}   +${head.continuations} continued` : range;
  if (head.mean === void 0) {
    return [`${head.n} completions`, tokens];
  }
  const right = head.two ? `${head.right ?? 0}/${head.n} right` : `reward ${number(head.mean)}`;
  return [right, `spread ${(head.spread ?? 0).toFixed(2)}`, tokens];
}
function addButton(parent, className, text, title) {
  const node = add(parent, "button", className, text);
  Object.assign(node, { title, type: "button", tabIndex: -1 });
}
function addPicture(parent, picture, pressed, sized) {
  const { src, alt, tokens } = picture;
  const button = add(parent, "button", "picture");
  Object.assign(button, { title: `${alt}: click for ${pressed}`, type: "button", tabIndex: -1 });
  const image = add(button, "img");
  image.addEventListener("load", sized);
  if (src.startsWith("data:image/png;") || src.startsWith("data:image/jpeg;")) {
    image.src = src;
  }
  image.alt = alt;
  if (tokens) {
    const title = `${tokens} tokens stand for this image`;
    add(button, "span", "chip", `image ×${tokens}`).title = title;
  }
  return button;
}
function signed(value) {
  return value > 0 ? `+${value.toFixed(2)}` : value < 0 ? `−${(-value).toFixed(2)}` : "0.00";
}
function thousands(value) {
  return value.toLocaleString("en");
}

// src/widgets/cursor.ts
var HINT = "Point at a token, or use the arrow keys, to read its numbers.";
var PAGE = 10;
var ROOM = 8;
var Cursor = class {
  constructor(box, readout, list, rows, acts) {
    this.box = box;
    this.readout = readout;
    this.list = list;
    this.rows = rows;
    this.acts = acts;
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("click", (event) => this.click(event));
    box.addEventListener("mouseover", (event) => this.hover(event));
    box.addEventListener("mouseleave", () => this.say());
    box.addEventListener("focus", () => this.show());
    box.addEventListener("blur", () => this.show());
    this.say();
  }
  box;
  readout;
  list;
  rows;
  acts;
  get item() {
    return this.list.items[this.at];
  }
  /** The completion and token that it is at. */
  get place() {
    return { sample: this.sample, token: this.token };
  }
  /** To a token of a completion, where that is in the list. */
  goToSample(i, token) {
    const at = this.list.items.findIndex(({ samples }) => samples.includes(i));
    if (at >= 0) {
      this.goTo(at, this.list.items[at]?.samples.indexOf(i), token);
    }
  }
  /** To the list's begin, or to an item of it. */
  goTo(at = 0, column = 0, token = null) {
    this.at = Math.max(0, at);
    this.column = column;
    this.token = token;
  }
  /** Mark where the cursor is. */
  show() {
    for (const old of this.box.querySelectorAll(".here, .cursor")) {
      old.classList.remove("here", "cursor");
    }
    const { sample } = this;
    this.acts.chosen(sample === void 0 ? void 0 : this.rows.rows.get(sample), this.token);
    const item = this.list.node(this.item);
    const node = item?.querySelectorAll(".card")[this.column] ?? item;
    if (!node) {
      return;
    }
    node.classList.toggle("here", this.box.contains(document.activeElement));
    this.box.setAttribute("aria-activedescendant", node.id);
    const span = this.token === null ? null : node.querySelector(`[data-t="${this.token}"]`);
    if (span) {
      this.showToken(span);
    }
  }
  showToken(span) {
    span.classList.add("cursor");
    const tokens = span.closest(".tokens");
    tokens?.classList.toggle("uncut", !tokens.classList.contains("full"));
    const [token, list] = [span.getBoundingClientRect(), this.box.getBoundingClientRect()];
    if (token.bottom > list.bottom) {
      this.box.scrollTop += token.bottom - list.bottom + ROOM;
    } else if (token.top < list.top) {
      this.box.scrollTop -= list.top - token.top + ROOM;
    }
    if (this.list.measure()) {
      this.acts.drawSoon();
    }
  }
  /** The numbers of the cursor's token, or of another one. */
  say(i = this.sample, t = this.token) {
    const row = i === void 0 ? void 0 : this.rows.rows.get(i);
    const piece = row?.pieces[t ?? -1];
    const known = row !== void 0 && t !== null && piece !== void 0;
    this.readout.textContent = known ? this.described(row, t, piece) : HINT;
    this.readout.classList.toggle("hint", !known);
  }
  described(row, t, piece) {
    const value = (c) => row.values[c]?.[t] ?? NaN;
    return describeToken(t, piece, kindOf(row, t), row.ids[t], this.rows.scales, value);
  }
  /** The completion that the cursor is at. */
  get sample() {
    return this.item?.samples[this.column];
  }
  click(event) {
    const target = event.target;
    const place = this.list.placeOf(target);
    if (!place) {
      return;
    }
    const { item, at } = place;
    const one = target.closest("[data-i]")?.dataset["i"];
    const i = one === void 0 ? item.samples[0] : Number(one);
    this.goTo(at, i === void 0 ? 0 : Math.max(0, item.samples.indexOf(i)));
    const pressed = target.closest("button")?.className;
    if (item.head !== null) {
      if (pressed === "spell" || pressed === "picture" && !target.closest(".whole")) {
        this.acts.spell(item.head);
      } else if (!target.closest(".whole")) {
        this.acts.toggleHead(item.head);
      }
    } else if (item.branch !== null) {
      this.acts.toggleBranch(item.branch);
    } else if (i !== void 0 && pressed === "more") {
      this.acts.more(i);
    } else if (target.dataset["t"] !== void 0) {
      this.token = Number(target.dataset["t"]);
    } else if (pressed?.startsWith("picture") && this.rows.full.has(i ?? -1)) {
    } else if (i !== void 0 && window.getSelection()?.isCollapsed) {
      this.acts.toggleFull(i);
    }
    this.show();
    this.say();
  }
  hover(event) {
    const span = event.target.closest("[data-t]");
    if (span) {
      this.say(Number(span.parentElement?.dataset["i"]), Number(span.dataset["t"]));
    } else {
      this.say();
    }
  }
  key(event) {
    const { item } = this;
    if (event.target !== this.box || event.ctrlKey || event.metaKey || event.altKey || !item) {
      return;
    }
    const go = this.itemKeys(item)[event.key] ?? this.keys()[event.key];
    if (!go) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    go();
    this.reveal();
    this.show();
    this.say();
  }
  keys() {
    return {
      ArrowDown: () => this.move(1),
      ArrowUp: () => this.move(-1),
      PageDown: () => this.move(PAGE),
      PageUp: () => this.move(-PAGE),
      Home: () => this.goTo(0),
      End: () => this.goTo(this.list.items.length - 1),
      Escape: () => {
        this.token = null;
      }
    };
  }
  itemKeys({ head, branch }) {
    if (head !== null) {
      return this.foldKeys(this.rows.open.has(head), () => this.acts.toggleHead(head));
    }
    if (branch !== null) {
      const open = !this.rows.tree.closed.has(branch);
      return this.foldKeys(open, () => this.acts.toggleBranch(branch));
    }
    return this.rowKeys();
  }
  foldKeys(open, toggle) {
    return {
      ArrowRight: () => open ? this.move(1) : toggle(),
      ArrowLeft: () => open ? toggle() : this.toParent(),
      Enter: toggle,
      " ": toggle
    };
  }
  rowKeys() {
    const { sample: i, token } = this;
    const row = i === void 0 ? void 0 : this.rows.rows.get(i);
    const toggle = () => {
      if (i !== void 0) {
        this.acts.toggleFull(i);
      }
    };
    const keys = { Enter: toggle, " ": toggle };
    if (token === null) {
      keys["ArrowLeft"] = () => this.toParent();
    }
    if (!row) {
      return keys;
    }
    if (row.pieces.length) {
      keys["ArrowRight"] = () => this.toToken(row, token === null ? row.born : token + 1);
    }
    if (token !== null) {
      keys["ArrowLeft"] = () => this.toToken(row, token - 1);
      keys["Home"] = () => this.toToken(row, 0);
      keys["End"] = () => this.toToken(row, row.pieces.length - 1);
    }
    return keys;
  }
  move(by) {
    const step = Math.sign(by);
    for (let left = Math.abs(by); left > 0; left--) {
      const column = this.column + step;
      const next = this.list.items[this.at + step];
      if (column >= 0 && column < Math.max(1, this.item?.samples.length ?? 1)) {
        this.column = column;
      } else if (next) {
        this.goTo(this.at + step, step > 0 ? 0 : Math.max(0, next.samples.length - 1));
      }
    }
    this.token = null;
  }
  /** To the prompt of a completion, the place that it continues from, or the completion that a place is of. */
  toParent() {
    const { item } = this;
    let { at } = this;
    while (item && at > 0 && !isAbove(this.list.items[at], item)) {
      at--;
    }
    this.goTo(at);
  }
  /** To a token of a completion, more of which is shown where it ends before; before the first: to none. */
  toToken({ i, n, pieces }, at) {
    if (at >= pieces.length && pieces.length < n) {
      if (this.rows.full.has(i)) {
        this.acts.more(i);
      } else {
        this.acts.toggleFull(i);
      }
    }
    this.token = at < 0 ? null : Math.min(at, pieces.length - 1);
  }
  /** Scroll so that the item can be seen. */
  reveal() {
    this.list.reveal(this.at);
    this.acts.draw();
  }
  at = 0;
  column = 0;
  token = null;
};
function isAbove(above, item) {
  if (!above || above.head !== null) {
    return true;
  }
  return item.branch === null ? above.branch !== null && above.depth === item.depth : above.branch === null && above.depth < item.depth;
}

// src/widgets/fork.ts
var UNDER_ONE = "by the weights that the engine has now; session.snapshot() keeps some to choose from";
var UNDER_MANY = "whose weights continue: an adapter, or a kept version; the policy: as it is in the engine now";
var NO_PLACE = "Continue from a token: click one, or go to it with the arrow keys, then Tab.";
var NO_KERNEL = "no kernel: nothing can be continued";
var ForkForm = class {
  constructor(parent, state, acts) {
    this.state = state;
    this.acts = acts;
    this.parts = makeForm(parent);
    const { form, n, text, under, call, copy } = this.parts;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.press();
    });
    form.addEventListener("keydown", (event) => this.key(event));
    for (const field of [n, text, under]) {
      field.addEventListener("input", () => this.draw());
    }
    copy.addEventListener("click", () => void copyText(call, copy));
    this.show(state);
  }
  state;
  acts;
  /** Draw what Python says. */
  show(state) {
    const { under } = this.parts;
    if (state.under !== this.state.under || !under.options.length) {
      const chosen = under.value;
      const names = ["", ...state.under ?? []];
      under.replaceChildren(...names.map((name) => new Option(name || "the policy", name)));
      under.value = names.includes(chosen) ? chosen : "";
      under.title = names.length > 1 ? UNDER_MANY : UNDER_ONE;
    }
    this.state = state;
    this.draw();
  }
  /** Continue from this token of this completion, or from none. */
  choose(row, token) {
    const at = row === void 0 ? null : token;
    if (this.row === row && this.at === at) {
      return;
    }
    this.row = row;
    this.at = at;
    if (at !== null && !this.known) {
      this.known = this.acts.choices();
      this.dead = !this.known;
    }
    this.draw();
  }
  /** What the form asks for; null where it is not filled in. */
  get asked() {
    const { n, text, under } = this.parts;
    const count = Number(n.value);
    if (!this.row || this.at === null || !Number.isInteger(count) || count < 1) {
      return null;
    }
    const fields = { n: count, text: text.value, under: under.value };
    return { sample: this.row.i, at: this.at, ...fields };
  }
  press() {
    const { asked } = this;
    if (this.state.busy) {
      this.dead = !this.acts.stop();
    } else if (asked) {
      this.dead = !this.acts.start(asked);
    }
    this.draw();
  }
  key(event) {
    const [leaves, starts] = [event.key === "Escape", isEnterInField(event)];
    if (!leaves && !starts) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    if (leaves) {
      this.acts.leave();
    } else if (!this.state.busy) {
      this.press();
    }
  }
  draw() {
    const { state, asked, parts } = this;
    const { busy, why } = state;
    parts.form.hidden = why !== "";
    parts.said.hidden = why !== "";
    setText(parts.place, this.row && this.at !== null ? placeOf2(this.row, this.at) : NO_PLACE);
    parts.form.classList.toggle("placed", this.at !== null);
    setText(parts.go, busy ? "stop" : "continue");
    parts.go.disabled = this.dead || !busy && !asked;
    parts.go.title = busy ? "stop it: what is drawn so far stays" : titleOf(asked, parts.n.value);
    const code = asked ? state.name + callOf(asked) : "";
    setText(parts.call, code);
    parts.call.title = code;
    parts.copy.disabled = !code;
    for (const field of [parts.n, parts.text, parts.under]) {
      field.disabled = this.dead;
    }
    setText(parts.said, this.dead ? NO_KERNEL : state.said);
    parts.said.classList.toggle("bad", this.dead || state.bad);
  }
  parts;
  row;
  at = null;
  /** Whether the adapters were asked for. */
  known = false;
  dead = false;
};
function makeForm(parent) {
  const form = add(parent, "form", "fork");
  form.noValidate = true;
  form.setAttribute("aria-label", "continue from a token");
  form.dataset["lmSuppressShortcuts"] = "true";
  const place = add(form, "span", "place");
  const fields = add(form, "span", "fields");
  const n = add(labelled(fields, "n"), "input");
  Object.assign(n, { type: "number", min: "1", value: "16", title: "so many continuations" });
  const text = add(labelled(fields, "text"), "input");
  const title = "written in place of the token and all behind it, before what is drawn";
  Object.assign(text, { type: "text", placeholder: "none", title });
  const under = add(labelled(fields, "under"), "select");
  const go = add(fields, "button", "go", "continue");
  go.type = "submit";
  const call = add(form, "code", "call");
  const copy = add(form, "button", "copy", "copy");
  Object.assign(copy, { type: "button", title: "copy the call that does the same in a cell" });
  const said = add(parent, "div", "forksaid");
  said.setAttribute("role", "status");
  return { form, place, n, text, under, go, call, copy, said };
}
function labelled(parent, text) {
  return add(parent, "label", "", text);
}
function isEnterInField({ key, target, isComposing }) {
  return key === "Enter" && !isComposing && target instanceof HTMLInputElement;
}
function placeOf2({ p, k }, at) {
  return `Continue from token ${at} of completion ${k} of prompt ${p}`;
}
function titleOf(asked, n) {
  if (!asked) {
    return Number(n) >= 1 ? NO_PLACE : "n: a whole number, at least 1";
  }
  const kept = asked.at ? `keep its first ${asked.at} tokens` : "keep nothing of it but its prompt";
  const text = asked.text ? ", then the text," : "";
  return `draw ${asked.n} completions that ${kept}${text} and show them below it`;
}
function callOf({ sample, at, n, text, under }) {
  const options = [`at=${at}`, `n=${n}`];
  if (text) {
    options.push(`text=${JSON.stringify(text)}`);
  }
  if (under) {
    options.push(`under=${JSON.stringify(under)}`);
  }
  return `.fork(${sample}, ${options.join(", ")})`;
}

// src/widgets/list.ts
var ESTIMATE = { head: 30, row: 26, cards: 150, branch: 26 };
var OVERSCAN = 240;
var HEIGHT = 480;
var MEASURED_TIMES = 3;
var List = class {
  constructor(box, space, make) {
    this.box = box;
    this.space = space;
    this.make = make;
  }
  box;
  space;
  make;
  /** What is in view, in order. */
  visible = [];
  get items() {
    return this._items;
  }
  /** Draw these from now on; what was measured of them is known by their keys. */
  set items(items) {
    this._items = items;
    this.clear();
  }
  /** Pixels from the top of an item, or of the list's end. */
  top(at) {
    return this.tops[at] ?? 0;
  }
  node(item) {
    return item && this.nodes.get(item.key);
  }
  /** What stands where an element of the list is. */
  placeOf(target) {
    const node = target.closest(".item");
    return this.visible.find((placed) => placed.node === node);
  }
  /** Forget how high an item was, or all of them. */
  forget(key) {
    if (key === void 0) {
      this.heights.clear();
    } else {
      this.heights.delete(key);
    }
  }
  /** Scroll so that an item can be seen; below 0: none. */
  reveal(at) {
    if (at < 0) {
      return;
    }
    const [top, bottom, height] = [this.top(at), this.top(at + 1), this.box.clientHeight];
    if (top < this.box.scrollTop) {
      this.box.scrollTop = top;
    } else if (bottom > this.box.scrollTop + height) {
      this.box.scrollTop = Math.min(top, bottom - height);
    }
  }
  /** Make elements anew: of those items, or all. */
  clear(stale = () => true) {
    for (const { item, node } of this.visible) {
      if (stale(item)) {
        node.remove();
        this.nodes.delete(item.key);
      }
    }
  }
  draw() {
    this.place();
    let times = 0;
    do {
      this.drawInView();
    } while (this.measure() && ++times < MEASURED_TIMES);
  }
  /** Whether some item is not as high as was thought; what is in view stays where it is. */
  measure() {
    if (!this.box.clientWidth) {
      return false;
    }
    let [changed, above] = [false, 0];
    for (const { item, at, node } of this.visible) {
      const [height, old] = [node.offsetHeight, this.top(at + 1) - this.top(at)];
      if (height && Math.abs(height - old) > 0.5) {
        above += this.top(at + 1) <= this.box.scrollTop ? height - old : 0;
        this.heights.set(item.key, height);
        changed = true;
      }
    }
    if (changed) {
      this.place();
      this.box.scrollTop += above;
    }
    return changed;
  }
  place() {
    this.tops = new Float64Array(this._items.length + 1);
    this._items.forEach((item, i) => {
      this.tops[i + 1] = this.top(i) + (this.heights.get(item.key) ?? ESTIMATE[item.kind]);
    });
    this.space.style.height = `${this.top(this._items.length)}px`;
  }
  drawInView() {
    const from = this.box.scrollTop - OVERSCAN;
    const to = this.box.scrollTop + (this.box.clientHeight || HEIGHT) + OVERSCAN;
    const visible = [];
    for (let at = firstAfter(this.tops, from); this.top(at) < to; at++) {
      const item = this._items[at];
      if (!item) {
        break;
      }
      const node = this.nodes.get(item.key) ?? this.make(item);
      this.nodes.set(item.key, node);
      visible.push({ item, at, node });
    }
    const kept = new Set(visible.map(({ item }) => item.key));
    for (const [key, node] of this.nodes) {
      if (!kept.has(key)) {
        node.remove();
        this.nodes.delete(key);
      }
    }
    let next = this.space.firstChild;
    for (const { node, at } of visible) {
      if (next === node) {
        next = node.nextSibling;
      } else {
        this.space.insertBefore(node, next);
      }
      node.style.top = `${this.top(at)}px`;
    }
    this.visible = visible;
  }
  _items = [];
  tops = new Float64Array(1);
  nodes = /* @__PURE__ */ new Map();
  heights = /* @__PURE__ */ new Map();
};
function firstAfter(tops, from) {
  let [low, high] = [0, tops.length - 1];
  while (low < high) {
    const middle = low + high >> 1;
    if ((tops[middle + 1] ?? Infinity) <= from) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// src/widgets/model.ts
var Listening = class {
  constructor(model) {
    this.model = model;
  }
  model;
  on(event, handler) {
    this.model.on(event, handler);
    this.handlers.push([event, handler]);
  }
  close() {
    for (const [event, handler] of this.handlers) {
      this.model.off(event, handler);
    }
  }
  handlers = [];
};
function tell(model, message) {
  try {
    model.send(message);
    return true;
  } catch {
    return false;
  }
}
function unique() {
  return Math.random().toString(36).slice(2) + Date.now().toString(36);
}

// src/widgets/questions.ts
var BUSY_AFTER = 1e3;
var Questions = class {
  constructor(model, name, notify) {
    this.model = model;
    this.name = name;
    this.notify = notify;
  }
  model;
  name;
  notify;
  /** Ask Python; `keys`: of the items that wait for the answer. The question's name, empty where there is no kernel. */
  ask(content, keys = []) {
    const id = `${this.name}.${this.serial++}`;
    if (!tell(this.model, { id, ...content })) {
      this.notify("no kernel: only what was sent before can be shown");
      return "";
    }
    this.asked.set(id, keys);
    keys.forEach((key) => this.waiting.add(key));
    setTimeout(() => {
      if (this.asked.has(id)) {
        this.notify("waiting for the kernel (busy)");
      }
    }, BUSY_AFTER);
    return id;
  }
  /** Whether an answer is to one of these questions, and has what was asked for. */
  takes(answer) {
    const keys = this.asked.get(answer.id);
    if (!keys) {
      return false;
    }
    keys.forEach((key) => this.waiting.delete(key));
    this.asked.delete(answer.id);
    if (!this.asked.size) {
      this.notify(answer.error ?? "");
    }
    return !answer.error;
  }
  /** Whether an item's answer is on its way. */
  waits(key) {
    return this.waiting.has(key);
  }
  /** Take no answer to what was asked so far: numbers in it would be others. */
  forget() {
    this.asked.clear();
    this.waiting.clear();
    this.notify("");
  }
  asked = /* @__PURE__ */ new Map();
  waiting = /* @__PURE__ */ new Set();
  serial = 0;
};

// src/widgets/tree.ts
var Tree = class {
  /** Branches whose continuations are hidden, by key. */
  closed = /* @__PURE__ */ new Set();
  get branches() {
    return this._branches;
  }
  set branches(branches) {
    this._branches = branches;
    this.holding = new Map(branches.flatMap((branch) => branch.samples.map((i) => [i, branch])));
  }
  named(key) {
    return this._branches.find((branch) => branch.key === key);
  }
  /** The branch that a completion belongs to. */
  holds(i) {
    return this.holding.get(i);
  }
  /** What was continued from a completion, in the order of its tokens. */
  from(i) {
    return this._branches.filter(({ of }) => of === i).sort((a, b) => a.kept - b.kept);
  }
  toggle(key) {
    if (!this.closed.delete(key)) {
      this.closed.add(key);
    }
  }
  _branches = [];
  holding = /* @__PURE__ */ new Map();
};
function itemsOf(groups, open, across, tree) {
  const items = [];
  for (const [p, own] of groups) {
    items.push({ key: `h${p}`, kind: "head", head: p, samples: [], branch: null, depth: 0 });
    if (open.has(p)) {
      addGroup(items, own, across, tree);
    }
  }
  return items;
}
function addGroup(items, own, across, tree) {
  const members = /* @__PURE__ */ new Map();
  for (const i of own) {
    const branch = tree.holds(i);
    const known = members.get(branch);
    if (known) {
      known.push(i);
    } else {
      members.set(branch, [i]);
    }
  }
  const addRows = (rows, depth) => {
    for (let k = 0; k < rows.length; k += across) {
      const samples = rows.slice(k, k + across);
      const kind = across > 1 ? "cards" : "row";
      const key = `${across}r${samples[0] ?? 0}`;
      items.push({ key, kind, head: null, samples, branch: null, depth });
      if (tree.branches.length) {
        samples.flatMap((i) => tree.from(i)).forEach((branch) => addBranch(branch, depth + 1));
      }
    }
  };
  const addBranch = (branch, depth) => {
    const rows = members.get(branch);
    if (rows) {
      members.delete(branch);
      const { key } = branch;
      items.push({ key: `b${key}`, kind: "branch", head: null, samples: [], branch: key, depth });
      if (!tree.closed.has(key)) {
        addRows(rows, depth);
      }
    }
  };
  addRows(members.get(void 0) ?? [], 0);
  for (const branch of [...members.keys()]) {
    if (branch) {
      addBranch(branch, 1);
    }
  }
}

// src/widgets/rows.ts
var Rows = class {
  constructor(scales, openTokens) {
    this.scales = scales;
    this.openTokens = openTokens;
  }
  scales;
  openTokens;
  /** What was continued from what. */
  tree = new Tree();
  heads = /* @__PURE__ */ new Map();
  rows = /* @__PURE__ */ new Map();
  /** All messages of prompts that were asked for. */
  prompts = /* @__PURE__ */ new Map();
  /** Prompts whose completions are shown. */
  open = /* @__PURE__ */ new Set();
  /** Completions shown whole. */
  full = /* @__PURE__ */ new Set();
  /** Prompts shown whole. */
  spelt = /* @__PURE__ */ new Set();
  /** Keep lines and rows that came with their numbers; the keys of what changed. */
  take({ heads, rows }, ids, values) {
    for (const head of heads) {
      this.heads.set(head.p, head);
    }
    let at = 0;
    for (const sent of rows) {
      const end = at + sent.pieces.length;
      const own = this.scales.map(
        (_, c) => values.subarray(c * ids.length + at, c * ids.length + end)
      );
      const before = this.rows.get(sent.i);
      this.rows.set(sent.i, joined(before, sent, ids.subarray(at, end), own));
      at = end;
    }
    return [...heads.map((head) => `h${head.p}`), ...rows.map((row) => `r${row.i}`)];
  }
  /** Number completions anew; what is known of them stays where their channels are the same. */
  grow(scales, shift) {
    const same = scales.map(({ name }) => name).join() === this.scales.map(({ name }) => name).join();
    const [rows, full] = [[...this.rows], [...this.full]];
    this.rows.clear();
    this.full.clear();
    this.scales = scales;
    full.forEach((i) => this.full.add(moved(i, shift)));
    for (const [i, row] of same ? rows : []) {
      this.rows.set(moved(i, shift), { ...row, i: moved(i, shift) });
    }
  }
  /** Show a completion whole, or its preview again. */
  toggle(i) {
    if (!this.rows.has(i)) {
      return;
    }
    const whole = !this.full.delete(i);
    if (whole) {
      this.full.add(i);
    }
    this.want(i, whole ? this.openTokens : 0);
  }
  /** Ask for the next tokens of a completion. */
  more(i) {
    this.want(i, (this.rows.get(i)?.pieces.length ?? 0) + this.openTokens);
  }
  want(i, tokens) {
    const row = this.rows.get(i);
    if (row) {
      this.rows.set(i, { ...row, wanted: Math.min(row.n, tokens) });
    }
  }
};
function moved(i, { after, by }) {
  return i < after ? i : i + by;
}
function joined(old, sent, ids, values) {
  if (!old || sent.from === 0) {
    return { ...sent, ids, values, wanted: old?.wanted ?? 0 };
  }
  if (sent.from !== old.pieces.length) {
    return old;
  }
  return {
    ...old,
    pieces: [...old.pieces, ...sent.pieces],
    kinds: old.kinds + sent.kinds,
    images: [...old.images, ...sent.images],
    ids: Int32Array.from([...old.ids, ...ids]),
    values: old.values.map((before, c) => Float32Array.from([...before, ...values[c] ?? []]))
  };
}
function int32(data) {
  return new Int32Array(bytesOf(data));
}
function float32(data) {
  return new Float32Array(bytesOf(data));
}
function bytesOf(data) {
  if (!data) {
    return new ArrayBuffer(0);
  }
  const { buffer, byteOffset, byteLength } = data;
  return buffer.slice(byteOffset, byteOffset + byteLength);
}

// src/widgets/state.ts
function groupsOf(buffers) {
  const [groups, counts, samples] = buffers.map(int32);
  let at = 0;
  return [...groups ?? []].map((p, g) => {
    const own = samples?.subarray(at, at += counts?.[g] ?? 0) ?? [];
    return [p, [...own]];
  });
}

// src/widgets/viewer.ts
var ASK_AFTER = 60;
var ARRANGE_AFTER = 250;
var CARD_WIDTH = 280;
var LABEL = "Rollouts by prompt. Up and down: rows. Right: open, then the tokens. Enter: whole text. Tab at a token: continue from it.";
var Viewer = class {
  constructor(model, el) {
    this.model = model;
    this.el = el;
    const facts = model.get("facts");
    this.rows = new Rows(facts.channels, facts.openTokens);
    this.rows.tree.branches = model.get("tree");
    el.classList.add("rlbv", "rlb-live");
    const top = add(el, "div", "top");
    this.legend = add(top, "div", "legend");
    this.notice = add(top, "div", "notice");
    this.notice.setAttribute("role", "status");
    this.box = makeList(el);
    this.space = add(this.box, "div", "space");
    this.space.setAttribute("role", "presentation");
    const readout = makeReadout(el, model.get("fork").why);
    this.questions = new Questions(model, this.name, (text) => this.notify(text));
    this.form = this.makeForm();
    this.list = new List(this.box, this.space, (item) => this.node(item));
    this.cursor = new Cursor(this.box, readout, this.list, this.rows, {
      toggleHead: (p) => this.toggleHead(p),
      toggleFull: (i) => this.toggleFull(i),
      toggleBranch: (key) => this.toggleBranch(key),
      chosen: (row, token) => this.form.choose(row, token),
      more: (i) => this.more(i),
      spell: (p) => this.spell(p),
      draw: () => this.draw(),
      drawSoon: () => this.drawSoon()
    });
    this.listening = new Listening(model);
    this.listen();
    this.drawLegend();
    const { first, order } = { first: model.get("first"), order: model.get("order") };
    this.rows.take(first, int32(first.ids), float32(first.values));
    this.arrange([order.groups, order.counts, order.samples]);
    if (!this.isCurrent(order)) {
      this.askOrder();
    }
  }
  model;
  el;
  close() {
    this.observer.disconnect();
    clearTimeout(this.askTimer);
    clearTimeout(this.orderTimer);
    cancelAnimationFrame(this.frame);
    this.listening.close();
  }
  listen() {
    this.listening.on("change:colour", () => this.recolour());
    this.listening.on("change:whitespace", () => this.redraw());
    this.listening.on("change:columns", () => this.relist());
    for (const name of ["sort", "filter", "search"]) {
      this.listening.on(`change:${name}`, () => this.askOrderSoon());
    }
    this.listening.on("change:fork", () => this.form.show(this.model.get("fork")));
    this.listening.on("change:grown", () => this.grow());
    this.listening.on("msg:custom", (content, buffers) => this.hear(content, buffers));
    this.box.addEventListener("scroll", () => this.drawSoon(), { passive: true });
    this.observer.observe(this.box);
  }
  // -- messages
  hear(answer, buffers) {
    if (!this.questions.takes(answer)) {
      return;
    }
    if (answer.kind === "prompt") {
      this.rows.prompts.set(answer.p, answer.parts);
      this.redraw([`h${answer.p}`]);
    } else if (answer.kind === "rows") {
      const [ids = null, values = null] = buffers;
      this.redraw(this.rows.take(answer, int32(ids), float32(values)));
    } else if (answer.id === this.orderId) {
      this.arrange(buffers);
      if (!this.isCurrent(answer)) {
        this.askOrder();
      }
    }
  }
  notify(text) {
    this.notice.textContent = text;
  }
  get choice() {
    const { model } = this;
    return { sort: model.get("sort"), filter: model.get("filter"), search: model.get("search") };
  }
  isCurrent({ sort, filter, search }) {
    const { choice } = this;
    return sort === choice.sort && filter === choice.filter && search === choice.search;
  }
  askOrderSoon() {
    clearTimeout(this.orderTimer);
    this.orderTimer = setTimeout(() => this.askOrder(), ARRANGE_AFTER);
  }
  askOrder() {
    this.orderId = this.questions.ask({ kind: "order", ...this.choice });
  }
  /** Ask for what is in view and not there. */
  askRows() {
    const heads = [];
    const rows = [];
    const keys = [];
    for (const { item } of this.list.visible) {
      if (item.head !== null && !this.rows.heads.has(item.head) && !this.questions.waits(item.key)) {
        heads.push(item.head);
        keys.push(item.key);
      }
      for (const i of item.samples) {
        const missing = this.missingOf(i);
        if (missing && !this.questions.waits(`r${i}`)) {
          rows.push(missing);
          keys.push(`r${i}`);
        }
      }
    }
    if (heads.length || rows.length) {
      const most = this.model.get("facts").rowsAtOnce;
      this.questions.ask({ kind: "rows", heads, rows: rows.slice(0, most) }, keys);
    }
  }
  /** Of a completion: its number, the first token that is missing, how many (null: a preview). */
  missingOf(i) {
    const row = this.rows.rows.get(i);
    if (!row) {
      return [i, 0, null];
    }
    if (row.small && row.wanted) {
      return [i, 0, row.wanted];
    }
    const { length } = row.pieces;
    return length < Math.min(row.wanted, row.n) ? [i, length, row.wanted - length] : null;
  }
  // -- the order of prompts and completions
  arrange(buffers) {
    this.groups = groupsOf(buffers);
    this.rows.open.clear();
    let rows = 0;
    for (const [p, own] of this.groups) {
      if (rows >= this.model.get("facts").openAtFirst) {
        break;
      }
      this.rows.open.add(p);
      rows += own.length;
    }
    this.box.scrollTop = 0;
    this.cursor.goTo();
    this.relist();
  }
  /** Show what the rollouts have grown to; what is open, the scroll and the cursor stay. */
  grow() {
    const { after = 0, by = 0, key = "" } = this.model.get("grown");
    const [order, first] = [this.model.get("order"), this.model.get("first")];
    const { sample, token } = this.cursor.place;
    const { tree } = this.rows;
    this.questions.forget();
    this.rows.grow(this.model.get("facts").channels, { after, by });
    this.rows.take(first, int32(first.ids), float32(first.values));
    tree.branches = this.model.get("tree");
    tree.closed.delete(key);
    this.groups = groupsOf([order.groups, order.counts, order.samples]);
    this.drawLegend();
    this.relist();
    if (sample !== void 0) {
      this.cursor.goToSample(moved(sample, { after, by }), token);
    }
    this.list.reveal(this.list.items.findIndex(({ branch }) => branch === key));
    this.draw();
    if (!this.isCurrent(order)) {
      this.askOrder();
    }
  }
  /** One item per line. */
  relist() {
    const kept = this.cursor.item?.key;
    const room = Math.floor((this.box.clientWidth - 24) / CARD_WIDTH);
    this.across = this.model.get("columns") ? Math.max(2, room) : 1;
    this.list.items = itemsOf(this.groups, this.rows.open, this.across, this.rows.tree);
    this.cursor.goTo(this.list.items.findIndex((item) => item.key === kept));
    this.draw();
  }
  // -- what pointer and keys ask for
  toggleHead(p) {
    if (!this.rows.open.delete(p)) {
      this.rows.open.add(p);
    }
    this.list.forget(`h${p}`);
    this.relist();
  }
  toggleFull(i) {
    this.rows.toggle(i);
    this.redraw([`r${i}`]);
  }
  toggleBranch(key) {
    this.rows.tree.toggle(key);
    this.relist();
  }
  makeForm() {
    const ask = (content) => this.questions.ask({ ...content }) !== "";
    return new ForkForm(this.el, this.model.get("fork"), {
      choices: () => ask({ kind: "choices" }),
      start: (asked) => ask({ kind: "fork", ...asked }),
      stop: () => ask({ kind: "stop" }),
      leave: () => this.box.focus()
    });
  }
  more(i) {
    this.rows.more(i);
    this.askRows();
  }
  spell(p) {
    if (!this.rows.spelt.delete(p)) {
      this.rows.spelt.add(p);
      if (!this.rows.prompts.has(p)) {
        this.questions.ask({ kind: "prompt", p });
      }
    }
    this.redraw([`h${p}`]);
  }
  // -- drawing
  node(item) {
    return nodeOf(item, this.rows, {
      name: this.name,
      whitespace: this.model.get("whitespace"),
      across: this.across,
      paint: (tokens) => this.paint(tokens),
      sized: () => this.drawSoon()
    });
  }
  draw() {
    this.list.draw();
    clearTimeout(this.askTimer);
    this.askTimer = setTimeout(() => this.askRows(), ASK_AFTER);
    this.el.classList.toggle("nothing", !this.list.items.length);
    this.cursor.show();
  }
  drawSoon() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }
  /** Draw anew: the items of these prompts (`h3`) and completions (`r7`), or all. */
  redraw(keys) {
    const stale = new Set(keys);
    this.list.clear(
      ({ key, samples }) => !keys || stale.has(key) || samples.some((i) => stale.has(`r${i}`))
    );
    this.draw();
  }
  resized() {
    if (this.width === this.box.clientWidth) {
      return;
    }
    this.width = this.box.clientWidth;
    this.list.forget();
    if (this.model.get("columns")) {
      this.relist();
    } else {
      this.drawSoon();
    }
  }
  recolour() {
    this.drawLegend();
    this.space.querySelectorAll(".tokens").forEach((tokens) => this.paint(tokens));
  }
  drawLegend() {
    drawLegend(this.legend, this.rows.scales, this.model.get("colour"));
  }
  paint(tokens) {
    const row = this.rows.rows.get(Number(tokens.dataset["i"]));
    const colour2 = this.model.get("colour");
    for (const span of tokens.querySelectorAll(".t")) {
      const t = Number(span.dataset["t"]);
      paintToken(span, this.rows.scales, colour2, (c) => row?.values[c]?.[t] ?? NaN);
    }
  }
  name = `rlbv${unique()}`;
  rows;
  legend;
  notice;
  box;
  space;
  list;
  cursor;
  form;
  questions;
  listening;
  observer = new ResizeObserver(() => this.resized());
  orderId = "";
  groups = [];
  across = 1;
  width = 0;
  frame = 0;
  askTimer;
  orderTimer;
};
function makeReadout(el, why) {
  const readout = add(el, "div", "readout");
  readout.setAttribute("role", "status");
  readout.setAttribute("aria-live", "polite");
  readout.title = why && `These cannot be continued from a token: ${why}`;
  return readout;
}
function makeList(el) {
  const list = add(el, "div", "list");
  list.setAttribute("role", "tree");
  list.tabIndex = 0;
  list.setAttribute("aria-label", LABEL);
  list.dataset["lmSuppressShortcuts"] = "true";
  return list;
}
var viewer_default = {
  render({ model, el }) {
    const viewer = new Viewer(model, el);
    return () => viewer.close();
  }
};
export {
  viewer_default as default
};
