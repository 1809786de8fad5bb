// @vitest-environment jsdom
import { beforeEach, expect, it } from 'vitest';

import { add } from './dom';
import type { Item } from './item';
import { List } from './list';

/** Pixels, by the key of an item; 26 where it is not here. */
let heights: Record<string, number>;
let box: HTMLElement;
let space: HTMLElement;
let list: List;

beforeEach(() => {
  heights = {};
  box = document.createElement('div');
  space = add(box, 'div');
  Object.defineProperties(box, { clientWidth: { value: 600 }, clientHeight: { value: 260 } });
  list = new List(box, space, ({ key }) => {
    const node = document.createElement('div');
    node.className = 'item';
    node.textContent = key;
    return Object.defineProperty(node, 'offsetHeight', { get: () => heights[key] ?? 26 });
  });
});

function rows(count: number): Item[] {
  const one = { kind: 'row', head: null, branch: null, depth: 0 } as const;
  return Array.from({ length: count }, (_, i) => ({ ...one, key: `r${i}`, samples: [i] }));
}

/** Draw so many rows, scrolled to so many pixels; what is drawn. */
function draw(count: number, pixels = 0): (string | null)[] {
  if (list.items.length !== count) {
    list.items = rows(count);
  }
  box.scrollTop = pixels;
  list.draw();
  return [...space.children].map(node => node.textContent);
}

function top(key: string): string | undefined {
  return list.visible.find(({ item }) => item.key === key)?.node.style.top;
}

const keys = (from: number, to: number): string[] =>
  rows(to)
    .slice(from)
    .map(({ key }) => key);

it('what is in view is drawn, and little more, in its order whichever way it is scrolled', () => {
  expect(draw(1000)).toEqual(keys(0, 20));
  expect(space.style.height).toBe('26000px');
  expect(draw(1000, 13_000)).toEqual(keys(490, 520));
  expect(draw(1000, 12_870)).toEqual(keys(485, 515));
  expect(draw(1000, 25_740).at(-1)).toBe('r999');
});

it('what stays in view keeps its element: a selection in it stays', () => {
  draw(1000);
  const kept = space.children[1];
  draw(1000, 100);
  expect(space.children[1]).toBe(kept);
});

it('there is room for an item that is higher than was thought', () => {
  heights['r1'] = 126;
  draw(10);
  expect([top('r1'), top('r2'), space.style.height]).toEqual(['26px', '152px', '360px']);
});

it('an item above the view that turns out higher does not move what is in view', () => {
  heights['r495'] = 126;
  draw(1000, 13_000);
  expect([box.scrollTop, top('r500')]).toEqual([13_100, '13100px']);
});

it('it is empty without items, also after it had some', () => {
  draw(3);
  expect([draw(0), space.style.height]).toEqual([[], '0px']);
});
