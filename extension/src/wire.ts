/**
 * What the server's handlers answer (docs/monitor-api.md), read defensively: a monitor may be older, and what is in a
 * name or a message was written by somebody else. A key that is missing or of another type leaves its default.
 */
import { Trouble } from './asks';
import type { SessionView } from './schema';

export interface Listed {
  readonly name: string;
  /** `gone`: only the session's file is left; `parked`: it is on disk, nothing of it runs. */
  readonly state: 'live' | 'gone' | 'parked';
  /** Of a parked one. */
  readonly parked?: Parked;
}

/** A parked session: where it stood, what it takes on disk, since when it is there. */
export interface Parked {
  readonly model: string;
  readonly step: number;
  readonly version: number;
  readonly bytes: number;
  /** Seconds since it was parked. */
  readonly age: number;
  /** What could not be kept. */
  readonly lost: readonly string[];
}

export interface Machine {
  readonly used: number;
  readonly total: number;
}

export interface Gpu extends Machine {
  /** What its maker calls it. */
  readonly name: string;
}

export interface Listing {
  /** The server's clock, Unix seconds. */
  readonly time: number;
  readonly sessions: readonly Listed[];
  readonly memory: Machine | null;
  readonly gpus: readonly Gpu[];
  /** Why the GPUs' memory is not known; empty where it is, or where there are none. */
  readonly gpusError: string;
}

/** What an engine's memory is told by; what it says is the view's. */
export interface Engine {
  readonly name: string;
  /** Bytes of its parts in its device's memory; empty while nobody has told. */
  readonly bytes: Readonly<Record<string, number>>;
  readonly workers: readonly Worker[];
}

export interface Worker {
  readonly name: string;
  readonly resident: number | null;
}

export interface Step {
  readonly step: number;
  readonly reward: number | null;
  readonly length: number | null;
}

export interface Sample {
  readonly time: number;
  readonly resident: Readonly<Record<string, number>>;
  readonly owners: Readonly<Record<string, Readonly<Record<string, number>>>>;
}

export interface SessionState {
  /** The monitor's clock, Unix seconds. */
  readonly time: number;
  readonly step: number;
  readonly version: number;
  readonly branch: string;
  readonly engines: readonly Engine[];
  readonly historyTotal: number;
  readonly history: readonly Step[];
  readonly samples: readonly Sample[];
  /** What a reader is told, as the monitor says it. */
  readonly view: SessionView;
}

export interface Command {
  readonly id: string;
  readonly verb: string;
  readonly state: 'running' | 'done' | 'failed';
  readonly error: string;
  readonly result: Readonly<Record<string, unknown>>;
  /** What it took; 0 while it runs. */
  readonly seconds: number;
}

type Json = Readonly<Record<string, unknown>>;

export function readListing(value: unknown): Listing {
  const found = object(value);
  const time = number(found['time']) ?? 0;
  return {
    time,
    sessions: list(found['sessions']).map(row => listed(row, time)),
    memory: machine(found['memory']),
    gpus: list(found['gpus']).map(gpu => ({
      ...(machine(gpu) ?? { used: 0, total: 0 }),
      name: text(gpu['name'])
    })),
    gpusError: text(found['gpus_error'])
  };
}

function listed(row: Json, now: number): Listed {
  const name = text(row['name']);
  if (row['state'] !== 'parked') {
    return { name, state: row['state'] === 'live' ? 'live' : 'gone' };
  }
  const parked = {
    model: text(row['model']),
    step: number(row['step']) ?? 0,
    version: number(row['version']) ?? 0,
    bytes: number(row['bytes']) ?? 0,
    age: Math.max(0, now - (number(row['time']) ?? now)),
    lost: Array.isArray(row['lost']) ? row['lost'].map(text) : []
  };
  return { name, state: 'parked', parked };
}

/** Rejects the answer of a monitor that serves no view. */
export function readState(value: unknown): SessionState {
  const found = object(value);
  if (!isObject(found['view'])) {
    throw new Trouble('old', 'the monitor serves no view');
  }
  return {
    time: number(found['time']) ?? 0,
    step: number(found['step']) ?? 0,
    version: number(found['version']) ?? 0,
    branch: text(found['branch']),
    engines: list(found['engines']).map(engine),
    historyTotal: number(found['history_total']) ?? 0,
    history: list(found['history']).map(step),
    samples: list(found['samples']).map(sample),
    view: found['view'] as unknown as SessionView // typed by what the monitor makes it of
  };
}

export function readCommand(value: unknown): Command {
  const found = object(object(value)['command']);
  const error = object(found['error']);
  const state = found['state'];
  return {
    id: text(found['id']),
    verb: text(found['verb']),
    state: state === 'running' || state === 'failed' ? state : 'done',
    error: [text(error['kind']), text(error['message'])].filter(said => said).join(': '),
    result: object(found['result']),
    seconds: Math.max(0, (number(found['ended']) ?? 0) - (number(found['started']) ?? 0))
  };
}

function engine(row: Json): Engine {
  return {
    name: text(row['name']),
    bytes: numbers(row['bytes']),
    workers: list(row['workers']).map(worker => ({
      name: text(worker['name']),
      resident: number(worker['resident'])
    }))
  };
}

function step(row: Json, index: number): Step {
  return {
    step: number(row['step']) ?? index + 1,
    reward: number(row['reward']),
    length: number(row['length'])
  };
}

function sample(row: Json): Sample {
  const owners = Object.entries(object(row['owners']));
  return {
    time: number(row['time']) ?? 0,
    resident: numbers(row['resident']),
    owners: Object.fromEntries(owners.map(([worker, held]) => [worker, numbers(held)]))
  };
}

function machine(value: unknown): Machine | null {
  const { used, total } = numbers(value);
  return used !== undefined && total ? { used, total } : null;
}

function isObject(value: unknown): value is Json {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function object(value: unknown): Json {
  return isObject(value) ? value : {};
}

function list(value: unknown): readonly Json[] {
  return Array.isArray(value) ? value.map(object) : [];
}

function text(value: unknown): string {
  return typeof value === 'string' ? value : typeof value === 'number' ? String(value) : '';
}

function number(value: unknown): number | null {
  return typeof value === 'number' && Number.isFinite(value) ? value : null;
}

function numbers(value: unknown): Record<string, number> {
  const found = Object.entries(object(value));
  return Object.fromEntries(
    found.filter((pair): pair is [string, number] => number(pair[1]) !== null)
  );
}
