// Charts of the dashboard: memory by owner over time, lengths, metrics over the steps, the split of the last step.
//
// Memory comes whole with the widget's state and then as messages with the moments since; kept for ten minutes.

const SVG = "http://www.w3.org/2000/svg";
const OWNERS = ["weights", "gradients", "optimizer", "kv_cache", "activations", "other"];
const LETTERS = { rollout: "R", score: "C", train: "T", sync: "S", offload: "O", onload: "N", snapshot: "P", save: "W" };
const KEPT_S = 600;
const WINDOWS = [[60, "last minute"], [180, "last 3 minutes"], [600, "last 10 minutes"]];
const REDRAW_MS = 250;
const SEEN = 0.01; // part of the scale below which a band is no wider than a hair
const LANE = 40, GAP = 6, BAND = 14, AXIS = 16;
const PER_LETTER = 6.2, PER_SMALL = 5.6; // pixels of a letter, at most

export default () => {
  const ring = { times: [], lanes: new Map(), marks: new Map(), untold: -Infinity };
  const drawers = new Set();
  const changed = (what) => { for (const drawer of drawers) drawer(what); };
  return {
    initialize({ model }) {
      merge(ring, model.get("memory"));
      model.on("msg:custom", (message) => {
        if (!message.memory) return;
        merge(ring, message.memory);
        changed("memory");
      });
      for (const name of ["lengths", "curves", "split"]) model.on(`change:${name}`, () => changed(name));
      model.on("change:cell", () => changed("split"));
    },
    render({ model, el }) {
      const view = makeCharts(el);
      let seconds = 180;
      const draw = {
        memory: () => drawMemory(view, ring, seconds),
        lengths: () => drawLengths(view, model.get("lengths") ?? [], heightOf(ring)),
        curves: () => drawCurves(view, model.get("curves") ?? []),
        split: () => drawSplit(view, model.get("split"), model.get("cell")),
      };
      const due = new Set(Object.keys(draw));
      let timer = null, last = 0;
      const flush = () => {
        timer = null;
        last = Date.now();
        for (const what of due) draw[what]();
        due.clear();
      };
      const later = (what) => {
        due.add(what);
        timer ??= setTimeout(() => requestAnimationFrame(flush), Math.max(0, REDRAW_MS - (Date.now() - last)));
      };
      drawers.add(later);
      view.window.addEventListener("change", () => { seconds = Number(view.window.value); later("memory"); });
      let width = 0;
      const observer = new ResizeObserver(() => {
        if (el.clientWidth === width) return;
        width = el.clientWidth;
        Object.keys(draw).forEach(later);
      });
      observer.observe(el);
      flush();
      return () => {
        observer.disconnect();
        clearTimeout(timer);
        drawers.delete(later);
      };
    },
  };
};

// -- memory that is kept

// Append what is newer; a process that was not there has no number.
function merge(ring, memory) {
  if (!memory?.times) return;
  ring.untold = Math.max(ring.untold, memory.untold ?? -Infinity);
  const last = ring.times.at(-1) ?? -Infinity;
  const fresh = memory.times.map((time, i) => [time, i]).filter(([time]) => time > last);
  const length = ring.times.length;
  for (const lane of memory.lanes) {
    if (!ring.lanes.has(lane.name)) {
      ring.lanes.set(lane.name, { owners: OWNERS.map(() => new Array(length).fill(null)), total: null, detail: "" });
    }
    const kept = ring.lanes.get(lane.name);
    kept.total = lane.total;
    kept.detail = lane.detail;
  }
  const given = new Map(memory.lanes.map((lane) => [lane.name, lane.owners]));
  for (const [time, i] of fresh) {
    ring.times.push(time);
    for (const [name, lane] of ring.lanes) {
      lane.owners.forEach((values, owner) => values.push(given.get(name)?.[owner][i] ?? null));
    }
  }
  const old = ring.times.findIndex((time) => time >= (ring.times.at(-1) ?? 0) - KEPT_S);
  if (old > 0) {
    ring.times.splice(0, old);
    for (const lane of ring.lanes.values()) lane.owners.forEach((values) => values.splice(0, old));
  }
  for (const mark of memory.marks) ring.marks.set(`${mark[0]} ${mark[3]}`, mark); // one that ran has ended now
  for (const [name, [time, seconds]] of ring.marks) {
    if (seconds !== null && time + seconds < (ring.times.at(-1) ?? 0) - KEPT_S) ring.marks.delete(name);
  }
}

