import { expect, it } from 'vitest';

import { Trouble } from '../asks';
import { Answers, command } from '../testing';
import { answerOf, Server } from './press';
import type { Control } from './press';

const OFFLOAD: Control = {
  key: 'inference/kv_cache',
  label: 'KV cache ● resident',
  name: 'KV cache of inference: resident',
  command: 'offload KV cache of inference',
  verb: 'offload',
  args: { engine: 'inference', parts: ['kv_cache'] },
  enabled: true,
  title: '',
  pressed: true
};
const SYNC: Control = { ...OFFLOAD, key: 'sync', command: 'sync', verb: 'sync', args: {} };

it('a press goes through the server where it knows the session', async () => {
  const answers = new Answers();
  answers.commands = [() => Promise.resolve(command('running'))];
  const server = new Server(answers, 'demo');
  expect(await server.press(OFFLOAD)).toMatchObject({ state: 'done' });
  expect(answers.pressed).toEqual([['demo', 'offload', OFFLOAD.args]]);
  expect(server.known).toBe(true);
});

it('it is left to the kernel where there is no server, or one that does not know it', async () => {
  expect(await new Server(null, 'demo').press(SYNC)).toBeNull();
  expect(await new Server(new Answers(), 'other').knows().catch(() => null)).toBeNull();
  const silent = new Answers();
  silent.states['demo'] = () => Promise.reject(new Trouble('unknown', 'no session'));
  expect(await new Server(silent, 'demo').press(SYNC)).toBeNull();
});

it('a server that went away is asked no more, a refusal is told', async () => {
  const answers = new Answers();
  const server = new Server(answers, 'demo');
  answers.commands = [
    () => Promise.reject(new Trouble('refused', 'rollout 5 runs')),
    () => Promise.reject(new Trouble('server', 'Failed to fetch'))
  ];
  await expect(server.press(SYNC)).rejects.toThrow('rollout 5 runs');
  expect([await server.press(SYNC), server.known]).toEqual([null, false]);
});

it('what became of it is said in words', () => {
  const done = { ...command('done'), seconds: 0.42 };
  expect(answerOf(OFFLOAD, { ...done, result: { kv_cache: 'meta' } })).toBe(
    'offload KV cache of inference: now meta · done · 0.42 s'
  );
  expect(answerOf(SYNC, { ...done, result: { version: 4 } })).toBe('sync: v4 · done · 0.42 s');
  expect(answerOf(SYNC, { ...done, result: { stopped: [] } })).toBe(
    'sync: nothing ran · done · 0.42 s'
  );
  expect(answerOf(SYNC, command('failed', 'SessionError: no'))).toBe('sync: SessionError: no');
});
