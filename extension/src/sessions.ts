/**
 * The one copy of what the panel knows: the sessions of this machine, when each was last heard, and what was asked of
 * them. Whatever is shown derives from it (view.ts).
 */
import { Signal } from '@lumino/signaling';
import type { ISignal } from '@lumino/signaling';

import { followed, Trouble } from './asks';
import type { Asks, Question } from './asks';
import type { Gpu, Listed, Machine, Sample, SessionState, Step } from './wire';

/** Steps that a sparkline shows. */
export const STEPS = 60;
const ENDED_MS = 300;
/** So often is looked whether a session that was closed is gone. */
const END_LOOKS = 200;

/** What came of a press. */
export interface Notice {
  /** What a reader calls what was pressed. */
  readonly label: string;
  /** Why it failed; null where it was done. */
  readonly trouble: Error | null;
  /** When that was, in seconds of our clock. */
  readonly at: number;
}

/** What is known of one session. */
export interface Entry {
  readonly listed: Listed;
  /** Its last answer; null before the first. */
  readonly state: SessionState | null;
  /** When that came, in seconds of our clock. */
  readonly heard: number;
  /** Why the last question got no answer; null where it got one. */
  readonly trouble: Trouble | null;
  readonly samples: readonly Sample[];
  readonly history: readonly Step[];
  /** Commands under way: what was pressed, and what a reader calls it. */
  readonly pending: ReadonlyMap<string, string>;
  /** What came of the last one. */
  readonly notice: Notice | null;
}

export interface Options {
  /** Seconds of our clock. */
  clock?: () => number;
  /** Waits before a command is looked after again. */
  wait?: (milliseconds: number) => Promise<void>;
  /** Seconds of memory samples to keep. */
  history?: number;
}

/** A press: what is asked of a session. */
export interface Press {
  readonly name: string;
  readonly verb: string;
  readonly args?: Readonly<Record<string, unknown>>;
  /** Tells this press apart from others that are under way. */
  readonly key?: string;
  /** What a reader calls it. */
  readonly label?: string;
}

export class Sessions {
  /** Seconds of memory samples to keep. */
  history: number;
  /** True while somebody sees more than one line of it: only then samples and steps are asked for. */
  watched = false;

  constructor(
    private readonly api: Asks,
    options: Options = {}
  ) {
    this.clock = options.clock ?? (() => Date.now() / 1000);
    this.history = options.history ?? 180;
    this.wait = options.wait ?? (ms => new Promise(resolve => setTimeout(resolve, ms)));
  }

  /** Seconds of the clock that `Entry.heard` is told in. */
  readonly clock: () => number;

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get entries(): readonly Entry[] {
    return [...this._entries.values()];
  }

  get memory(): Machine | null {
    return this._memory;
  }

  /** The machine's GPUs; none where it has none. */
  get gpus(): readonly Gpu[] {
    return this._gpus;
  }

  /** Why the GPUs' memory is not known; empty where it is. */
  get gpusError(): string {
    return this._gpusError;
  }

  /** When the server last answered, in seconds of our clock; 0 before it did. */
  get heard(): number {
    return this._heard;
  }

  /** Why the server did not answer the last question; null where it did. */
  get trouble(): Error | null {
    return this._trouble;
  }

  /** The session that commands without a name mean; empty before one was looked at. */
  get selected(): string {
    return this._selected;
  }

  select(name: string): void {
    if (this._selected !== name) {
      this._selected = name;
      this._changed.emit();
    }
  }

  find(name: string): Entry | undefined {
    return this._entries.get(name);
  }

  /**
   * Look once: which sessions there are, then each of them by itself, so that one whose monitor is slow holds up no
   * other. Rejects where the server does not answer.
   */
  async refresh(): Promise<void> {
    try {
      const listing = await this.api.sessions();
      this._serverTime = listing.time;
      this._memory = listing.memory;
      this._gpus = listing.gpus;
      this._gpusError = listing.gpusError;
      this._heard = this.clock();
      this._trouble = null;
      this._list(listing.sessions);
    } catch (error) {
      this._trouble = errorOf(error);
      this._changed.emit();
      throw error;
    }
    this._changed.emit();
    const live = this.entries.filter(entry => entry.listed.state === 'live');
    const asked = live.map(entry => this._look(entry.listed.name));
    await Promise.race([Promise.all(asked), this.wait(1000)]);
  }

  /** Ask something of a session and follow it until it is over; what came of it stands in its entry. */
  async press(press: Press): Promise<void> {
    const { name, verb, key = verb, label = key } = press;
    await this._during(name, key, label, async () => {
      const command = await followed(this.api, name, verb, press.args ?? {}, this.wait);
      if (verb === 'close') {
        return this._ended(name);
      }
      if (command.state === 'failed') {
        throw new Error(command.error);
      }
    });
  }

