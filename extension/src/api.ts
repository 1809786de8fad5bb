/**
 * The one client of the server's handlers below `rlbench/api/` (rlbench/labapp): the panel asks through JupyterLab's
 * connection (lab.ts), a notebook's drawing through the page's own (widgets/connection.ts).
 */
import { Trouble } from './asks';
import type { Asks, Question, TroubleKind } from './asks';
import { readCommand, readListing, readState } from './wire';
import type { Command, Listing, SessionState } from './wire';

/** How long an answer may take; the handlers themselves give up on a monitor after 5 s. */
const LIMIT_MS = 8000;
/** Killing waits for processes to end. */
const KILL_LIMIT_MS = 120_000;

/** How this page reaches its Jupyter server. */
export interface Connection {
  /** Ends in a slash. */
  readonly baseUrl: string;
  request(url: string, init: RequestInit): Promise<Response>;
}

export class Api implements Asks {
  constructor(private readonly connection: Connection) {}

  async sessions(): Promise<Listing> {
    try {
      return readListing(await this.ask(['sessions']));
    } catch (error) {
      if (error instanceof Trouble && error.status === 404) {
        throw new Trouble('absent', 'it was started without the extension rlbench.labapp', 404);
      }
      throw error;
    }
  }

  async state(name: string, question: Question): Promise<SessionState> {
    const query: Record<string, string> = { history: String(question.history) };
    if (question.since !== undefined) {
      query['since'] = String(question.since);
    }
    const value = await this.ask(['sessions', name, 'look'], query);
    const why = told(value, 'error');
    if (why) {
      throw new Trouble(kindOf(told(value, 'state')), why);
    }
    return readState(value);
  }

  async command(
    name: string,
    verb: string,
    args: Readonly<Record<string, unknown>>
  ): Promise<Command> {
    return readCommand(await this.ask(['sessions', name, 'command'], {}, { verb, args }));
  }

  async followed(name: string, id: string): Promise<Command> {
    return readCommand(await this.ask(['sessions', name, 'command', id]));
  }

  async kill(name: string): Promise<string> {
    const said = await this.ask(['sessions', name, 'kill'], {}, {}, KILL_LIMIT_MS);
    return told(said, 'message');
  }

  private async ask(
    path: readonly string[],
    query: Record<string, string> = {},
    body?: unknown,
    limit = LIMIT_MS
  ): Promise<unknown> {
    const { baseUrl } = this.connection;
    const asked = String(new URLSearchParams(query));
    const place = ['rlbench', 'api', ...path.map(encodeURIComponent)].join('/');
    const url = `${baseUrl}${place}${asked && `?${asked}`}`;
    const init: RequestInit = { signal: AbortSignal.timeout(limit) };
    if (body !== undefined) {
      init.method = 'POST';
      init.body = JSON.stringify(body);
    }
    let response: Response;
    let said: string;
    try {
      response = await this.connection.request(url, init);
      said = await response.text();
    } catch (error) {
      throw new Trouble('server', error instanceof Error ? error.message : String(error));
    }
    const value = parsed(said);
    if (value === undefined) {
      const why = `HTTP ${response.status} ${response.statusText}`.trim();
      throw new Trouble('server', why, response.status);
    }
    if (!response.ok) {
      const why = told(value, 'error') || told(value, 'message') || response.statusText;
      throw new Trouble(kindOf(told(value, 'state')), why, response.status);
    }
    return value;
  }
}

function parsed(said: string): unknown {
  try {
    return JSON.parse(said);
  } catch {
    return undefined;
  }
}

function kindOf(state: string): TroubleKind {
  return state === 'unknown' || state === 'gone' || state === 'silent' ? state : 'refused';
}

function told(value: unknown, key: string): string {
  const found =
    typeof value === 'object' && value !== null ? (value as Record<string, unknown>)[key] : '';
  return typeof found === 'string' ? found : '';
}
