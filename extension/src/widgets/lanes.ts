/** Memory by owner over time, one lane per device and process, with what ran above them. */
import { OWNERS, SEEN } from '../memory';
import { add, empty, fitted, mebibytes, number, PER_SMALL, picture, svg } from './dom';
import { now, top } from './ring';
import type { Lane, Mark, Ring } from './ring';

const LETTERS: Readonly<Record<string, string>> = {
  rollout: 'R',
  score: 'C',
  train: 'T',
  sync: 'S',
  offload: 'O',
  onload: 'N',
  snapshot: 'P',
  save: 'W'
};
/** Kinds that have a colour of their own. */
const PHASES = ['rollout', 'score', 'train', 'sync'];
const DEATHS = ['oom', 'died'];
const LANE = 40;
const GAP = 6;
const BAND = 14;
export const AXIS = 16;

/** Pixels from the left at which a moment is drawn. */
type Across = (time: number) => number;

export function heightOf(lanes: number): number {
  return BAND + lanes * (LANE + GAP) + AXIS + 4;
}

/** Draw the last `seconds` of `ring`, and name the colours in `key`. */
export function drawMemory(body: Element, key: Element, ring: Ring, seconds: number): void {
  const end = ring.times.at(-1) ?? 0;
  if (ring.times.length < 2) {
    empty(body, 'No memory samples yet: the monitor takes two a second.');
    return;
  }
  const first = Math.max(0, ring.times.findIndex(time => time >= end - seconds) - 1);
  const times = ring.times.slice(first);
  const start = Math.max(times[0] ?? 0, end - seconds);
  const lanes = ring.since(first);
  const width = Math.max(240, body.clientWidth);
  const left = width < 480 ? 68 : 112;
  const right = width - (width < 480 ? 88 : 118);
  const height = heightOf(lanes.length);
  const x: Across = time =>
    left + ((Math.max(start, time) - start) / (end - start)) * (right - left);
  const most = Math.max(1, ...lanes.map(lane => (lane.total ? 0 : top(lane))));
  drawKey(key, lanes, most, ring.untold >= start);
  body.replaceChildren();
  const said = lanes.map(lane => `${lane.name} ${mebibytes(now(lane))}`).join('; ');
  const root = picture(body, width, height, `memory: ${said}`);
  lanes.forEach((lane, row) => {
    const base = BAND + row * (LANE + GAP) + LANE;
    drawLane(root, lane, times, x, base, lane.total ?? most);
    svg(root, 'line', { x1: left, x2: right, y1: base + 0.5, y2: base + 0.5, class: 'rlb-rule' });
    drawLabels(root, lane, base, left, right, width);
  });
  drawMarks(root, [...ring.marks.values()], start, end, x, height - AXIS);
  const small = { y: height - 3, class: 'rlb-small' };
  svg(root, 'text', { x: left, ...small }, `−${Math.round(end - start)} s`);
  svg(root, 'text', { x: right, ...small, 'text-anchor': 'end' }, 'now');
}

/** A lane's name before it, and what it holds behind it. */
function drawLabels(
  root: Element,
  lane: Lane,
  base: number,
  left: number,
  right: number,
  width: number
): void {
  const middle = base - LANE / 2;
  const at = { x: 0, y: middle + 4, class: 'rlb-lane-name' };
  svg(svg(root, 'text', at, fitted(lane.name, left - 4)), 'title', {}, lane.name);
  const current = now(lane);
  const held = mebibytes(current);
  const value =
    current === null ? 'gone' : lane.total ? `${held} of ${mebibytes(lane.total)}` : held;
  const x = right + 8;
  svg(root, 'text', { x, y: middle + (lane.detail ? -1 : 4), class: 'rlb-number' }, value);
  if (lane.detail) {
    const detail = fitted(lane.detail, width - x, PER_SMALL);
    const node = svg(root, 'text', { x, y: middle + 12, class: 'rlb-small' }, detail);
    svg(node, 'title', {}, lane.detail);
  }
}

