// @vitest-environment jsdom
import { beforeEach, expect, it } from 'vitest';

import { OWNERS } from '../memory';
import { drawMemory } from './lanes';
import { Ring } from './ring';
import type { Lane, Mark } from './ring';
import { HOSTILE } from './testing';

let body: HTMLElement;
let key: HTMLElement;

beforeEach(() => {
  body = document.createElement('div');
  key = document.createElement('div');
  Object.defineProperty(body, 'clientWidth', { value: 600 });
});

/** Draw what processes and devices held at 0, 50 and 100 s. */
function draw(lanes: readonly Partial<Lane>[], marks: readonly Mark[] = [], untold = -1): void {
  const ring = new Ring();
  const blank = { name: 'actor 0', owners: held({ weights: [1, 1, 1] }), total: null, detail: '' };
  const all = lanes.map(lane => ({ ...blank, ...lane }));
  ring.merge({ times: [0, 50, 100], lanes: all, marks, untold });
  drawMemory(body, key, ring, 100);
}

/** MiB by owner, then by moment. */
function held(mib: Readonly<Record<string, (number | null)[]>>): Lane['owners'] {
  return OWNERS.map(owner => mib[owner] ?? [0, 0, 0]);
}

function said(part: string): string {
  return [...body.querySelectorAll(part)].map(node => node.firstChild?.textContent).join(' | ');
}

it('memory is drawn once there is something over time', () => {
  drawMemory(body, key, new Ring(), 100);
  expect(body.textContent).toBe('No memory samples yet: the monitor takes two a second.');
});

it('a device is as high as it has memory, a process as the one that held most', () => {
  const owners = held({ weights: [5, 10, 20] });
  draw([{ name: 'gpu 0', owners, total: 40 }, { owners }]);
  const edges = [...body.querySelectorAll('polygon')].map(one => one.getAttribute('points'));
  expect(edges[0]).toMatch(/^112.0,49.0 297.0,44.0 482.0,34.0 /);
  expect(edges[1]).toMatch(/^112.0,90.0 297.0,80.0 482.0,60.0 /);
});

it('a lane says what it holds now, of how much, and where it is gone', () => {
  const device = { name: 'gpu 0', total: 4096, detail: 'H100' };
  const gone = { name: 'b', owners: held({ weights: [1, 1, null] }) };
  draw([{ ...device, owners: held({ weights: [0, 0, 2048] }) }, gone]);
  expect(said('text')).toBe('gpu 0 | 2 GiB of 4 GiB | H100 | b | gone | −100 s | now');
  expect(body.innerHTML).not.toMatch(/NaN|undefined|Infinity/);
});

it('the key names what can be seen, what is too thin for it, and why it is grey', () => {
  const owners = held({ weights: [500, 500, 500], kv_cache: [0, 99, 0], other: [1, 1, 1] });
  draw([{ owners, total: 600 }], [], 50);
  expect(key.textContent).toMatch(/^weightsKV cachetoo thin to see: othergrey at first: /);
});

const ran: Mark[] = [
  [-90, 10, 'save', 'before'],
  [0, 40, 'train', 'step'],
  [50, 5, 'sync', 'v4'],
  [60, 1, 'score', 'math'],
  [70, null, 'rollout', 'third']
];

it('what ran is a word where there is room, a letter where there is little, else a band', () => {
  draw([{}], ran);
  expect(said('.rlb-mark-text')).toBe('train | S | rollout');
  expect(said('rect title')).toBe('step · 40 s | v4 · 5 s | math · 1 s | third · runs');
});

it('a death is told over what ran', () => {
  draw([{}], [...ran, [50, 0, 'died', 'killed']]);
  const parts = ['.rlb-mark-text', '.rlb-oom-sign', '.rlb-oom-sign title'];
  expect(parts.map(part => said(part))).toEqual(['train | rollout', '✕ died', 'killed']);
});

it('names stay text, and whole in their title where they are cut', () => {
  draw([{ name: HOSTILE, detail: HOSTILE }], [[0, 90, 'other', HOSTILE]]);
  expect(body.querySelectorAll('img, script, [onerror]')).toHaveLength(0);
  expect(said('.rlb-lane-name')).toBe('</script><img sr…');
  expect(said('.rlb-lane-name title')).toBe(HOSTILE);
});
