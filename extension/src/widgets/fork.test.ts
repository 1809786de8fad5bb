// @vitest-environment jsdom
import { beforeEach, describe, expect, it, vi } from 'vitest';

import { callOf, ForkForm } from './fork';
import type { ForkState } from './fork';
import type { Row } from './rows';
import { HOSTILE, sent } from './testing';

const STATE: ForkState = {
  why: '',
  name: 'mine',
  under: null,
  busy: false,
  said: '',
  bad: false
};
const ROW: Row = { ...sent(3), ids: new Int32Array(), values: [], wanted: 0 };

let el: HTMLElement;
let form: ForkForm;
const acts = { choices: vi.fn(), start: vi.fn(), stop: vi.fn(), leave: vi.fn() };

beforeEach(() => {
  Object.values(acts).forEach(act => act.mockReset().mockReturnValue(true));
  el = document.createElement('div');
  form = new ForkForm(el, STATE, acts);
});

function one(selector: string): HTMLInputElement {
  return el.querySelector<HTMLInputElement>(selector) ?? expect.fail(`nothing is ${selector}`);
}

function fill(field: string, value: string): void {
  const node = one(field);
  node.value = value;
  node.dispatchEvent(new Event('input'));
}

function submit(): void {
  one('form').dispatchEvent(new Event('submit', { cancelable: true }));
}

const text = (selector: string): string | null => one(selector).textContent;

describe('the form', () => {
  it('waits for a token, then asks once which adapters there are, and says what it will do', () => {
    expect([text('.place'), one('.go').disabled]).toEqual([
      expect.stringContaining('click one'),
      true
    ]);
    form.choose(ROW, 17);
    form.choose(ROW, 4);
    expect(acts.choices).toHaveBeenCalledTimes(1);
    expect(text('.place')).toBe('Continue from token 4 of completion 1 of prompt 1');
    expect(text('.call')).toBe('mine.fork(3, at=4, n=16)');
    expect(one('.go').title).toContain('draw 16 completions that keep its first 4 tokens');
  });

  it('starts what its fields say', () => {
    form.choose(ROW, 2);
    form.show({ ...STATE, under: ['base', 'main'] });
    fill('input[type=number]', '8');
    fill('input[type=text]', 'a "b"\n');
    fill('select', 'base');
    submit();
    const asked = { sample: 3, at: 2, n: 8, text: 'a "b"', under: 'base' };
    expect(acts.start).toHaveBeenCalledWith(asked);
    expect(text('.call')).toBe('mine.fork(3, at=2, n=8, text="a \\"b\\"", under="base")');
    fill('input[type=number]', '0');
    expect([one('.go').disabled, text('.call')]).toEqual([true, '']);
  });

  it('stops what runs, and says what Python says, as text', () => {
    form.choose(ROW, 2);
    form.show({ ...STATE, busy: true, said: HOSTILE });
    expect([text('.go'), text('.forksaid'), el.querySelector('img')]).toEqual([
      'stop',
      HOSTILE,
      null
    ]);
    submit();
    expect([acts.stop.mock.calls.length, acts.start.mock.calls.length]).toEqual([1, 0]);
  });

  it('is not there where nothing can be continued, and of no use without a kernel', () => {
    form.show({ ...STATE, why: 'from a file' });
    expect(one('form').hidden).toBe(true);
    form.show(STATE);
    acts.choices.mockReturnValue(false);
    form.choose(ROW, 1);
    expect([text('.forksaid'), one('.go').disabled]).toEqual([
      expect.stringContaining('no kernel'),
      true
    ]);
  });

  it('starts by Enter in a field, once', () => {
    const enter = (): KeyboardEvent =>
      new KeyboardEvent('keydown', { key: 'Enter', bubbles: true, cancelable: true });
    form.choose(ROW, 2);
    fill('input[type=text]', '9');
    expect(one('input[type=text]').dispatchEvent(enter())).toBe(false);
    expect(acts.start).toHaveBeenCalledWith({ sample: 3, at: 2, n: 16, text: '9', under: '' });
    form.show({ ...STATE, busy: true });
    one('input[type=text]').dispatchEvent(enter());
    expect([acts.start.mock.calls.length, acts.stop.mock.calls.length]).toEqual([1, 0]);
    expect(one('.go').dispatchEvent(enter())).toBe(true); // a button's own click does it
  });

  it('is left by Escape', () => {
    const leaves = new KeyboardEvent('keydown', { key: 'Escape', bubbles: true });
    one('input').dispatchEvent(leaves);
    expect(acts.leave).toHaveBeenCalledTimes(1);
  });
});

it('a call is the shortest that says it', () => {
  const plain = { sample: 0, at: 0, n: 1, text: '', under: '' };
  expect(callOf(plain)).toBe('.fork(0, at=0, n=1)');
});
