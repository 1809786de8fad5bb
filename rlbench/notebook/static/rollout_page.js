// Built from extension/src/widgets by extension/bundle.mjs: change those.
"use strict";
(() => {
  // src/format.ts
  var KIB = 2 ** 10;
  var MIB = 2 ** 20;
  var GIB = 2 ** 30;
  function digits(value) {
    return Math.abs(value) >= 1e3 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }

  // src/widgets/dom.ts
  var MIB2 = 2 ** 20;
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

  // src/widgets/tokens.ts
  var STRONGEST = 0.62;
  var STOPS = 13;
  var LONGEST = 60;
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

  // src/widgets/page.ts
  function byId(id) {
    const node = document.getElementById(id);
    if (!node) {
      throw new Error(`the page has no #${id}`);
    }
    return node;
  }
  var facts = JSON.parse(byId("facts").textContent ?? "");
  var completions = [...document.querySelectorAll("[data-i]")];
  var readout = byId("readout");
  var [select, filter, search] = [
    byId("colour"),
    byId("filter"),
    byId("search")
  ];
  var numbers = /* @__PURE__ */ new Map();
  var cursor = null;
  function factsOf(completion) {
    return facts.rows[completion.dataset["i"] ?? ""];
  }
  function numbersOf(completion) {
    const known = numbers.get(completion);
    if (known) {
      return known;
    }
    const bytes = Uint8Array.from(atob(factsOf(completion)?.values ?? ""), (c) => c.charCodeAt(0));
    const flat = new Float32Array(bytes.buffer);
    const count = completion.querySelectorAll("i").length;
    const made = facts.channels.map((_, c) => flat.subarray(c * count, (c + 1) * count));
    numbers.set(completion, made);
    return made;
  }
  function recolour() {
    const chosen = Number(select.value);
    const scale = facts.channels[chosen];
    drawLegend(byId("legend"), facts.channels, chosen);
    for (const completion of completions) {
      const values = numbersOf(completion)[chosen];
      completion.querySelectorAll("i").forEach((token, t) => {
        token.style.background = (scale && colour(scale, values?.[t] ?? NaN)) ?? "";
        token.style.background ||= "none";
        token.removeAttribute("title");
      });
    }
  }
  function show() {
    const text = search.value.trim().toLowerCase();
    const holds = (node) => Boolean(node?.textContent?.toLowerCase().includes(text));
    for (const group of document.querySelectorAll(".g")) {
      const prompt = holds(group.querySelector(".h"));
      let shown = 0;
      for (const completion of group.querySelectorAll("tr")) {
        completion.hidden = !(fits(completion) && (prompt || holds(completion)));
        shown += Number(!completion.hidden);
      }
      group.hidden = !shown;
    }
  }
  function fits(completion) {
    const row = factsOf(completion);
    switch (filter.value) {
      case "right":
        return Boolean(row?.right);
      case "wrong":
        return !row?.right;
      case "cut":
        return Boolean(row?.cut);
      default:
        return true;
    }
  }
  function say(token) {
    const completion = token.closest("[data-i]");
    if (!completion) {
      return;
    }
    const t = [...completion.querySelectorAll("i")].indexOf(token);
    const values = numbersOf(completion);
    const kind = token.classList.contains("s") ? "s" : token.classList.contains("b") ? "b" : "t";
    const piece = (token.textContent ?? "").replace("⏎\n", "\n");
    const id = factsOf(completion)?.ids[t];
    const value = (c) => values[c]?.[t] ?? NaN;
    readout.textContent = describeToken(t, piece, kind, id, facts.channels, value);
  }
  function goTo(token) {
    cursor?.classList.remove("at");
    cursor = token;
    cursor.classList.add("at");
    cursor.scrollIntoView({ block: "nearest" });
    say(cursor);
  }
  function cellOf(event) {
    return event.target.closest("[data-i] .t");
  }
  function key(event) {
    const cell = cellOf(event);
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const tokens = [...cell.querySelectorAll("i")];
    const t = cursor ? tokens.indexOf(cursor) : -1;
    const wanted = { ArrowLeft: t - 1, ArrowRight: t + 1, Home: 0, End: tokens.length - 1 }[event.key];
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (by !== void 0) {
      const shown = completions.filter((one) => !one.hidden && !one.closest(".g")?.hidden);
      const at = shown.findIndex((one) => one.contains(cell)) + by;
      shown[at]?.querySelector(".t")?.focus();
    } else if (wanted === void 0) {
      return;
    } else {
      const token = tokens[wanted];
      if (token) {
        goTo(token);
      }
    }
    event.preventDefault();
  }
  for (const completion of completions) {
    const cell = completion.querySelector(".t");
    if (cell) {
      cell.tabIndex = 0;
      cell.setAttribute("role", "group");
      const number2 = completion.dataset["i"] ?? "";
      cell.setAttribute("aria-label", `completion ${number2}; arrow keys read its tokens`);
    }
  }
  facts.channels.forEach(
    ({ name }, c) => select.add(new Option(name.replaceAll("_", " "), String(c), false, c === facts.colour))
  );
  select.addEventListener("change", recolour);
  filter.addEventListener("change", show);
  search.addEventListener("input", show);
  document.addEventListener("mouseover", (event) => {
    const token = event.target.closest("[data-i] i");
    if (token) {
      say(token);
    }
  });
  document.addEventListener("keydown", key);
  document.addEventListener("focusin", (event) => {
    const cell = cellOf(event);
    const token = cell?.contains(cursor) ? cursor : cell?.querySelector("i");
    if (token) {
      goTo(token);
    }
  });
  byId("controls").hidden = false;
  recolour();
})();
