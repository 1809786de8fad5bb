/// <reference types="node" />
import { readFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { describe, expect, it } from 'vitest';

import { readCommand, readListing, readState } from './wire';

/** The example below a heading of the monitor's documentation. */
function documented(heading: string): unknown {
  const page = readFileSync(resolve(__dirname, '../../docs/monitor-api.md'), 'utf8');
  const section = page.split(`## ${heading}`)[1] ?? '';
  return JSON.parse(section.split('```json')[1]?.split('```')[0] ?? '');
}

describe('answers as the documentation has them', () => {
  it('a state', () => {
    const state = readState(documented('GET /state'));
    expect([state.model, state.step, state.version, state.historyTotal]).toEqual([
      'tiny',
      12,
      12,
      12
    ]);
    expect(state.engines[0]?.parts).toEqual({ weights: 'cuda', kv_cache: 'cuda' });
    expect(state.engines[0]?.workers[0]?.resident).toBe(1288490188);
    expect(state.running[0]?.progress[0]).toMatchObject({
      tokens: 512,
      finished: 3,
      total: 64,
      done: null
    });
    expect(state.verbs).toEqual(['train_step']);
    expect(state.driver).toEqual({ pid: 4600, mode: 'notebook', alive: true });
    expect(state.history).toEqual([{ step: 12, reward: 0.5, length: null }]);
    expect(state.failure?.message).toBe('this loss fails');
    expect(state.endsIn).toBeNull();
  });

  it('the devices of the machine', () => {
    const gpu = { name: 'Accelerator X', used: 3, total: 10 };
    const listing = readListing({ gpus: [gpu, { name: 7 }, null], gpus_error: 'no driver' });
    const unknown = { used: 0, total: 0 };
    expect(listing.gpus).toEqual([gpu, { ...unknown, name: '7' }, { ...unknown, name: '' }]);
    expect(listing.gpusError).toBe('no driver');
    expect(readListing({}).gpus).toEqual([]);
  });

  it('samples', () => {
    const { samples } = readState(documented('GET /samples'));
    expect(samples[0]?.resident).toEqual({ 'rlbench/demo/actor/0': 734003200 });
    expect(samples[0]?.owners['rlbench/demo/actor/0']?.['optimizer']).toBe(41943040);
  });

  it('a command, done and failed', () => {
    expect(readCommand(documented('GET /command/ID'))).toMatchObject({
      verb: 'offload',
      state: 'done'
    });
    const error = { kind: 'SessionError', message: 'no' };
    expect(readCommand({ command: { state: 'failed', error } }).error).toBe('SessionError: no');
  });
});

describe('answers of another kind', () => {
  it.each([
    null,
    7,
    'x',
    [],
    { engines: 'none', running: [null, 3], samples: { a: 1 }, driver: [] }
  ])('%j is an empty state', value => {
    const state = readState(value);
    expect([state.step, state.engines, state.samples, state.driver]).toEqual([0, [], [], null]);
  });

  it('takes numbers for numbers alone', () => {
    const listing = readListing({
      sessions: [{ name: 5, state: 'odd' }],
      memory: { used: '1', total: 2 }
    });
    expect(listing.sessions).toEqual([{ name: '5', state: 'gone' }]);
    expect(listing.memory).toBeNull();
    expect(readState({ history: [{ reward: Number.NaN }] }).history[0]?.reward).toBeNull();
  });

  it('leaves out a part that an engine does not have', () => {
    const state = readState({ engines: [{ state: { weights: 'cuda', optimizer: 'none' } }] });
    expect(state.engines[0]?.parts).toEqual({ weights: 'cuda' });
  });
});
