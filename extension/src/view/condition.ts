/** How a session is: who drives it, whether it answers, and how old its numbers are. */
import type { Entry, Sessions } from '../sessions';
import { say } from '../text';
import type { Condition, Now } from './shape';
import type { Trans } from '../text';
import { troubleSaid } from './trouble';

/** Without an answer for so many intervals, and seconds, numbers are called stale. */
const STALE_INTERVALS = 3;
const STALE_S = 4;

/** The time and the machine by which sessions are shown; `interval`: seconds between two looks. */
export function nowOf(sessions: Sessions, interval: number, trans: Trans): Now {
  return {
    clock: sessions.clock(),
    interval,
    serverTrouble: troubleSaid(sessions.trouble, trans),
    onGpu: sessions.gpus.length > 0
  };
}

export function conditionOf({ listed, state }: Entry): Condition {
  if (listed.state !== 'live') {
    return listed.state;
  }
  return state?.view.condition ?? 'waiting';
}

/** Seconds since the session was heard, where that is too long ago; null while its numbers are new. */
export function age(entry: Entry, now: Now): number | null {
  if (!entry.state) {
    return null;
  }
  const seconds = Math.max(0, now.clock - entry.heard);
  return seconds > Math.max(STALE_S, STALE_INTERVALS * now.interval) ? seconds : null;
}

export function statusOf(entry: Entry, trans: Trans): string {
  switch (conditionOf(entry)) {
    case 'gone':
      return trans.__('session gone');
    case 'parked':
      return trans.__('parked');
    case 'waiting':
      return trans.__('waiting for its monitor');
    default:
      return say(entry.state?.view.status ?? '', trans);
  }
}
