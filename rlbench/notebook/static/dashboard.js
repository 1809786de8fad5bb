// Built from extension/src/widgets by extension/bundle.mjs: change those.

// src/format.ts
var KIB = 2 ** 10;
var MIB = 2 ** 20;
var GIB = 2 ** 30;
function digits(value) {
  return Math.abs(value) >= 1e3 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}
function gib(bytes) {
  const units = [
    [GIB, "GiB"],
    [MIB, "MiB"],
    [KIB, "KiB"]
  ];
  const found = units.find(([size]) => Math.abs(bytes) >= 1e3 * size / 1024);
  return found ? `${digits(bytes / found[0])} ${found[1]}` : `${Math.round(bytes)} B`;
}

// src/widgets/dom.ts
var SVG = "http://www.w3.org/2000/svg";
var PER_LETTER = 6.2;
var PER_SMALL = 5.6;
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
function svg(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    node.setAttribute(name, String(value));
  }
  if (text !== void 0) {
    node.textContent = text;
  }
  parent.append(node);
  return node;
}
function picture(parent, width, height, label) {
  const viewBox = `0 0 ${width} ${height}`;
  return svg(parent, "svg", { width, height, viewBox, role: "img", "aria-label": label });
}
function empty(box, text, code = "") {
  box.replaceChildren();
  const note = add(box, "div", "rlb-q rlb-empty");
  note.append(text);
  if (code) {
    add(note, "code", "", code);
  }
  return note;
}
function fitted(text, pixels, each = PER_LETTER) {
  const most = Math.floor(pixels / each);
  if (text.length <= most) {
    return text;
  }
  const end = / \d+$/.exec(text)?.[0] ?? "";
  return most < 3 ? "" : `${text.slice(0, most - 1 - end.length)}…${end}`;
}
function number(value) {
  return value === null || value === void 0 || !Number.isFinite(value) ? "–" : digits(value);
}
function mebibytes(mib) {
  return mib === null ? "" : gib(mib * MIB2);
}

// src/memory.ts
var OWNERS = [
  "weights",
  "gradients",
  "optimizer",
  "kv_cache",
  "activations",
  "other"
];
var SEEN = 0.01;

// src/widgets/ring.ts
var KEPT_S = 600;
var Ring = class {
  times = [];
  marks = /* @__PURE__ */ new Map();
  untold = -Infinity;
  /** Append what is newer; a process that was not there has no number. */
  merge(memory) {
    if (!memory) {
      return;
    }
    this.untold = Math.max(this.untold, memory.untold ?? -Infinity);
    this.append(memory);
    for (const mark of memory.marks) {
      this.marks.set(`${mark[0]} ${mark[3]}`, mark);
    }
    this.forget((this.times.at(-1) ?? 0) - KEPT_S);
  }
  /** The lanes from moment `first` on, without those of which nothing is known since. */
  since(first) {
    return [...this.kept].map(([name, lane]) => ({
      name,
      ...lane,
      owners: lane.owners.map((values) => values.slice(first))
    })).filter((lane) => lane.owners[0]?.some((value) => value !== null));
  }
  /** How many processes and devices have numbers now. */
  get lanes() {
    return this.since(this.times.length - 1).length;
  }
  append(memory) {
    const last = this.times.at(-1) ?? -Infinity;
    const before = this.times.length;
    for (const { name, total, detail } of memory.lanes) {
      const blank = () => Array.from({ length: before }, () => null);
      const owners = this.kept.get(name)?.owners ?? OWNERS.map(blank);
      this.kept.set(name, { owners, total, detail });
    }
    const given = new Map(memory.lanes.map((lane) => [lane.name, lane.owners]));
    memory.times.forEach((time, i) => {
      if (time <= last) {
        return;
      }
      this.times.push(time);
      for (const [name, lane] of this.kept) {
        lane.owners.forEach((values, owner) => values.push(given.get(name)?.[owner]?.[i] ?? null));
      }
    });
  }
  forget(until) {
    const old = this.times.findIndex((time) => time >= until);
    if (old > 0) {
      this.times.splice(0, old);
      for (const lane of this.kept.values()) {
        lane.owners.forEach((values) => values.splice(0, old));
      }
    }
    for (const [name, [time, seconds]] of this.marks) {
      if (seconds !== null && time + seconds < until) {
        this.marks.delete(name);
      }
    }
  }
  kept = /* @__PURE__ */ new Map();
};
function now(lane) {
  const last = lane.owners.map((values) => values.at(-1) ?? null);
  return last[0] === null ? null : last.reduce((sum, value) => sum + (value ?? 0), 0);
}
function top(lane) {
  const moments = lane.owners[0] ?? [];
  const sum = (i) => lane.owners.reduce((all, values) => all + (values[i] ?? 0), 0);
  return Math.max(0, ...moments.map((_, i) => sum(i)));
}

