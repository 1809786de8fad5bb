/**
 * The way of a press from the dashboard to the monitor: through the Jupyter server's handlers, which work while the
 * kernel is busy or dead, else through the kernel.
 */
import { followed, Trouble } from '../asks';
import type { Asks } from '../asks';
import type { Command } from '../wire';
import { digits } from '../format';

/** A control of the view (rlbench/monitor/schema.py), its texts in English. */
export interface Control {
  readonly key: string;
  readonly label: string;
  readonly name: string;
  readonly verb: string;
  readonly args: { readonly engine?: string; readonly parts?: readonly string[] };
  /** What a reader calls it while it is under way. */
  readonly command: string;
  readonly enabled: boolean;
  readonly title: string;
  readonly pressed: boolean | null;
}

/** A session's commands through the server, where its extension knows the session. */
export class Server {
  known = false;

  constructor(
    private readonly api: Asks | null,
    private readonly name: string
  ) {}

  async knows(): Promise<boolean> {
    if (!this.known && this.api) {
      try {
        await this.api.state(this.name, { history: 0 });
        this.known = true;
      } catch (error) {
        if (!(error instanceof Trouble)) {
          throw error;
        }
      }
    }
    return this.known;
  }

  /** What became of a press; null where the server did not take it, and the kernel is to be asked. */
  async press({ verb, args }: Control): Promise<Command | null> {
    if (!this.api || !(await this.knows())) {
      return null;
    }
    const wait = (ms: number): Promise<void> => new Promise(resolve => setTimeout(resolve, ms));
    try {
      return await followed(this.api, this.name, verb, args, wait);
    } catch (error) {
      if (error instanceof Trouble && error.kind === 'server') {
        this.known = false;
        return null;
      }
      throw error;
    }
  }
}

/** What became of a command, in words. */
export function answerOf(control: Control, { state, error, result, seconds }: Command): string {
  if (state === 'failed') {
    return `${control.command}: ${error}`;
  }
  const said = (control.args.parts ?? [])
    .filter(part => part in result)
    .map(part => `now ${String(result[part])}`);
  const { stopped, version, label } = result;
  if (Array.isArray(stopped)) {
    said.push(stopped.length ? stopped.join(', ') : 'nothing ran');
  }
  if (typeof version === 'number' && control.verb === 'sync') {
    said.push(`v${version}`);
  }
  if (typeof label === 'string' && label) {
    said.push(label);
  }
  return `${control.command}: ${[...said, 'done'].slice(0, 2).join(' · ')} · ${digits(seconds)} s`;
}
