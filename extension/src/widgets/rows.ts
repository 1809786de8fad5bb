/** What is known of the prompts and completions of a viewer: what came so far, and which are open. */
import type { Scale } from './tokens';
import { Tree } from './tree';

export interface Image {
  readonly src: string;
  readonly alt: string;
  /** That stand for it; 0: not known. */
  readonly tokens: number;
}

/** The line of a prompt, as rlbench/notebook/rollouts/rows.py sends it. */
export interface Head {
  readonly p: number;
  readonly text: string;
  /** Whether the text is not all of the prompt. */
  readonly more: boolean;
  /** Completions, without those that were continued from others. */
  readonly n: number;
  readonly continuations: number;
  /** Least and most tokens of its completions. */
  readonly lengths: readonly [number, number] | null;
  readonly images: readonly Image[];
  /** Of its rewards, where it has some. */
  readonly right?: number;
  readonly two?: boolean;
  readonly mean?: number;
  readonly spread?: number;
}

/** A completion, or what comes after `from` tokens of it. */
export interface Sent {
  readonly i: number;
  readonly k: number;
  readonly p: number;
  /** Tokens of the whole. */
  readonly n: number;
  /** Tokens that it has from the completion it was continued from. */
  readonly born: number;
  readonly from: number;
  readonly reward: number | null;
  readonly right: boolean;
  readonly finish: string;
  /** Where its tokens have no text of their own. */
  readonly text?: string;
  readonly pieces: readonly string[];
  /** One letter per piece. */
  readonly kinds: string;
  /** What an environment showed, in front of the token `t`. */
  readonly images: readonly (Image & { readonly t: number })[];
  /** Whether those are sent again, larger, where all of the completion is asked for. */
  readonly small: boolean;
}

export interface Row extends Sent {
  readonly ids: Int32Array;
  /** By channel. */
  readonly values: readonly Float32Array[];
  /** So many of its tokens are to be shown; 0: the preview. */
  readonly wanted: number;
}

/** One of a prompt's messages, or a part of one. */
export interface Message {
  readonly role: string;
  readonly text: string;
  readonly image: string;
  readonly tokens: number;
  /** As Python encoded it; the text names it. */
  readonly sound?: string;
}

export interface Window {
  readonly heads: readonly Head[];
  readonly rows: readonly Sent[];
}

/** That completions from number `after` on are `by` higher now. */
export interface Shift {
  readonly after: number;
  readonly by: number;
}

export class Rows {
  /** What was continued from what. */
  readonly tree = new Tree();
  readonly heads = new Map<number, Head>();
  readonly rows = new Map<number, Row>();
  /** All messages of prompts that were asked for. */
  readonly prompts = new Map<number, readonly Message[]>();
  /** Prompts whose completions are shown. */
  readonly open = new Set<number>();
  /** Completions shown whole. */
  readonly full = new Set<number>();
  /** Prompts shown whole. */
  readonly spelt = new Set<number>();

  constructor(
    public scales: readonly Scale[],
    /** Tokens of a completion that are shown at once where it is shown whole. */
    readonly openTokens: number
  ) {}

  /** Keep lines and rows that came with their numbers; the keys of what changed. */
  take({ heads, rows }: Window, ids: Int32Array, values: Float32Array): readonly string[] {
    for (const head of heads) {
      this.heads.set(head.p, head);
    }
    let at = 0;
    for (const sent of rows) {
      const end = at + sent.pieces.length;
      const own = this.scales.map((_, c) =>
        values.subarray(c * ids.length + at, c * ids.length + end)
      );
      const before = this.rows.get(sent.i);
      this.rows.set(sent.i, joined(before, sent, ids.subarray(at, end), own));
      at = end;
    }
    return [...heads.map(head => `h${head.p}`), ...rows.map(row => `r${row.i}`)];
  }

  /** Number completions anew; what is known of them stays where their channels are the same. */
  grow(scales: readonly Scale[], shift: Shift): void {
    const same =
      scales.map(({ name }) => name).join() === this.scales.map(({ name }) => name).join();
    const [rows, full] = [[...this.rows], [...this.full]];
    this.rows.clear();
    this.full.clear();
    this.scales = scales;
    full.forEach(i => this.full.add(moved(i, shift)));
    for (const [i, row] of same ? rows : []) {
      this.rows.set(moved(i, shift), { ...row, i: moved(i, shift) });
    }
  }

  /** Show a completion whole, or its preview again. */
  toggle(i: number): void {
    if (!this.rows.has(i)) {
      return;
    }
    const whole = !this.full.delete(i);
    if (whole) {
      this.full.add(i);
    }
    this.want(i, whole ? this.openTokens : 0);
  }

  /** Ask for the next tokens of a completion. */
  more(i: number): void {
    this.want(i, (this.rows.get(i)?.pieces.length ?? 0) + this.openTokens);
  }

  private want(i: number, tokens: number): void {
    const row = this.rows.get(i);
    if (row) {
      this.rows.set(i, { ...row, wanted: Math.min(row.n, tokens) });
    }
  }
}

/** The number that a completion has since. */
export function moved(i: number, { after, by }: Shift): number {
  return i < after ? i : i + by;
}

/** A row with what came after its tokens, or instead of them. */
function joined(
  old: Row | undefined,
  sent: Sent,
  ids: Int32Array,
  values: readonly Float32Array[]
): Row {
  if (!old || sent.from === 0) {
    return { ...sent, ids, values, wanted: old?.wanted ?? 0 };
  }
  if (sent.from !== old.pieces.length) {
    return old;
  }
  return {
    ...old,
    pieces: [...old.pieces, ...sent.pieces],
    kinds: old.kinds + sent.kinds,
    images: [...old.images, ...sent.images],
    ids: Int32Array.from([...old.ids, ...ids]),
    values: old.values.map((before, c) => Float32Array.from([...before, ...(values[c] ?? [])]))
  };
}

/** A buffer's numbers; it may come as a view into a larger one. */
export function int32(data: DataView | null): Int32Array {
  return new Int32Array(bytesOf(data));
}

export function float32(data: DataView | null): Float32Array {
  return new Float32Array(bytesOf(data));
}

function bytesOf(data: DataView | null): ArrayBuffer {
  if (!data) {
    return new ArrayBuffer(0);
  }
  const { buffer, byteOffset, byteLength } = data;
  return buffer.slice(byteOffset, byteOffset + byteLength);
}
