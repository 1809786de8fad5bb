/** What the panel asks of the server, and how an answer can fail. */
import type { Command, Listing, SessionState } from './wire';

export type TroubleKind =
  | 'server'
  /** The server was started without our handlers. */
  | 'absent'
  | 'unknown'
  | 'gone'
  | 'silent'
  | 'refused'
  /** A monitor whose state is another one than this panel reads. */
  | 'old'
  /** A session that was closed and is still there. */
  | 'lasting';

/** A question that got no good answer; `kind` says who did not give it. */
export class Trouble extends Error {
  constructor(
    readonly kind: TroubleKind,
    message: string,
    /** The answer's HTTP status; 0 where there was none. */
    readonly status = 0
  ) {
    super(message);
  }
}

export interface Question {
  /** So many last step records. */
  history: number;
  /** Memory samples newer than this, Unix seconds; none where it is left out. */
  since?: number;
}

/** What the panel asks of the server; api.ts does it over HTTP. */
export interface Asks {
  sessions(): Promise<Listing>;
  state(name: string, question: Question): Promise<SessionState>;
  command(name: string, verb: string, args: Readonly<Record<string, unknown>>): Promise<Command>;
  followed(name: string, id: string): Promise<Command>;
  kill(name: string): Promise<string>;
}

const FOLLOW_MS = 300;

/** Ask something of a session and follow it until it has ended. */
export async function followed(
  api: Pick<Asks, 'command' | 'followed'>,
  name: string,
  verb: string,
  args: Readonly<Record<string, unknown>>,
  wait: (milliseconds: number) => Promise<void>
): Promise<Command> {
  let command = await api.command(name, verb, args);
  while (command.state === 'running' && verb !== 'close') {
    // of a session that closes nobody is left to ask
    await wait(FOLLOW_MS);
    command = await api.followed(name, command.id);
  }
  return command;
}
