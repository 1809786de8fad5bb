/** What can be done with a session: what its monitor offers, and what the panel itself does. */
import type { Entry } from '../sessions';
import type { Control } from '../schema';
import { say } from '../text';
import type { Trans } from '../text';
import type { Action } from './shape';

/** Why the monitor's controls cannot be pressed; empty where they can. */
function muteOf({ listed, state }: Entry, trans: Trans): string {
  return listed.state === 'gone' || !state ? trans.__('its monitor does not answer') : '';
}

/** A control as the monitor offers it; one that drives the session waits until the monitor answers again. */
export function actionOf(control: Control, entry: Entry, trans: Trans): Action {
  const silent = control.drives && control.enabled && entry.trouble !== null;
  const mute = muteOf(entry, trans) || (silent ? trans.__('its monitor does not answer') : '');
  const pending = entry.pending.has(control.key);
  return {
    key: control.key,
    verb: control.verb,
    args: control.args,
    label: say(control.label, trans),
    command: say(control.command, trans),
    title: mute || say(control.title, trans),
    enabled: control.enabled && !mute && !pending,
    pending
  };
}

export function actionsOf(entry: Entry, trans: Trans): readonly Action[] {
  const gone = entry.listed.state === 'gone' ? trans.__('the session is gone') : '';
  const own = (verb: string, label: string, title: string, whyNot = ''): Action => {
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
  if (entry.listed.state === 'parked') {
    return [
      own('attach', trans.__('attach'), trans.__('Insert the cell that brings it back')),
      own('kill', trans.__('forget'), trans.__('Remove it from disk; asks first'))
    ];
  }
  return [
    ...(entry.state?.view.controls ?? []).map(control => actionOf(control, entry, trans)),
    own(
      'attach',
      trans.__('attach'),
      trans.__('Insert the cell that attaches a notebook to it'),
      gone
    ),
    own(
      'park',
      trans.__('park'),
      trans.__('Write all of it to disk and free its memory; asks first'),
      muteOf(entry, trans)
    ),
    own(
      'close',
      trans.__('close'),
      trans.__('End the session with its weights and snapshots; asks first'),
      muteOf(entry, trans)
    ),
    own(
      'kill',
      trans.__('kill'),
      trans.__('End its processes, also where nothing answers; asks first')
    )
  ];
}
