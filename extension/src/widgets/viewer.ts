/**
 * The list of the rollout viewer: prompts and their completions, only as many as are in view. Python's half is
 * rlbench/notebook/rollouts/viewer.py; what it is asked and what it answers is described at RolloutDrawing.answer.
 */
import { Cursor } from './cursor';
import { add } from './dom';
import { ForkForm } from './fork';
import { nodeOf } from './item';
import type { Item } from './item';
import { List } from './list';
import { Listening, unique } from './model';
import type { Context, Model } from './model';
import { Questions } from './questions';
import { float32, int32, moved, Rows } from './rows';
import { groupsOf } from './state';
import type { Answer, Choice, State } from './state';
import { drawLegend, paintToken } from './tokens';
import { itemsOf } from './tree';
import type { Groups } from './tree';

/** Milliseconds. */
const ASK_AFTER = 60;
const ARRANGE_AFTER = 250;
/** Pixels. */
const CARD_WIDTH = 280;
const LABEL =
  'Rollouts by prompt. Up and down: rows. Right: open, then the tokens. Enter: whole text. Tab at a token: continue from it.';

class Viewer {
  constructor(
    private readonly model: Model<State>,
    private readonly el: HTMLElement
  ) {
    const facts = model.get('facts');
    this.rows = new Rows(facts.channels, facts.openTokens);
    this.rows.tree.branches = model.get('tree');
    el.classList.add('rlbv', 'rlb-live');
    const top = add(el, 'div', 'top');
    this.legend = add(top, 'div', 'legend');
    this.notice = add(top, 'div', 'notice');
    this.notice.setAttribute('role', 'status');
    this.box = makeList(el);
    this.space = add(this.box, 'div', 'space');
    this.space.setAttribute('role', 'presentation');
    const readout = makeReadout(el, model.get('fork').why);
    this.questions = new Questions(model, this.name, text => this.notify(text));
    this.form = this.makeForm();
    this.list = new List(this.box, this.space, item => this.node(item));
    this.cursor = new Cursor(this.box, readout, this.list, this.rows, {
      toggleHead: p => this.toggleHead(p),
      toggleFull: i => this.toggleFull(i),
      toggleBranch: key => this.toggleBranch(key),
      chosen: (row, token) => this.form.choose(row, token),
      more: i => this.more(i),
      spell: p => this.spell(p),
      draw: () => this.draw(),
      drawSoon: () => this.drawSoon()
    });
    this.listening = new Listening(model);
    this.listen();
    this.drawLegend();
    const { first, order } = { first: model.get('first'), order: model.get('order') };
    this.rows.take(first, int32(first.ids), float32(first.values));
    this.arrange([order.groups, order.counts, order.samples]);
    if (!this.isCurrent(order)) {
      this.askOrder();
    }
  }

  close(): void {
    this.observer.disconnect();
    clearTimeout(this.askTimer);
    clearTimeout(this.orderTimer);
    cancelAnimationFrame(this.frame);
    this.listening.close();
  }

  private listen(): void {
    this.listening.on('change:colour', () => this.recolour());
    this.listening.on('change:whitespace', () => this.redraw());
    this.listening.on('change:columns', () => this.relist());
    for (const name of ['sort', 'filter', 'search']) {
      this.listening.on(`change:${name}`, () => this.askOrderSoon());
    }
    this.listening.on('change:fork', () => this.form.show(this.model.get('fork')));
    this.listening.on('change:grown', () => this.grow());
    this.listening.on('msg:custom', (content, buffers) => this.hear(content as Answer, buffers));
    this.box.addEventListener('scroll', () => this.drawSoon(), { passive: true });
    this.observer.observe(this.box);
  }

  // -- messages

