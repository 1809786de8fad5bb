/** The panel's commands, for its buttons, the palette and shortcuts; without a name they mean the selected session. */
import { Dialog, InputDialog, showDialog } from '@jupyterlab/apputils';
import type { CommandRegistry } from '@lumino/commands';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

import { icons, panelIcon } from './icons';
import type { Press, Sessions } from './sessions';
import { nowOf } from './view/condition';
import { ordered, viewOf } from './view/session';
import type { Action } from './view/shape';
import type { Trans } from './text';

export const PREFIX = 'rlbench:';
export const CommandIDs = {
  open: `${PREFIX}open-panel`,
  begin: `${PREFIX}new-session`,
  refresh: `${PREFIX}refresh`
} as const;

/** Verbs that are asked of a whole session; each is a command `rlbench:VERB`. */
const VERBS = [
  'stop',
  'pause',
  'resume',
  'sync',
  'snapshot',
  'attach',
  'park',
  'close',
  'kill'
] as const;
const MOVES = ['offload', 'onload'] as const;

interface Context {
  sessions: Sessions;
  trans: Trans;
  /** Asks the server anew, now. */
  look: () => Promise<void>;
  attach: (name: string) => Promise<void>;
}

/** Add the commands that act on sessions; returns the ids of those for the palette. */
export function addSessionCommands(commands: CommandRegistry, context: Context): readonly string[] {
  const { sessions, trans } = context;
  const labels = labelsOf(trans);
  for (const verb of [...VERBS, ...MOVES]) {
    const icon = icons[verb];
    commands.addCommand(PREFIX + verb, {
      label: labels[verb],
      ...(icon ? { icon } : {}),
      isEnabled: () => sessions.entries.length > 0,
      describedBy: {
        args: {
          type: 'object',
          properties: {
            name: {
              type: 'string',
              description: trans.__('The session; without: the selected one')
            },
            engine: { type: 'string', description: trans.__('The engine that is moved') },
            parts: { type: 'array', description: trans.__('Parts of it; without: all') }
          }
        }
      },
      execute: async args => {
        const what = await asked(verb, args, context);
        if (what) {
          await run(what, context);
        }
      }
    });
  }
  commands.addCommand(CommandIDs.refresh, {
    label: trans.__('Look at the RL sessions now'),
    icon: panelIcon,
    describedBy: { args: { type: 'object', properties: {} } },
    execute: () => context.look()
  });
  return [...[...VERBS, ...MOVES].map(verb => PREFIX + verb), CommandIDs.refresh];
}

/** A button of the panel. */
export function press(name: string, action: Action, context: Context): Promise<void> {
  const { verb, key, args } = action;
  return run({ name, verb, key, args, label: action.command }, context);
}

/** What a command from elsewhere asks of a session; null where it did not say enough, nor did who was asked. */
async function asked(
  verb: string,
  args: ReadonlyPartialJSONObject,
  context: Context
): Promise<Press | null> {
  const name = typeof args['name'] === 'string' ? args['name'] : await chosen(context);
  if (!name) {
    return null;
  }
  const label = wordsOf(context.trans)[verb] ?? verb;
  if (!(MOVES as readonly string[]).includes(verb)) {
    return { name, verb, label };
  }
  const engine =
    typeof args['engine'] === 'string' ? args['engine'] : await engineOf(name, verb, context);
  if (!engine) {
    return null;
  }
  const parts = Array.isArray(args['parts']) ? { parts: args['parts'] } : {};
  return {
    name,
    verb,
    args: { engine, ...parts },
    key: `${verb} ${engine}`,
    label: context.trans.__('%1 %2', label, engine)
  };
}

async function run(what: Press, context: Context): Promise<void> {
  const { sessions } = context;
  const { name, verb } = what;
  if (verb === 'attach') {
    return context.attach(name);
  }
  if (isFinal(verb) && !(await confirmed(verb, name, context))) {
    return;
  }
  await (verb === 'kill' ? sessions.kill(name, what.label) : sessions.press(what));
  return context.look();
}