// src/widgets/lanes.ts
var LETTERS = {
  rollout: "R",
  score: "C",
  train: "T",
  sync: "S",
  offload: "O",
  onload: "N",
  snapshot: "P",
  save: "W"
};
var PHASES = ["rollout", "score", "train", "sync"];
var DEATHS = ["oom", "died"];
var LANE = 40;
var GAP = 6;
var BAND = 14;
var AXIS = 16;
function heightOf(lanes) {
  return BAND + lanes * (LANE + GAP) + AXIS + 4;
}
function drawMemory(body, key, ring, seconds) {
  const end = ring.times.at(-1) ?? 0;
  if (ring.times.length < 2) {
    empty(body, "No memory samples yet: the monitor takes two a second.");
    return;
  }
  const first = Math.max(0, ring.times.findIndex((time) => time >= end - seconds) - 1);
  const times = ring.times.slice(first);
  const start = Math.max(times[0] ?? 0, end - seconds);
  const lanes = ring.since(first);
  const width = Math.max(240, body.clientWidth);
  const left = width < 480 ? 68 : 112;
  const right = width - (width < 480 ? 88 : 118);
  const height = heightOf(lanes.length);
  const x = (time) => left + (Math.max(start, time) - start) / (end - start) * (right - left);
  const most = Math.max(1, ...lanes.map((lane) => lane.total ? 0 : top(lane)));
  drawKey(key, lanes, most, ring.untold >= start);
  body.replaceChildren();
  const said = lanes.map((lane) => `${lane.name} ${mebibytes(now(lane))}`).join("; ");
  const root = picture(body, width, height, `memory: ${said}`);
  lanes.forEach((lane, row) => {
    const base = BAND + row * (LANE + GAP) + LANE;
    drawLane(root, lane, times, x, base, lane.total ?? most);
    svg(root, "line", { x1: left, x2: right, y1: base + 0.5, y2: base + 0.5, class: "rlb-rule" });
    drawLabels(root, lane, base, left, right, width);
  });
  drawMarks(root, [...ring.marks.values()], start, end, x, height - AXIS);
  const small = { y: height - 3, class: "rlb-small" };
  svg(root, "text", { x: left, ...small }, `−${Math.round(end - start)} s`);
  svg(root, "text", { x: right, ...small, "text-anchor": "end" }, "now");
}
function drawLabels(root, lane, base, left, right, width) {
  const middle = base - LANE / 2;
  const at = { x: 0, y: middle + 4, class: "rlb-lane-name" };
  svg(svg(root, "text", at, fitted(lane.name, left - 4)), "title", {}, lane.name);
  const current = now(lane);
  const held = mebibytes(current);
  const value = current === null ? "gone" : lane.total ? `${held} of ${mebibytes(lane.total)}` : held;
  const x = right + 8;
  svg(root, "text", { x, y: middle + (lane.detail ? -1 : 4), class: "rlb-number" }, value);
  if (lane.detail) {
    const detail = fitted(lane.detail, width - x, PER_SMALL);
    const node = svg(root, "text", { x, y: middle + 12, class: "rlb-small" }, detail);
    svg(node, "title", {}, lane.detail);
  }
}
function drawKey(key, lanes, most, untold) {
  const largest = OWNERS.map(
    (_, owner) => Math.max(
      0,
      ...lanes.flatMap(
        (lane) => (lane.owners[owner] ?? []).map((value) => (value ?? 0) / (lane.total ?? most))
      )
    )
  );
  const named = (owner) => owner === "kv_cache" ? "KV cache" : owner;
  const thin = [];
  key.replaceChildren();
  OWNERS.forEach((owner, i) => {
    const share = largest[i] ?? 0;
    if (share >= SEEN) {
      const one = add(key, "span");
      add(one, "i", `rlb-swatch ${fillOf(owner)}`);
      one.append(named(owner));
    } else if (share > 0) {
      thin.push(named(owner));
    }
  });
  if (thin.length) {
    add(key, "span", "rlb-q", `too thin to see: ${thin.join(", ")}`);
  }
  if (untold) {
    add(key, "span", "rlb-q", "grey at first: workers tell whose it is while somebody looks");
  }
}
function fillOf(owner) {
  return `rlb-fill-${owner.replace("_", "-")}`;
}
function drawLane(root, lane, times, x, base, most) {
  let below = times.map(() => 0);
  const point = (sums) => (time, i) => `${x(time).toFixed(1)},${(base - (sums[i] ?? 0) / most * LANE).toFixed(1)}`;
  OWNERS.forEach((owner, i) => {
    const values = lane.owners[i] ?? [];
    if (!values.some((value) => (value ?? 0) > 0)) {
      return;
    }
    const above = below.map((sum, at) => sum + (values[at] ?? 0));
    const outline = [...times.map(point(above)), ...times.map(point(below)).reverse()];
    const area = svg(root, "polygon", { points: outline.join(" "), class: fillOf(owner) });
    const last = values.at(-1) ?? null;
    const said = last === null ? "gone" : mebibytes(last);
    svg(area, "title", {}, `${lane.name}: ${owner.replace("_", " ")} ${said}`);
    below = above;
  });
}
function drawMarks(root, marks, start, end, x, bottom) {
  const until = ([time, seconds]) => seconds === null ? end : time + seconds;
  const shown = marks.filter((mark) => until(mark) >= start && mark[0] <= end);
  const deaths = shown.filter(([, , what]) => DEATHS.includes(what));
  const covered = (at) => deaths.some(([time]) => Math.abs(x(time) - at) < 30);
  for (const mark of shown.filter((one) => !deaths.includes(one))) {
    const [time, seconds, what, label] = mark;
    const left = x(time);
    const wide = Math.max(1, x(Math.min(until(mark), end)) - left);
    const colour = `rlb-phase-${PHASES.includes(what) ? what : "other"}`;
    const place = { x: left, y: 2, width: wide, height: BAND - 5, class: colour };
    const took = seconds === null ? "runs" : `${number(seconds)} s`;
    svg(svg(root, "rect", place), "title", {}, `${label} · ${took}`);
    if (wide >= 12 && !covered(left + wide / 2)) {
      const word = what === "other" ? label.slice(0, Math.floor(wide / 7)) : what;
      const at = { x: left + wide / 2, y: BAND - 5, class: "rlb-mark-text" };
      const text = wide >= 56 ? word : LETTERS[what] ?? "·";
      svg(root, "text", { ...at, "text-anchor": "middle" }, text);
    }
  }
  for (const [time, , what, label] of deaths) {
    const at = x(time);
    svg(root, "line", { x1: at, x2: at, y1: BAND, y2: bottom, class: "rlb-oom" });
    const ground = { x: at - 24, y: 0, width: 48, height: BAND, rx: 2, class: "rlb-ground" };
    svg(root, "rect", ground);
    const sign = { x: at, y: BAND - 3, class: "rlb-oom-sign", "text-anchor": "middle" };
    const text = svg(root, "text", sign, what === "oom" ? "✕ OOM" : "✕ died");
    svg(text, "title", {}, label);
  }
}

