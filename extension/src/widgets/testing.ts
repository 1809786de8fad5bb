/** For the tests alone: what Python sends of prompts and completions, and a kernel that answers what a test says. */
import type { Model } from './model';
import type { Head, Sent } from './rows';
import type { Scale } from './tokens';
import type { Branch } from './tree';

/** Text that would be markup, were it ever read as that. */
export const HOSTILE =
  '</script><img src=x onerror="window.pwned=1"><script>window.pwned=1</script>';

const RANGE = { unit: '', about: '', low: -1, high: 1, bound: 1, saturated: false };
export const ADVANTAGE: Scale = { ...RANGE, name: 'advantage', label: 'adv', kind: 'signed' };
export const CLIPPED: Scale = { ...RANGE, name: 'clipped', label: 'clipped', kind: 'flag' };

/** A prompt's line, of two completions that were not scored. */
export function head(p: number, change: Partial<Head> = {}): Head {
  return {
    p,
    text: `say ${p}`,
    more: false,
    n: 2,
    continuations: 0,
    lengths: [2, 2],
    images: [],
    ...change
  };
}

/** A completion that was not scored; every prompt has two. */
export function sent(i: number, change: Partial<Sent> = {}): Sent {
  const pieces = change.pieces ?? [`word${i}`, ' end'];
  const said = { born: 0, from: 0, n: pieces.length, pieces, kinds: 't'.repeat(pieces.length) };
  const place = { i, k: i % 2, p: Math.floor(i / 2) };
  return {
    ...place,
    ...said,
    images: [],
    small: false,
    reward: null,
    right: false,
    finish: 'stop',
    ...change
  };
}

/** One continuation of the first completion, which was not scored. */
export function branch(change: Partial<Branch> = {}): Branch {
  const place = { key: '0.1', p: 0, of: 0, kept: 1, text: '', under: '' };
  return { ...place, samples: [2], said: 'not scored', ...change };
}

export function integers(...values: readonly number[]): DataView {
  return new DataView(Int32Array.from(values).buffer);
}

export function floats(...values: readonly number[]): DataView {
  return new DataView(Float32Array.from(values).buffer);
}

type Handler = Parameters<Model<object>['on']>[1];

/** The page's end of a widget: `asked` is what Python was sent. */
export class Kernel<State extends object> implements Model<State> {
  readonly asked: Record<string, unknown>[] = [];
  gone = false;

  constructor(private state: State) {}

  get<Name extends keyof State>(name: Name): State[Name] {
    return this.state[name];
  }

  set(change: Partial<State>): void {
    this.state = { ...this.state, ...change };
    Object.keys(change).forEach(name => this.tell(`change:${name}`));
  }

  on(event: string, handler: Handler): void {
    this.handlers.push([event, handler]);
  }

  off(event: string, handler: Handler): void {
    this.handlers = this.handlers.filter(([name, one]) => name !== event || one !== handler);
  }

  send(content: unknown): void {
    if (this.gone) {
      throw new Error('the comm is closed');
    }
    this.asked.push(content as Record<string, unknown>);
  }

  /** Answer the last question. */
  answer(content: object, ...buffers: readonly DataView[]): void {
    this.tell('msg:custom', { ...this.asked.at(-1), ...content }, buffers);
  }

  private tell(event: string, content?: unknown, buffers: readonly DataView[] = []): void {
    this.handlers.forEach(([name, handler]) => name === event && handler(content, buffers));
  }

  private handlers: (readonly [string, Handler])[] = [];
}