  /** End a session by its processes, also where its monitor does not answer. */
  async kill(name: string, label = 'kill'): Promise<void> {
    await this._during(name, 'kill', label, () => this.api.kill(name));
  }

  private async _ended(name: string): Promise<void> {
    for (let looks = 0; this._entries.has(name); looks++) {
      if (looks === END_LOOKS) {
        throw new Trouble('lasting', 'it has not ended yet');
      }
      await this.wait(ENDED_MS);
      await this.refresh().catch(() => undefined);
    }
  }

  private async _during(
    name: string,
    key: string,
    label: string,
    act: () => Promise<unknown>
  ): Promise<void> {
    const before = this._entries.get(name);
    if (!before || before.pending.has(key)) {
      return;
    }
    this._set(name, { pending: new Map([...before.pending, [key, label]]), notice: null });
    let trouble: Error | null = null;
    try {
      await act();
    } catch (error) {
      trouble = errorOf(error);
    }
    const pending = new Map(this._entries.get(name)?.pending);
    pending.delete(key);
    this._set(name, { pending, notice: { label, trouble, at: this.clock() } });
  }

  private async _look(name: string): Promise<void> {
    const before = this._entries.get(name);
    if (!before || this._asking.has(name)) {
      return;
    }
    this._asking.add(name);
    try {
      const state = await this.api.state(name, this._question(before));
      const now = this._entries.get(name) ?? before;
      this._set(name, {
        state,
        heard: this.clock(),
        trouble: null,
        samples: this._samples(now.samples, state),
        history: state.history.length ? state.history : state.historyTotal ? now.history : []
      });
      if (state.history.length || !state.historyTotal) {
        this._rows.set(name, rowsOf(state));
      }
    } catch (error) {
      const trouble = error instanceof Trouble ? error : new Trouble('server', String(error));
      this._set(name, { trouble });
    } finally {
      this._asking.delete(name);
    }
  }

  /** The rows of its steps only where they are not those we have; samples since the last one. */
  private _question(entry: Entry): Question {
    if (!this.watched) {
      return { history: 0 };
    }
    const known = entry.state !== null && this._rows.get(entry.listed.name) === rowsOf(entry.state);
    const now = entry.state?.time ?? this._serverTime;
    const last = entry.samples.at(-1)?.time ?? 0;
    return { history: known ? 0 : STEPS, since: Math.max(last, now - this.history) };
  }

  private _samples(before: readonly Sample[], state: SessionState): readonly Sample[] {
    const last = before.at(-1)?.time ?? 0;
    const joined = [...before, ...state.samples.filter(sample => sample.time > last)];
    return joined.filter(sample => sample.time >= state.time - this.history);
  }

  private _list(sessions: readonly Listed[]): void {
    const before = this._entries;
    this._entries = new Map(
      sessions.map(listed => {
        const known = before.get(listed.name) ?? BLANK;
        const { pending, notice } = known; // nothing else of a parked session is of now
        const kept = listed.state === 'parked' ? { ...BLANK, pending, notice } : known;
        return [listed.name, { ...kept, listed }];
      })
    );
    for (const name of before.keys()) {
      if (!this._entries.has(name)) {
        this._rows.delete(name);
      }
    }
  }

  private _set(name: string, change: Partial<Entry>): void {
    const before = this._entries.get(name);
    if (before) {
      this._entries.set(name, { ...before, ...change });
      this._changed.emit();
    }
  }

  private readonly wait: (milliseconds: number) => Promise<void>;
  private readonly _changed = new Signal<this, void>(this);
  private readonly _asking = new Set<string>();
  /** The steps that each entry's rows are of. */
  private readonly _rows = new Map<string, string>();
  private _entries = new Map<string, Entry>();
  private _memory: Machine | null = null;
  private _serverTime = 0;
  private _heard = 0;
  private _gpus: readonly Gpu[] = [];
  private _gpusError = '';
  private _trouble: Error | null = null;
  private _selected = '';
}

const BLANK: Omit<Entry, 'listed'> = {
  state: null,
  heard: 0,
  trouble: null,
  samples: [],
  history: [],
  pending: new Map(),
  notice: null
};

function errorOf(error: unknown): Error {
  return error instanceof Error ? error : new Error(String(error));
}

/** Names what led to where the session stands: versions are never used twice. */
function rowsOf(state: SessionState): string {
  return [state.historyTotal, state.step, state.version, state.branch].join('/');
}
