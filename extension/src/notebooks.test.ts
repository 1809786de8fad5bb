import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { INotebookTracker } from '@jupyterlab/notebook';
import { expect, it } from 'vitest';

import { insertAttach } from './notebooks';
import { attachSource } from './starter';

const CELL = attachSource('demo');

/** A notebook of code cells, `# …` is a text cell; what happens to it is kept in order. */
function notebook(before: readonly string[], active: number) {
  const [cells, source] = [[...before], before[active]];
  const happened: string[] = [];
  const write = (at: number, instead: number, text: string): void => {
    cells.splice(at, instead, text);
    happened.push('the cell is there');
  };
  const getSource = (): string | undefined => source?.replace('# ', '');
  const setSource = (text: string): void => write(active, 1, text);
  const type = source?.startsWith('# ') ? 'markdown' : 'code';
  const insertCell = (at: number, cell: { source: string }): void => write(at, 0, cell.source);
  const content = {
    activeCell:
      source === undefined ? null : { model: { type, sharedModel: { getSource, setSource } } },
    activeCellIndex: active,
    model: { sharedModel: { insertCell } },
    activate: () => happened.push('it has the keyboard')
  };
  return { id: 'n1', context: { ready: Promise.resolve() }, content, cells, happened };
}

type Notebook = ReturnType<typeof notebook>;

/** Attach to the session; the commands that were executed for it. */
async function attach(open: Notebook | null, made: Notebook | null = null): Promise<string[]> {
  const executed: string[] = [];
  const commands = { execute: (id: string) => (executed.push(id), Promise.resolve(made)) };
  const shell = { activateById: (id: string) => (open ?? made)?.happened.push(`${id} comes up`) };
  const tracker = { currentWidget: open } as unknown as INotebookTracker;
  await insertAttach('demo', tracker, { commands, shell } as unknown as JupyterFrontEnd);
  return executed;
}

it.each([
  ['fills a blank active cell', ['a = 1', ' \n', 'b'], 1, ['a = 1', CELL, 'b'], 1],
  ['goes below an active cell that is not blank', ['a = 1', 'b'], 0, ['a = 1', CELL, 'b'], 1],
  ['goes below a blank text cell', ['# ', ''], 0, ['# ', CELL, ''], 1],
  ['is the first of a notebook without cells', [], -1, [CELL], 0]
])(
  'the cell that attaches %s, once the notebook is in front',
  async (_, before, active, after, at) => {
    const open = notebook(before, active);
    const { cells, content, happened } = open;
    expect(await attach(open)).toEqual([]);
    expect([cells, content.activeCellIndex]).toEqual([after, at]);
    expect(happened).toEqual(['n1 comes up', 'the cell is there', 'it has the keyboard']);
  }
);

it('it goes into a new notebook where none is open, and nowhere where that has no kernel', async () => {
  const made = notebook([''], 0);
  expect(await attach(null, made)).toEqual(['notebook:create-new']);
  expect(made.cells).toEqual([CELL]);
  expect(await attach(null)).toEqual(['notebook:create-new']);
});
