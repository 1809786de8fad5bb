import { describe, expect, it } from 'vitest';

import { branch } from './testing';
import { itemsOf, Tree } from './tree';
import type { Branch } from './tree';

function treeOf(...branches: readonly Branch[]): Tree {
  const tree = new Tree();
  tree.branches = branches;
  return tree;
}

/** The lines of one open prompt, as their keys behind one `>` per level. */
function lines(own: readonly number[], tree: Tree, across = 1): string {
  const items = itemsOf([[0, own]], new Set([0]), across, tree);
  return items.map(({ key, depth }) => '>'.repeat(depth) + key).join(' ');
}

const FIRST = branch({ key: 'a', of: 0, kept: 5, samples: [2, 3] });
const EARLIER = branch({ key: 'b', of: 0, kept: 1, samples: [4] });
const DEEPER = branch({ key: 'c', of: 3, kept: 6, samples: [5, 6] });

describe('continuations', () => {
  it('stand below what they continue, earlier places first, in the order of the list', () => {
    const tree = treeOf(FIRST, EARLIER, DEEPER);
    const all = 'h0 1r0 >bb >1r4 >ba >1r3 >>bc >>1r6 >>1r5 >1r2 1r1';
    expect(lines([6, 0, 4, 3, 2, 1, 5], tree)).toBe(all);
    expect(tree.holds(5)?.key).toBe('c');
  });

  it('are hidden with their place, and shown again', () => {
    const tree = treeOf(FIRST, DEEPER);
    tree.toggle('a');
    expect(lines([0, 2, 3, 5], tree)).toContain('h0 1r0 >ba');
    tree.toggle('a');
    expect(lines([0, 2, 3], tree)).toBe('h0 1r0 >ba >1r2 >1r3');
  });

  it('stand at the end where what they continue is not shown, and once where origins are in a circle', () => {
    expect(lines([1, 2, 3], treeOf(FIRST))).toBe('h0 1r1 >ba >1r2 >1r3');
    const circle = treeOf(
      branch({ key: 'x', of: 1, samples: [0] }),
      branch({ key: 'y', samples: [1] })
    );
    expect(lines([0, 1], circle)).toBe('h0 >bx >1r0 >>by >>1r1');
  });

  it('stand side by side below the line of what they continue', () => {
    expect(lines([0, 1, 2, 3], treeOf(FIRST), 2)).toBe('h0 2r0 >ba >2r2');
  });
});

it('a prompt that is closed has its own line alone', () => {
  expect(itemsOf([[4, [1, 2]]], new Set(), 1, new Tree())).toMatchObject([{ key: 'h4', head: 4 }]);
});
