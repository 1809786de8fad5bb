// @vitest-environment jsdom
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Trouble } from './asks';
import { Polling } from './polling';
import { Sessions } from './sessions';
import { Answers } from './testing';

let answers: Answers;
let sessions: Sessions;
let polling: Polling;
let hidden = false;

const looks = vi.fn();

beforeEach(() => {
  vi.useFakeTimers();
  looks.mockClear();
  hidden = false;
  vi.spyOn(document, 'hidden', 'get').mockImplementation(() => hidden);
  vi.spyOn(document, 'visibilityState', 'get').mockImplementation(() =>
    hidden ? 'hidden' : 'visible'
  );
  answers = new Answers();
  const ask = answers.sessions.bind(answers);
  answers.sessions = () => {
    looks();
    return ask();
  };
  sessions = new Sessions(answers);
  polling = new Polling(sessions, 1);
});

afterEach(() => {
  polling.dispose();
  vi.useRealTimers();
  vi.restoreAllMocks();
});

function hide(value: boolean): void {
  hidden = value;
  document.dispatchEvent(new Event('visibilitychange'));
}

/** How often it looks in so many seconds from now on. */
async function countIn(seconds: number): Promise<number> {
  const before = looks.mock.calls.length;
  await vi.advanceTimersByTimeAsync(1000 * seconds);
  return looks.mock.calls.length - before;
}

describe('when it looks', () => {
  it('seldom for the status bar, often for the panel', async () => {
    await countIn(6);
    expect(await countIn(20)).toBe(4);
    polling.watch(true);
    expect(await countIn(0.1)).toBe(1);
    expect(await countIn(10)).toBe(10);
    polling.seconds = 2;
    await countIn(0.1);
    expect(await countIn(10)).toBe(5);
    polling.watch(false);
    await countIn(10);
    expect(await countIn(20)).toBe(2);
  });

  it('never while the page is hidden, and at once when it is seen again', async () => {
    polling.watch(true);
    await countIn(3);
    hide(true);
    await countIn(1.5);
    expect(await countIn(60)).toBe(0);
    hide(false);
    expect(await countIn(0.1)).toBe(1);
    expect(await countIn(5)).toBeGreaterThanOrEqual(4);
  });

  it('less often while the server does not answer, and goes on when it does', async () => {
    polling.watch(true);
    await countIn(3);
    answers.fails = new Trouble('server', 'Failed to fetch');
    await countIn(30);
    expect(await countIn(60)).toBeLessThan(20);
    answers.fails = null;
    await countIn(11);
    expect(await countIn(10)).toBeGreaterThanOrEqual(9);
  });

  it('not at all where the server has no such extension, until somebody looks', async () => {
    answers.fails = new Trouble('absent', 'not there', 404);
    await countIn(5);
    expect(await countIn(120)).toBe(0);
    answers.fails = null;
    polling.watch(true);
    await countIn(1);
    expect(await countIn(5)).toBe(5);
  });
});
