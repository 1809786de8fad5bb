import { describe, expect, it } from 'vitest';

import { OWNERS, bandsOf, timelineOf } from './memory';
import type { Sample } from './wire';

function sampleOf(
  time: number,
  owners: Sample['owners'],
  resident: Sample['resident'] = {}
): Sample {
  return { time, owners, resident };
}

describe('memory of an engine', () => {
  it('stacks the owners of its workers and of no other', () => {
    const line = timelineOf(
      [
        sampleOf(1, { a: { weights: 10, other: 5 }, b: { weights: 1 }, c: { weights: 100 } }),
        sampleOf(2, { a: { weights: 10, other: 9 }, b: { weights: 1 } })
      ],
      ['a', 'b']
    );
    expect(line.edges[OWNERS.indexOf('weights')]).toEqual([11, 11]);
    expect(line.edges[OWNERS.indexOf('other')]).toEqual([16, 20]);
    expect([line.top, line.last]).toEqual([20, { weights: 11, other: 9 }]);
  });

  it('takes what nobody told apart as other', () => {
    const line = timelineOf([sampleOf(1, {}, { a: 7 })], ['a', 'missing']);
    expect([line.top, line.last]).toEqual([7, { other: 7 }]);
  });

  it('names in its legend what can be seen, and apart from that what is too thin', () => {
    const process = { weights: 5, gradients: 0, optimizer: 9, activations: 400, other: 900 };
    expect(bandsOf([process])).toEqual({
      seen: ['activations', 'other'],
      thin: ['weights', 'optimizer']
    });
    expect(bandsOf([process, { weights: 50, other: 60 }]).seen).toContain('weights');
    expect(bandsOf([])).toEqual({ seen: [], thin: [] });
  });

  it('does not take the memory of a process for that of a GPU', () => {
    const line = timelineOf(
      [sampleOf(1, { a: { weights: 3 } }, { a: 7, b: 9 })],
      ['a', 'b'],
      false
    );
    expect([line.top, line.last]).toEqual([3, { weights: 3 }]);
  });

  it('thins many samples out but keeps the newest', () => {
    const samples = Array.from({ length: 1201 }, (_, i) => sampleOf(i, {}, { a: i }));
    const line = timelineOf(samples, ['a']);
    expect(line.times.length).toBeLessThanOrEqual(240);
    expect([line.times.at(-1), line.last.other]).toEqual([1200, 1200]);
  });

  it('is empty without samples', () => expect(timelineOf([], ['a']).top).toBe(0));
});
