import { describe, expect, it } from 'vitest';

import { Trouble } from '../asks';
import { entry, MIB, PARKED, state, trans } from '../testing';
import type { Report } from '../testing';
import { ordered, viewOf } from './session';
import type { Action, View } from './shape';
import { summaryOf } from './summary';

const NOW = { clock: 101, interval: 1 };

function shown(report: Report = 'idle', at = NOW): View {
  return viewOf(entry({ state: state({}, report) }), at, trans);
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
    ['idle', 'idle', 'idle'],
    ['running', 'running', 'training'],
    ['paused', 'paused', 'paused'],
    ['lost', 'kernel gone', 'lost'],
    ['lost', 'script ended', 'script']
  ] as const)('%s: %s', (condition, status, report) => {
    expect(shown(report)).toMatchObject({ condition, status });
  });

  it('is waited for before it was heard', () => {
    const view = viewOf(entry({ state: null }), NOW, trans);
    expect([view.condition, view.status]).toEqual(['waiting', 'waiting for its monitor']);
    expect(view.actions.filter(one => one.enabled).map(one => one.verb)).toEqual([
      'attach',
      'kill'
    ]);
  });

  it('is gone where only its file is left, whatever it said last', () => {
    const view = viewOf(entry({ listed: { name: 'demo', state: 'gone' } }), NOW, trans);
    expect([view.condition, view.status]).toEqual(['gone', 'session gone']);
    expect(view.actions.filter(one => one.enabled).map(one => one.verb)).toEqual(['kill']);
  });

  it('is parked where it lies on disk: what it said last is not of now', () => {
    const listed = { name: 'demo', state: 'parked', parked: PARKED } as const;
    const view = viewOf(entry({ listed, state: null }), NOW, trans);
    expect([view.condition, view.status]).toEqual(['parked', 'parked']);
    expect(view.facts).toBe(
      'tiny · step 4 · v5 · 12 MiB on disk · parked 90 s ago · not kept: DATA'
    );
    expect(view.actions.map(one => [one.verb, one.label, one.enabled])).toEqual([
      ['attach', 'attach', true],
      ['kill', 'forget', true]
    ]);
    expect(summaryOf([entry({ listed, state: null })], NOW, trans)).toBe('');
  });

  it('will be parked, or end', () => {
    expect(shown('leased').facts).toContain('parked in 60 s');
    expect(shown('lost').facts).toContain('ends in 60 s');
  });

  it('comes first where nobody drives it, last where it is parked', () => {
    const names = ordered([
      entry({ listed: { name: 'c', state: 'parked' } }, 'c'),
      entry({}, 'a'),
      entry({ state: state({}, 'lost') }, 'z'),
      entry({ state: state({}, 'running') }, 'b'),
      entry({ listed: { name: 'y', state: 'gone' } }, 'y')
    ]).map(one => one.listed.name);
    expect(names).toEqual(['y', 'z', 'a', 'b', 'c']);
  });
});

describe('old numbers', () => {
  it('are called stale, with their age', () => {
    expect(shown('idle', { clock: 104, interval: 1 }).stale).toBe('');
    expect(shown('idle', { clock: 112, interval: 1 }).stale).toBe('stale 12 s');
    expect(shown('idle', { clock: 220, interval: 1 }).stale).toBe('stale 2 min');
  });

  it('are not called so for being looked at seldom', () => {
    expect(shown('idle', { clock: 112, interval: 5 }).stale).toBe('');
    expect(shown('idle', { clock: 117, interval: 5 }).stale).toBe('stale 17 s');
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
  it('is said with the time that is left', () => {
    expect(shown('running').phase).toEqual({
      text: 'rollout 5 · 16/64 samples · 150 tokens',
      share: 0.25,
      left: '30 s left'
    });
    expect(shown('training').phase).toMatchObject({
      text: 'DATA step: DATA · DATA 1/2',
      share: 0.5
    });
    expect(shown().phase).toEqual({ text: '', share: null, left: '' });
  });

  it('stands in the status bar with the memory of all sessions', () => {
    const all = [entry({}, 'a'), entry({ state: state({}, 'running') }, 'b')];
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
      ['offload', 'Offload weights of actor to host: frees 100 MiB'],
      ['onload', 'Make optimizer of actor resident again']
    ]);
    expect(actor?.chips[1]?.args).toEqual({ engine: 'actor', parts: ['optimizer'] });
    expect(inference?.toggle?.command).toBe('offload weights, KV cache of inference');
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
    const [engine] = shown('broken').engines;
    expect([engine?.note, engine?.warns]).toEqual(['DATA: session.heal()', true]);
  });
});

describe('actions', () => {
  it('that drive the session wait until nothing runs, and say so', () => {
    const view = shown('running');
    const held = 'rollout 5 runs: stop it first, or wait for it';
    for (const verb of ['sync', 'snapshot']) {
      expect(action(view, verb)).toMatchObject({ enabled: false, title: held });
    }
    expect(view.engines[0]?.chips[0]).toMatchObject({ enabled: false, title: held });
    expect(action(view, 'stop').enabled).toBe(true);
    expect(action(shown(), 'sync').enabled).toBe(true);
  });

  it('that drive the session wait for a monitor that is silent, others are tried', () => {
    const trouble = new Trouble('silent', 'the monitor does not answer');
    const view = viewOf(entry({ trouble }), NOW, trans);
    const silent = { enabled: false, title: 'its monitor does not answer' };
    expect(action(view, 'sync')).toMatchObject(silent);
    expect(view.engines[0]?.chips[0]).toMatchObject(silent);
    expect(action(view, 'pause').enabled).toBe(true);
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
    expect(action(shown('lost'), 'attach').enabled).toBe(true);
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

  it('tell the last error with its time', () => {
    expect(shown('failed').error).toMatch(/^\d.*DATA: DATA: DATA$/);
    expect(shown().error).toBe('');
  });
});
