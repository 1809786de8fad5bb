/// <reference types="node" />
import { readFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { describe, expect, it } from 'vitest';

import { Trouble } from './asks';
import { trans } from './testing';
import { say } from './text';
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
    expect([state.step, state.version, state.historyTotal]).toEqual([12, 12, 12]);
    expect(state.engines[0]?.workers[0]?.resident).toBe(1288490188);
    expect(state.engines[0]?.bytes['weights']).toBe(41943040);
    expect(state.history).toEqual([{ step: 12, reward: 0.5, length: null }]);
    expect(state.view.condition).toBe('running');
    expect(say(state.view.phase.what[0] ?? '', trans)).toBe('train_step: rollout 13');
    expect(state.view.controls[0]?.key).toBe('stop');
  });

  it('the devices of the machine', () => {
    const gpu = { name: 'Accelerator X', used: 3, total: 10 };
    const listing = readListing({ gpus: [gpu, { name: 7 }, null], gpus_error: 'no driver' });
    const unknown = { used: 0, total: 0 };
    expect(listing.gpus).toEqual([gpu, { ...unknown, name: '7' }, { ...unknown, name: '' }]);
    expect(listing.gpusError).toBe('no driver');
    expect(readListing({}).gpus).toEqual([]);
  });

  it('the sessions, parked ones too', () => {
    const listing = readListing(documented('Through the Jupyter server'));
    const states = listing.sessions.map(one => [one.name, one.state]);
    expect(states).toEqual([
      ['demo', 'live'],
      ['older', 'parked']
    ]);
    expect(listing.sessions[1]?.parked).toMatchObject({
      step: 30,
      version: 30,
      age: 600,
      lost: []
    });
    const bare = readListing({ sessions: [{ name: 'x', state: 'parked' }] }).sessions[0]?.parked;
    expect(bare).toMatchObject({ model: '', step: 0, age: 0, lost: [] });
  });

  it('samples', () => {
    const { samples } = readState({ ...(documented('GET /samples') as object), view: {} });
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
  it.each([null, 7, 'x', [], { engines: [] }, { view: [] }])('%j is refused as a state', value => {
    expect(() => readState(value)).toThrow(Trouble);
  });

  it('what is missing or of another type is left empty', () => {
    const state = readState({ view: {}, engines: 'none', samples: { a: 1 }, step: '4' });
    expect([state.step, state.engines, state.samples]).toEqual([0, [], []]);
  });

  it('takes numbers for numbers alone', () => {
    const listing = readListing({
      sessions: [{ name: 5, state: 'odd' }],
      memory: { used: '1', total: 2 }
    });
    expect(listing.sessions).toEqual([{ name: '5', state: 'gone' }]);
    expect(listing.memory).toBeNull();
    expect(
      readState({ view: {}, history: [{ reward: Number.NaN }] }).history[0]?.reward
    ).toBeNull();
  });
});