// -- the frame

function makeCharts(el) {
  const root = add(el, "div", "rlb-charts");
  const panel = (name, title) => {
    const box = add(root, "section", `rlb-panel rlb-panel-${name}`);
    box.setAttribute("aria-label", title);
    const head = add(box, "div", "rlb-panel-head");
    add(head, "b", "").textContent = title;
    return { box, head, body: add(box, "div", "rlb-panel-body") };
  };
  const view = { root, memory: panel("memory", "memory"), lengths: panel("lengths", "lengths") };
  view.key = add(view.memory.head, "span", "rlb-key");
  view.window = add(view.memory.head, "select", "rlb-window");
  view.window.setAttribute("aria-label", "time shown");
  for (const [seconds, text] of WINDOWS) {
    const option = add(view.window, "option", "");
    option.value = String(seconds);
    option.textContent = text;
    option.selected = seconds === 180;
  }
  view.lengthsText = add(view.lengths.head, "span", "rlb-numbers");
  view.curves = add(root, "section", "rlb-panel rlb-panel-curves");
  view.curves.setAttribute("aria-label", "metrics of the last 100 steps");
  view.split = add(root, "section", "rlb-panel rlb-panel-split");
  view.split.setAttribute("aria-label", "time of the last step");
  return view;
}

function add(parent, tag, name) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  parent.append(node);
  return node;
}

function svg(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function empty(box, text, code) {
  box.replaceChildren();
  const note = add(box, "div", "rlb-q rlb-empty");
  note.append(text);
  if (code) add(note, "code", "").textContent = code;
}

// -- memory

function drawMemory(view, ring, seconds) {
  const body = view.memory.body;
  if (ring.times.length < 2) { empty(body, "No memory samples yet: the monitor takes two a second."); return; }
  const end = ring.times.at(-1);
  const first = Math.max(0, ring.times.findIndex((time) => time >= end - seconds) - 1);
  const start = Math.max(ring.times[first], end - seconds);
  const times = ring.times.slice(first);
  const lanes = [...ring.lanes].map(([name, lane]) => ({
    name, ...lane, owners: lane.owners.map((values) => values.slice(first)),
  })).filter((lane) => lane.owners[0].some((value) => value !== null));
  const width = Math.max(240, body.clientWidth), nameWidth = width < 480 ? 68 : 112, bytesWidth = width < 480 ? 88 : 118;
  const plot = width - nameWidth - bytesWidth;
  const height = BAND + lanes.length * (LANE + GAP) + AXIS + 4;
  const x = (time) => nameWidth + ((Math.max(start, time) - start) / (end - start)) * plot;
  body.replaceChildren();
  const said = lanes.map((lane) => `${lane.name} ${bytes(now(lane))}`).join("; ");
  const root = svg(body, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `memory: ${said}` });
  const most = Math.max(1, ...lanes.map((lane) => lane.total ? 0 : top(lane)));
  drawKey(view.key, lanes, most, ring.untold >= start);
  lanes.forEach((lane, row) => {
    const base = BAND + row * (LANE + GAP) + LANE;
    const name = svg(root, "text", { x: 0, y: base - LANE / 2 + 4, class: "rlb-lane-name" }, fitted(lane.name, nameWidth - 4));
    svg(name, "title", {}, lane.name);
    drawLane(root, lane, times, x, base, lane.total || most);
    svg(root, "line", { x1: nameWidth, x2: nameWidth + plot, y1: base + .5, y2: base + .5, class: "rlb-rule" });
    const current = now(lane);
    const value = current === null ? "gone" : lane.total ? `${bytes(current)} of ${bytes(lane.total)}` : bytes(current);
    svg(root, "text", { x: nameWidth + plot + 8, y: base - LANE / 2 + (lane.detail ? -1 : 4), class: "rlb-number" }, value);
    if (lane.detail) {
      const at = { x: nameWidth + plot + 8, y: base - LANE / 2 + 12, class: "rlb-small" };
      svg(svg(root, "text", at, fitted(lane.detail, bytesWidth - 8, PER_SMALL)), "title", {}, lane.detail);
    }
  });
  drawMarks(root, ring.marks.values(), start, end, x, height - AXIS);
  const span = Math.round(end - start);
  svg(root, "text", { x: nameWidth, y: height - 3, class: "rlb-small" }, `−${span} s`);
  svg(root, "text", { x: nameWidth + plot, y: height - 3, class: "rlb-small", "text-anchor": "end" }, "now");
}