  private hear(answer: Answer, buffers: readonly DataView[]): void {
    if (!this.questions.takes(answer)) {
      return;
    }
    if (answer.kind === 'prompt') {
      this.rows.prompts.set(answer.p, answer.parts);
      this.redraw([`h${answer.p}`]);
    } else if (answer.kind === 'rows') {
      const [ids = null, values = null] = buffers;
      this.redraw(this.rows.take(answer, int32(ids), float32(values)));
    } else if (answer.id === this.orderId) {
      this.arrange(buffers);
      if (!this.isCurrent(answer)) {
        this.askOrder();
      }
    }
  }

  private notify(text: string): void {
    this.notice.textContent = text;
  }

  private get choice(): Choice {
    const { model } = this;
    return { sort: model.get('sort'), filter: model.get('filter'), search: model.get('search') };
  }

  private isCurrent({ sort, filter, search }: Choice): boolean {
    const { choice } = this;
    return sort === choice.sort && filter === choice.filter && search === choice.search;
  }

  private askOrderSoon(): void {
    clearTimeout(this.orderTimer);
    this.orderTimer = setTimeout(() => this.askOrder(), ARRANGE_AFTER);
  }

  private askOrder(): void {
    this.orderId = this.questions.ask({ kind: 'order', ...this.choice });
  }

