/** Completions as a tree: prompts, their completions, and below each what was continued from one of its tokens. */
import type { Item } from './item';

/** What came of a fork, as rlbench/notebook/rollouts/rows.py sends it. */
export interface Branch {
  /** Names it, also where completions are numbered anew. */
  readonly key: string;
  readonly p: number;
  /** The completion it continues; −1: not there any more. */
  readonly of: number;
  /** Tokens of that which stand before it. */
  readonly kept: number;
  /** Written behind those; may be empty. */
  readonly text: string;
  /** The adapter that continued; "" for the policy. */
  readonly under: string;
  readonly samples: readonly number[];
  /** Its value in words, or why it has none. */
  readonly said: string;
}

/** The prompts, and of each the completions that are shown, in order. */
export type Groups = readonly (readonly [number, readonly number[]])[];

export class Tree {
  /** Branches whose continuations are hidden, by key. */
  readonly closed = new Set<string>();

  get branches(): readonly Branch[] {
    return this._branches;
  }
  set branches(branches: readonly Branch[]) {
    this._branches = branches;
    this.holding = new Map(branches.flatMap(branch => branch.samples.map(i => [i, branch])));
  }

  named(key: string): Branch | undefined {
    return this._branches.find(branch => branch.key === key);
  }

  /** The branch that a completion belongs to. */
  holds(i: number): Branch | undefined {
    return this.holding.get(i);
  }

  /** What was continued from a completion, in the order of its tokens. */
  from(i: number): readonly Branch[] {
    return this._branches.filter(({ of }) => of === i).sort((a, b) => a.kept - b.kept);
  }

  toggle(key: string): void {
    if (!this.closed.delete(key)) {
      this.closed.add(key);
    }
  }

  private _branches: readonly Branch[] = [];
  private holding = new Map<number, Branch>();
}

/** The lines of the list: `across` completions stand side by side, below them what was continued from them. */
export function itemsOf(
  groups: Groups,
  open: ReadonlySet<number>,
  across: number,
  tree: Tree
): Item[] {
  const items: Item[] = [];
  for (const [p, own] of groups) {
    items.push({ key: `h${p}`, kind: 'head', head: p, samples: [], branch: null, depth: 0 });
    if (open.has(p)) {
      addGroup(items, own, across, tree);
    }
  }
  return items;
}

function addGroup(items: Item[], own: readonly number[], across: number, tree: Tree): void {
  const members = new Map<Branch | undefined, number[]>();
  for (const i of own) {
    const branch = tree.holds(i);
    const known = members.get(branch);
    if (known) {
      known.push(i);
    } else {
      members.set(branch, [i]);
    }
  }
  const addRows = (rows: readonly number[], depth: number): void => {
    for (let k = 0; k < rows.length; k += across) {
      const samples = rows.slice(k, k + across);
      const kind = across > 1 ? 'cards' : 'row';
      const key = `${across}r${samples[0] ?? 0}`;
      items.push({ key, kind, head: null, samples, branch: null, depth });
      if (tree.branches.length) {
        samples.flatMap(i => tree.from(i)).forEach(branch => addBranch(branch, depth + 1));
      }
    }
  };
  const addBranch = (branch: Branch, depth: number): void => {
    const rows = members.get(branch);
    if (rows) {
      members.delete(branch);
      const { key } = branch;
      items.push({ key: `b${key}`, kind: 'branch', head: null, samples: [], branch: key, depth });
      if (!tree.closed.has(key)) {
        addRows(rows, depth);
      }
    }
  };
  addRows(members.get(undefined) ?? [], 0);
  for (const branch of [...members.keys()]) {
    if (branch) {
      addBranch(branch, 1); // what it continues is not shown
    }
  }
}
