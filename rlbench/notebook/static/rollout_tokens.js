// Tokens as coloured, readable spans. Shared by the viewer and the exported page, which put this text before their own
// (a widget's module cannot import another file). Text of models goes through textContent alone.

const LOG = (value) => (value > 0 ? Math.log(value) : NaN);
const STRONGEST = 0.62; // as in palette.py

// Three significant digits with a real minus sign; "–" where not known.
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let text = size >= 1000 ? Math.round(size).toLocaleString("en") : String(Number(size.toPrecision(3)));
  if (size && size < 1e-4) text = size.toExponential(1);
  return (value < 0 && Number(value) !== 0 ? "−" : "") + text;
}

// −1 to 1 (0 to 1 without a sign): how strongly a value colours its token.
function share(scale, value) {
  if (!Number.isFinite(value) || !scale.bound) return 0;
  const off = scale.kind === "signed" ? value : scale.kind === "ratio" ? LOG(value) : Math.abs(value);
  return Math.max(-1, Math.min(1, (Number.isFinite(off) ? off : -scale.bound) / scale.bound));
}

function colour(scale, value) {
  const part = share(scale, value);
  if (Math.abs(part) < 0.02) return "";
  const hue = scale.kind === "size" || scale.kind === "flag" ? "magnitude" : part < 0 ? "negative" : "positive";
  return `color-mix(in srgb, var(--rlb-${hue}) ${(Math.abs(part) * STRONGEST * 100).toFixed(0)}%, transparent)`;
}

// What a piece is drawn as: line feeds always visible, spaces and tabs on request.
function drawnText(piece, kind, whitespace, breakLines) {
  if (kind !== "t") return piece;
  if (piece === "") return "∅";
  const ends = piece.replaceAll("\n", breakLines ? "⏎\n" : "⏎");
  return whitespace ? ends.replaceAll(" ", "·").replaceAll("\t", "→\t") : ends;
}

const KIND_CLASS = { t: "t", s: "t pill", b: "t byte", i: "t byte" };
const KIND_TITLE = { s: "special token", b: "byte of a character that a later token completes", i: "token id" };

function tokenSpan(piece, kind, at, whitespace, breakLines) {
  const span = document.createElement("span");
  span.className = KIND_CLASS[kind];
  span.dataset.t = at;
  span.textContent = drawnText(piece, kind, whitespace, breakLines);
  return span;
}

// Colour one token by its values over all channels, and mark what colour alone must not say.
function paintToken(span, scales, chosen, value) {
  span.style.background = colour(scales[chosen], value(chosen));
  scales.forEach((scale, c) => {
    if (scale.name === "clipped") span.classList.toggle("clip", value(c) > 0);
    if (scale.name === "mask") span.classList.toggle("off", value(c) === 0);
  });
}

// "token 3  '3'  id 21  sampler −0.12  trainer −0.11  ratio 1.01  adv −0.87  H 0.4"
function describeToken(at, piece, kind, id, scales, value) {
  const shown = piece.length > 60 ? `${piece.slice(0, 60)}…` : piece;
  const quoted = `'${shown.replaceAll("\n", "\\n").replaceAll("\t", "\\t")}'`;
  const parts = [`token ${at}`, quoted, `id ${id}`];
  if (KIND_TITLE[kind]) parts.push(`(${KIND_TITLE[kind]})`);
  scales.forEach((scale, c) => {
    if (scale.kind === "flag") parts.push(value(c) > 0 ? scale.label : value(c) === 0 ? `not ${scale.label}` : `${scale.label} –`);
    else parts.push(`${scale.label} ${number(value(c))}`);
  });
  return parts.join("  ");
}

// The colours of a channel between its real least and largest value, with both in figures.
function drawLegend(element, scale, scales) {
  element.replaceChildren();
  const add = (className, text) => {
    const span = document.createElement("span");
    span.className = className;
    span.textContent = text;
    element.append(span);
    return span;
  };
  const name = add("name", scale.name.replaceAll("_", " ") + (scale.unit ? ` (${scale.unit})` : ""));
  name.title = scale.about;
  if (scale.low === scale.high) {
    add("figure", `${number(scale.low)} everywhere`);
  } else {
    add("figure", number(scale.low));
    const bar = add("bar", "");
    const stops = Array.from({ length: 13 }, (_, k) => {
      const part = k / 12;
      const at = scale.kind === "ratio" && scale.low > 0
        ? scale.low * (scale.high / scale.low) ** part
        : scale.low + part * (scale.high - scale.low);
      return colour(scale, at) || "transparent";
    });
    bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(",")})`;
    add("figure", number(scale.high));
    if (scale.saturated) {
      const bound = number(scale.bound);
      const from = scale.kind === "ratio" ? `×${number(Math.exp(scale.bound))}` : scale.kind === "signed" ? `±${bound}` : bound;
      add("note", `full colour from ${from}`);
    }
  }
  if (scales.some((s) => s.name === "clipped")) add("note", "").append(mark("clip", "clipped"));
  if (scales.some((s) => s.name === "mask" && s.low === 0)) add("note", "").append(mark("off", "not trained"));
}

function mark(className, text) {
  const span = document.createElement("span");
  span.className = `t ${className}`;
  span.textContent = text;
  return span;
}
