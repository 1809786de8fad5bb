import { describe, expect, it } from 'vitest';

import { Trouble } from '../asks';
import { entry, MIB, state, trans } from '../testing';
import { ordered, viewOf } from './session';
import type { Action, View } from './shape';
import { summaryOf } from './summary';

const NOW = { clock: 101, interval: 1 };
const ROLLOUT = {
  id: 'a',
  what: 'rollout 5',
  engine: 'inference',
  since: 990,
  progress: [
    { tokens: 100, finished: 12, total: 32 },
    { tokens: 50, finished: 4, total: 32 }
  ]
};
const DEAD = { pid: 7, mode: 'notebook', alive: false };

function shown(change: Record<string, unknown> = {}, at = NOW): View {
  return viewOf(entry({ state: state(change) }), at, trans);
}

function action(view: View, verb: string): Action {
  const found = view.actions.find(one => one.verb === verb);
  if (!found) {
    throw new Error(`no ${verb}`);
  }
  return found;
}

describe('how a session is', () => {
  it.each([
    ['idle', 'idle', {}],
    ['running', 'running', { running: [ROLLOUT] }],
    ['running', 'running', { verbs: [{ what: 'train_step' }] }],
    ['paused', 'paused', { paused: true, running: [ROLLOUT] }],
    ['lost', 'kernel gone', { driver: DEAD, running: [ROLLOUT] }],
    ['lost', 'script ended', { driver: { ...DEAD, mode: 'script' } }],
    ['idle', 'idle', { driver: null }]
  ])('%s: %s', (condition, status, change) => {
    expect(shown(change)).toMatchObject({ condition, status });
  });

  it('is gone where only its file is left, whatever it said last', () => {
    const view = viewOf(entry({ listed: { name: 'demo', state: 'gone' } }), NOW, trans);
    expect([view.condition, view.status]).toEqual(['gone', 'session gone']);
    expect(view.actions.filter(one => one.enabled).map(one => one.verb)).toEqual(['kill']);
  });

  it('comes first where nobody drives it', () => {
    const names = ordered([
      entry({}, 'a'),
      entry({ state: state({ driver: DEAD }) }, 'z'),
      entry({ state: state({ running: [ROLLOUT] }) }, 'b'),
      entry({ listed: { name: 'y', state: 'gone' } }, 'y')
    ]).map(one => one.listed.name);
    expect(names).toEqual(['y', 'z', 'a', 'b']);
  });
});

describe('old numbers', () => {
  it('are called stale, with their age', () => {
    expect(shown({}, { clock: 104, interval: 1 }).stale).toBe('');
    expect(shown({}, { clock: 112, interval: 1 }).stale).toBe('stale 12 s');
    expect(shown({}, { clock: 220, interval: 1 }).stale).toBe('stale 2 min');
  });

  it('are not called so for being looked at seldom', () => {
    expect(shown({}, { clock: 112, interval: 5 }).stale).toBe('');
    expect(shown({}, { clock: 117, interval: 5 }).stale).toBe('stale 17 s');
  });

  it('say why there are no newer ones', () => {
    const trouble = new Trouble('silent', 'the monitor does not answer');
    expect(viewOf(entry({ trouble }), NOW, trans).trouble).toBe('the monitor does not answer');
  });

  it('are stale in the status bar too', () => {
    expect(summaryOf([entry()], { clock: 112, interval: 1 }, trans)).toBe(
      '2.88 GiB · idle · stale 12 s'
    );
  });
});

describe('what runs', () => {
  it('adds the replicas up and tells the time left by the clock of the monitor', () => {
    const { phase } = shown({ running: [ROLLOUT] });
    expect(phase.text).toBe('rollout 5 · 16/64 samples · 150 tokens');
    expect(phase.share).toBe(0.25);
    expect(phase.left).toBe('30 s left');
  });

  it('goes by the slowest rank', () => {
    const progress = [
      { phase: 'backward', done: 7, total: 16 },
      { phase: 'backward', done: 3, total: 16 }
    ];
    const { phase } = shown({ running: [{ ...ROLLOUT, what: 'train_step', progress }] });
    expect([phase.text, phase.share]).toEqual(['train_step · backward 3/16', 3 / 16]);
  });

  it('guesses no time from too little, nor while it is paused', () => {
    const few = { ...ROLLOUT, progress: [{ finished: 1, total: 64 }] };
    expect(shown({ running: [few] }).phase.left).toBe('');
    expect(shown({ running: [ROLLOUT], paused: true }).phase.left).toBe('');
  });

  it('stands in the status bar with the memory of all sessions', () => {
    const all = [entry({}, 'a'), entry({ state: state({ running: [ROLLOUT] }) }, 'b')];
    expect(summaryOf(all, NOW, trans)).toBe('2 sessions · 5.76 GiB · rollout 5 · 25 %');
    expect(summaryOf([], NOW, trans)).toBe('');
  });

  it('of a session that is gone counts no more', () => {
    const gone = entry({ listed: { name: 'a', state: 'gone' }, heard: 1 }, 'a');
    expect(summaryOf([gone], NOW, trans)).toBe('session gone');
    expect(summaryOf([gone, entry({}, 'b')], NOW, trans)).toBe('2 sessions · 2.88 GiB · idle');
  });
});

