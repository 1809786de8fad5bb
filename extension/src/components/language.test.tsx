// @vitest-environment jsdom
// Every text that a reader meets comes out of the catalogue: what does not is told here.
import { cleanup, render } from '@testing-library/react';
import { CommandRegistry } from '@lumino/commands';
import React from 'react';
import { afterEach, expect, it, vi } from 'vitest';

import { Trouble } from '../asks';
import { addSessionCommands, press } from '../commands';
import { Sessions } from '../sessions';
import { starterNotebook } from '../starter';
import { Answers, command, foreign, PARKED, settled, state } from '../testing';
import type { Report } from '../testing';
import { actionsOf } from '../view/actions';
import { nowOf } from '../view/condition';
import { viewOf } from '../view/session';
import { summaryOf } from '../view/summary';
import { Overview } from './overview';

const said = vi.hoisted(() => [] as string[]);

vi.mock('../icons', () => ({ icons: {}, panelIcon: undefined }));
vi.mock('@jupyterlab/apputils', () => ({
  Dialog: {
    cancelButton: () => undefined, // JupyterLab's own word
    warnButton: ({ label }: { label: string }) => said.push(label)
  },
  showDialog: ({ title, body }: { title: string; body: string }) => {
    said.push(title, body);
    return Promise.resolve({ button: { accept: false } });
  },
  InputDialog: {
    getItem: ({ title }: { title: string }) => {
      said.push(title);
      return Promise.resolve({ value: null });
    }
  }
}));

/** Names, numbers and what monitors say: nobody translates these. */
const DATA =
  /tiny|fork|rollout 5|step(?=: DATA|, DATA)|rlbench\.labapp|DATA\w*|actor|inference|fsdp2|vllm|import rlbench as rb\s+session = rb\.Session\("tiny"\)|[\d:]+ [AP]M|\bv\d+\b|[\d.,/]+ ?([KMGT]iB|B|min|s|h|%)?|~/g;

/** Those texts of which something is left without what the catalogue gave and what nobody translates. */
function untranslated(texts: readonly string[]): readonly string[] {
  return texts.filter(text => /\p{L}/u.test(text.replace(/«[^«»]*»/g, ' ').replace(DATA, ' ')));
}

function textsOf(node: Element): readonly string[] {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const found: string[] = [];
  while (walker.nextNode()) {
    found.push(walker.currentNode.textContent ?? '');
  }
  for (const one of node.querySelectorAll('*')) {
    for (const name of ['title', 'aria-label', 'aria-valuetext', 'placeholder']) {
      found.push(one.getAttribute(name) ?? '');
    }
  }
  return found.filter(text => text.trim());
}

const SAMPLE = {
  time: 999,
  owners: {
    'rlbench/demo/actor/0': Object.fromEntries(
      ['weights', 'gradients', 'optimizer', 'kv_cache', 'activations', 'other'].map(o => [
        o,
        2 ** 30
      ])
    )
  },
  resident: {}
};
const HISTORY = [1, 2].map(step => ({ step, reward: step, length: 100 }));
const REPORTS: readonly Report[] = [
  'running',
  'training',
  'paused',
  'idle',
  'failed',
  'lost',
  'leased',
  'script',
  'building',
  'broken',
  'moved'
];
const HOST = { used: 2 ** 33, total: 2 ** 34 };

async function all(): Promise<{ answers: Answers; sessions: Sessions }> {
  const answers = new Answers();
  const names = [...REPORTS.map(report => `DATA${report}`), 'DATAsilent', 'DATAwaiting'];
  answers.listing = {
    time: 1000,
    sessions: [
      ...names.map(name => ({ name, state: 'live' as const })),
      { name: 'DATAgone', state: 'gone' },
      { name: 'DATAparked', state: 'parked', parked: PARKED }
    ],
    memory: HOST,
    gpus: [{ ...HOST, name: 'DATA' }],
    gpusError: 'DATA'
  };
  for (const report of REPORTS) {
    const change = report === 'running' ? { samples: [SAMPLE], history: HISTORY } : {};
    answers.states[`DATA${report}`] = () => Promise.resolve(state(change, report));
  }
  answers.states['DATAwaiting'] = () => new Promise(() => undefined);
  answers.states['DATAsilent'] = () => Promise.reject(new Trouble('silent', 'DATA'));
  const sessions = new Sessions(answers, { clock: () => 100, wait: () => Promise.resolve() });
  sessions.watched = true;
  await sessions.refresh();
  await settled();
  return { answers, sessions };
}

