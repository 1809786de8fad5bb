// @vitest-environment jsdom
import { describe, expect, it } from 'vitest';

import { add, fitted, mebibytes, number } from './dom';
import { drawMemory } from './lanes';
import { densityOf, drawLengths, saidOf } from './lengths';
import { firstAfter } from './list';
import { now, Ring, top } from './ring';
import type { Memory } from './ring';
import { Rows } from './rows';
import { count, drawCurves, drawSplit } from './steps';

const NONE = Array.from({ length: 6 }, () => [0]);

function memory(time: number, mib: number, change: Partial<Memory> = {}): Memory {
  const owners = NONE.map((values, owner) => (owner ? values : [mib]));
  const lanes = [{ name: 'actor 0', owners, total: null, detail: '' }];
  return { times: [time], lanes, marks: [], untold: null, ...change };
}

describe('memory that is kept', () => {
  it('takes only what is newer, for ten minutes', () => {
    const ring = new Ring();
    ring.merge(memory(0, 1));
    ring.merge(memory(100, 2));
    ring.merge(memory(100, 3));
    expect(ring.times).toEqual([0, 100]);
    ring.merge(memory(650, 4));
    expect(ring.times).toEqual([100, 650]);
    const [lane] = ring.since(0);
    expect(lane && [now(lane), top(lane)]).toEqual([4, 4]);
  });

  it('has no number for a process that was not there', () => {
    const ring = new Ring();
    ring.merge(memory(0, 1));
    ring.merge({ ...memory(1, 5), lanes: [{ name: 'b', owners: NONE, total: 9, detail: '' }] });
    expect(ring.since(0).map(lane => now(lane))).toEqual([null, 0]);
    expect(ring.since(0)[1]?.owners[0]).toEqual([null, 0]);
    expect(ring.lanes).toBe(1);
  });

  it('replaces a mark that ran once it has ended, and forgets it at last', () => {
    const ring = new Ring();
    ring.merge(memory(0, 1, { marks: [[0, null, 'train', 'train_step']] }));
    ring.merge(memory(5, 1, { marks: [[0, 4, 'train', 'train_step']] }));
    expect([...ring.marks.values()]).toEqual([[0, 4, 'train', 'train_step']]);
    ring.merge(memory(700, 1));
    expect(ring.marks.size).toBe(0);
  });

  it('is drawn with what ran and what died', () => {
    const ring = new Ring();
    ring.merge(memory(0, 100, { marks: [[1, 0, 'oom', 'killed']] }));
    ring.merge(memory(60, 200, { marks: [[2, 50, 'rollout', 'rollout 3']] }));
    const [body, key] = [add(document.body, 'div'), add(document.body, 'div')];
    drawMemory(body, key, ring, 180);
    expect(body.querySelector('svg')?.getAttribute('aria-label')).toBe('memory: actor 0 200 MiB');
    const texts = [...body.querySelectorAll('text')].map(one => one.textContent);
    expect(texts).toEqual(['actor 0actor 0', '200 MiB', 'rollout', '✕ OOMkilled', '−60 s', 'now']);
    expect(key.textContent).toBe('weights');
  });
});

describe('lengths', () => {
  const lengths = {
    rollout: 'rollout 3',
    samples: 4,
    truncated: 0.25,
    p50: 3,
    p90: null,
    p99: null,
    max: 8,
    edges: [0, 2, 8],
    counts: [1, 3]
  };

  it('are said in figures and drawn by density', () => {
    expect(saidOf(lengths)).toEqual(['p50 3', 'max 8', 'truncated 25 %']);
    expect(densityOf(lengths)).toEqual([0.125, 0.125]);
    const [body, text] = [document.createElement('div'), document.createElement('span')];
    drawLengths(body, text, [lengths, lengths], 120);
    expect([body.querySelectorAll('rect').length, text.textContent]).toEqual([
      2,
      'p50 3  max 8  truncated 25 %'
    ]);
    drawLengths(body, text, [], 120);
    expect(body.textContent).toBe('No rollouts yet. session.rollout(prompts)');
  });
});

describe('steps', () => {
  it('are curves with their last value, and teach how to begin where there are none', () => {
    const box = document.createElement('div');
    drawCurves(box, [{ label: 'KL', unit: 'nats', points: [] }]);
    expect(box.textContent).toContain('session.train_step(batch)');
    drawCurves(box, [
      {
        label: 'KL',
        unit: 'nats',
        points: [
          [1, 0.25],
          [2, 0.5]
        ]
      }
    ]);
    expect(box.querySelector('svg')?.getAttribute('aria-label')).toBe(
      'KL: 2 steps, 0.25 to 0.5, last 0.5'
    );
  });

  it('are split into what took time', () => {
    const box = document.createElement('div');
    const parts = [
      ['rollout', 0.9],
      ['idle', 0]
    ] as const;
    drawSplit(box, { step: 3, seconds: 1, parts, tokens_per_s: 3104 }, 'cell 3 s');
    expect(box.querySelector('.rlb-split-line')?.textContent).toBe(
      'step 1 srollout 0.9 s3.1k tok/scell 3 s'
    );
    expect(box.querySelectorAll('.rlb-split-bar span')).toHaveLength(1);
  });
});

it('numbers have units, three digits and a dash where nothing is known', () => {
  expect([number(null), number(NaN), number(0.12345), number(12345)]).toEqual([
    '–',
    '–',
    '0.123',
    '12,345'
  ]);
  expect([mebibytes(900), mebibytes(2048), mebibytes(null)]).toEqual(['900 MiB', '2 GiB', '']);
  expect([count(12), count(3104), count(2.5e6)]).toEqual(['12', '3.1k', '2.5M']);
});

it('a name that is too long keeps the number of its worker', () => {
  expect(fitted('a-long-engine 12', 62)).toBe('a-long… 12');
  expect([fitted('short', 62), fitted('abcdef', 12)]).toEqual(['short', '']);
});

it('the first item in view is the first that ends below its top', () => {
  const tops = Float64Array.from([0, 10, 20, 30]);
  expect([-5, 0, 9, 10, 25, 99].map(from => firstAfter(tops, from))).toEqual([0, 0, 0, 1, 2, 3]);
});

it('rows that come later are joined to what is there, and others are not', () => {
  const rows = new Rows([], 512);
  const sent = {
    i: 7,
    k: 0,
    p: 0,
    n: 4,
    born: 0,
    reward: null,
    right: false,
    finish: 'stop',
    small: false
  };
  const take = (from: number, pieces: readonly string[]): void => {
    const images = [{ t: from, tokens: 1, src: '', alt: '' }];
    const one = { ...sent, from, pieces, kinds: 't'.repeat(pieces.length), images };
    rows.take({ heads: [], rows: [one] }, new Int32Array(pieces.length), new Float32Array());
  };
  take(0, ['a', 'b']);
  rows.toggle(7);
  expect(rows.rows.get(7)?.wanted).toBe(4);
  take(3, ['d']);
  take(2, ['c', 'd']);
  expect(rows.rows.get(7)).toMatchObject({
    images: [{ t: 0 }, { t: 2 }],
    pieces: ['a', 'b', 'c', 'd'],
    kinds: 'tttt',
    wanted: 4
  });
  rows.toggle(7);
  expect([rows.rows.get(7)?.wanted, rows.full.size]).toEqual([0, 0]);
});
