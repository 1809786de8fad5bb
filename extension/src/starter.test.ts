import { describe, expect, it } from 'vitest';

import { attachSource, starterNotebook } from './starter';
import { trans } from './testing';

describe('the attaching cell', () => {
  it('names the session', () => {
    expect(attachSource('demo')).toBe(
      'import rlbench as rb\n\nsession = rb.attach("demo")\nsession'
    );
  });

  it.each([
    ['"); import os; os.abort() #', String.raw`rb.attach("\"); import os; os.abort() #")`],
    ['a\nb', String.raw`rb.attach("a\nb")`],
    ['back\\slash', String.raw`rb.attach("back\\slash")`],
    ['\u{1f600}', String.raw`rb.attach("\U0001f600")`]
  ])('stays one string: %j', (name, call) => expect(attachSource(name)).toContain(call));
});

describe('the starter notebook', () => {
  it('has an id for every cell and no outputs', () => {
    const { cells, nbformat } = starterNotebook(trans) as {
      cells: { id: string; cell_type: string; outputs?: unknown[] }[];
      nbformat: number;
    };
    expect(nbformat).toBe(4);
    expect(new Set(cells.map(cell => cell.id)).size).toBe(cells.length);
    expect(
      cells.filter(cell => cell.cell_type === 'code').every(cell => cell.outputs?.length === 0)
    ).toBe(true);
  });
});
