/** What a drawing has asked Python and waits for. */
import { tell } from './model';
import type { Model } from './model';

/** Milliseconds. */
const BUSY_AFTER = 1000;

export interface Answered {
  readonly id: string;
  readonly error?: string;
}

export class Questions<State> {
  constructor(
    private readonly model: Model<State>,
    /** Begins the names of this drawing's questions. */
    private readonly name: string,
    private readonly notify: (text: string) => void
  ) {}

  /** Ask Python; `keys`: of the items that wait for the answer. The question's name, empty where there is no kernel. */
  ask(content: Readonly<Record<string, unknown>>, keys: readonly string[] = []): string {
    const id = `${this.name}.${this.serial++}`;
    if (!tell(this.model, { id, ...content })) {
      this.notify('no kernel: only what was sent before can be shown');
      return '';
    }
    this.asked.set(id, keys);
    keys.forEach(key => this.waiting.add(key));
    setTimeout(() => {
      if (this.asked.has(id)) {
        this.notify('waiting for the kernel (busy)');
      }
    }, BUSY_AFTER);
    return id;
  }

  /** Whether an answer is to one of these questions, and has what was asked for. */
  takes(answer: Answered): boolean {
    const keys = this.asked.get(answer.id);
    if (!keys) {
      return false; // another view's, or of before the rollouts grew
    }
    keys.forEach(key => this.waiting.delete(key));
    this.asked.delete(answer.id);
    if (!this.asked.size) {
      this.notify(answer.error ?? '');
    }
    return !answer.error;
  }

  /** Whether an item's answer is on its way. */
  waits(key: string): boolean {
    return this.waiting.has(key);
  }

  /** Take no answer to what was asked so far: numbers in it would be others. */
  forget(): void {
    this.asked.clear();
    this.waiting.clear();
    this.notify('');
  }

  private readonly asked = new Map<string, readonly string[]>();
  private readonly waiting = new Set<string>();
  private serial = 0;
}
