/** What the panel does in notebooks: the cell that attaches to a session, and the starter notebook. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { NotebookPanel, INotebookTracker } from '@jupyterlab/notebook';
import type { Contents } from '@jupyterlab/services';
import type { CommandRegistry } from '@lumino/commands';

import { attachSource, starterNotebook } from './starter';
import type { Trans } from './text';

const STARTER = 'rl-session';
const MOST_STARTERS = 100;

/** Insert the attaching cell below the active one of the current notebook, or of a new one where none is open. */
export async function insertAttach(
  name: string,
  tracker: INotebookTracker,
  { commands, shell }: JupyterFrontEnd
): Promise<void> {
  const open = tracker.currentWidget;
  const panel = open ?? ((await commands.execute('notebook:create-new')) as NotebookPanel | null);
  if (!panel) {
    return; // the question for a kernel was left unanswered
  }
  await panel.context.ready;
  const { content } = panel;
  const model = content.model;
  if (!model) {
    return;
  }
  shell.activateById(panel.id); // before the cell shows: nothing comes to the front after that
  const active = content.activeCell;
  const blank = active?.model.type === 'code' && !active.model.sharedModel.getSource().trim();
  if (blank) {
    active.model.sharedModel.setSource(attachSource(name));
  } else {
    const index = content.activeCellIndex + 1;
    model.sharedModel.insertCell(index, {
      cell_type: 'code',
      source: attachSource(name),
      metadata: { trusted: true }
    });
    content.activeCellIndex = index;
  }
  content.activate();
}

/** Write the starter notebook into a folder and open it; returns its path. */
export async function openStarter(
  folder: string,
  contents: Contents.IManager,
  commands: CommandRegistry,
  trans: Trans
): Promise<string> {
  const taken = new Set(
    ((await contents.get(folder, { content: true })).content as Contents.IModel[]).map(
      item => item.name
    )
  );
  const names = Array.from(
    { length: MOST_STARTERS },
    (_, i) => `${STARTER}${i ? `-${i}` : ''}.ipynb`
  );
  const name = names.find(one => !taken.has(one));
  const made = await contents.newUntitled({ path: folder, type: 'notebook' });
  const saved = await contents.save(made.path, {
    type: 'notebook',
    format: 'json',
    content: starterNotebook(trans)
  });
  const path = name
    ? (await contents.rename(saved.path, folder ? `${folder}/${name}` : name)).path
    : saved.path;
  await commands.execute('docmanager:open', { path, factory: 'Notebook' });
  return path;
}