// Which colour is whose, of what can be seen, and why the rest cannot.
function drawKey(key, lanes, most, untold) {
  const largest = OWNERS.map((_, owner) =>
    Math.max(0, ...lanes.map((lane) => Math.max(...lane.owners[owner]) / (lane.total || most))));
  const named = (owner) => owner === "kv_cache" ? "KV cache" : owner;
  key.replaceChildren();
  OWNERS.forEach((owner, i) => {
    if (largest[i] < SEEN) return;
    const one = add(key, "span", "");
    add(one, "i", `rlb-swatch rlb-fill-${owner.replace("_", "-")}`);
    one.append(named(owner));
  });
  const thin = OWNERS.filter((_, i) => largest[i] > 0 && largest[i] < SEEN).map(named);
  if (thin.length) add(key, "span", "rlb-q").textContent = `too thin to see: ${thin.join(", ")}`;
  if (untold) add(key, "span", "rlb-q").textContent = "grey at first: workers tell whose it is while somebody looks";
}

function drawLane(root, lane, times, x, base, most) {
  const below = times.map(() => 0);
  lane.owners.forEach((values, owner) => {
    if (!values.some((value) => value > 0)) return;
    const low = below.slice();
    values.forEach((value, i) => { below[i] += value ?? 0; });
    const y = (value) => (base - (value / most) * LANE).toFixed(1);
    const up = times.map((time, i) => `${x(time).toFixed(1)},${y(below[i])}`);
    const down = times.map((time, i) => `${x(time).toFixed(1)},${y(low[i])}`).reverse();
    const area = svg(root, "polygon", { points: up.concat(down).join(" "), class: `rlb-fill-${OWNERS[owner].replace("_", "-")}` });
    const last = values.at(-1);
    svg(area, "title", {}, `${lane.name}: ${OWNERS[owner].replace("_", " ")} ${last === null ? "gone" : bytes(last)}`);
  });
}

// What ran, as a band above the lanes with letters; a process killed for want of memory is a ✕ through all of them.
function drawMarks(root, marks, start, end, x, bottom) {
  const seen = [...marks].filter(([time, seconds]) => (seconds === null ? end : time + seconds) >= start && time <= end);
  const deaths = seen.filter(([, , what]) => what === "oom" || what === "died");
  const covered = (at) => deaths.some(([time]) => Math.abs(x(time) - at) < 30);
  for (const [time, seconds, what, label] of seen.filter((mark) => !deaths.includes(mark))) {
    const until = seconds === null ? end : time + seconds;
    const left = x(time), wide = Math.max(1, x(Math.min(until, end)) - left);
    const known = ["rollout", "score", "train", "sync"].includes(what) ? what : "other";
    const bar = svg(root, "rect", { x: left, y: 2, width: wide, height: BAND - 5, class: `rlb-phase-${known}` });
    svg(bar, "title", {}, `${label} · ${seconds === null ? "runs" : `${number(seconds)} s`}`);
    if (wide >= 12 && !covered(left + wide / 2)) {
      const letter = LETTERS[what] ?? "·";
      const text = wide >= 56 ? (what === "other" ? label.slice(0, Math.floor(wide / 7)) : what) : letter;
      svg(root, "text", { x: left + wide / 2, y: BAND - 5, class: "rlb-mark-text", "text-anchor": "middle" }, text);
    }
  }
  for (const [time, , what, label] of deaths) {
    const at = x(time), sign = what === "oom" ? "✕ OOM" : "✕ died";
    svg(root, "line", { x1: at, x2: at, y1: BAND, y2: bottom, class: "rlb-oom" });
    svg(root, "rect", { x: at - 24, y: 0, width: 48, height: BAND, rx: 2, class: "rlb-ground" });
    const text = svg(root, "text", { x: at, y: BAND - 3, class: "rlb-oom-sign", "text-anchor": "middle" }, sign);
    svg(text, "title", {}, label);
  }
}

// A text cut to so many pixels; the number of a worker, at its end, stays.
function fitted(text, pixels, each = PER_LETTER) {
  const most = Math.floor(pixels / each);
  if (text.length <= most) return text;
  const end = text.match(/ \d+$/)?.[0] ?? "";
  return most < 3 ? "" : `${text.slice(0, most - 1 - end.length)}…${end}`;
}

