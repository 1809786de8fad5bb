/** Metrics over the last steps as small multiples, and what the seconds of the last step went to. */
import { add, empty, number, PER_SMALL, picture, svg } from './dom';

const HEIGHT = 44;
const COUNTS: readonly (readonly [number, string])[] = [
  [1e9, 'B'],
  [1e6, 'M'],
  [1e3, 'k']
];

export interface Curve {
  readonly label: string;
  readonly unit: string;
  /** Step and value. */
  readonly points: readonly (readonly [number, number])[];
}

export interface Split {
  readonly step: number | null;
  readonly seconds: number;
  /** Part of the step and its seconds. */
  readonly parts: readonly (readonly [string, number])[];
  readonly tokens_per_s: number | null;
}

export function drawCurves(box: Element, curves: readonly Curve[]): void {
  if (!curves.some(curve => curve.points.length)) {
    empty(box, 'No steps yet. ', 'session.train_step(batch)');
    return;
  }
  box.replaceChildren();
  const cells = curves.map(curve => {
    const cell = add(box, 'div', 'rlb-curve');
    const head = add(cell, 'div', 'rlb-curve-head');
    const last = curve.points.at(-1);
    add(head, 'span', 'rlb-q', curve.label);
    add(head, 'span', 'rlb-big', last ? number(last[1]) : '–');
    if (curve.unit && last) {
      add(head, 'span', 'rlb-q', curve.unit);
    }
    return { cell, curve };
  });
  // once all are there, each has its width
  cells.forEach(({ cell, curve }) => drawCurve(cell, curve));
}

function drawCurve(cell: Element, { label, points }: Curve): void {
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
  const x = (step: number): number => 1 + ((step - first[0]) / span) * (width - 6);
  const y = (value: number): number =>
    flat ? (HEIGHT - 12) / 2 : 4 + (1 - (value - low) / (high - low)) * (HEIGHT - 20);
  const line = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  const rule = HEIGHT - 11.5;
  svg(root, 'line', { x1: 0, x2: width, y1: rule, y2: rule, class: 'rlb-rule' });
  svg(root, 'polyline', { points: line.join(' '), class: 'rlb-line' });
  const cx = values.length > 1 ? x(last[0]) : 4;
  const dot = svg(root, 'circle', { cx, cy: y(last[1]), r: 2.5, class: 'rlb-dot' });
  svg(dot, 'title', {}, `step ${last[0]}: ${number(last[1])}`);
  const range = flat ? '' : `${number(low)} – ${number(high)}`;
  const at = `step ${last[0]}`;
  const small = { y: HEIGHT - 1, class: 'rlb-small' };
  svg(root, 'text', { x: 0, ...small }, range);
  if ((range.length + at.length + 1) * PER_SMALL <= width) {
    svg(root, 'text', { x: width, ...small, 'text-anchor': 'end' }, at);
  }
}

/** The split of the last step; `cell`: what the notebook's cell took, in words. */
export function drawSplit(box: Element, split: Split | null, cell: string): void {
  if (!split) {
    const note = empty(box, 'The time of a step is split here after ', 'session.train_step(batch)');
    if (cell) {
      add(note, 'span', 'rlb-cell', cell);
    }
    return;
  }
  box.replaceChildren();
  const parts = split.parts.filter(([, seconds]) => seconds > 0);
  const said = ([part, seconds]: readonly [string, number]): string =>
    `${part} ${number(seconds)} s`;
  const line = add(box, 'div', 'rlb-split-line');
  add(line, 'b', '', `step ${number(split.seconds)} s`);
  for (const part of parts) {
    const one = add(line, 'span', 'rlb-numbers');
    add(one, 'i', `rlb-swatch rlb-swatch-${part[0]}`);
    one.append(said(part));
  }
  if (split.tokens_per_s !== null) {
    add(line, 'span', 'rlb-rate', `${count(split.tokens_per_s)} tok/s`);
  }
  if (cell) {
    add(line, 'span', 'rlb-q', cell);
  }
  const bar = add(box, 'div', 'rlb-split-bar');
  bar.setAttribute('role', 'img');
  bar.setAttribute('aria-label', split.parts.map(said).join(', '));
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  for (const part of parts) {
    const piece = add(bar, 'span', `rlb-swatch-${part[0]}`);
    piece.style.width = `${(100 * part[1]) / total}%`;
    piece.title = said(part);
  }
}

/** As format_count of rlbench/units.py: 3.1k. */
export function count(value: number): string {
  const found = COUNTS.find(([size]) => value >= 0.9995 * size);
  return found
    ? `${Number((value / found[0]).toPrecision(3))}${found[1]}`
    : number(Number(value.toPrecision(3)));
}
