import { describe, expect, it } from 'vitest';

import { digits, duration, gib, percent, short } from './format';

describe('numbers for a reader', () => {
  it.each([
    [0, '0'],
    [0.62345, '0.623'],
    [12.345, '12.3'],
    [999.4, '999'],
    [12345.6, '12,346'],
    [-1500, '-1,500']
  ])('%d is %s', (value, said) => expect(digits(value)).toBe(said));

  it.each([
    [0, '0 B'],
    [12 * 2 ** 10, '12 KiB'],
    [900 * 2 ** 20, '900 MiB'],
    [1229 * 2 ** 20, '1.2 GiB'],
    [6.4 * 2 ** 30, '6.4 GiB']
  ])('%d bytes are %s', (bytes, said) => expect(gib(bytes)).toBe(said));

  it.each([
    [0.4, '0 s'],
    [99, '99 s'],
    [600, '10 min'],
    [20000, '5.56 h']
  ])('%d seconds are %s', (seconds, said) => expect(duration(seconds)).toBe(said));

  it('shares are whole percents', () => expect(percent(28 / 64)).toBe('44 %'));

  it('long text is cut and says so', () => {
    expect(short('x'.repeat(100), 10)).toBe('xxxxxxxxx…');
    expect(short('whole', 10)).toBe('whole');
  });
});
