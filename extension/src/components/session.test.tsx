// @vitest-environment jsdom
import { cleanup, fireEvent, render, screen } from '@testing-library/react';
import React from 'react';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Sessions } from '../sessions';
import { Answers, settled, state, stateJson, trans } from '../testing';
import { readState } from '../wire';
import { Overview } from './overview';

vi.mock('../icons', () => ({ icons: {} })); // JupyterLab's own are drawn in the browser tests

const HOSTILE = `<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\u202e`;
let now = 100;
let answers: Answers;
let sessions: Sessions;
const pressed = vi.fn();
const begun = vi.fn();

function Shown(): React.JSX.Element {
  return (
    <Overview sessions={sessions} interval={1} onPress={pressed} onNew={begun} trans={trans} />
  );
}

async function shown(): Promise<ReturnType<typeof render>> {
  await sessions.refresh();
  await settled();
  return render(<Shown />);
}

beforeEach(() => {
  now = 100;
  pressed.mockClear();
  answers = new Answers();
  sessions = new Sessions(answers, { clock: () => now, wait: () => Promise.resolve() });
});

afterEach(cleanup);

const button = (name: RegExp): HTMLElement => screen.getByRole('button', { name });

describe('a block', () => {
  it('keeps what others wrote as text', async () => {
    const json = JSON.parse(
      JSON.stringify(stateJson({}, 'broken')).replaceAll(/tiny|DATA|actor|fsdp2/g, () =>
        JSON.stringify(HOSTILE).slice(1, -1)
      )
    ) as unknown;
    answers.listing = { ...answers.listing, sessions: [{ name: HOSTILE, state: 'live' }] };
    answers.states[HOSTILE] = () => Promise.resolve(readState(json));
    const { container } = await shown();
    expect(container.querySelectorAll('img, script')).toHaveLength(0);
    expect((container.textContent ?? '').split('<img src=x').length).toBeGreaterThan(4);
  });

  it('counts the age of its numbers on without any answer', async () => {
    const { container, rerender } = await shown();
    expect(container.textContent).not.toContain('stale');
    now = 112;
    rerender(<Shown />);
    expect(container.querySelector('.rlb-mod-stale header')?.textContent).toContain('stale 12 s');
  });

  it('says that not even the server answers', async () => {
    const { container, rerender } = await shown();
    answers.fails = new Error('Failed to fetch');
    await sessions.refresh().catch(() => undefined);
    now = 130;
    rerender(<Shown />);
    expect(container.textContent).toContain(
      'does not answer, last heard 30 s ago: Failed to fetch'
    );
  });

  it('of a session that is gone says what is left to do', async () => {
    answers.listing = { ...answers.listing, sessions: [{ name: 'demo', state: 'gone' }] };
    const { container } = await shown();
    expect(container.querySelector('.rlb-Trouble')?.textContent).toMatch(/kill removes what/);
  });

  it('hands a press on with what it is about', async () => {
    await shown();
    fireEvent.click(button(/^weights: resident\. Offload weights of actor/));
    expect(pressed.mock.lastCall?.[0]).toBe('demo');
    expect(pressed.mock.lastCall?.[1]).toMatchObject({
      verb: 'offload',
      args: { engine: 'actor', parts: ['weights'] }
    });
  });

  it('does nothing where a control cannot be pressed, but lets the keyboard stay there', async () => {
    await shown();
    const stop = button(/^stop: nothing runs/);
    expect(stop.getAttribute('aria-disabled')).toBe('true');
    stop.focus();
    expect(document.activeElement).toBe(stop);
    fireEvent.click(stop);
    expect(pressed).not.toHaveBeenCalled();
  });
});

describe('the keyboard', () => {
  it('goes along the buttons of a session', async () => {
    await shown();
    const stop = button(/^stop/);
    stop.focus();
    fireEvent.keyDown(stop, { key: 'ArrowRight' });
    expect(document.activeElement).toBe(button(/^pause/));
    fireEvent.keyDown(button(/^pause/), { key: 'End' });
    expect(document.activeElement).toBe(button(/^kill/));
    fireEvent.keyDown(button(/^kill/), { key: 'ArrowRight' });
    expect(document.activeElement).toBe(stop);
  });

  it('stops at a row of buttons once, where it was last', async () => {
    await shown();
    const stops = (): (string | undefined)[] =>
      [...document.querySelectorAll<HTMLElement>('.rlb-Toolbar button')]
        .filter(one => one.tabIndex === 0)
        .map(one => one.dataset['verb']);
    expect(stops()).toEqual(['stop']);
    fireEvent.focus(button(/^sync/));
    expect(stops()).toEqual(['sync']);
  });

  it('stays on the button that was "pause" when it becomes "resume"', async () => {
    const { rerender } = await shown();
    button(/^pause/).focus();
    answers.states['demo'] = () => Promise.resolve(state({}, 'paused'));
    await sessions.refresh();
    await settled();
    rerender(<Shown />);
    expect(document.activeElement).toBe(button(/^resume/));
  });

  it('goes from session to session', async () => {
    answers.listing = {
      ...answers.listing,
      sessions: ['a', 'b'].map(name => ({ name, state: 'live' }))
    };
    answers.states = { a: () => Promise.resolve(state()), b: () => Promise.resolve(state()) };
    const { container } = await shown();
    const [a, b] = container.querySelectorAll<HTMLElement>('.rlb-Session');
    a?.focus();
    expect(sessions.selected).toBe('a');
    fireEvent.keyDown(a as HTMLElement, { key: 'ArrowDown' });
    expect(document.activeElement).toBe(b);
    expect(sessions.selected).toBe('b');
  });
});

it('teaches how to begin where there is no session', async () => {
  answers.listing = { ...answers.listing, sessions: [] };
  await shown();
  fireEvent.click(button(/New RL session/));
  expect(begun).toHaveBeenCalled();
});
