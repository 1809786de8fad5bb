/** How a session is: who drives it, whether it answers, and how old its numbers are. */
import type { Entry, Sessions } from '../sessions';
import type { SessionState } from '../wire';
import type { Condition, Now, Trans } from './shape';
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
  if (listed.state === 'gone') {
    return 'gone';
  }
  if (!state) {
    return 'waiting';
  }
  if (state.driver && !state.driver.alive) {
    return 'lost';
  }
  if (state.paused) {
    return 'paused';
  }
  return state.running.length || state.verbs.length ? 'running' : 'idle';
}

/** Seconds since the session was heard, where that is too long ago; null while its numbers are new. */
export function age(entry: Entry, now: Now): number | null {
  if (!entry.state) {
    return null;
  }
  const seconds = Math.max(0, now.clock - entry.heard);
  return seconds > Math.max(STALE_S, STALE_INTERVALS * now.interval) ? seconds : null;
}

export function statusOf(condition: Condition, state: SessionState | null, trans: Trans): string {
  switch (condition) {
    case 'gone':
      return trans.__('session gone');
    case 'lost':
      return state?.driver?.mode === 'script' ? trans.__('script ended') : trans.__('kernel gone');
    case 'paused':
      return trans.__('paused');
    case 'running':
      return trans.__('running');
    case 'idle':
      return trans.__('idle');
    case 'waiting':
      return trans.__('waiting for its monitor');
  }
}
