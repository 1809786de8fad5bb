import { beforeEach, describe, expect, it } from 'vitest';

import { Trouble } from './asks';
import { Sessions, STEPS } from './sessions';
import { Answers, command, settled, state } from './testing';

let now = 0;
let answers: Answers;
let sessions: Sessions;

beforeEach(() => {
  now = 100;
  answers = new Answers();
  sessions = new Sessions(answers, {
    clock: () => now,
    wait: () => Promise.resolve(),
    history: 60
  });
  sessions.watched = true;
});

const sample = (time: number): Record<string, unknown> => ({ time, resident: { w: time } });

describe('looking', () => {
  it('keeps the time of the answer with the answer', async () => {
    await sessions.refresh();
    await settled();
    now = 130;
    answers.states['demo'] = () =>
      Promise.reject(new Trouble('silent', 'it lives but says nothing'));
    await sessions.refresh();
    await settled();
    const found = sessions.find('demo');
    expect(found?.heard).toBe(100);
    expect(found?.state?.step).toBe(4);
    expect(found?.trouble?.message).toBe('it lives but says nothing');
  });

  it('is not held up by one session whose monitor is slow', async () => {
    answers.listing = {
      ...answers.listing,
      sessions: ['slow', 'demo'].map(name => ({ name, state: 'live' }))
    };
    answers.states['slow'] = () => new Promise(() => undefined);
    await sessions.refresh();
    await settled();
    expect(sessions.find('demo')?.heard).toBe(100);
    await sessions.refresh();
    expect(answers.asked.filter(([name]) => name === 'slow')).toHaveLength(1);
    expect(answers.asked.filter(([name]) => name === 'demo')).toHaveLength(2);
  });

  it('does not ask a session of which only the file is left', async () => {
    answers.listing = { ...answers.listing, sessions: [{ name: 'demo', state: 'gone' }] };
    await sessions.refresh();
    expect(answers.asked).toEqual([]);
    expect(sessions.entries.map(entry => entry.listed.state)).toEqual(['gone']);
  });

  it('forgets a session that is closed', async () => {
    await sessions.refresh();
    answers.listing = { ...answers.listing, sessions: [] };
    await sessions.refresh();
    await settled();
    expect(sessions.entries).toEqual([]);
  });

  it('says that the server does not answer, and rejects so that polling backs off', async () => {
    answers.fails = new Trouble('server', 'Failed to fetch');
    await expect(sessions.refresh()).rejects.toThrow('Failed to fetch');
    expect(sessions.trouble?.message).toBe('Failed to fetch');
    answers.fails = null;
    await sessions.refresh();
    expect(sessions.trouble).toBeNull();
  });

  it('asks for samples since the last one and keeps those of its window', async () => {
    answers.states['demo'] = () =>
      Promise.resolve(state({ time: 1000, samples: [900, 950, 1000].map(sample) }));
    await sessions.refresh();
    await settled();
    answers.states['demo'] = () =>
      Promise.resolve(state({ time: 1030, samples: [1000, 1030].map(sample) }));
    await sessions.refresh();
    await settled();
    expect(answers.asked.map(([, question]) => question.since)).toEqual([940, 1000]);
    expect(sessions.find('demo')?.samples.map(one => one.time)).toEqual([1000, 1030]);
  });

  it('asks for the steps only where others than those it has led here', async () => {
    const history = [1, 2, 3, 4].map(step => ({ step, reward: step / 10 }));
    answers.states['demo'] = () => Promise.resolve(state({ history }));
    await sessions.refresh();
    await settled();
    answers.states['demo'] = () => Promise.resolve(state());
    await sessions.refresh();
    await settled();
    expect(sessions.find('demo')?.history).toHaveLength(4);
    answers.states['demo'] = () =>
      Promise.resolve(state({ step: 3, version: 5, history_total: 3 }));
    await sessions.refresh(); // went back a step: known from the next answer on
    await settled();
    await sessions.refresh();
    await settled();
    expect(answers.asked.map(([, question]) => question.history)).toEqual([STEPS, 0, 0, STEPS]);
  });

  it('asks for one line alone where nobody sees more', async () => {
    sessions.watched = false;
    await sessions.refresh();
    expect(answers.asked[0]?.[1]).toEqual({ history: 0 });
  });
});

describe('pressing', () => {
  beforeEach(async () => {
    await sessions.refresh();
    await settled();
  });

  it('follows the command until it is over', async () => {
    answers.commands = [command('running'), command('running'), command('done')].map(
      one => () => Promise.resolve(one)
    );
    const under = sessions.press({
      name: 'demo',
      verb: 'offload',
      args: { engine: 'actor' },
      key: 'k'
    });
    expect(sessions.find('demo')?.pending).toEqual(new Map([['k', 'k']]));
    await under;
    expect(answers.pressed).toEqual([['demo', 'offload', { engine: 'actor' }]]);
    expect(sessions.find('demo')?.pending.size).toBe(0);
    expect(sessions.find('demo')?.notice).toEqual({ label: 'k', trouble: null, at: 100 });
  });

  it.each([
    [
      'failed later',
      (): Promise<never> => Promise.reject(new Trouble('refused', 'rollout 5 runs'))
    ],
    ['was refused', () => Promise.resolve(command('failed', 'rollout 5 runs'))]
  ])('says why where it %s', async (_, answer) => {
    answers.commands = [answer];
    await sessions.press({ name: 'demo', verb: 'sync' });
    const { label, trouble } = sessions.find('demo')?.notice ?? {};
    expect([label, trouble?.message]).toEqual(['sync', 'rollout 5 runs']);
  });

  it('is done once, however often it is pressed meanwhile', async () => {
    answers.commands = [() => new Promise(() => undefined)];
    void sessions.press({ name: 'demo', verb: 'sync' });
    await sessions.press({ name: 'demo', verb: 'sync' });
    expect(answers.pressed).toHaveLength(1);
  });

  it('knows that a session which closes takes its endpoint along', async () => {
    answers.commands = [() => Promise.resolve(command('running'))];
    const closing = sessions.press({ name: 'demo', verb: 'close' });
    answers.listing = { ...answers.listing, sessions: [] };
    await closing;
    expect(sessions.entries).toEqual([]);
    expect(answers.commands).toEqual([]);
  });

  it('says where a session does not end', async () => {
    answers.commands = [() => Promise.resolve(command('running'))];
    await sessions.press({ name: 'demo', verb: 'close' });
    expect(sessions.find('demo')?.notice?.trouble).toMatchObject({ kind: 'lasting' });
  });

  it('kills by the server, not through the monitor', async () => {
    await sessions.kill('demo');
    expect([answers.killed, answers.pressed]).toEqual([['demo'], []]);
  });
});
