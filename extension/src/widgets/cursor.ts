/**
 * What pointer and keys do in the rollout viewer. The cursor is an item of the list, which of its completions where
 * several stand side by side, and a token of that, or none.
 */
import type { Item } from './item';
import { kindOf } from './item';
import type { List } from './list';
import type { Row, Rows } from './rows';
import { describeToken } from './tokens';

const HINT = 'Point at a token, or use the arrow keys, to read its numbers.';
const PAGE = 10;
/** Pixels between a token that is scrolled to and the list's edge. */
const ROOM = 8;

/** What the viewer does when it is told to. */
export interface Acts {
  /** Show or hide a prompt's completions. */
  toggleHead(p: number): void;
  /** Show a completion whole, or its preview. */
  toggleFull(i: number): void;
  /** Show or hide what continues from a place. */
  toggleBranch(key: string): void;
  /** The cursor is at a token of a completion, or at none. */
  chosen(row: Row | undefined, token: number | null): void;
  /** Show more of a completion. */
  more(i: number): void;
  /** Show all of a prompt, or one line of it. */
  spell(p: number): void;
  draw(): void;
  drawSoon(): void;
}

export class Cursor {
  constructor(
    private readonly box: HTMLElement,
    private readonly readout: HTMLElement,
    private readonly list: List,
    private readonly rows: Rows,
    private readonly acts: Acts
  ) {
    box.addEventListener('keydown', event => this.key(event));
    box.addEventListener('click', event => this.click(event));
    box.addEventListener('mouseover', event => this.hover(event));
    box.addEventListener('mouseleave', () => this.say());
    box.addEventListener('focus', () => this.show());
    box.addEventListener('blur', () => this.show());
    this.say();
  }

  get item(): Item | undefined {
    return this.list.items[this.at];
  }

  /** The completion and token that it is at. */
  get place(): { readonly sample: number | undefined; readonly token: number | null } {
    return { sample: this.sample, token: this.token };
  }

  /** To a token of a completion, where that is in the list. */
  goToSample(i: number, token: number | null): void {
    const at = this.list.items.findIndex(({ samples }) => samples.includes(i));
    if (at >= 0) {
      this.goTo(at, this.list.items[at]?.samples.indexOf(i), token);
    }
  }

  /** To the list's begin, or to an item of it. */
  goTo(at = 0, column = 0, token: number | null = null): void {
    this.at = Math.max(0, at);
    this.column = column;
    this.token = token;
  }

  /** Mark where the cursor is. */
  show(): void {
    for (const old of this.box.querySelectorAll('.here, .cursor')) {
      old.classList.remove('here', 'cursor');
    }
    const { sample } = this;
    this.acts.chosen(sample === undefined ? undefined : this.rows.rows.get(sample), this.token);
    const item = this.list.node(this.item);
    const node = item?.querySelectorAll('.card')[this.column] ?? item;
    if (!node) {
      return;
    }
    node.classList.toggle('here', this.box.contains(document.activeElement));
    this.box.setAttribute('aria-activedescendant', node.id);
    const span = this.token === null ? null : node.querySelector(`[data-t="${this.token}"]`);
    if (span) {
      this.showToken(span);
    }
  }

  private showToken(span: Element): void {
    span.classList.add('cursor');
    const tokens = span.closest('.tokens');
    tokens?.classList.toggle('uncut', !tokens.classList.contains('full'));
    const [token, list] = [span.getBoundingClientRect(), this.box.getBoundingClientRect()];
    if (token.bottom > list.bottom) {
      this.box.scrollTop += token.bottom - list.bottom + ROOM;
    } else if (token.top < list.top) {
      this.box.scrollTop -= list.top - token.top + ROOM;
    }
    if (this.list.measure()) {
      this.acts.drawSoon();
    }
  }

  /** The numbers of the cursor's token, or of another one. */
  private say(i = this.sample, t = this.token): void {
    const row = i === undefined ? undefined : this.rows.rows.get(i);
    const piece = row?.pieces[t ?? -1];
    const known = row !== undefined && t !== null && piece !== undefined;
    this.readout.textContent = known ? this.described(row, t, piece) : HINT;
    this.readout.classList.toggle('hint', !known);
  }

  private described(row: Row, t: number, piece: string): string {
    const value = (c: number): number => row.values[c]?.[t] ?? NaN;
    return describeToken(t, piece, kindOf(row, t), row.ids[t], this.rows.scales, value);
  }

  /** The completion that the cursor is at. */
  private get sample(): number | undefined {
    return this.item?.samples[this.column];
  }

