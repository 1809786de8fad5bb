// The exported page's controls: colour by any channel, show some completions, read a token's numbers.
// The page reads without them. Text of models is in the page already; nothing here writes markup.

const facts = JSON.parse(document.getElementById("facts").textContent);
const completions = [...document.querySelectorAll("[data-i]")];
const readout = document.getElementById("readout");
let chosen = facts.colour;

function numbers(element) {
  if (!element.rlb) {
    const bytes = Uint8Array.from(atob(facts.rows[element.dataset.i].values), (c) => c.charCodeAt(0));
    const flat = new Float32Array(bytes.buffer), count = element.querySelectorAll("i").length;
    element.rlb = facts.channels.map((_, c) => flat.subarray(c * count, (c + 1) * count));
  }
  return element.rlb;
}

function recolour() {
  drawLegend(document.getElementById("legend"), facts.channels[chosen], facts.channels);
  for (const element of completions) {
    const values = numbers(element);
    element.querySelectorAll("i").forEach((token, t) => {
      token.style.background = colour(facts.channels[chosen], values[chosen][t]) || "none";
      token.removeAttribute("title");
    });
  }
}

function filter() {
  const wanted = document.getElementById("filter").value, text = document.getElementById("search").value.trim().toLowerCase();
  for (const group of document.querySelectorAll(".g")) {
    let shown = 0;
    const prompt = text && group.querySelector(".h").textContent.toLowerCase().includes(text);
    for (const element of group.querySelectorAll("tr")) {
      const row = facts.rows[element.dataset.i];
      const fits = { all: true, right: row.right, wrong: !row.right, cut: row.cut }[wanted];
      const found = !text || prompt || element.textContent.toLowerCase().includes(text);
      element.hidden = !(fits && found);
      shown += !element.hidden;
    }
    group.hidden = !shown;
  }
}

function hover(event) {
  const token = event.target.closest?.("[data-i] i");
  if (token) say(token);
}

function say(token) {
  const element = token.closest("[data-i]"), t = [...element.querySelectorAll("i")].indexOf(token), values = numbers(element);
  const kind = token.classList.contains("s") ? "s" : token.classList.contains("b") ? "b" : "t";
  const id = facts.rows[element.dataset.i].ids[t];
  readout.textContent = describeToken(t, token.textContent.replace("⏎\n", "\n"), kind, id, facts.channels, (c) => values[c][t]);
}

// The keyboard's token: left and right go through a completion, up and down to the next one that is shown.
let cursor = null;

function goTo(token) {
  cursor?.classList.remove("at");
  cursor = token;
  cursor.classList.add("at");
  cursor.scrollIntoView({ block: "nearest" });
  say(cursor);
}

function key(event) {
  const cell = event.target.closest?.("[data-i] .t");
  if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
  const rows = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (rows) {
    const shown = completions.filter((element) => !element.hidden && !element.closest(".g").hidden);
    shown[shown.indexOf(cell.closest("[data-i]")) + rows]?.querySelector(".t").focus();
  } else {
    const tokens = [...cell.querySelectorAll("i")], t = tokens.indexOf(cursor);
    const wanted = { ArrowLeft: t - 1, ArrowRight: t + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (wanted === undefined) return;
    if (tokens[wanted]) goTo(tokens[wanted]);
  }
  event.preventDefault();
}

function focused(event) {
  const cell = event.target.closest?.("[data-i] .t");
  if (!cell) return;
  const token = cell.contains(cursor) ? cursor : cell.querySelector("i");
  if (token) goTo(token);
}

for (const element of completions) {
  const cell = element.querySelector(".t");
  cell.tabIndex = 0;
  cell.setAttribute("role", "group");
  cell.setAttribute("aria-label", `completion ${element.dataset.i}; arrow keys read its tokens`);
}
const select = document.getElementById("colour");
facts.channels.forEach((scale, c) => select.add(new Option(scale.name.replaceAll("_", " "), c, false, c === chosen)));
select.addEventListener("change", () => ((chosen = Number(select.value)), recolour()));
document.getElementById("filter").addEventListener("change", filter);
document.getElementById("search").addEventListener("input", filter);
document.addEventListener("mouseover", hover);
document.addEventListener("keydown", key);
document.addEventListener("focusin", focused);
document.getElementById("controls").hidden = false;
recolour();
