/** For the tests alone: a session's state as the server tells it, and a server that answers what a test says. */
import type { Asks, Question } from './asks';
import type { Entry } from './sessions';
import type { Trans } from './text';
import reports from './reports.json';
import { readState } from './wire';
import type { Command, Listing, Parked, SessionState } from './wire';

/** English as it is, with the arguments in their places. */
export const trans: Trans = {
  __: (text, ...args: unknown[]) => fill(text, args),
  _n: (one, many, n, ...args: unknown[]) => fill(n === 1 ? one : many, [n, ...args])
};

function fill(text: string, args: readonly unknown[]): string {
  return args.reduce<string>((said, arg, i) => said.replaceAll(`%${i + 1}`, String(arg)), text);
}

/** Another language: what came out of a catalogue stands between «», arguments do not; so what did not is seen. */
export const foreign: Trans = {
  __: (text, ...args: unknown[]) => fill(`«${text}»`, args.map(outside)),
  _n: (one, many, n, ...args: unknown[]) =>
    fill(`«${n === 1 ? one : many}»`, [n, ...args].map(outside))
};

function outside(arg: unknown): string {
  return `»${String(arg)}«`;
}

export const MIB = 2 ** 20;

/** What a monitor answers of a session, as scripts/panel_schema.py had it said. */
export type Report = keyof typeof reports;

/** A state as JSON: two engines, nothing runs; or another report. */
export function stateJson(
  change: Record<string, unknown> = {},
  report: Report = 'idle'
): Record<string, unknown> {
  return { ...reports[report], ...change };
}

export function state(change: Record<string, unknown> = {}, report?: Report): SessionState {
  return readState(stateJson(change, report));
}

export function entry(change: Partial<Entry> = {}, name = 'demo'): Entry {
  return {
    listed: { name, state: 'live' },
    state: state(),
    heard: 100,
    trouble: null,
    samples: [],
    history: [],
    pending: new Map(),
    notice: null,
    ...change
  };
}

/** What is listed of a parked session. */
export const PARKED: Parked = {
  model: 'tiny',
  step: 4,
  version: 5,
  bytes: 12 * MIB,
  age: 90,
  lost: ['DATA']
};

/** A server that answers what a test puts here, and remembers what it was asked. */
export class Answers implements Asks {
  listing: Listing = {
    time: 1000,
    sessions: [{ name: 'demo', state: 'live' }],
    memory: null,
    gpus: [],
    gpusError: ''
  };
  states: Record<string, () => Promise<SessionState>> = { demo: () => Promise.resolve(state()) };
  commands: (() => Promise<Command>)[] = [];
  readonly asked: (readonly [string, Question])[] = [];
  readonly pressed: (readonly [string, string, Readonly<Record<string, unknown>>])[] = [];
  readonly killed: string[] = [];
  fails: Error | null = null;

  sessions(): Promise<Listing> {
    return this.fails ? Promise.reject(this.fails) : Promise.resolve(this.listing);
  }

  state(name: string, question: Question): Promise<SessionState> {
    this.asked.push([name, question]);
    return (this.states[name] ?? (() => Promise.reject(new Error('nobody'))))();
  }

  command(name: string, verb: string, args: Readonly<Record<string, unknown>>): Promise<Command> {
    this.pressed.push([name, verb, args]);
    return this.followed();
  }

  followed(): Promise<Command> {
    return (this.commands.shift() ?? (() => Promise.resolve(command('done'))))();
  }

  kill(name: string): Promise<string> {
    this.killed.push(name);
    return Promise.resolve('closed');
  }
}

export function command(state: Command['state'], error = ''): Command {
  return { id: 'c1', verb: 'offload', state, error, result: {}, seconds: 0 };
}

/** Lets what was promised happen. */
export async function settled(): Promise<void> {
  for (let i = 0; i < 20; i++) {
    await Promise.resolve();
  }
}
