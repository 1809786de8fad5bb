/** What JupyterLab loads: the sessions of this machine, the side panel, the status bar's item, the launcher's card. */
import { ILayoutRestorer } from '@jupyterlab/application';
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { Token } from '@lumino/coreutils';

import { Api } from './api';
import { addSessionCommands, CommandIDs, press } from './commands';
import { panelIcon } from './icons';
import { labConnection } from './lab';
import { insertAttach, openStarter } from './notebooks';
import { Panel, PANEL_ID } from './panel';
import { Polling } from './polling';
import { Sessions } from './sessions';
import { StatusItem } from './statusbar';

const DOMAIN = 'rlbench';

interface Looking {
  readonly sessions: Sessions;
  readonly polling: Polling;
}

const ILooking = new Token<Looking>(
  'rlbench-lab:ILooking',
  'The sessions of this machine, kept up to date.'
);

const looking: JupyterFrontEndPlugin<Looking> = {
  id: 'rlbench-lab:sessions',
  description: 'Keeps what the panel and the status bar show up to date.',
  autoStart: true,
  provides: ILooking,
  activate: app => {
    const sessions = new Sessions(new Api(labConnection(app.serviceManager.serverSettings)));
    return { sessions, polling: new Polling(sessions) };
  }
};

const panel: JupyterFrontEndPlugin<void> = {
  id: 'rlbench-lab:panel',
  description: 'The side panel: what runs, where the memory is, and the button that stops it.',
  autoStart: true,
  requires: [ILooking, INotebookTracker],
  optional: [ICommandPalette, ILayoutRestorer, ISettingRegistry, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    { sessions, polling }: Looking,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    settings: ISettingRegistry | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const { commands, shell } = app;
    const context = {
      sessions,
      trans,
      look: () => polling.look(),
      attach: (name: string) => insertAttach(name, tracker, app)
    };
    const widget = new Panel(
      sessions,
      polling,
      {
        press: (name, action) => void press(name, action, context),
        begin: () => void commands.execute(CommandIDs.begin)
      },
      trans
    );
    shell.add(widget, 'right', { rank: 850, type: 'RL Sessions' });
    restorer?.add(widget, PANEL_ID);

    commands.addCommand(CommandIDs.open, {
      label: trans.__('Show RL Sessions'),
      icon: panelIcon,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => shell.activateById(PANEL_ID)
    });
    const listed = [CommandIDs.open, ...addSessionCommands(commands, context)];
    for (const command of listed) {
      palette?.addItem({ command, category: trans.__('RL Sessions') });
    }
    if (settings) {
      void follow(settings, { sessions, polling });
    }
  }
};

const statusItem: JupyterFrontEndPlugin<void> = {
  id: 'rlbench-lab:status',
  description: 'Memory and phase of the sessions in the status bar.',
  autoStart: true,
  requires: [ILooking, IStatusBar],
  optional: [ITranslator],
  activate: (
    app: JupyterFrontEnd,
    { sessions, polling }: Looking,
    bar: IStatusBar,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const open = (): void => void app.commands.execute(CommandIDs.open);
    const item = new StatusItem(sessions, polling, open, trans);
    bar.registerStatusItem('rlbench-lab:status', { item, align: 'left', rank: 900 });
  }
};

const launcher: JupyterFrontEndPlugin<void> = {
  id: 'rlbench-lab:launcher',
  description: 'The launcher card that opens a starter notebook.',
  autoStart: true,
  optional: [ILauncher, ICommandPalette, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    cards: ILauncher | null,
    palette: ICommandPalette | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    app.commands.addCommand(CommandIDs.begin, {
      label: trans.__('New RL session'),
      caption: trans.__('Open a notebook that begins a session'),
      icon: panelIcon,
      describedBy: {
        args: {
          type: 'object',
          properties: {
            cwd: { type: 'string', description: trans.__('The folder of the notebook') }
          }
        }
      },
      execute: args =>
        openStarter(
          typeof args['cwd'] === 'string' ? args['cwd'] : '',
          app.serviceManager.contents,
          app.commands,
          trans
        )
    });
    // among JupyterLab's own cards, whose section is named in JupyterLab's own catalogue
    const category = (translator ?? nullTranslator).load('jupyterlab').__('Notebook');
    cards?.add({ command: CommandIDs.begin, category, rank: 90 });
    palette?.addItem({ command: CommandIDs.begin, category: trans.__('RL Sessions') });
  }
};

/** The panel's settings, now and whenever they change. */
async function follow(registry: ISettingRegistry, { sessions, polling }: Looking): Promise<void> {
  const settings = await registry.load(panel.id);
  const apply = (): void => {
    polling.seconds = settings.get('refresh').composite as number;
    sessions.history = 60 * (settings.get('history').composite as number);
  };
  settings.changed.connect(apply);
  apply();
}

export default [looking, panel, statusItem, launcher];
