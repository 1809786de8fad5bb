/** What a block of the panel says about a session: a pure function of an entry and the time. */
import { digits, duration, gib, short } from '../format';
import type { SessionView } from '../schema';
import type { Entry } from '../sessions';
import { say, sayAll } from '../text';
import { actionsOf } from './actions';
import { age, conditionOf, statusOf } from './condition';
import { enginesOf } from './engines';
import type { Condition, Curve, Now, Phase, View } from './shape';
import type { Trans } from '../text';
import type { Parked } from '../wire';
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
    status: statusOf(entry, trans),
    staleFor,
    stale: staleFor === null ? '' : trans.__('stale %1', duration(staleFor)),
    trouble: short(troubleOf(entry, now, trans), 200),
    facts: listed.parked
      ? parkedFacts(listed.parked, trans)
      : sayAll(state?.view.facts ?? [], trans),
    phase: phaseOf(state?.view.phase, trans),
    engines: state ? enginesOf(entry, state, now.onGpu ?? false, trans) : [],
    curves: curvesOf(entry, trans),
    error: errorOf(state?.view.failure),
    notice,
    noticeFailed: !entry.pending.size && Boolean(entry.notice?.trouble),
    actions: actionsOf(entry, trans)
  };
}

/** Sessions that nobody drives come first, parked ones last, else all by name. */
export function ordered(entries: readonly Entry[]): readonly Entry[] {
  const places = new Map<Condition, number>([
    ['lost', 0],
    ['gone', 0],
    ['parked', 2]
  ]);
  const lost = (entry: Entry): number => places.get(conditionOf(entry)) ?? 1;
  return [...entries].sort((a, b) => lost(a) - lost(b) || (a.listed.name < b.listed.name ? -1 : 1));
}

/** Where a parked session stood, what it takes and for how long it has. */
function parkedFacts(parked: Parked, trans: Trans): string {
  const { model, step, version, bytes, age: since, lost } = parked;
  const size = trans.__('%1 on disk', gib(bytes));
  const said = [
    model,
    trans.__('step %1', step),
    `v${version}`,
    size,
    trans.__('parked %1 ago', duration(since))
  ];
  return [...said, ...(lost.length ? [trans.__('not kept: %1', lost.join('; '))] : [])].join(' · ');
}

function phaseOf(phase: SessionView['phase'] | undefined, trans: Trans): Phase {
  const { what = [], fraction = null, left = '' } = phase ?? {};
  return { text: sayAll(what, trans), share: fraction, left: say(left, trans) };
}

function errorOf(failure: SessionView['failure'] | undefined): string {
  if (!failure) {
    return '';
  }
  const at = failure.time ? new Date(failure.time * 1000).toLocaleTimeString() : '';
  return `${at} ${failure.text}`.trim();
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
