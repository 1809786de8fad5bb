// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { add } from './dom';
import {
  ADVANTAGE,
  branch,
  CLIPPED,
  floats,
  head,
  HOSTILE,
  integers,
  Kernel,
  sent
} from './testing';
import viewer from './viewer';
import type { State } from './state';

const CHOICE = { sort: 0, filter: 0, search: '' };
const FACTS = { channels: [ADVANTAGE, CLIPPED], openAtFirst: 2, openTokens: 4, rowsAtOnce: 10 };
const FIRST: State['first'] = {
  heads: [0, 1, 2].map(p => head(p, { more: p === 1 })),
  rows: [sent(0), sent(1, { n: 1003 })],
  ids: integers(10, 11, 12, 13),
  values: floats(1, NaN, -0.5, 0, 1, 0, 0, NaN)
};
const FORK = { why: '', name: 'rollouts', under: null, busy: false, said: '', bad: false };
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
  const grown = { tree: [], grown: {}, fork: FORK };
  const said = { facts: FACTS, order, first: FIRST, ...grown };
  kernel = new Kernel<State>({ ...said, ...CHOICE, ...looks, ...change });
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

describe('continuations', () => {
  /** Two completions of prompt 0 continue its first one behind one token. */
  function grow(): void {
    const fresh = [2, 3].map(i => sent(i, { p: 0, k: i, born: 1, pieces: ['word0', ` new${i}`] }));
    const order = {
      groups: integers(0, 1),
      counts: integers(4, 2),
      samples: integers(0, 3, 2, 1, 4, 5)
    };
    const heads = [head(0, { continuations: 2 })];
    kernel.set({
      order: { ...CHOICE, ...order },
      first: { heads, rows: fresh, ids: integers(1, 2, 3, 4), values: floats(...Array<number>(8)) },
      tree: [branch({ samples: [2, 3], said: 'value 0.5' })],
      grown: { after: 2, by: 2, key: '0.1' }
    });
    vi.runAllTimers();
  }

  it('of a token under the cursor are asked for, with what the form says', () => {
    show(2);
    click(`${row(0)} [data-t="1"]`);
    expect(kernel.asked).toMatchObject([{ kind: 'choices' }]);
    expect(said('.fork .call')).toBe('rollouts.fork(0, at=1, n=16)');
    one('.fork').dispatchEvent(new Event('submit', { cancelable: true }));
    const asked = { sample: 0, at: 1, n: 16, text: '', under: '' };
    expect(kernel.asked.at(-1)).toMatchObject({ kind: 'fork', ...asked });
    kernel.set({ fork: { ...FORK, busy: true, said: '3/16' } });
    expect([said('.fork .go'), said('.forksaid')]).toEqual(['stop', '3/16']);
  });

  it('stand below what they continue, which is marked there; the cursor stays, and old answers are not taken', () => {
    show(2);
    click(`${prompt(1)} .line`);
    const before = kernel.asked.at(-1);
    click(`${row(0)} [data-t="1"]`);
    grow();
    kernel.answer({ ...before, heads: [], rows: [sent(2)] }, ...TWO);
    const lines = [...el.querySelectorAll('.space > .item')].map(node => node.id.split('-')[1]);
    expect(lines).toEqual(['h0', '1r0', 'b0.1', '1r3', '1r2', '1r1', 'h1', '1r4', '1r5']);
    expect(said('.branch .line')).toBe(
      '▾↳ from token 1 of completion 02 continuations   value 0.5'
    );
    expect([said(`${row(0)} .forked`), said(`${row(3)} .shared`), said('.cursor')]).toEqual([
      ' end',
      'word0',
      ' end'
    ]);
    expect(said(`${prompt(0)} .facts`)).toBe('2 completions   2 tok   +2 continued');
    click('.branch');
    expect(el.querySelector(row(3))).toBeNull();
  });

  it('are walked by the keyboard, from their own first token, and back to what they continue', () => {
    show(2);
    grow();
    box.focus();
    const at = (): string | undefined => one('.here').id.split('-')[1];
    'ArrowDown ArrowDown ArrowDown ArrowRight'.split(' ').forEach(key => press(key));
    expect([at(), said('.cursor')]).toEqual(['1r3', ' new3']);
    const up: (string | undefined)[] = [];
    for (const key of ['Escape', 'ArrowLeft', 'ArrowLeft', 'ArrowLeft']) {
      press(key);
      up.push(at());
    }
    expect(up).toEqual(['1r3', 'b0.1', 'b0.1', '1r0']);
  });

  it('are not offered where they cannot be drawn, and the title says why', () => {
    show(1, { fork: { ...FORK, why: 'from a file' } });
    expect([one('.readout').title, one('.fork').hidden]).toEqual([
      'These cannot be continued from a token: from a file',
      true
    ]);
  });
});
