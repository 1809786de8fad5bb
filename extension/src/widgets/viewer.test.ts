// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { add } from './dom';
import { ADVANTAGE, CLIPPED, floats, head, HOSTILE, integers, Kernel, sent } from './testing';
import viewer from './viewer';
import type { State } from './viewer';

const CHOICE = { sort: 0, filter: 0, search: '' };
const FACTS = { channels: [ADVANTAGE, CLIPPED], openAtFirst: 2, openTokens: 4, rowsAtOnce: 10 };
const FIRST: State['first'] = {
  heads: [0, 1, 2].map(p => head(p, { more: p === 1 })),
  rows: [sent(0), sent(1, { n: 1003 })],
  ids: integers(10, 11, 12, 13),
  values: floats(1, NaN, -0.5, 0, 1, 0, 0, NaN)
};
const TWO = [integers(1, 2), floats(0, 0, 0, 0)];

let kernel: Kernel<State>;
let el: HTMLElement;
let box: HTMLElement;
let close: () => void;

/** Show prompts with two completions each, the first prompt open. */
function show(prompts = 3, change: Partial<State> = {}): void {
  const all = Array.from({ length: 2 * prompts }, (_, i) => i);
  const [groups, counts] = [integers(...all.slice(0, prompts)), integers(...all.map(() => 2))];
  const order = { ...CHOICE, groups, counts, samples: integers(...all) };
  const looks = { colour: 0, whitespace: false, columns: false };
  kernel = new Kernel({ facts: FACTS, order, first: FIRST, ...CHOICE, ...looks, ...change });
  el = add(document.body, 'div');
  close = viewer.render({ model: kernel, el });
  box = one('.list');
  vi.runAllTimers();
}

function one(selector: string): HTMLElement {
  return el.querySelector(selector) ?? expect.fail(`nothing is ${selector}`);
}

function said(selector = '.item .number, .item .tokens'): string {
  return [...el.querySelectorAll(selector)].map(node => node.textContent).join(' | ');
}

function click(selector: string): void {
  one(selector).click();
  vi.runAllTimers();
}

/** Whether the list takes the key for itself. */
function press(key: string, more: KeyboardEventInit = {}): boolean {
  return !box.dispatchEvent(new KeyboardEvent('keydown', { key, cancelable: true, ...more }));
}

const row = (i: number): string => `[id$="-1r${i}"]`;
const prompt = (p: number): string => `[id$="-h${p}"]`;

beforeEach(() => {
  vi.useFakeTimers();
  const observer = { observe: vi.fn(), disconnect: vi.fn() };
  vi.stubGlobal(
    'ResizeObserver',
    vi.fn(() => observer)
  );
});
afterEach(() => {
  close();
  el.remove();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe('what is drawn', () => {
  it('is what came with the drawing: nothing is asked', () => {
    show();
    expect(said()).toBe('prompt 0 | word0 end | word1 end … +1,001 tok | prompt 1 | prompt 2');
    expect(kernel.asked).toEqual([]);
  });

  it('is nothing where there is nothing', () => {
    show(0);
    expect([said(), el.classList.contains('nothing'), kernel.asked]).toEqual(['', true, []]);
  });

  it('is asked for once where it is not there, as far as it is in view', () => {
    show(500, { facts: { ...FACTS, openAtFirst: 1000 } });
    const rows = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11].map(i => [i, 0, null]);
    expect(kernel.asked).toMatchObject([{ kind: 'rows', heads: [3, 4, 5, 6, 7, 8], rows }]);
    kernel.answer({ heads: [head(3)], rows: [sent(6)] }, ...TWO);
    expect(one(row(6)).textContent).toBe('word6 end2 tokstop');
    box.scrollTop = 30_000;
    box.dispatchEvent(new Event('scroll'));
    vi.runAllTimers();
    expect([one(prompt(366)).textContent, el.querySelector(prompt(3))]).toEqual([
      '▾prompt 366…',
      null
    ]);
    expect(kernel.asked.at(-1)?.['heads']).toContain(366);
  });

  it('shows spaces, and completions side by side, on request, until it is closed', () => {
    show();
    kernel.set({ whitespace: true, columns: true });
    expect(said('.cards .card .tokens')).toBe('word0·end | word1·end … +1,001 tok');
    close();
    kernel.set({ whitespace: false });
    expect(said('.cards .card .tokens')).toContain('·');
  });
});

it('a token has the colour of its value in the chosen channel, none where that is not known', () => {
  show();
  const colours = (): string =>
    [...el.querySelectorAll<HTMLElement>('.item .t')]
      .map(({ style }) => style.background.replace(/.*--rlb-(\w+)\) (\d+%).*/, '$1 $2'))
      .join(' | ');
  expect(colours()).toBe('positive 62% |  | negative 31% | ');
  kernel.set({ colour: 1 });
  expect([colours(), said('.item .clip')]).toEqual(['magnitude 62% |  |  | ', 'word0']);
  kernel.set({ colour: 7 });
  expect(colours()).toBe(' |  |  | ');
});

