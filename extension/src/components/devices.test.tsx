// @vitest-environment jsdom
import { cleanup, render, screen } from '@testing-library/react';
import React from 'react';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';

import { Sessions } from '../sessions';
import { Answers, MIB, settled, state, trans } from '../testing';
import { Overview } from './overview';

vi.mock('../icons', () => ({ icons: {} }));

const GIB = 1024 * MIB;
const HOST = { used: 8 * GIB, total: 16 * GIB };
const GPU = { name: 'Accelerator X', used: 20 * GIB, total: 80 * GIB };
const SAMPLE = {
  time: 1000,
  owners: { 'rlbench/demo/inference/0': { weights: 4 * GIB, kv_cache: 6 * GIB } },
  resident: {}
};
let now = 100;
let answers: Answers;
let sessions: Sessions;

beforeEach(() => {
  now = 100;
  answers = new Answers();
  sessions = new Sessions(answers, { clock: () => now, wait: () => Promise.resolve() });
  answers.states['demo'] = () => Promise.resolve({ ...state(), samples: [SAMPLE] });
});

afterEach(cleanup);

async function bars(listing: Partial<Answers['listing']>): Promise<readonly string[]> {
  answers.listing = { ...answers.listing, memory: HOST, ...listing };
  await sessions.refresh();
  await settled();
  render(
    <Overview sessions={sessions} interval={1} onPress={vi.fn()} onNew={vi.fn()} trans={trans} />
  );
  return screen
    .getAllByRole('meter')
    .map(bar => `${bar.getAttribute('aria-label')}: ${bar.getAttribute('aria-valuetext')}`);
}

function widths(index: number): readonly string[] {
  const parts = document.querySelectorAll('.rlb-Bar')[index]?.querySelectorAll('i') ?? [];
  return [...parts].map(part => `${part.className} ${Math.round(parseFloat(part.style.width))} %`);
}

it('the host holds the engines where there is no GPU', async () => {
  const [host] = await bars({});
  expect(host).toMatch(/^host\. The coloured part.*: 8 GiB of 16 GiB used, 2\.88 GiB by/);
  expect(widths(0)[0]).toBe('rlb-mod-ours 18 %');
});

it('a GPU is named, and the part of it that the sessions hold is told', async () => {
  expect(await bars({ gpus: [GPU] })).toEqual([
    'GPU 0. Accelerator X: 20 GiB of 80 GiB used, 10.1 GiB by the sessions',
    'host: 8 GiB of 16 GiB used'
  ]);
  expect(document.querySelector('.rlb-Device')?.textContent).toBe('GPU 020 GiB / 80 GiB 25 %');
  expect(widths(0)).toEqual(['rlb-mod-ours 13 %', 'rlb-mod-others 12 %']);
  expect(widths(1)).toEqual(['rlb-mod-ours 0 %', 'rlb-mod-others 50 %']);
});

it('of several GPUs nobody knows which a session is on', async () => {
  const said = await bars({ gpus: [GPU, { ...GPU, used: 0 }] });
  expect(said.slice(0, 2)).toEqual([
    'GPU 0. Accelerator X: 20 GiB of 80 GiB used',
    'GPU 1. Accelerator X: 0 B of 80 GiB used'
  ]);
  expect(widths(0)[0]).toBe('rlb-mod-ours 0 %');
});

it('a driver that fails says so', async () => {
  await bars({ gpusError: 'NVML did not answer within 1 s' });
  expect(document.body.textContent).toContain('GPU memory: NVML did not answer within 1 s');
});

it('numbers of a server that does not answer are pale, and those of a silent session do not count', async () => {
  await bars({});
  expect(document.querySelector('.rlb-Devices.rlb-mod-stale')).toBeNull();
  cleanup();
  now = 120;
  answers.states['demo'] = () => Promise.reject(new Error('silent'));
  const [host] = await bars({});
  expect(host).toContain(', 0 B by the sessions');
  cleanup();
  answers.fails = new Error('Failed to fetch');
  await expect(sessions.refresh()).rejects.toThrow();
  render(
    <Overview sessions={sessions} interval={1} onPress={vi.fn()} onNew={vi.fn()} trans={trans} />
  );
  expect(document.querySelector('.rlb-Devices.rlb-mod-stale')).not.toBeNull();
});
