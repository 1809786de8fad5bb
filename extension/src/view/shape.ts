/** What the panel shows, as plain values; view/session.ts makes them. */
import type { Timeline } from '../memory';
import type { SessionView } from '../schema';

/** Beside what a monitor says: its monitor ended; it is on disk; it was not heard yet. */
export type Condition = SessionView['condition'] | 'gone' | 'parked' | 'waiting';

export interface Phase {
  readonly text: string;
  readonly share: number | null;
  readonly left: string;
}

export interface Action {
  /** Stable; also the key of what is under way. */
  readonly key: string;
  readonly verb: string;
  readonly args: Readonly<Record<string, unknown>>;
  readonly label: string;
  /** What a reader calls it while it is under way and after it. */
  readonly command: string;
  /** What it will do, or why it cannot. */
  readonly title: string;
  readonly enabled: boolean;
  readonly pending: boolean;
}

export interface Chip extends Action {
  readonly part: string;
  readonly sign: string;
  readonly word: string;
  readonly resident: boolean;
}

export interface EngineView {
  readonly name: string;
  readonly kind: string;
  readonly memory: string;
  readonly note: string;
  readonly warns: boolean;
  readonly chips: readonly Chip[];
  /** Offloads or brings back all of it; null where it has no parts yet. */
  readonly toggle: Action | null;
  readonly timeline: Timeline;
}

export interface Curve {
  readonly label: string;
  readonly last: string;
  readonly values: readonly number[];
  /** What its drawing shows, in words. */
  readonly title: string;
}

export interface View {
  readonly name: string;
  readonly condition: Condition;
  /** One or two words for the condition. */
  readonly status: string;
  /** Seconds since the numbers came, where that is too long; null while they are new. */
  readonly staleFor: number | null;
  readonly stale: string;
  /** The monitor's or the server's excuse. */
  readonly trouble: string;
  readonly facts: string;
  readonly phase: Phase;
  readonly engines: readonly EngineView[];
  readonly curves: readonly Curve[];
  readonly error: string;
  readonly notice: string;
  readonly noticeFailed: boolean;
  readonly actions: readonly Action[];
}

export interface Now {
  /** Seconds of the clock that entries are told in. */
  readonly clock: number;
  /** Seconds between two looks. */
  readonly interval: number;
  /** Why the server does not answer; empty where it does. */
  readonly serverTrouble?: string;
  /** Whether engines lie in the memory of GPUs, and not in the host's. */
  readonly onGpu?: boolean;
}
