/** Memory of the last ten minutes: whole with the widget's state, then moment by moment as messages come. */
import { OWNERS } from '../memory';

const KEPT_S = 600;

/** When it began (Unix seconds), seconds it took or null while it runs, its kind, its name. */
export type Mark = readonly [number, number | null, string, string];

export interface Lane {
  readonly name: string;
  /** MiB by owner, then by moment; null where the process was not there. */
  readonly owners: readonly (readonly (number | null)[])[];
  /** MiB the device has; null for a process. */
  readonly total: number | null;
  readonly detail: string;
}

/** As rlbench/notebook/dashboard/memory.py sends it. */
export interface Memory {
  /** Unix seconds. */
  readonly times: readonly number[];
  readonly marks: readonly Mark[];
  readonly lanes: readonly Lane[];
  /** The last moment at which a process had not told whose its memory is. */
  readonly untold: number | null;
}

interface Kept {
  owners: (number | null)[][];
  total: number | null;
  detail: string;
}

export class Ring {
  readonly times: number[] = [];
  readonly marks = new Map<string, Mark>();
  untold = -Infinity;

  /** Append what is newer; a process that was not there has no number. */
  merge(memory: Memory | null): void {
    if (!memory) {
      return;
    }
    this.untold = Math.max(this.untold, memory.untold ?? -Infinity);
    this.append(memory);
    for (const mark of memory.marks) {
      this.marks.set(`${mark[0]} ${mark[3]}`, mark); // one that ran has ended now
    }
    this.forget((this.times.at(-1) ?? 0) - KEPT_S);
  }

  /** The lanes from moment `first` on, without those of which nothing is known since. */
  since(first: number): Lane[] {
    return [...this.kept]
      .map(([name, lane]) => ({
        name,
        ...lane,
        owners: lane.owners.map(values => values.slice(first))
      }))
      .filter(lane => lane.owners[0]?.some(value => value !== null));
  }

  /** How many processes and devices have numbers now. */
  get lanes(): number {
    return this.since(this.times.length - 1).length;
  }

  private append(memory: Memory): void {
    const last = this.times.at(-1) ?? -Infinity;
    const before = this.times.length;
    for (const { name, total, detail } of memory.lanes) {
      const blank = (): (number | null)[] => Array.from({ length: before }, () => null);
      const owners = this.kept.get(name)?.owners ?? OWNERS.map(blank);
      this.kept.set(name, { owners, total, detail });
    }
    const given = new Map(memory.lanes.map(lane => [lane.name, lane.owners]));
    memory.times.forEach((time, i) => {
      if (time <= last) {
        return;
      }
      this.times.push(time);
      for (const [name, lane] of this.kept) {
        lane.owners.forEach((values, owner) => values.push(given.get(name)?.[owner]?.[i] ?? null));
      }
    });
  }

  private forget(until: number): void {
    const old = this.times.findIndex(time => time >= until);
    if (old > 0) {
      this.times.splice(0, old);
      for (const lane of this.kept.values()) {
        lane.owners.forEach(values => values.splice(0, old));
      }
    }
    for (const [name, [time, seconds]] of this.marks) {
      if (seconds !== null && time + seconds < until) {
        this.marks.delete(name);
      }
    }
  }

  private readonly kept = new Map<string, Kept>();
}

/** What a lane holds now; null where its process is gone. */
export function now(lane: Lane): number | null {
  const last = lane.owners.map(values => values.at(-1) ?? null);
  return last[0] === null ? null : last.reduce<number>((sum, value) => sum + (value ?? 0), 0);
}

/** The most a lane held. */
export function top(lane: Lane): number {
  const moments = lane.owners[0] ?? [];
  const sum = (i: number): number => lane.owners.reduce((all, values) => all + (values[i] ?? 0), 0);
  return Math.max(0, ...moments.map((_, i) => sum(i)));
}