describe('engines', () => {
  it('say their memory, their version, and where each part is', () => {
    const [actor, inference] = shown().engines;
    expect([actor?.memory, actor?.kind, actor?.note]).toEqual(['900 MiB', 'fsdp2\u00a0×1', 'v4']);
    expect([inference?.note, inference?.warns]).toEqual(['v3, 1 version behind', true]);
    expect(actor?.chips.map(chip => chip.label)).toEqual([
      'weights ● resident',
      'optimizer ○ host'
    ]);
  });

  it('say before a press what it moves and what that frees', () => {
    const [actor, inference] = shown().engines;
    expect(actor?.chips.map(chip => [chip.verb, chip.title])).toEqual([
      ['offload', 'Offload weights of actor: frees 100 MiB'],
      ['onload', 'Make optimizer of actor resident again']
    ]);
    expect(actor?.chips[1]?.args).toEqual({ engine: 'actor', parts: ['optimizer'] });
    expect(inference?.toggle?.title).toBe('Offload weights, KV cache of inference: frees 1 GiB');
  });

  it('are drawn on one scale', () => {
    const samples = [
      {
        time: 1000,
        owners: {},
        resident: { 'rlbench/demo/actor/0': 5, 'rlbench/demo/inference/0': 50 }
      }
    ];
    const view = viewOf(entry({ samples }), NOW, trans);
    expect(view.engines.map(engine => engine.timeline.top)).toEqual([50, 50]);
  });

  describe('on GPUs', () => {
    const onGpu = { ...NOW, onGpu: true };
    const sample = {
      time: 998,
      owners: { 'rlbench/demo/actor/0': { weights: 100 * MIB, activations: 40 * MIB } },
      resident: { 'rlbench/demo/actor/0': 900 * MIB, 'rlbench/demo/inference/0': 2048 * MIB }
    };
    const memory = (view: View): string[] => view.engines.map(engine => engine.memory);

    it('say what they hold of the GPUs, not of the host', () => {
      const view = viewOf(entry({ samples: [sample] }), onGpu, trans);
      expect(memory(view)).toEqual(['140 MiB', '']);
      expect(view.engines[1]?.timeline.last).toEqual({});
    });

    it('say what is known of it where no new sample tells', () => {
      const samples = [{ ...sample, time: 900 }];
      expect(memory(viewOf(entry({ samples }), onGpu, trans))).toEqual(['~150 MiB', '']);
      expect(summaryOf([entry()], onGpu, trans)).toBe('~150 MiB · idle');
    });
  });

  it('that broke say what mends them', () => {
    const engines = [
      { name: 'actor', kind: 'train', broken: 'rank 1 died', state: {}, workers: [] }
    ];
    expect(shown({ engines }).engines[0]).toMatchObject({
      note: 'rank 1 died: session.heal()',
      warns: true,
      toggle: null
    });
  });
});

describe('actions', () => {
  it('that drive the session wait until nothing runs, and say so', () => {
    const view = shown({ running: [ROLLOUT] });
    const held = 'rollout 5 runs: stop it first, or wait for it';
    for (const verb of ['sync', 'snapshot']) {
      expect(action(view, verb)).toMatchObject({ enabled: false, title: held });
    }
    expect(view.engines[0]?.chips[0]).toMatchObject({ enabled: false, title: held });
    expect(action(view, 'stop')).toMatchObject({
      enabled: true,
      title: 'Stop rollout 5: what is finished is kept'
    });
  });

  it('that stop need something that runs', () => {
    expect(action(shown(), 'stop').enabled).toBe(false);
    expect(action(shown(), 'sync').enabled).toBe(true);
  });

  it('pause what goes on and resume what is paused', () => {
    const verbs = (view: View): string[] => view.actions.map(one => one.verb);
    expect(verbs(shown())).toContain('pause');
    expect(verbs(shown({ paused: true }))).toContain('resume');
    expect(verbs(shown({ paused: true }))).not.toContain('pause');
  });

  it('under way cannot be pressed again', () => {
    const view = viewOf(entry({ pending: new Map([['sync', 'send the weights']]) }), NOW, trans);
    expect(action(view, 'sync')).toMatchObject({ enabled: false, pending: true });
    expect(view.notice).toBe('send the weights …');
  });

  it('say for a while that they are done, and until the next one why they failed', () => {
    const notice = { label: 'sync', trouble: null, at: 100 };
    expect(viewOf(entry({ notice }), NOW, trans).notice).toBe('sync: done');
    expect(viewOf(entry({ notice }), { ...NOW, clock: 121 }, trans).notice).toBe('');
    const failed = { ...notice, trouble: new Trouble('lasting', 'x') };
    const later = viewOf(entry({ notice: failed }), { ...NOW, clock: 999 }, trans);
    expect([later.notice, later.noticeFailed]).toEqual(['sync: it has not ended yet', true]);
    const again = entry({ notice: failed, pending: new Map([['sync', 'sync']]) });
    expect(viewOf(again, NOW, trans)).toMatchObject({ notice: 'sync …', noticeFailed: false });
  });

  it('attach stays possible where the kernel is gone', () => {
    expect(action(shown({ driver: DEAD }), 'attach').enabled).toBe(true);
  });
});

describe('curves and errors', () => {
  it('show the last value that a step has', () => {
    const history = [
      { step: 1, reward: 0.25, length: 100 },
      { step: 2, reward: null, length: 118.04 }
    ];
    const { curves } = viewOf(entry({ history }), NOW, trans);
    expect(curves.map(curve => [curve.last, curve.values.length, curve.title])).toEqual([
      ['0.25', 1, 'reward 0.25'],
      ['118 tok', 2, 'length over the last 2 steps: 100 to 118 tok']
    ]);
  });

  it('cut an error to what fits', () => {
    const last_error = {
      what: 'train_step',
      kind: 'ValueError',
      message: 'x'.repeat(1000),
      time: 0
    };
    const { error } = shown({ last_error });
    expect(error).toMatch(/^train_step: ValueError: x+…$/);
    expect(error.length).toBe(300);
  });
});