function now(lane) {
  const last = lane.owners.map((values) => values.at(-1));
  return last[0] === null ? null : last.reduce((sum, value) => sum + value, 0);
}

function top(lane) {
  return Math.max(...lane.owners[0].map((_, i) => lane.owners.reduce((sum, values) => sum + (values[i] ?? 0), 0)));
}

// -- lengths

// As high as the panel of memory beside it.
function heightOf(ring) {
  const lanes = [...ring.lanes.values()].filter((lane) => now(lane) !== null).length;
  return Math.max(120, BAND + lanes * (LANE + GAP) + AXIS + 4);
}

function drawLengths(view, all, height) {
  const body = view.lengths.body;
  if (!all.length) {
    view.lengthsText.textContent = "";
    empty(body, "No rollouts yet. ", "session.rollout(prompts)");
    return;
  }
  const last = all.at(-1);
  const said = [["p50", last.p50], ["p90", last.p90], ["p99", last.p99], ["max", last.max]]
    .filter(([, value]) => value !== null).map(([name, value]) => `${name} ${number(value)}`);
  if (last.truncated !== null) said.push(`truncated ${number(last.truncated * 100)} %`);
  view.lengthsText.textContent = said.join("  ");
  const width = Math.max(200, body.clientWidth), base = height - AXIS - 2, head = 14;
  const low = Math.min(...all.map((one) => one.edges[0] ?? 0));
  const high = Math.max(low + 1, ...all.map((one) => one.edges.at(-1) ?? 1));
  const share = (one) => one.counts.map((count) => count / Math.max(1, one.samples));
  const density = (one) => share(one).map((part, i) => part / Math.max(1e-9, one.edges[i + 1] - one.edges[i]));
  const most = Math.max(1e-9, ...all.flatMap(density));
  const x = (value) => ((value - low) / (high - low)) * (width - 2) + 1;
  const y = (value) => base - (value / most) * (base - head);
  body.replaceChildren();
  const label = `histogram of lengths of ${last.samples} samples: ${said.join(", ")}`;
  const root = svg(body, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  all.slice(0, -1).forEach((one, i) => {
    const values = density(one);
    const points = values.flatMap((value, k) => [`${x(one.edges[k])},${y(value)}`, `${x(one.edges[k + 1])},${y(value)}`]);
    const outline = [`${x(one.edges[0])},${base}`, ...points, `${x(one.edges.at(-1))},${base}`].join(" ");
    const area = svg(root, "polygon", { points: outline, class: "rlb-earlier", opacity: 0.05 + (0.09 * (i + 1)) / all.length });
    svg(area, "title", {}, one.rollout);
  });
  density(last).forEach((value, i) => {
    if (!value) return;
    const left = x(last.edges[i]), right = x(last.edges[i + 1]);
    const bar = svg(root, "rect", {
      x: left, width: Math.max(1, right - left - 1), y: y(value), height: base - y(value), class: "rlb-bar",
    });
    svg(bar, "title", {}, `${number(last.edges[i])} to ${number(last.edges[i + 1])} tokens: ${last.counts[i]}`);
  });
  for (const [name, value] of [["p50", last.p50], ["p90", last.p90]]) {
    if (value === null) continue;
    const near = name === "p90" && last.p50 !== null ? x(last.p50) + 26 : 12; // else their names lie over each other
    const at = Math.min(width - 12, Math.max(near, x(value)));
    svg(root, "line", { x1: x(value), x2: x(value), y1: head - 2, y2: base, class: "rlb-quantile" });
    svg(root, "text", { x: at, y: 10, class: "rlb-small", "text-anchor": "middle" }, name);
  }
  svg(root, "line", { x1: 0, x2: width, y1: base + .5, y2: base + .5, class: "rlb-rule" });
  svg(root, "text", { x: 0, y: height - 3, class: "rlb-small" }, number(low));
  svg(root, "text", { x: width, y: height - 3, class: "rlb-small", "text-anchor": "end" }, `${number(high)} tokens`);
  const count = `${last.rollout} · ${last.samples} samples${all.length > 1 ? `, faint: ${all.length - 1} earlier` : ""}`;
  const room = width - 2 * 6 * `${number(high)} tokens`.length;
  svg(root, "text", { x: width / 2, y: height - 3, class: "rlb-small", "text-anchor": "middle" }, fitted(count, room, PER_SMALL));
}

// -- metrics

function drawCurves(view, curves) {
  const box = view.curves;
  if (!curves.some((curve) => curve.points.length)) {
    empty(box, "No steps yet. ", "session.train_step(batch)");
    return;
  }
  box.replaceChildren();
  const cells = curves.map((curve) => {
    const cell = add(box, "div", "rlb-curve");
    const head = add(cell, "div", "rlb-curve-head");
    add(head, "span", "rlb-q").textContent = curve.label;
    const value = add(head, "span", "rlb-big");
    value.textContent = curve.points.length ? number(curve.points.at(-1)[1]) : "–";
    if (curve.unit && curve.points.length) add(head, "span", "rlb-q").textContent = curve.unit;
    return cell;
  });
  curves.forEach((curve, i) => drawCurve(cells[i], curve)); // once all are there, each has its width
}

function drawCurve(cell, curve) {
  const width = Math.max(90, cell.clientWidth), height = 44;
  const values = curve.points.map(([, value]) => value);
  const low = Math.min(...values), high = Math.max(...values);
  const said = values.length ? `${values.length} steps, ${number(low)} to ${number(high)}, last ${number(values.at(-1))}` : "no values";
  const root = svg(cell, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${curve.label}: ${said}` });
  if (!values.length) return;
  const first = curve.points[0][0], span = curve.points.at(-1)[0] - first || 1;
  const x = (step) => 1 + ((step - first) / span) * (width - 6);
  const y = (value) => high > low ? 4 + (1 - (value - low) / (high - low)) * (height - 20) : (height - 12) / 2;
  const points = curve.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  svg(root, "line", { x1: 0, x2: width, y1: height - 11.5, y2: height - 11.5, class: "rlb-rule" });
  svg(root, "polyline", { points: points.join(" "), class: "rlb-line" });
  const [lastStep, lastValue] = curve.points.at(-1);
  const dot = svg(root, "circle", { cx: values.length > 1 ? x(lastStep) : 4, cy: y(lastValue), r: 2.5, class: "rlb-dot" });
  svg(dot, "title", {}, `step ${lastStep}: ${number(lastValue)}`);
  const range = high > low ? `${number(low)} – ${number(high)}` : "", at = `step ${lastStep}`;
  svg(root, "text", { x: 0, y: height - 1, class: "rlb-small" }, range);
  if ((range.length + at.length + 1) * PER_SMALL > width) return;
  svg(root, "text", { x: width, y: height - 1, class: "rlb-small", "text-anchor": "end" }, at);
}

// -- time

function drawSplit(view, split, cell) {
  const box = view.split;
  if (!split) {
    empty(box, "The time of a step is split here after ", "session.train_step(batch)");
    if (cell) add(box.firstChild, "span", "rlb-cell").textContent = cell;
    return;
  }
  box.replaceChildren();
  const line = add(box, "div", "rlb-split-line");
  add(line, "b", "").textContent = `step ${number(split.seconds)} s`;
  for (const [part, seconds] of split.parts) {
    if (seconds <= 0) continue;
    const one = add(line, "span", "rlb-numbers");
    add(one, "i", `rlb-swatch rlb-swatch-${part}`);
    one.append(`${part} ${number(seconds)} s`);
  }
  if (split.tokens_per_s !== null) {
    const rate = add(line, "span", "rlb-rate");
    rate.textContent = `${count(split.tokens_per_s)} tok/s`;
  }
  if (cell) add(line, "span", "rlb-q").textContent = cell;
  const bar = add(box, "div", "rlb-split-bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", split.parts.map(([part, seconds]) => `${part} ${number(seconds)} s`).join(", "));
  const total = split.parts.reduce((sum, [, seconds]) => sum + Math.max(0, seconds), 0) || 1;
  for (const [part, seconds] of split.parts) {
    if (seconds <= 0) continue;
    const piece = add(bar, "span", `rlb-swatch-${part}`);
    piece.style.width = `${(100 * seconds) / total}%`;
    piece.title = `${part} ${number(seconds)} s`;
  }
}

// -- numbers

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

function bytes(mib) {
  if (mib === null) return "";
  return mib >= 1000 ? `${number(mib / 1024)} GiB` : `${number(mib)} MiB`;
}

// As format_count of rlbench/units.py: 3.1k.
function count(value) {
  for (const [size, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (value >= 0.9995 * size) return `${Number((value / size).toPrecision(3))}${letter}`;
  return number(Number(value.toPrecision(3)));
}