// src/widgets/lengths.ts
var HEAD = 14;
function densityOf({ edges, counts, samples }) {
  const widthOf = (i) => (edges[i + 1] ?? 0) - (edges[i] ?? 0);
  return counts.map((count2, i) => count2 / Math.max(1, samples) / Math.max(1e-9, widthOf(i)));
}
function saidOf({ p50, p90, p99, max, truncated }) {
  const said = Object.entries({ p50, p90, p99, max }).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${number(value)}`);
  return truncated === null ? said : [...said, `truncated ${number(truncated * 100)} %`];
}
function drawLengths(body, text, all, height) {
  const last = all.at(-1);
  if (!last) {
    text.textContent = "";
    empty(body, "No rollouts yet. ", "session.rollout(prompts)");
    return;
  }
  const said = saidOf(last);
  text.textContent = said.join("  ");
  const width = Math.max(200, body.clientWidth);
  const base = height - AXIS - 2;
  const low = Math.min(...all.map((one) => one.edges[0] ?? 0));
  const high = Math.max(low + 1, ...all.map((one) => one.edges.at(-1) ?? 1));
  const most = Math.max(1e-9, ...all.flatMap(densityOf));
  const x = (value = 0) => (value - low) / (high - low) * (width - 2) + 1;
  const y = (value) => base - value / most * (base - HEAD);
  body.replaceChildren();
  const label = `histogram of lengths of ${last.samples} samples: ${said.join(", ")}`;
  const root = picture(body, width, height, label);
  all.slice(0, -1).forEach((one, i) => {
    const opacity = 0.05 + 0.09 * (i + 1) / all.length;
    const area = svg(root, "polygon", {
      points: outlineOf(one, x, y),
      class: "rlb-earlier",
      opacity
    });
    svg(area, "title", {}, one.rollout);
  });
  densityOf(last).forEach((value, i) => {
    if (!value) {
      return;
    }
    const [left, right] = [last.edges[i], last.edges[i + 1]];
    const wide = Math.max(1, x(right) - x(left) - 1);
    const place = { x: x(left), width: wide, y: y(value), height: base - y(value) };
    const bar = svg(root, "rect", { ...place, class: "rlb-bar" });
    const tokens = `${number(left)} to ${number(right)} tokens`;
    svg(bar, "title", {}, `${tokens}: ${last.counts[i] ?? 0}`);
  });
  drawQuantiles(root, last, x, width, base);
  svg(root, "line", { x1: 0, x2: width, y1: base + 0.5, y2: base + 0.5, class: "rlb-rule" });
  const small = { y: height - 3, class: "rlb-small" };
  const longest = `${number(high)} tokens`;
  svg(root, "text", { x: 0, ...small }, number(low));
  svg(root, "text", { x: width, ...small, "text-anchor": "end" }, longest);
  const earlier = all.length > 1 ? `, faint: ${all.length - 1} earlier` : "";
  const count2 = `${last.rollout} · ${last.samples} samples${earlier}`;
  const room = fitted(count2, width - 2 * 6 * longest.length, PER_SMALL);
  svg(root, "text", { x: width / 2, ...small, "text-anchor": "middle" }, room);
}
function outlineOf(one, x, y) {
  const { edges } = one;
  const points = densityOf(one).flatMap((value, k) => [
    `${x(edges[k])},${y(value)}`,
    `${x(edges[k + 1])},${y(value)}`
  ]);
  return [`${x(edges[0])},${y(0)}`, ...points, `${x(edges.at(-1))},${y(0)}`].join(" ");
}
function drawQuantiles(root, { p50, p90 }, x, width, base) {
  for (const [name, value] of Object.entries({ p50, p90 })) {
    if (value === null) {
      continue;
    }
    const near = name === "p90" && p50 !== null ? x(p50) + 26 : 12;
    const at = Math.min(width - 12, Math.max(near, x(value)));
    svg(root, "line", {
      x1: x(value),
      x2: x(value),
      y1: HEAD - 2,
      y2: base,
      class: "rlb-quantile"
    });
    svg(root, "text", { x: at, y: 10, class: "rlb-small", "text-anchor": "middle" }, name);
  }
}
function addNumbers(head) {
  return add(head, "span", "rlb-numbers");
}

// src/widgets/steps.ts
var HEIGHT = 44;
var COUNTS = [
  [1e9, "B"],
  [1e6, "M"],
  [1e3, "k"]
];
function drawCurves(box, curves) {
  if (!curves.some((curve) => curve.points.length)) {
    empty(box, "No steps yet. ", "session.train_step(batch)");
    return;
  }
  box.replaceChildren();
  const cells = curves.map((curve) => {
    const cell = add(box, "div", "rlb-curve");
    const head = add(cell, "div", "rlb-curve-head");
    const last = curve.points.at(-1);
    add(head, "span", "rlb-q", curve.label);
    add(head, "span", "rlb-big", last ? number(last[1]) : "–");
    if (curve.unit && last) {
      add(head, "span", "rlb-q", curve.unit);
    }
    return { cell, curve };
  });
  cells.forEach(({ cell, curve }) => drawCurve(cell, curve));
}
function drawCurve(cell, { label, points }) {
  const width = Math.max(90, cell.clientWidth);
  const values = points.map(([, value]) => value);
  const [first, last] = [points[0], points.at(-1)];
  if (!first || !last) {
    picture(cell, width, HEIGHT, `${label}: no values`);
    return;
  }
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const flat = high <= low;
  const between = `${number(low)} to ${number(high)}, last ${number(last[1])}`;
  const root = picture(cell, width, HEIGHT, `${label}: ${values.length} steps, ${between}`);
  const span = last[0] - first[0] || 1;
  const x = (step) => 1 + (step - first[0]) / span * (width - 6);
  const y = (value) => flat ? (HEIGHT - 12) / 2 : 4 + (1 - (value - low) / (high - low)) * (HEIGHT - 20);
  const line = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  const rule = HEIGHT - 11.5;
  svg(root, "line", { x1: 0, x2: width, y1: rule, y2: rule, class: "rlb-rule" });
  svg(root, "polyline", { points: line.join(" "), class: "rlb-line" });
  const cx = values.length > 1 ? x(last[0]) : 4;
  const dot = svg(root, "circle", { cx, cy: y(last[1]), r: 2.5, class: "rlb-dot" });
  svg(dot, "title", {}, `step ${last[0]}: ${number(last[1])}`);
  const range = flat ? "" : `${number(low)} – ${number(high)}`;
  const at = `step ${last[0]}`;
  const small = { y: HEIGHT - 1, class: "rlb-small" };
  svg(root, "text", { x: 0, ...small }, range);
  if ((range.length + at.length + 1) * PER_SMALL <= width) {
    svg(root, "text", { x: width, ...small, "text-anchor": "end" }, at);
  }
}
function drawSplit(box, split, cell) {
  if (!split) {
    const note = empty(box, "The time of a step is split here after ", "session.train_step(batch)");
    if (cell) {
      add(note, "span", "rlb-cell", cell);
    }
    return;
  }
  box.replaceChildren();
  const parts = split.parts.filter(([, seconds]) => seconds > 0);
  const said = ([part, seconds]) => `${part} ${number(seconds)} s`;
  const line = add(box, "div", "rlb-split-line");
  add(line, "b", "", `step ${number(split.seconds)} s`);
  for (const part of parts) {
    const one = add(line, "span", "rlb-numbers");
    add(one, "i", `rlb-swatch rlb-swatch-${part[0]}`);
    one.append(said(part));
  }
  if (split.tokens_per_s !== null) {
    add(line, "span", "rlb-rate", `${count(split.tokens_per_s)} tok/s`);
  }
  if (cell) {
    add(line, "span", "rlb-q", cell);
  }
  const bar = add(box, "div", "rlb-split-bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", split.parts.map(said).join(", "));
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  for (const part of parts) {
    const piece = add(bar, "span", `rlb-swatch-${part[0]}`);
    piece.style.width = `${100 * part[1] / total}%`;
    piece.title = said(part);
  }
}
function count(value) {
  const found = COUNTS.find(([size]) => value >= 0.9995 * size);
  return found ? `${Number((value / found[0]).toPrecision(3))}${found[1]}` : number(Number(value.toPrecision(3)));
}

// src/widgets/dashboard.ts
var WINDOWS = [
  [60, "last minute"],
  [180, "last 3 minutes"],
  [600, "last 10 minutes"]
];
var SHOWN_S = 180;
var REDRAW_MS = 250;
var dashboard_default = () => {
  const ring = new Ring();
  const drawers = /* @__PURE__ */ new Set();
  const changed = (what) => drawers.forEach((draw) => draw(what));
  return {
    initialize({ model }) {
      ring.merge(model.get("memory"));
      model.on("msg:custom", (content) => {
        ring.merge(content.memory ?? null);
        changed("memory");
      });
      for (const name of ["lengths", "curves", "split"]) {
        model.on(`change:${name}`, () => changed(name));
      }
      model.on("change:cell", () => changed("split"));
    },
    render({ model, el }) {
      const { memory, key, seconds, lengths, numbers, curves, split } = makeCharts(el);
      const later = inTime({
        memory: () => drawMemory(memory, key, ring, Number(seconds.value)),
        lengths: () => drawLengths(lengths, numbers, model.get("lengths"), Math.max(120, heightOf(ring.lanes))),
        curves: () => drawCurves(curves, model.get("curves")),
        split: () => drawSplit(split, model.get("split"), model.get("cell"))
      });
      drawers.add(later.draw);
      seconds.addEventListener("change", () => later.draw("memory"));
      let width = 0;
      const observer = new ResizeObserver(() => {
        if (el.clientWidth !== width) {
          width = el.clientWidth;
          later.all();
        }
      });
      observer.observe(el);
      later.now();
      return () => {
        observer.disconnect();
        later.close();
        drawers.delete(later.draw);
      };
    }
  };
};
function inTime(draw) {
  const due = new Set(Object.keys(draw));
  let timer;
  let last = 0;
  const now2 = () => {
    timer = void 0;
    last = Date.now();
    due.forEach((what) => draw[what]());
    due.clear();
  };
  const later = (what) => {
    due.add(what);
    const wait = Math.max(0, REDRAW_MS - (Date.now() - last));
    timer ??= setTimeout(() => requestAnimationFrame(now2), wait);
  };
  return {
    draw: later,
    all: () => Object.keys(draw).forEach(later),
    now: now2,
    close: () => clearTimeout(timer)
  };
}
function makeCharts(el) {
  const root = add(el, "div", "rlb-charts");
  const section = (name, label) => {
    const box = add(root, "section", `rlb-panel rlb-panel-${name}`);
    box.setAttribute("aria-label", label);
    return box;
  };
  const panel = (title) => {
    const box = section(title, title);
    const head = add(box, "div", "rlb-panel-head");
    add(head, "b", "", title);
    return { head, body: add(box, "div", "rlb-panel-body") };
  };
  const memory = panel("memory");
  const lengths = panel("lengths");
  const key = add(memory.head, "span", "rlb-key");
  const seconds = add(memory.head, "select", "rlb-window");
  seconds.setAttribute("aria-label", "time shown");
  for (const [value, text] of WINDOWS) {
    seconds.add(new Option(text, String(value), false, value === SHOWN_S));
  }
  return {
    memory: memory.body,
    key,
    seconds,
    lengths: lengths.body,
    numbers: addNumbers(lengths.head),
    curves: section("curves", "metrics of the last 100 steps"),
    split: section("split", "time of the last step")
  };
}
export {
  dashboard_default as default
};
