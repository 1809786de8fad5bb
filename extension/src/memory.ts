/** Memory of an engine over time, by owner: what its timeline draws. */
import type { Sample } from './wire';

/** Owners of memory, stacked from below in this order; the hues of style/palette.css. */
export const OWNERS = [
  'weights',
  'gradients',
  'optimizer',
  'kv_cache',
  'activations',
  'other'
] as const;

export type Owner = (typeof OWNERS)[number];

/** What a reader calls each owner. */
export type OwnerNames = Readonly<Record<Owner, string>>;

export interface Timeline {
  /** Unix seconds. */
  readonly times: readonly number[];
  /** For each owner: the upper edge of its band, in bytes from the ground, at each of the times. */
  readonly edges: readonly (readonly number[])[];
  /** The largest sum, in bytes. */
  readonly top: number;
  /** The last sum by owner, in bytes, for a reader. */
  readonly last: Readonly<Partial<Record<Owner, number>>>;
}

/** Moments that a drawing of this width can show. */
const MOST = 240;

/**
 * What the workers of one engine held at each sample.
 *
 * Owners are of the device's memory. Where that is the host's (`onHost`), a worker that has not told its owners yet is
 * drawn by what its process holds.
 */
export function timelineOf(
  samples: readonly Sample[],
  workers: readonly string[],
  onHost = true
): Timeline {
  const every = Math.max(1, Math.ceil(samples.length / MOST));
  // counted from the end, so that the newest is always among them
  const shown = samples.filter((_, index) => (samples.length - 1 - index) % every === 0);
  const stacks = shown.map(sample => stackOf(sample, workers, onHost));
  const edges = OWNERS.map((_, owner) =>
    stacks.map(stack => stack.slice(0, owner + 1).reduce((a, b) => a + b, 0))
  );
  const sums = edges.at(-1) ?? [];
  const last = stacks.at(-1) ?? [];
  return {
    times: shown.map(sample => sample.time),
    edges,
    top: sums.reduce((a, b) => Math.max(a, b), 0),
    last: Object.fromEntries(
      OWNERS.flatMap((owner, index) => (last[index] ? [[owner, last[index]]] : []))
    )
  };
}

/** Bytes by owner, all workers together; what nobody told apart is `other`. */
function stackOf(sample: Sample, workers: readonly string[], onHost: boolean): readonly number[] {
  const stack = OWNERS.map(() => 0);
  for (const worker of workers) {
    const owners = sample.owners[worker] ?? (onHost ? { other: sample.resident[worker] ?? 0 } : {});
    OWNERS.forEach((owner, index) => {
      stack[index] = (stack[index] ?? 0) + Math.max(0, owners[owner] ?? 0);
    });
  }
  return stack;
}

/** Part of a stack below which its band is no wider than a hair. */
export const SEEN = 0.01;

/** What a legend names: owners whose band can be seen in some stack, and those that are there but too thin for it. */
export interface Bands {
  readonly seen: readonly Owner[];
  readonly thin: readonly Owner[];
}

/** Of stacks by owner, in bytes. */
export function bandsOf(stacks: readonly Readonly<Record<string, number>>[]): Bands {
  const largest = (owner: Owner): number =>
    Math.max(0, ...stacks.map(stack => (stack[owner] ?? 0) / (sum(stack) || 1)));
  return {
    seen: OWNERS.filter(owner => largest(owner) >= SEEN),
    thin: OWNERS.filter(owner => largest(owner) > 0 && largest(owner) < SEEN)
  };
}

function sum(stack: Readonly<Record<string, number>>): number {
  return Object.values(stack).reduce((a, b) => a + b, 0);
}
