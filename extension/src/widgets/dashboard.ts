/** Charts of the dashboard: memory by owner over time, lengths, metrics over the steps, the split of the last step. */
import { add } from './dom';
import { drawMemory, heightOf } from './lanes';
import { addNumbers, drawLengths } from './lengths';
import type { Lengths } from './lengths';
import type { Context } from './model';
import { Ring } from './ring';
import type { Memory } from './ring';
import { drawCurves, drawSplit } from './steps';
import type { Curve, Split } from './steps';

const WINDOWS: readonly (readonly [number, string])[] = [
  [60, 'last minute'],
  [180, 'last 3 minutes'],
  [600, 'last 10 minutes']
];
const SHOWN_S = 180;
const REDRAW_MS = 250;

interface State {
  readonly memory: Memory | null;
  readonly lengths: readonly Lengths[];
  readonly curves: readonly Curve[];
  readonly split: Split | null;
  readonly cell: string;
}

type Chart = 'memory' | 'lengths' | 'curves' | 'split';
type Draw = Readonly<Record<Chart, () => void>>;

export default () => {
  const ring = new Ring();
  const drawers = new Set<(what: Chart) => void>();
  const changed = (what: Chart): void => drawers.forEach(draw => draw(what));
  return {
    initialize({ model }: Context<State>): void {
      ring.merge(model.get('memory'));
      model.on('msg:custom', content => {
        ring.merge((content as { memory?: Memory }).memory ?? null);
        changed('memory');
      });
      for (const name of ['lengths', 'curves', 'split'] as const) {
        model.on(`change:${name}`, () => changed(name));
      }
      model.on('change:cell', () => changed('split'));
    },

    render({ model, el }: Context<State>): () => void {
      const { memory, key, seconds, lengths, numbers, curves, split } = makeCharts(el);
      const later = inTime({
        memory: () => drawMemory(memory, key, ring, Number(seconds.value)),
        lengths: () =>
          drawLengths(lengths, numbers, model.get('lengths'), Math.max(120, heightOf(ring.lanes))),
        curves: () => drawCurves(curves, model.get('curves')),
        split: () => drawSplit(split, model.get('split'), model.get('cell'))
      });
      drawers.add(later.draw);
      seconds.addEventListener('change', () => later.draw('memory'));
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

/** Draws what changed, four times a second at most. */
function inTime(draw: Draw): {
  draw: (what: Chart) => void;
  all: () => void;
  now: () => void;
  close: () => void;
} {
  const due = new Set(Object.keys(draw) as Chart[]);
  let timer: ReturnType<typeof setTimeout> | undefined;
  let last = 0;
  const now = (): void => {
    timer = undefined;
    last = Date.now();
    due.forEach(what => draw[what]());
    due.clear();
  };
  const later = (what: Chart): void => {
    due.add(what);
    const wait = Math.max(0, REDRAW_MS - (Date.now() - last));
    timer ??= setTimeout(() => requestAnimationFrame(now), wait);
  };
  return {
    draw: later,
    all: () => (Object.keys(draw) as Chart[]).forEach(later),
    now,
    close: () => clearTimeout(timer)
  };
}

interface Charts {
  readonly memory: Element;
  readonly key: Element;
  /** What of the memory is shown. */
  readonly seconds: HTMLSelectElement;
  readonly lengths: Element;
  readonly numbers: Element;
  readonly curves: Element;
  readonly split: Element;
}

function makeCharts(el: Element): Charts {
  const root = add(el, 'div', 'rlb-charts');
  const section = (name: string, label: string): Element => {
    const box = add(root, 'section', `rlb-panel rlb-panel-${name}`);
    box.setAttribute('aria-label', label);
    return box;
  };
  const panel = (title: string): { head: Element; body: Element } => {
    const box = section(title, title);
    const head = add(box, 'div', 'rlb-panel-head');
    add(head, 'b', '', title);
    return { head, body: add(box, 'div', 'rlb-panel-body') };
  };
  const memory = panel('memory');
  const lengths = panel('lengths');
  const key = add(memory.head, 'span', 'rlb-key');
  const seconds = add(memory.head, 'select', 'rlb-window');
  seconds.setAttribute('aria-label', 'time shown');
  for (const [value, text] of WINDOWS) {
    seconds.add(new Option(text, String(value), false, value === SHOWN_S));
  }
  return {
    memory: memory.body,
    key,
    seconds,
    lengths: lengths.body,
    numbers: addNumbers(lengths.head),
    curves: section('curves', 'metrics of the last 100 steps'),
    split: section('split', 'time of the last step')
  };
}
