/** The line of the status bar. */
import { duration, percent } from '../format';
import type { Entry } from '../sessions';
import { say } from '../text';
import { age, statusOf } from './condition';
import { joined, saidOf, sessionHeld } from './held';
import type { Now } from './shape';
import type { Trans } from '../text';

/** What one line can say of all sessions: the busiest phase and the memory of all. */
export function summaryOf(all: readonly Entry[], now: Now, trans: Trans): string {
  const entries = all.filter(entry => entry.listed.state !== 'parked');
  if (!entries.length) {
    return '';
  }
  const live = entries.filter(entry => entry.listed.state === 'live');
  const known = live.flatMap(entry => (entry.state ? [{ entry, state: entry.state }] : []));
  const memory = joined(live.flatMap(entry => sessionHeld(entry, now.onGpu ?? false) ?? []));
  const busy = known.find(({ state }) => state.view.phase.busy) ?? known[0];
  const said = [];
  if (entries.length > 1) {
    said.push(trans._n('%1 session', '%1 sessions', entries.length));
  }
  if (memory) {
    said.push(saidOf(memory));
  }
  if (busy) {
    const { phase, condition } = busy.state.view;
    const [first = ''] = condition === 'running' ? phase.what : [];
    const works = condition === 'running' || condition === 'paused';
    said.push(say(first, trans) || statusOf(busy.entry, trans));
    if (works && phase.fraction !== null) {
      said.push(percent(phase.fraction));
    }
  } else if (entries[0]) {
    said.push(statusOf(entries[0], trans));
  }
  const ages = live.flatMap(entry => age(entry, now) ?? []);
  if (ages.length) {
    said.push(trans.__('stale %1', duration(Math.max(...ages))));
  }
  return said.join(' · ');
}
