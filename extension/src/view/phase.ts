/** What runs in a session: how far it is, and how long it will take. */
import { digits, duration, short } from '../format';
import type { Call, Progress, SessionState } from '../wire';
import type { Phase, Trans } from './shape';

/** Below this share the time that is left is a guess nobody should see. */
const LEAST_SHARE = 0.05;

/** What runs, how far it is, and how long it will take. */
export function phaseOf(state: SessionState, trans: Trans): Phase {
  const verbs = [...new Set(state.verbs)].map(verb => short(verb));
  const call = latest(state.running);
  if (!call) {
    return { text: verbs.join(', '), share: null, left: '' };
  }
  const [said, share] = progressOf(call.progress, trans);
  const what = short(call.what);
  const verb = verbs[0];
  const named = verb && !what.includes(verb) ? `${verb}: ${what}` : what;
  const known = share !== null && share >= LEAST_SHARE && call.since > 0 && !state.paused;
  const left = known ? ((state.time - call.since) * (1 - share)) / share : null;
  return {
    text: [named, said].filter(text => text).join(' · '),
    share,
    left: left === null ? '' : trans.__('%1 left', duration(Math.max(0, left)))
  };
}

function latest(calls: readonly Call[]): Call | undefined {
  return [...calls].sort((a, b) => b.since - a.since)[0];
}

/** `3/64 samples · 512 tokens` or `backward 7/16`, and the share that is done. */
function progressOf(workers: readonly Progress[], trans: Trans): [string, number | null] {
  const ranks = workers.filter(worker => worker.done !== null && worker.total > 0);
  if (ranks.length) {
    // they go through the same number: what counts is the slowest
    const slowest = ranks.reduce((a, b) => (share(b) < share(a) ? b : a));
    const text = `${short(slowest.phase)} ${slowest.done ?? 0}/${slowest.total}`.trim();
    return [text, Math.min(1, share(slowest))];
  }
  const sum = (key: 'total' | 'finished' | 'tokens'): number =>
    workers.reduce((all, worker) => all + worker[key], 0);
  const total = sum('total');
  if (!total) {
    return ['', null];
  }
  const finished = sum('finished');
  const text = trans.__('%1/%2 samples · %3 tokens', finished, total, digits(sum('tokens')));
  return [text, Math.min(1, finished / total)];
}

function share(worker: Progress): number {
  return (worker.done ?? 0) / worker.total;
}