/** Which colour is whose, of what can be seen, and why the rest cannot. */
function drawKey(key: Element, lanes: readonly Lane[], most: number, untold: boolean): void {
  const largest = OWNERS.map((_, owner) =>
    Math.max(
      0,
      ...lanes.flatMap(lane =>
        (lane.owners[owner] ?? []).map(value => (value ?? 0) / (lane.total ?? most))
      )
    )
  );
  const named = (owner: string): string => (owner === 'kv_cache' ? 'KV cache' : owner);
  const thin: string[] = [];
  key.replaceChildren();
  OWNERS.forEach((owner, i) => {
    const share = largest[i] ?? 0;
    if (share >= SEEN) {
      const one = add(key, 'span');
      add(one, 'i', `rlb-swatch ${fillOf(owner)}`);
      one.append(named(owner));
    } else if (share > 0) {
      thin.push(named(owner));
    }
  });
  if (thin.length) {
    add(key, 'span', 'rlb-q', `too thin to see: ${thin.join(', ')}`);
  }
  if (untold) {
    add(key, 'span', 'rlb-q', 'grey at first: workers tell whose it is while somebody looks');
  }
}

function fillOf(owner: string): string {
  return `rlb-fill-${owner.replace('_', '-')}`;
}

function drawLane(
  root: Element,
  lane: Lane,
  times: readonly number[],
  x: Across,
  base: number,
  most: number
): void {
  let below = times.map(() => 0);
  const point = (sums: readonly number[]) => (time: number, i: number) =>
    `${x(time).toFixed(1)},${(base - ((sums[i] ?? 0) / most) * LANE).toFixed(1)}`;
  OWNERS.forEach((owner, i) => {
    const values = lane.owners[i] ?? [];
    if (!values.some(value => (value ?? 0) > 0)) {
      return;
    }
    const above = below.map((sum, at) => sum + (values[at] ?? 0));
    const outline = [...times.map(point(above)), ...times.map(point(below)).reverse()];
    const area = svg(root, 'polygon', { points: outline.join(' '), class: fillOf(owner) });
    const last = values.at(-1) ?? null;
    const said = last === null ? 'gone' : mebibytes(last);
    svg(area, 'title', {}, `${lane.name}: ${owner.replace('_', ' ')} ${said}`);
    below = above;
  });
}

/** What ran, as a band above the lanes with letters; what died is a ✕ through all of them. */
function drawMarks(
  root: Element,
  marks: readonly Mark[],
  start: number,
  end: number,
  x: Across,
  bottom: number
): void {
  const until = ([time, seconds]: Mark): number => (seconds === null ? end : time + seconds);
  const shown = marks.filter(mark => until(mark) >= start && mark[0] <= end);
  const deaths = shown.filter(([, , what]) => DEATHS.includes(what));
  const covered = (at: number): boolean => deaths.some(([time]) => Math.abs(x(time) - at) < 30);
  for (const mark of shown.filter(one => !deaths.includes(one))) {
    const [time, seconds, what, label] = mark;
    const left = x(time);
    const wide = Math.max(1, x(Math.min(until(mark), end)) - left);
    const colour = `rlb-phase-${PHASES.includes(what) ? what : 'other'}`;
    const place = { x: left, y: 2, width: wide, height: BAND - 5, class: colour };
    const took = seconds === null ? 'runs' : `${number(seconds)} s`;
    svg(svg(root, 'rect', place), 'title', {}, `${label} · ${took}`);
    if (wide >= 12 && !covered(left + wide / 2)) {
      const word = what === 'other' ? label.slice(0, Math.floor(wide / 7)) : what;
      const at = { x: left + wide / 2, y: BAND - 5, class: 'rlb-mark-text' };
      const text = wide >= 56 ? word : (LETTERS[what] ?? '·');
      svg(root, 'text', { ...at, 'text-anchor': 'middle' }, text);
    }
  }
  for (const [time, , what, label] of deaths) {
    const at = x(time);
    svg(root, 'line', { x1: at, x2: at, y1: BAND, y2: bottom, class: 'rlb-oom' });
    const ground = { x: at - 24, y: 0, width: 48, height: BAND, rx: 2, class: 'rlb-ground' };
    svg(root, 'rect', ground);
    const sign = { x: at, y: BAND - 3, class: 'rlb-oom-sign', 'text-anchor': 'middle' };
    const text = svg(root, 'text', sign, what === 'oom' ? '✕ OOM' : '✕ died');
    svg(text, 'title', {}, label);
  }
}
