/** What can be done with a session: each says before it is pressed what it will do, or why it cannot be done. */
import { short } from '../format';
import type { Entry } from '../sessions';
import type { SessionState } from '../wire';
import type { Action, Trans } from './shape';

/** Why nothing that drives the session can be asked now; empty where it can. */
export function heldBy(
  { listed, trouble }: Entry,
  state: SessionState | null,
  trans: Trans
): string {
  if (listed.state === 'gone' || !state) {
    return trans.__('its monitor does not answer');
  }
  const names = new Set(
    [...state.verbs, ...state.running.map(call => call.what)].map(n => short(n))
  );
  if (names.size) {
    return trans.__('%1 runs: stop it first, or wait for it', [...names].join(', '));
  }
  if (trouble) {
    return trans.__('its monitor does not answer');
  }
  return state.engines.every(engine => engine.ready) ? '' : trans.__('the engines are being built');
}

export function actionsOf(entry: Entry, trans: Trans): readonly Action[] {
  const { state } = entry;
  const mute =
    entry.listed.state === 'gone' || !state ? trans.__('its monitor does not answer') : '';
  const held = heldBy(entry, state, trans);
  const running = state?.running.map(call => short(call.what)).join(', ') ?? '';
  const idle = running ? '' : trans.__('nothing runs that could be stopped');
  const action = (verb: string, label: string, title: string, whyNot = ''): Action => {
    const pending = entry.pending.has(verb);
    return {
      key: verb,
      verb,
      args: {},
      label,
      command: label,
      title: whyNot || title,
      enabled: !whyNot && !pending,
      pending
    };
  };
  return [
    action(
      'stop',
      trans.__('stop'),
      trans.__('Stop %1: what is finished is kept', running),
      mute || idle
    ),
    state?.paused
      ? action(
          'resume',
          trans.__('resume'),
          trans.__('Let generation go on with the same tokens'),
          mute
        )
      : action(
          'pause',
          trans.__('pause'),
          trans.__('Hold generation after its current step; nothing is lost'),
          mute
        ),
    action(
      'sync',
      trans.__('sync'),
      trans.__('Send the weights (v%1) to the replicas, verified', state?.version ?? 0),
      held
    ),
    action(
      'snapshot',
      trans.__('snapshot'),
      trans.__('Keep weights, optimizer, step and history in host memory'),
      held
    ),
    action(
      'attach',
      trans.__('attach'),
      trans.__('Insert the cell that attaches a notebook to it'),
      entry.listed.state === 'gone' ? trans.__('the session is gone') : ''
    ),
    action(
      'close',
      trans.__('close'),
      trans.__('End the session with its weights and snapshots; asks first'),
      mute
    ),
    action(
      'kill',
      trans.__('kill'),
      trans.__('End its processes, also where nothing answers; asks first')
    )
  ];
}
