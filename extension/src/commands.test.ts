// @vitest-environment jsdom
import { CommandRegistry } from '@lumino/commands';
import { beforeEach, describe, expect, it, vi } from 'vitest';

import { addSessionCommands } from './commands';
import { Sessions } from './sessions';
import { Answers, settled, state, trans } from './testing';

const dialogs = vi.hoisted(() => ({ accept: true, said: [] as string[], pick: '' }));

vi.mock('./icons', () => ({ icons: {}, panelIcon: undefined }));
vi.mock('@jupyterlab/apputils', () => ({
  Dialog: { cancelButton: vi.fn(), warnButton: vi.fn() },
  showDialog: ({ title, body }: { title: string; body: string }) => {
    dialogs.said.push(`${title} ${body}`);
    return Promise.resolve({ button: { accept: dialogs.accept } });
  },
  InputDialog: { getItem: () => Promise.resolve({ value: dialogs.pick }) }
}));

let answers: Answers;
let sessions: Sessions;
let commands: CommandRegistry;
const attached = vi.fn();

beforeEach(async () => {
  Object.assign(dialogs, { accept: true, said: [], pick: '' });
  attached.mockReset();
  answers = new Answers();
  sessions = new Sessions(answers, { wait: () => Promise.resolve() });
  commands = new CommandRegistry();
  addSessionCommands(commands, {
    sessions,
    trans,
    look: () => Promise.resolve(),
    attach: name => Promise.resolve(attached(name) as undefined)
  });
  await sessions.refresh();
  await settled();
});

describe('ending a session', () => {
  it.each(['kill', 'close'])(
    '%s asks first, and is not done where the answer is no',
    async verb => {
      dialogs.accept = false;
      await commands.execute(`rlbench:${verb}`);
      expect(dialogs.said[0]).toMatch(/session demo\? tiny · step 4 · v4\. Its processes end/);
      expect([answers.killed, answers.pressed]).toEqual([[], []]);
      dialogs.accept = true;
      await commands.execute(`rlbench:${verb}`);
      expect(answers.killed.length + answers.pressed.length).toBe(1);
    }
  );
});

describe('commands without a name', () => {
  it('mean the only session', async () => {
    await commands.execute('rlbench:pause');
    expect(answers.pressed).toEqual([['demo', 'pause', {}]]);
  });

  it('mean the selected one of several, else the one that is picked', async () => {
    answers.listing = {
      ...answers.listing,
      sessions: ['a', 'b'].map(name => ({ name, state: 'live' }))
    };
    answers.states = { a: () => Promise.resolve(state()), b: () => Promise.resolve(state()) };
    await sessions.refresh();
    dialogs.pick = 'a';
    await commands.execute('rlbench:pause');
    sessions.select('b');
    await commands.execute('rlbench:pause');
    expect(answers.pressed.map(([name]) => name)).toEqual(['a', 'b']);
  });

  it('ask which engine is meant', async () => {
    dialogs.pick = 'inference';
    await commands.execute('rlbench:offload');
    expect(answers.pressed).toEqual([['demo', 'offload', { engine: 'inference' }]]);
  });

  it('cannot be given where there is no session', async () => {
    answers.listing = { ...answers.listing, sessions: [] };
    await sessions.refresh();
    expect(commands.isEnabled('rlbench:stop')).toBe(false);
  });
});

it('attaching goes to the notebook, not to the session', async () => {
  await commands.execute('rlbench:attach', { name: 'demo' });
  expect(attached).toHaveBeenCalledWith('demo');
  expect(answers.pressed).toEqual([]);
});
