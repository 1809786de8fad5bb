/** What Python tells the rollout viewer and answers it (rlbench/notebook/rollouts/viewer.py). */
import type { ForkState } from './fork';
import type { Answered } from './questions';
import { int32 } from './rows';
import type { Message, Shift, Window } from './rows';
import type { Scale } from './tokens';
import type { Branch, Groups } from './tree';

/** What says which completions are shown, and in which order. */
export interface Choice {
  readonly sort: number;
  readonly filter: number;
  readonly search: string;
}

interface Order extends Choice {
  /** int32: the prompts, how many completions of each, and these. */
  readonly groups: DataView | null;
  readonly counts: DataView | null;
  readonly samples: DataView | null;
}

export interface State extends Choice {
  readonly facts: {
    readonly channels: readonly Scale[];
    /** Rows: so many groups are open at first that it is reached. */
    readonly openAtFirst: number;
    readonly openTokens: number;
    readonly rowsAtOnce: number;
  };
  readonly order: Order;
  readonly first: Window & { readonly ids: DataView | null; readonly values: DataView | null };
  /** What was continued from what. */
  readonly tree: readonly Branch[];
  /** What the last fork changed; `key`: its branch. Empty before there was one. */
  readonly grown: Partial<Shift> & { readonly key?: string };
  readonly fork: ForkState;
  readonly colour: number;
  readonly whitespace: boolean;
  readonly columns: boolean;
}

export type Answer = Answered &
  (
    | ({ readonly kind: 'order' } & Choice)
    | { readonly kind: 'prompt'; readonly p: number; readonly parts: readonly Message[] }
    | ({ readonly kind: 'rows' } & Window)
  );

/** The prompts with the completions of each, of buffers as `Order` has them. */
export function groupsOf(buffers: readonly (DataView | null)[]): Groups {
  const [groups, counts, samples] = buffers.map(int32);
  let at = 0;
  return [...(groups ?? [])].map((p, g) => {
    const own = samples?.subarray(at, (at += counts?.[g] ?? 0)) ?? [];
    return [p, [...own]];
  });
}