type Final = 'park' | 'close' | 'kill';

/** Whether a session that runs does not after it. */
function isFinal(verb: string): verb is Final {
  return verb === 'park' || verb === 'close' || verb === 'kill';
}

async function confirmed(verb: Final, name: string, context: Context): Promise<boolean> {
  const { sessions, trans } = context;
  const entry = sessions.find(name);
  const facts = entry ? viewOf(entry, nowOf(sessions, 1, trans), trans).facts : '';
  const { title, said, label } = questionOf(verb, name, entry?.listed.state === 'parked', trans);
  const result = await showDialog({
    title,
    body: [facts, said].filter(text => text).join('. '),
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label })],
    defaultButton: 0
  });
  return result.button.accept;
}

function questionOf(
  verb: Final,
  name: string,
  parked: boolean,
  trans: Trans
): { title: string; said: string; label: string } {
  if (parked) {
    return {
      title: trans.__('Forget parked session %1?', name),
      said: trans.__('Its weights, snapshots and history are removed from disk.'),
      label: trans.__('Forget')
    };
  }
  if (verb === 'park') {
    return {
      title: trans.__('Park session %1?', name),
      said: trans.__(
        'All of it is written to disk and its processes end; attaching brings it back.'
      ),
      label: trans.__('Park')
    };
  }
  const said = trans.__(
    'Its processes end, and its weights and snapshots that are not saved as a checkpoint are lost.'
  );
  return verb === 'kill'
    ? { title: trans.__('Kill session %1?', name), said, label: trans.__('Kill') }
    : { title: trans.__('Close session %1?', name), said, label: trans.__('Close') };
}

/** The session that a command without a name means: the only one, the selected one, or the one that is picked. */
async function chosen({ sessions, trans }: Context): Promise<string> {
  const names = ordered(sessions.entries).map(entry => entry.listed.name);
  if (names.length < 2) {
    return names[0] ?? '';
  }
  if (names.includes(sessions.selected)) {
    return sessions.selected;
  }
  const picked = await InputDialog.getItem({ title: trans.__('Which session?'), items: names });
  return picked.value ?? '';
}

async function engineOf(name: string, verb: string, { sessions, trans }: Context): Promise<string> {
  const engines = sessions.find(name)?.state?.engines.map(engine => engine.name) ?? [];
  if (engines.length < 2) {
    return engines[0] ?? '';
  }
  const title =
    verb === 'offload' ? trans.__('Offload which engine?') : trans.__('Onload which engine?');
  const picked = await InputDialog.getItem({ title, items: engines });
  return picked.value ?? '';
}

function labelsOf(trans: Trans): Record<(typeof VERBS)[number] | (typeof MOVES)[number], string> {
  return {
    stop: trans.__('Stop What Runs in the RL Session'),
    pause: trans.__('Pause Generation'),
    resume: trans.__('Resume Generation'),
    sync: trans.__('Sync Weights to the Replicas'),
    snapshot: trans.__('Keep a Snapshot'),
    attach: trans.__('Insert the Cell That Attaches to the Session'),
    park: trans.__('Park the RL Session on Disk…'),
    close: trans.__('Close the RL Session…'),
    kill: trans.__('Kill the RL Session…'),
    offload: trans.__('Offload an Engine…'),
    onload: trans.__('Onload an Engine…')
  };
}

/** Verbs as they stand in what is said about a command. */
function wordsOf(trans: Trans): Readonly<Record<string, string>> {
  return {
    stop: trans.__('stop'),
    pause: trans.__('pause'),
    resume: trans.__('resume'),
    sync: trans.__('sync'),
    snapshot: trans.__('snapshot'),
    attach: trans.__('attach'),
    park: trans.__('park'),
    close: trans.__('close'),
    kill: trans.__('kill'),
    offload: trans.__('offload'),
    onload: trans.__('onload')
  };
}
