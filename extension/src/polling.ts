/** When to look: often while the panel shows, seldom for the status bar alone, never while the page is hidden. */
import { Poll } from '@lumino/polling';

import { Trouble } from './asks';
import type { Sessions } from './sessions';

/** So many times more seldom where nobody sees the panel. */
const SELDOM = 5;
const BACKOFF_MAX_MS = 10_000;

export class Polling {
  constructor(
    private readonly sessions: Sessions,
    seconds = 1
  ) {
    this._seconds = seconds;
    this._poll = new Poll({
      name: 'rlbench:sessions',
      factory: () => this._look(),
      frequency: this._frequency(),
      standby: 'when-hidden',
      linger: 0
    });
    document.addEventListener('visibilitychange', this._seen);
  }

  /** Seconds between two looks at an open panel. */
  get seconds(): number {
    return this._seconds;
  }
  set seconds(seconds: number) {
    this._seconds = seconds;
    this._poll.frequency = this._frequency();
    void this.look(); // the next look may be a long interval away
  }

  /** Seconds between two looks now. */
  get interval(): number {
    return this._seconds * (this.sessions.watched ? 1 : SELDOM);
  }

  /** Whether somebody sees the panel. */
  watch(watched: boolean): void {
    if (this.sessions.watched !== watched) {
      this.sessions.watched = watched;
      this._poll.frequency = this._frequency();
      if (watched) {
        void this.look();
      }
    }
  }

  /** Look now. */
  look(): Promise<void> {
    return this._poll.refresh();
  }

  dispose(): void {
    document.removeEventListener('visibilitychange', this._seen);
    this._poll.dispose();
  }

  private async _look(): Promise<void> {
    try {
      await this.sessions.refresh();
    } catch (error) {
      if (error instanceof Trouble && error.kind === 'absent') {
        void this._poll.stop(); // nothing will change before somebody looks again
      }
      throw error;
    }
  }

  private _frequency(): { interval: number; backoff: boolean; max: number } {
    const interval = 1000 * this.interval;
    return { interval, backoff: true, max: Math.max(BACKOFF_MAX_MS, interval) };
  }

  private readonly _seen = (): void => {
    if (document.visibilityState === 'visible') {
      void this.look();
    }
  };

  private readonly _poll: Poll<void>;
  private _seconds: number;
}
