/** The line of the status bar. */
import { duration, percent } from '../format';
import type { Entry } from '../sessions';
import { age, conditionOf, statusOf } from './condition';
import { joined, saidOf, sessionHeld } from './held';
import { phaseOf } from './phase';
import type { Now, Trans } from './shape';

/** What one line can say of all sessions: the busiest phase and the memory of all. */
export function summaryOf(entries: readonly Entry[], now: Now, trans: Trans): string {
  if (!entries.length) {
    return '';
  }
  const live = entries.filter(entry => entry.listed.state === 'live');
  const known = live.flatMap(entry => (entry.state ? [{ entry, state: entry.state }] : []));
  const memory = joined(live.flatMap(entry => sessionHeld(entry, now.onGpu ?? false) ?? []));
  const busy = known.find(({ state }) => state.running.length || state.verbs.length) ?? known[0];
  const said = [];
  if (entries.length > 1) {
    said.push(trans._n('%1 session', '%1 sessions', entries.length));
  }
  if (memory) {
    said.push(saidOf(memory));
  }
  if (busy) {
    const condition = conditionOf(busy.entry);
    const phase = phaseOf(busy.state, trans);
    const first = phase.text.split(' · ')[0] ?? '';
    const done = phase.share === null ? '' : percent(phase.share);
    said.push(
      condition === 'running' || condition === 'paused'
        ? [condition === 'paused' ? statusOf(condition, busy.state, trans) : first, done]
            .filter(text => text)
            .join(' · ')
        : statusOf(condition, busy.state, trans)
    );
  } else if (entries[0]) {
    said.push(statusOf(conditionOf(entries[0]), null, trans));
  }
  const ages = live.flatMap(entry => age(entry, now) ?? []);
  if (ages.length) {
    said.push(trans.__('stale %1', duration(Math.max(...ages))));
  }
  return said.join(' · ');
}