  /** Ask for what is in view and not there. */
  private askRows(): void {
    const heads: number[] = [];
    const rows: (readonly [number, number, number | null])[] = [];
    const keys: string[] = [];
    for (const { item } of this.list.visible) {
      if (
        item.head !== null &&
        !this.rows.heads.has(item.head) &&
        !this.questions.waits(item.key)
      ) {
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
      const most = this.model.get('facts').rowsAtOnce;
      this.questions.ask({ kind: 'rows', heads, rows: rows.slice(0, most) }, keys);
    }
  }

  /** Of a completion: its number, the first token that is missing, how many (null: a preview). */
  private missingOf(i: number): readonly [number, number, number | null] | null {
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

  private arrange(buffers: readonly (DataView | null)[]): void {
    this.groups = groupsOf(buffers);
    this.rows.open.clear();
    let rows = 0;
    for (const [p, own] of this.groups) {
      if (rows >= this.model.get('facts').openAtFirst) {
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
  private grow(): void {
    const { after = 0, by = 0, key = '' } = this.model.get('grown');
    const [order, first] = [this.model.get('order'), this.model.get('first')];
    const { sample, token } = this.cursor.place;
    const { tree } = this.rows;
    this.questions.forget();
    this.rows.grow(this.model.get('facts').channels, { after, by });
    this.rows.take(first, int32(first.ids), float32(first.values));
    tree.branches = this.model.get('tree');
    tree.closed.delete(key);
    this.groups = groupsOf([order.groups, order.counts, order.samples]);
    this.drawLegend();
    this.relist();
    if (sample !== undefined) {
      this.cursor.goToSample(moved(sample, { after, by }), token);
    }
    this.list.reveal(this.list.items.findIndex(({ branch }) => branch === key));
    this.draw();
    if (!this.isCurrent(order)) {
      this.askOrder();
    }
  }

  /** One item per line. */
  private relist(): void {
    const kept = this.cursor.item?.key;
    const room = Math.floor((this.box.clientWidth - 24) / CARD_WIDTH);
    this.across = this.model.get('columns') ? Math.max(2, room) : 1;
    this.list.items = itemsOf(this.groups, this.rows.open, this.across, this.rows.tree);
    this.cursor.goTo(this.list.items.findIndex(item => item.key === kept));
    this.draw();
  }

  // -- what pointer and keys ask for

  private toggleHead(p: number): void {
    if (!this.rows.open.delete(p)) {
      this.rows.open.add(p);
    }
    this.list.forget(`h${p}`);
    this.relist();
  }

  private toggleFull(i: number): void {
    this.rows.toggle(i);
    this.redraw([`r${i}`]);
  }

  private toggleBranch(key: string): void {
    this.rows.tree.toggle(key);
    this.relist();
  }

  private makeForm(): ForkForm {
    const ask = (content: object): boolean => this.questions.ask({ ...content }) !== '';
    return new ForkForm(this.el, this.model.get('fork'), {
      choices: () => ask({ kind: 'choices' }),
      start: asked => ask({ kind: 'fork', ...asked }),
      stop: () => ask({ kind: 'stop' }),
      leave: () => this.box.focus()
    });
  }

  private more(i: number): void {
    this.rows.more(i);
    this.askRows();
  }

  private spell(p: number): void {
    if (!this.rows.spelt.delete(p)) {
      this.rows.spelt.add(p);
      if (!this.rows.prompts.has(p)) {
        this.questions.ask({ kind: 'prompt', p });
      }
    }
    this.redraw([`h${p}`]);
  }

  // -- drawing

  private node(item: Item): HTMLElement {
    return nodeOf(item, this.rows, {
      name: this.name,
      whitespace: this.model.get('whitespace'),
      across: this.across,
      paint: tokens => this.paint(tokens),
      sized: () => this.drawSoon()
    });
  }

  private draw(): void {
    this.list.draw();
    clearTimeout(this.askTimer);
    this.askTimer = setTimeout(() => this.askRows(), ASK_AFTER);
    this.el.classList.toggle('nothing', !this.list.items.length);
    this.cursor.show();
  }

  private drawSoon(): void {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  /** Draw anew: the items of these prompts (`h3`) and completions (`r7`), or all. */
  private redraw(keys?: readonly string[]): void {
    const stale = new Set(keys);
    this.list.clear(
      ({ key, samples }) => !keys || stale.has(key) || samples.some(i => stale.has(`r${i}`))
    );
    this.draw();
  }

  private resized(): void {
    if (this.width === this.box.clientWidth) {
      return;
    }
    this.width = this.box.clientWidth;
    this.list.forget();
    if (this.model.get('columns')) {
      this.relist();
    } else {
      this.drawSoon();
    }
  }

  private recolour(): void {
    this.drawLegend();
    this.space.querySelectorAll<HTMLElement>('.tokens').forEach(tokens => this.paint(tokens));
  }

  private drawLegend(): void {
    drawLegend(this.legend, this.rows.scales, this.model.get('colour'));
  }

  private paint(tokens: HTMLElement): void {
    const row = this.rows.rows.get(Number(tokens.dataset['i']));
    const colour = this.model.get('colour');
    for (const span of tokens.querySelectorAll<HTMLElement>('.t')) {
      const t = Number(span.dataset['t']);
      paintToken(span, this.rows.scales, colour, c => row?.values[c]?.[t] ?? NaN);
    }
  }

  private readonly name = `rlbv${unique()}`;
  private readonly rows: Rows;
  private readonly legend: HTMLElement;
  private readonly notice: HTMLElement;
  private readonly box: HTMLElement;
  private readonly space: HTMLElement;
  private readonly list: List;
  private readonly cursor: Cursor;
  private readonly form: ForkForm;
  private readonly questions: Questions<State>;
  private readonly listening: Listening<State>;
  private readonly observer = new ResizeObserver(() => this.resized());
  private orderId = '';
  private groups: Groups = [];
  private across = 1;
  private width = 0;
  private frame = 0;
  private askTimer: ReturnType<typeof setTimeout> | undefined;
  private orderTimer: ReturnType<typeof setTimeout> | undefined;
}

/** `why`: nothing can be continued here. */
function makeReadout(el: Element, why: string): HTMLElement {
  const readout = add(el, 'div', 'readout');
  readout.setAttribute('role', 'status');
  readout.setAttribute('aria-live', 'polite');
  readout.title = why && `These cannot be continued from a token: ${why}`;
  return readout;
}

function makeList(el: Element): HTMLElement {
  const list = add(el, 'div', 'list');
  list.setAttribute('role', 'tree');
  list.tabIndex = 0;
  list.setAttribute('aria-label', LABEL);
  list.dataset['lmSuppressShortcuts'] = 'true'; // JupyterLab's own keys (arrows, enter) stay out of the list
  return list;
}

export default {
  render({ model, el }: Context<State>): () => void {
    const viewer = new Viewer(model, el);
    return () => viewer.close();
  }
};