  private click(event: MouseEvent): void {
    const target = event.target as HTMLElement;
    const place = this.list.placeOf(target);
    if (!place) {
      return;
    }
    const { item, at } = place;
    const one = target.closest<HTMLElement>('[data-i]')?.dataset['i'];
    const i = one === undefined ? item.samples[0] : Number(one);
    this.goTo(at, i === undefined ? 0 : Math.max(0, item.samples.indexOf(i)));
    const pressed = target.closest('button')?.className;
    if (item.head !== null) {
      if (pressed === 'spell' || (pressed === 'picture' && !target.closest('.whole'))) {
        this.acts.spell(item.head);
      } else if (!target.closest('.whole')) {
        this.acts.toggleHead(item.head);
      }
    } else if (item.branch !== null) {
      this.acts.toggleBranch(item.branch);
    } else if (i !== undefined && pressed === 'more') {
      this.acts.more(i);
    } else if (target.dataset['t'] !== undefined) {
      this.token = Number(target.dataset['t']);
    } else if (pressed?.startsWith('picture') && this.rows.full.has(i ?? -1)) {
      // it grows by itself
    } else if (i !== undefined && window.getSelection()?.isCollapsed) {
      this.acts.toggleFull(i);
    }
    this.show();
    this.say();
  }

  private hover(event: MouseEvent): void {
    const span = (event.target as Element).closest<HTMLElement>('[data-t]');
    if (span) {
      this.say(Number(span.parentElement?.dataset['i']), Number(span.dataset['t']));
    } else {
      this.say();
    }
  }

  private key(event: KeyboardEvent): void {
    const { item } = this;
    if (event.target !== this.box || event.ctrlKey || event.metaKey || event.altKey || !item) {
      return;
    }
    const go = this.itemKeys(item)[event.key] ?? this.keys()[event.key];
    if (!go) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    go();
    this.reveal();
    this.show();
    this.say();
  }

  private keys(): Record<string, () => void> {
    return {
      ArrowDown: () => this.move(1),
      ArrowUp: () => this.move(-1),
      PageDown: () => this.move(PAGE),
      PageUp: () => this.move(-PAGE),
      Home: () => this.goTo(0),
      End: () => this.goTo(this.list.items.length - 1),
      Escape: () => {
        this.token = null;
      }
    };
  }

  private itemKeys({ head, branch }: Item): Record<string, () => void> {
    if (head !== null) {
      return this.foldKeys(this.rows.open.has(head), () => this.acts.toggleHead(head));
    }
    if (branch !== null) {
      const open = !this.rows.tree.closed.has(branch);
      return this.foldKeys(open, () => this.acts.toggleBranch(branch));
    }
    return this.rowKeys();
  }

  private foldKeys(open: boolean, toggle: () => void): Record<string, () => void> {
    return {
      ArrowRight: () => (open ? this.move(1) : toggle()),
      ArrowLeft: () => (open ? toggle() : this.toParent()),
      Enter: toggle,
      ' ': toggle
    };
  }

  private rowKeys(): Record<string, () => void> {
    const { sample: i, token } = this;
    const row = i === undefined ? undefined : this.rows.rows.get(i);
    const toggle = (): void => {
      if (i !== undefined) {
        this.acts.toggleFull(i);
      }
    };
    const keys: Record<string, () => void> = { Enter: toggle, ' ': toggle };
    if (token === null) {
      keys['ArrowLeft'] = () => this.toParent();
    }
    if (!row) {
      return keys;
    }
    if (row.pieces.length) {
      keys['ArrowRight'] = () => this.toToken(row, token === null ? row.born : token + 1);
    }
    if (token !== null) {
      keys['ArrowLeft'] = () => this.toToken(row, token - 1);
      keys['Home'] = () => this.toToken(row, 0);
      keys['End'] = () => this.toToken(row, row.pieces.length - 1);
    }
    return keys;
  }

  private move(by: number): void {
    const step = Math.sign(by);
    for (let left = Math.abs(by); left > 0; left--) {
      const column = this.column + step;
      const next = this.list.items[this.at + step];
      if (column >= 0 && column < Math.max(1, this.item?.samples.length ?? 1)) {
        this.column = column;
      } else if (next) {
        this.goTo(this.at + step, step > 0 ? 0 : Math.max(0, next.samples.length - 1));
      }
    }
    this.token = null;
  }

  /** To the prompt of a completion, the place that it continues from, or the completion that a place is of. */
  private toParent(): void {
    const { item } = this;
    let { at } = this;
    while (item && at > 0 && !isAbove(this.list.items[at], item)) {
      at--;
    }
    this.goTo(at);
  }

  /** To a token of a completion, more of which is shown where it ends before; before the first: to none. */
  private toToken({ i, n, pieces }: Row, at: number): void {
    if (at >= pieces.length && pieces.length < n) {
      if (this.rows.full.has(i)) {
        this.acts.more(i);
      } else {
        this.acts.toggleFull(i);
      }
    }
    this.token = at < 0 ? null : Math.min(at, pieces.length - 1);
  }

  /** Scroll so that the item can be seen. */
  private reveal(): void {
    this.list.reveal(this.at);
    this.acts.draw();
  }

  private at = 0;
  private column = 0;
  private token: number | null = null;
}

/** Whether an item is the one that another hangs on. */
function isAbove(above: Item | undefined, item: Item): boolean {
  if (!above || above.head !== null) {
    return true;
  }
  return item.branch === null
    ? above.branch !== null && above.depth === item.depth
    : above.branch === null && above.depth < item.depth;
}
