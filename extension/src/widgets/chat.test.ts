// @vitest-environment jsdom
import { beforeEach, describe, expect, it, vi } from 'vitest';

import chat from './chat';
import type { Answer, ChatState } from './chat';
import { HOSTILE, Kernel } from './testing';

const ANSWER: Answer = { head: 'policy v3', text: '12345', note: '6 tok', growing: false };
const STATE: ChatState = {
  turns: [],
  answers: [],
  chosen: null,
  busy: false,
  said: '',
  bad: false,
  facts: '0 turns',
  code: 'chat',
  opened: null
};
const ASKED: Partial<ChatState> = {
  turns: [
    { role: 'system', text: 'be brief' },
    { role: 'user', text: 'sort 52143' }
  ],
  answers: [ANSWER, { ...ANSWER, head: 'base v0', text: HOSTILE }]
};

let el: HTMLElement;
let kernel: Kernel<ChatState>;

beforeEach(() => {
  el = document.createElement('div');
  kernel = new Kernel(STATE);
  chat.render({ model: kernel, el });
});

function all(selector: string): HTMLElement[] {
  return [...el.querySelectorAll<HTMLElement>(selector)];
}

function buttons(selector = 'button'): HTMLButtonElement[] {
  return [...el.querySelectorAll<HTMLButtonElement>(selector)];
}

function one(selector: string): HTMLElement {
  return all(selector)[0] ?? expect.fail(`nothing is ${selector}`);
}

function field(): HTMLTextAreaElement {
  return el.querySelector('textarea') ?? expect.fail('no field');
}

function button(name: string, i = 0): HTMLButtonElement {
  return buttons().filter(node => node.textContent === name)[i] ?? expect.fail(name);
}

function type(text: string): void {
  field().value = text;
  field().dispatchEvent(new Event('input'));
}

function key(name: string, options: KeyboardEventInit = {}): void {
  const event = new KeyboardEvent('keydown', { key: name, bubbles: true, ...options });
  field().dispatchEvent(event);
}

describe('a chat', () => {
  it('says what is typed by Enter, not by Shift+Enter, and not white space alone', () => {
    expect([one('.hint').textContent, button('say').disabled]).toEqual([expect.any(String), true]);
    type('  \n ');
    key('Enter');
    type('sort 52143');
    key('Enter', { shiftKey: true });
    expect(kernel.asked).toEqual([]);
    key('Enter');
    expect(kernel.asked).toEqual([{ kind: 'say', text: 'sort 52143' }]);
    expect(field().value).toBe('');
  });

  it('shows turns and answers as text, whatever a model wrote', () => {
    kernel.set(ASKED);
    expect(all('.turn').map(turn => turn.className)).toEqual(['turn other', 'turn user']);
    expect(all('.answer .head').map(head => head.textContent)).toEqual([
      '0 · policy v3',
      '1 · base v0'
    ]);
    expect(all('.answer .text')[1]?.textContent).toBe(HOSTILE);
    expect([el.querySelector('img'), el.querySelector('script')]).toEqual([null, null]);
  });

  it('keeps its cards while answers grow, and is stopped by the button that began them', () => {
    const growing = { ...ANSWER, text: '', growing: true };
    kernel.set({ ...ASKED, answers: [growing], busy: true });
    const card = one('.answer');
    expect([one('.answer .text').textContent, button('prefer').disabled]).toEqual(['…', true]);
    kernel.set({ answers: [{ ...growing, text: '123' }] });
    expect([one('.answer'), one('.answer .text').textContent]).toEqual([card, '123']);
    type('not now');
    key('Enter');
    expect(kernel.asked).toEqual([]);
    one('form').dispatchEvent(new Event('submit', { cancelable: true }));
    expect(kernel.asked).toEqual([{ kind: 'stop' }]);
    expect(field().value).toBe('not now');
  });

  it('prefers, opens tokens, asks again, and replies to the answer that was chosen for that', () => {
    kernel.set(ASKED);
    button('prefer', 1).click();
    button('tokens', 1).click();
    button('again').click();
    kernel.set({ chosen: 1, opened: 1, code: 'chat.now' });
    expect(button('prefer', 1).getAttribute('aria-pressed')).toBe('true');
    expect(all('.answer.followed .head').map(head => head.textContent)).toEqual(['✓ 1 · base v0']);
    button('reply', 0).click();
    expect(field().placeholder).toBe('say something to answer 0');
    type('and 871?');
    key('Enter');
    expect(kernel.asked).toEqual([
      { kind: 'prefer', answer: 1 },
      { kind: 'tokens', answer: 1 },
      { kind: 'again' },
      { kind: 'say', text: 'and 871?', after: 0 }
    ]);
    expect(one('.code').textContent).toBe('chat.now');
  });

  it('says that nothing can be said where the kernel is gone, and keeps what was typed', () => {
    kernel.set(ASKED);
    kernel.gone = true;
    type('hello');
    key('Enter');
    expect(one('.said').textContent).toContain('no kernel');
    expect(field().value).toBe('hello');
    expect(buttons('.answer button').every(node => node.disabled)).toBe(true);
  });

  it('copies its code, or chooses it where the page may not', async () => {
    kernel.set({ code: 'chat.now' });
    const writeText = vi.fn(() => Promise.resolve());
    vi.stubGlobal('navigator', { clipboard: { writeText } });
    button('copy').click();
    await vi.waitFor(() => expect(one('.copy').textContent).toBe('copied'));
    expect(writeText).toHaveBeenCalledWith('chat.now');
    vi.unstubAllGlobals();
  });
});
