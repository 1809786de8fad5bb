/** How long responses are: the last rollout's histogram over faint outlines of earlier ones. */
import { add, empty, fitted, number, PER_SMALL, picture, svg } from './dom';
import { AXIS } from './lanes';

const HEAD = 14;

/** As rlbench/notebook/dashboard/data.py sends it: `counts[i]` responses of `edges[i]` to below `edges[i + 1]` tokens. */
export interface Lengths {
  readonly rollout: string;
  readonly samples: number;
  readonly truncated: number | null;
  readonly p50: number | null;
  readonly p90: number | null;
  readonly p99: number | null;
  readonly max: number | null;
  readonly edges: readonly number[];
  readonly counts: readonly number[];
}

/** Share of the responses per token of a bin's width. */
export function densityOf({ edges, counts, samples }: Lengths): readonly number[] {
  const widthOf = (i: number): number => (edges[i + 1] ?? 0) - (edges[i] ?? 0);
  return counts.map((count, i) => count / Math.max(1, samples) / Math.max(1e-9, widthOf(i)));
}

/** `p50 118`, `truncated 6 %`: what is known of a rollout. */
export function saidOf({ p50, p90, p99, max, truncated }: Lengths): readonly string[] {
  const said = Object.entries({ p50, p90, p99, max })
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} ${number(value)}`);
  return truncated === null ? said : [...said, `truncated ${number(truncated * 100)} %`];
}

export function drawLengths(
  body: Element,
  text: Element,
  all: readonly Lengths[],
  height: number
): void {
  const last = all.at(-1);
  if (!last) {
    text.textContent = '';
    empty(body, 'No rollouts yet. ', 'session.rollout(prompts)');
    return;
  }
  const said = saidOf(last);
  text.textContent = said.join('  ');
  const width = Math.max(200, body.clientWidth);
  const base = height - AXIS - 2;
  const low = Math.min(...all.map(one => one.edges[0] ?? 0));
  const high = Math.max(low + 1, ...all.map(one => one.edges.at(-1) ?? 1));
  const most = Math.max(1e-9, ...all.flatMap(densityOf));
  const x = (value = 0): number => ((value - low) / (high - low)) * (width - 2) + 1;
  const y = (value: number): number => base - (value / most) * (base - HEAD);
  body.replaceChildren();
  const label = `histogram of lengths of ${last.samples} samples: ${said.join(', ')}`;
  const root = picture(body, width, height, label);
  all.slice(0, -1).forEach((one, i) => {
    const opacity = 0.05 + (0.09 * (i + 1)) / all.length;
    const area = svg(root, 'polygon', {
      points: outlineOf(one, x, y),
      class: 'rlb-earlier',
      opacity
    });
    svg(area, 'title', {}, one.rollout);
  });
  densityOf(last).forEach((value, i) => {
    if (!value) {
      return;
    }
    const [left, right] = [last.edges[i], last.edges[i + 1]];
    const wide = Math.max(1, x(right) - x(left) - 1);
    const place = { x: x(left), width: wide, y: y(value), height: base - y(value) };
    const bar = svg(root, 'rect', { ...place, class: 'rlb-bar' });
    const tokens = `${number(left)} to ${number(right)} tokens`;
    svg(bar, 'title', {}, `${tokens}: ${last.counts[i] ?? 0}`);
  });
  drawQuantiles(root, last, x, width, base);
  svg(root, 'line', { x1: 0, x2: width, y1: base + 0.5, y2: base + 0.5, class: 'rlb-rule' });
  const small = { y: height - 3, class: 'rlb-small' };
  const longest = `${number(high)} tokens`;
  svg(root, 'text', { x: 0, ...small }, number(low));
  svg(root, 'text', { x: width, ...small, 'text-anchor': 'end' }, longest);
  const earlier = all.length > 1 ? `, faint: ${all.length - 1} earlier` : '';
  const count = `${last.rollout} · ${last.samples} samples${earlier}`;
  const room = fitted(count, width - 2 * 6 * longest.length, PER_SMALL);
  svg(root, 'text', { x: width / 2, ...small, 'text-anchor': 'middle' }, room);
}

function outlineOf(
  one: Lengths,
  x: (value?: number) => number,
  y: (value: number) => number
): string {
  const { edges } = one;
  const points = densityOf(one).flatMap((value, k) => [
    `${x(edges[k])},${y(value)}`,
    `${x(edges[k + 1])},${y(value)}`
  ]);
  return [`${x(edges[0])},${y(0)}`, ...points, `${x(edges.at(-1))},${y(0)}`].join(' ');
}

function drawQuantiles(
  root: Element,
  { p50, p90 }: Lengths,
  x: (value?: number) => number,
  width: number,
  base: number
): void {
  for (const [name, value] of Object.entries({ p50, p90 })) {
    if (value === null) {
      continue;
    }
    const near = name === 'p90' && p50 !== null ? x(p50) + 26 : 12; // else their names lie over each other
    const at = Math.min(width - 12, Math.max(near, x(value)));
    svg(root, 'line', {
      x1: x(value),
      x2: x(value),
      y1: HEAD - 2,
      y2: base,
      class: 'rlb-quantile'
    });
    svg(root, 'text', { x: at, y: 10, class: 'rlb-small', 'text-anchor': 'middle' }, name);
  }
}

/** The panel's numbers beside its title. */
export function addNumbers(head: Element): Element {
  return add(head, 'span', 'rlb-numbers');
}