describe('a click', () => {
  it('on a prompt shows its completions and asks for them, another hides them', () => {
    show();
    click(`${prompt(1)} .line`);
    expect([said(row(2)), one(prompt(1)).getAttribute('aria-expanded')]).toEqual(['…', 'true']);
    const rows = [2, 3].map(i => [i, 0, null]);
    expect(kernel.asked).toMatchObject([{ kind: 'rows', heads: [], rows }]);
    click(`${prompt(1)} .line`);
    expect(el.querySelector(row(2))).toBeNull();
  });

  it('on "whole prompt" asks for its messages once', () => {
    show();
    click('.spell');
    expect(kernel.asked).toMatchObject([{ kind: 'prompt', p: 1 }]);
    kernel.answer({ parts: [{ role: 'user', text: HOSTILE, image: '', tokens: 0 }] });
    click('.spell');
    expect(said('.whole')).toBe('');
    click('.spell');
    expect([said('.whole'), kernel.asked.length]).toEqual([`user${HOSTILE}`, 1]);
  });

  it('between tokens asks for the rest of the completion, its button for what comes next', () => {
    show();
    click(`${row(1)} .tokens`);
    expect(kernel.asked.at(-1)).toMatchObject({ rows: [[1, 2, 2]] });
    kernel.answer({ heads: [], rows: [sent(1, { from: 2, pieces: ['\n', HOSTILE] })] }, ...TWO);
    expect(said(`${row(1)} .full`)).toBe(`word1 end⏎\n${HOSTILE}`);
    expect(said(`${row(1)} .more`)).toBe('next 4 of 1,003 tokens');
    click(`${row(1)} .more`);
    expect(kernel.asked.at(-1)).toMatchObject({ rows: [[1, 4, 4]] });
  });

  it('on a token says its numbers, as does the pointer over it', () => {
    show();
    click(`${row(0)} [data-t="1"]`);
    const clicked = "token 1  ' end'  id 11  adv –  not clipped";
    expect(said('.readout')).toBe(clicked);
    one(`${row(1)} [data-t="0"]`).dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
    expect(said('.readout')).toBe("token 0  'word1'  id 12  adv −0.5  not clipped");
    box.dispatchEvent(new MouseEvent('mouseleave'));
    expect(said('.readout')).toBe(clicked);
  });
});

it.each([
  ['ArrowDown ArrowDown ArrowUp', '1r0', ''],
  ['ArrowRight ArrowRight', '1r0', 'word0'],
  ['ArrowRight ArrowRight ArrowRight', '1r0', ' end'],
  ['ArrowDown ArrowRight Escape', '1r0', ''],
  ['End Home ArrowDown ArrowRight End Home ArrowRight', '1r0', ' end'],
  ['ArrowDown ArrowLeft ArrowLeft ArrowDown', 'h1', ''],
  ['End ArrowUp Enter ArrowDown', '1r2', '']
])('the keyboard goes with %s to %s %s, and leaves other keys to others', (keys, line, token) => {
  show();
  box.focus();
  expect(keys.split(' ').every(key => press(key))).toBe(true);
  expect([press('a'), press('End', { ctrlKey: true })]).toEqual([false, false]);
  expect([one('.here').id.split('-')[1], said('.cursor')]).toEqual([line, token]);
  expect(said('.readout')).toContain(token ? `'${token}'` : 'Point at a token');
});

describe('another order', () => {
  it('is asked for once the choice has come to rest, and drawn', () => {
    show();
    kernel.set({ search: 'w' });
    kernel.set({ search: 'wo' });
    vi.runAllTimers();
    expect(kernel.asked).toMatchObject([{ kind: 'order', ...CHOICE, search: 'wo' }]);
    kernel.answer({}, integers(2, 0), integers(2, 1), integers(5, 4, 1));
    expect(said()).toBe('prompt 2 | … | … | prompt 0');
  });

  it('that is not the choice any more is asked for anew; that of another drawing is not taken', () => {
    show(3, { sort: 1 });
    kernel.answer({ id: 'another' });
    expect(said('.number')).toBe('prompt 0 | prompt 1 | prompt 2');
    kernel.set({ sort: 2 });
    kernel.answer({});
    expect(kernel.asked.map(({ sort }) => sort)).toEqual([1, 2]);
  });
});

it('a kernel that is busy is named until it answers, with what went wrong; one that is gone, at once', () => {
  show();
  click('.spell');
  expect(said('.notice')).toBe('waiting for the kernel (busy)');
  kernel.answer({ error: HOSTILE });
  expect([said('.notice'), el.querySelector('img')]).toEqual([HOSTILE, null]);
  kernel.gone = true;
  one(`${prompt(2)} .line`).click();
  vi.advanceTimersByTime(3000);
  expect(said('.notice')).toBe('no kernel: only what was sent before can be shown');
});
