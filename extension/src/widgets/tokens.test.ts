import { describe, expect, it } from 'vitest';

import { colour, describeToken, drawnText, number, share } from './tokens';
import type { Scale } from './tokens';

const SIGNED: Scale = {
  name: 'advantage',
  label: 'adv',
  unit: '',
  kind: 'signed',
  about: '',
  low: -2,
  high: 1,
  bound: 1,
  saturated: true
};
const RATIO: Scale = { ...SIGNED, name: 'ratio', kind: 'ratio', bound: Math.log(2) };
const FLAG: Scale = { ...SIGNED, name: 'clipped', label: 'clipped', kind: 'flag' };

it.each([
  [null, '–'],
  [NaN, '–'],
  [-Infinity, '−∞'],
  [-0.12345, '−0.123'],
  [1234.5, '1,235'],
  [0.00001234, '1.2e-5']
])('%s is written %s', (value, text) => {
  expect(number(value)).toBe(text);
});

describe('how strongly a value colours its token', () => {
  it('goes by the distance from the middle, and no further than the bound', () => {
    expect([share(SIGNED, -0.5), share(SIGNED, -2), share(SIGNED, NaN)]).toEqual([-0.5, -1, 0]);
    expect(share(RATIO, 0.5)).toBeCloseTo(-1);
    expect([share(RATIO, 0), share(RATIO, 1)]).toEqual([-1, 0]);
  });

  it('has a hue for each sign, and one for sizes', () => {
    expect(colour(SIGNED, 1)).toBe('color-mix(in srgb, var(--rlb-positive) 62%, transparent)');
    expect(colour(SIGNED, -1)).toContain('negative');
    expect(colour({ ...SIGNED, kind: 'size' }, -1)).toContain('magnitude');
    expect(colour(SIGNED, 0.01)).toBe('');
  });
});

it('line feeds are always seen, spaces on request, special tokens as they are', () => {
  expect(drawnText('a\n b', 't', false, false)).toBe('a⏎ b');
  expect(drawnText('a\n b', 't', true, true)).toBe('a⏎\n·b');
  expect([drawnText('', 't', false, false), drawnText('', 's', false, false)]).toEqual(['∅', '']);
});

it('a token is described with its values in all channels', () => {
  const values = [-0.87, 1, 0];
  expect(
    describeToken(3, '3\n', 'b', 21, [SIGNED, RATIO, FLAG], channel => values[channel] ?? NaN)
  ).toBe(
    "token 3  '3\\n'  id 21  (byte of a character that a later token completes)  adv −0.87  adv 1  not clipped"
  );
});
