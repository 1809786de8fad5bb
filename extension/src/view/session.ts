/** What a block of the panel says about a session: a pure function of an entry and the time. */
import { digits, duration, short } from '../format';
import type { Entry } from '../sessions';
import type { SessionState } from '../wire';
import { actionsOf } from './actions';
import { age, conditionOf, statusOf } from './condition';
import { enginesOf } from './engines';
import { phaseOf } from './phase';
import type { Curve, Now, Trans, View } from './shape';
import { troubleSaid } from './trouble';

/** So long it is said that something was done, in seconds; what failed is said until the next press. */
const DONE_S = 20;

/** One session as it is shown. */
export function viewOf(entry: Entry, now: Now, trans: Trans): View {
  const { state, listed } = entry;
  const staleFor = age(entry, now);
  const condition = conditionOf(entry);
  const notice = noticeOf(entry, now, trans);
  return {
    name: listed.name,
    condition,
    status: statusOf(condition, state, trans),
    staleFor,
    stale: staleFor === null ? '' : trans.__('stale %1', duration(staleFor)),
    trouble: short(troubleOf(entry, now, trans), 200),
    facts: state ? factsOf(state, trans) : '',
    phase: state ? phaseOf(state, trans) : { text: '', share: null, left: '' },
    engines: state ? enginesOf(entry, state, now.onGpu ?? false, trans) : [],
    curves: curvesOf(entry, trans),
    error: errorOf(state),
    notice,
    noticeFailed: !entry.pending.size && Boolean(entry.notice?.trouble),
    actions: actionsOf(entry, trans)
  };
}

/** Sessions that nobody drives come first, then all by name. */
export function ordered(entries: readonly Entry[]): readonly Entry[] {
  const lost = (entry: Entry): number => (['lost', 'gone'].includes(conditionOf(entry)) ? 0 : 1);
  return [...entries].sort((a, b) => lost(a) - lost(b) || (a.listed.name < b.listed.name ? -1 : 1));
}

function factsOf(state: SessionState, trans: Trans): string {
  const facts = [short(state.model), trans.__('step %1', state.step), `v${state.version}`];
  if (state.branch && state.branch !== 'main') {
    facts.push(short(state.branch));
  }
  if (state.endsIn !== null && conditionOfDriver(state)) {
    facts.push(trans.__('ends in %1', duration(state.endsIn)));
  }
  return facts.filter(fact => fact).join(' · ');
}

function conditionOfDriver(state: SessionState): boolean {
  return state.driver !== null && !state.driver.alive;
}

function errorOf(state: SessionState | null): string {
  if (!state?.failure) {
    return '';
  }
  const { time, what, kind, message } = state.failure;
  const at = time ? new Date(time * 1000).toLocaleTimeString() : '';
  return short(`${at} ${what}: ${kind}: ${message}`.trim(), 300);
}

function troubleOf(entry: Entry, now: Now, trans: Trans): string {
  if (now.serverTrouble) {
    return now.serverTrouble;
  }
  return entry.listed.state === 'gone'
    ? trans.__('its monitor ended: kill removes what it left')
    : troubleSaid(entry.trouble, trans);
}

function noticeOf(entry: Entry, now: Now, trans: Trans): string {
  const pending = [...entry.pending.values()];
  if (pending.length) {
    return pending.map(label => `${short(label)} …`).join(', ');
  }
  if (!entry.notice) {
    return '';
  }
  const { label, trouble, at } = entry.notice;
  if (trouble) {
    return short(trans.__('%1: %2', label, troubleSaid(trouble, trans)), 300);
  }
  return now.clock - at < DONE_S ? trans.__('%1: done', short(label)) : '';
}

function curvesOf(entry: Entry, trans: Trans): readonly Curve[] {
  const curve = (label: string, key: 'reward' | 'length', unit: string): Curve => {
    const values = entry.history.flatMap(step => step[key] ?? []);
    const last = values.at(-1);
    const said = last === undefined ? '–' : `${digits(last)}${unit}`;
    return { label, last: said, values, title: titleOf(label, said, values, unit, trans) };
  };
  if (!entry.history.length) {
    return [];
  }
  return [
    curve(trans.__('reward'), 'reward', ''),
    curve(trans.__('length'), 'length', ` ${trans.__('tok')}`)
  ];
}

function titleOf(
  label: string,
  last: string,
  values: readonly number[],
  unit: string,
  trans: Trans
): string {
  if (values.length < 2) {
    return `${label} ${last}`;
  }
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const range = [digits(low), `${digits(high)}${unit}`];
  return trans.__('%1 over the last %2 steps: %3 to %4', label, values.length, ...range);
}
