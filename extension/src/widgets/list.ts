/** A list that scrolls: only as many of its items as are in view have elements, each as high as it turned out to be. */
import type { Item } from './item';

/** Pixels, until an item was measured. */
const ESTIMATE = { head: 30, row: 26, cards: 150, branch: 26 } as const;
/** Pixels drawn beyond the view, and the view's where it is not known. */
const OVERSCAN = 240;
const HEIGHT = 480;
const MEASURED_TIMES = 3;

/** An item in view, where it stands among all of them, and its element. */
export interface Placed {
  readonly item: Item;
  readonly at: number;
  readonly node: HTMLElement;
}

export class List {
  /** What is in view, in order. */
  visible: readonly Placed[] = [];

  constructor(
    private readonly box: HTMLElement,
    private readonly space: HTMLElement,
    private readonly make: (item: Item) => HTMLElement
  ) {}

  get items(): readonly Item[] {
    return this._items;
  }
  /** Draw these from now on; what was measured of them is known by their keys. */
  set items(items: readonly Item[]) {
    this._items = items;
    this.clear();
  }

  /** Pixels from the top of an item, or of the list's end. */
  top(at: number): number {
    return this.tops[at] ?? 0;
  }

  node(item: Item | undefined): HTMLElement | undefined {
    return item && this.nodes.get(item.key);
  }

  /** What stands where an element of the list is. */
  placeOf(target: Element): Placed | undefined {
    const node = target.closest('.item');
    return this.visible.find(placed => placed.node === node);
  }

  /** Forget how high an item was, or all of them. */
  forget(key?: string): void {
    if (key === undefined) {
      this.heights.clear();
    } else {
      this.heights.delete(key);
    }
  }

  /** Scroll so that an item can be seen; below 0: none. */
  reveal(at: number): void {
    if (at < 0) {
      return;
    }
    const [top, bottom, height] = [this.top(at), this.top(at + 1), this.box.clientHeight];
    if (top < this.box.scrollTop) {
      this.box.scrollTop = top;
    } else if (bottom > this.box.scrollTop + height) {
      this.box.scrollTop = Math.min(top, bottom - height);
    }
  }

  /** Make elements anew: of those items, or all. */
  clear(stale: (item: Item) => boolean = () => true): void {
    for (const { item, node } of this.visible) {
      if (stale(item)) {
        node.remove();
        this.nodes.delete(item.key);
      }
    }
  }

  draw(): void {
    this.place();
    let times = 0;
    do {
      this.drawInView();
    } while (this.measure() && ++times < MEASURED_TIMES);
  }

  /** Whether some item is not as high as was thought; what is in view stays where it is. */
  measure(): boolean {
    if (!this.box.clientWidth) {
      return false;
    }
    let [changed, above] = [false, 0];
    for (const { item, at, node } of this.visible) {
      const [height, old] = [node.offsetHeight, this.top(at + 1) - this.top(at)];
      if (height && Math.abs(height - old) > 0.5) {
        above += this.top(at + 1) <= this.box.scrollTop ? height - old : 0;
        this.heights.set(item.key, height);
        changed = true;
      }
    }
    if (changed) {
      this.place();
      this.box.scrollTop += above;
    }
    return changed;
  }

  private place(): void {
    this.tops = new Float64Array(this._items.length + 1);
    this._items.forEach((item, i) => {
      this.tops[i + 1] = this.top(i) + (this.heights.get(item.key) ?? ESTIMATE[item.kind]);
    });
    this.space.style.height = `${this.top(this._items.length)}px`;
  }

  private drawInView(): void {
    const from = this.box.scrollTop - OVERSCAN;
    const to = this.box.scrollTop + (this.box.clientHeight || HEIGHT) + OVERSCAN;
    const visible: Placed[] = [];
    for (let at = firstAfter(this.tops, from); this.top(at) < to; at++) {
      const item = this._items[at];
      if (!item) {
        break;
      }
      const node = this.nodes.get(item.key) ?? this.make(item);
      this.nodes.set(item.key, node);
      visible.push({ item, at, node });
    }
    const kept = new Set(visible.map(({ item }) => item.key));
    for (const [key, node] of this.nodes) {
      if (!kept.has(key)) {
        node.remove();
        this.nodes.delete(key);
      }
    }
    let next = this.space.firstChild;
    for (const { node, at } of visible) {
      // in the order of the list, for those who hear it read
      if (next === node) {
        next = node.nextSibling;
      } else {
        this.space.insertBefore(node, next);
      }
      node.style.top = `${this.top(at)}px`;
    }
    this.visible = visible;
  }

  private _items: readonly Item[] = [];
  private tops = new Float64Array(1);
  private readonly nodes = new Map<string, HTMLElement>();
  private readonly heights = new Map<string, number>();
}

/** The first item that ends after so many pixels. */
export function firstAfter(tops: Float64Array, from: number): number {
  let [low, high] = [0, tops.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((tops[middle + 1] ?? Infinity) <= from) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