function panelOf(sessions: Sessions, trans = foreign): readonly string[] {
  const { container } = render(
    <Overview sessions={sessions} interval={1} onPress={vi.fn()} onNew={vi.fn()} trans={trans} />
  );
  return textsOf(container);
}

afterEach(cleanup);

it('the panel', async () => {
  const { answers, sessions } = await all();
  await sessions.press({ name: 'DATAidle', verb: 'sync', label: foreign.__('sync') });
  answers.commands = Array.from({ length: 300 }, () => () => Promise.resolve(command('running')));
  await sessions.press({ name: 'DATApaused', verb: 'close', label: foreign.__('close') });
  const texts = panelOf(sessions);
  expect(texts.length).toBeGreaterThan(200);
  expect(untranslated(texts)).toEqual([]);
  for (const now of [nowOf(sessions, 1, foreign), { ...nowOf(sessions, 1, foreign), clock: 999 }]) {
    const lines = sessions.entries.map(entry => summaryOf([entry, entry], now, foreign));
    expect(untranslated(lines)).toEqual([]);
    const views = sessions.entries.map(entry => viewOf(entry, now, foreign));
    expect(untranslated(views.flatMap(view => [view.stale, view.notice]))).toEqual([]);
  }
});

it('the panel where nobody answers, and where there is nothing', async () => {
  const { answers, sessions } = await all();
  const trouble = new Trouble('absent', 'not this text');
  for (const fails of [trouble, null]) {
    answers.fails = fails;
    answers.listing = { ...answers.listing, sessions: [] };
    await sessions.refresh().catch(() => undefined);
    expect(untranslated(panelOf(sessions))).toEqual([]);
    cleanup();
  }
  expect(untranslated(panelOf(new Sessions(answers)))).toEqual([]);
});

it('the commands, and what they ask', async () => {
  const { sessions } = await all();
  const commands = new CommandRegistry();
  const context = {
    sessions,
    trans: foreign,
    look: () => Promise.resolve(),
    attach: () => Promise.resolve()
  };
  const ids = addSessionCommands(commands, context);
  expect(untranslated(ids.map(id => commands.label(id)))).toEqual([]);
  const told = await Promise.all(ids.map(id => commands.describedBy(id)));
  const properties = told.map(one => (one.args as { properties?: object }).properties ?? {});
  const about = properties.flatMap(one => Object.values(one) as { description: string }[]);
  expect(untranslated(about.map(one => one.description))).toEqual([]);

  const entry = sessions.find('DATArunning');
  const actions = entry ? viewOf(entry, nowOf(sessions, 1, foreign), foreign).actions : [];
  for (const action of actions.filter(one => ['park', 'close', 'kill'].includes(one.verb))) {
    await press('DATArunning', action, context);
  }
  const parked = sessions.find('DATAparked');
  const forget = parked && actionsOf(parked, foreign).find(one => one.verb === 'kill');
  if (forget) {
    await press('DATAparked', forget, context);
  }
  for (const verb of ['stop', 'offload', 'onload']) {
    await commands.execute(`rlbench:${verb}`, verb === 'stop' ? {} : { name: 'DATArunning' });
  }
  expect(said.length).toBeGreaterThanOrEqual(15);
  expect(untranslated(said)).toEqual([]);
  await commands.execute('rlbench:offload', { name: 'DATAidle', engine: 'actor' });
  const { label = '' } = sessions.find('DATAidle')?.notice ?? {};
  expect([label.includes('actor'), untranslated([label])]).toEqual([true, []]);
});

it('the starter notebook, but for its code', () => {
  const cells = starterNotebook(foreign)['cells'] as { cell_type: string; source: string }[];
  const prose = cells.filter(cell => cell.cell_type === 'markdown').map(cell => cell.source);
  expect(prose.length).toBe(2);
  expect(untranslated(prose)).toEqual([]);
});
