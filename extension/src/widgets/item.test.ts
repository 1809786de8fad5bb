// @vitest-environment jsdom
import { describe, expect, it, vi } from 'vitest';

import { nodeOf } from './item';
import type { Item, Look } from './item';
import { Rows } from './rows';
import type { Head, Sent } from './rows';
import { head, HOSTILE, sent } from './testing';

const LOOK: Look = { name: 'v', whitespace: false, across: 1, paint: vi.fn(), sized: vi.fn() };
const HEAD: Item = { key: 'h0', kind: 'head', head: 0, samples: [], branch: null, depth: 0 };
const ROW: Item = { key: '1r0', kind: 'row', head: null, samples: [0], branch: null, depth: 0 };
const PNG = 'data:image/png;base64,AAAA';

function known(heads: readonly Head[], rows: readonly Sent[] = []): Rows {
  const all = new Rows([], 2);
  all.take({ heads, rows }, new Int32Array(9), new Float32Array());
  return all;
}

function textOf(node: Element, part: string): string | null | undefined {
  return node.querySelector(part)?.textContent;
}

function row(change: Partial<Sent>): HTMLElement {
  return nodeOf(ROW, known([], [sent(0, change)]), LOOK);
}

describe('a completion', () => {
  it.each([
    [{ reward: 1, right: true }, '✓ +1.00', '2 tokstop'],
    [{ reward: 0, finish: 'length' }, '✗ 0.00', '2 tok✂ length'],
    [{ reward: -0.5, finish: 'abort' }, '✗ −0.50', '2 tok■ aborted'],
    [{ pieces: [] }, '', '0 tokstop']
  ])('with %j has a mark %j and says %j', (change, mark, meta) => {
    const node = row(change);
    expect([textOf(node, '.mark'), textOf(node, '.meta')]).toEqual([mark, meta]);
  });

  it('is read aloud with what it was worth, no longer than is bearable', () => {
    const node = row({ reward: 0.25, right: true, pieces: ['x'.repeat(100_000)] });
    expect(textOf(node, '.tokens')).toHaveLength(100_000);
    const said = 'completion 0, right, reward 0.25, 1 tokens, ended by stop: ';
    expect(node.getAttribute('aria-label')).toBe(said + 'x'.repeat(200));
  });
});

describe('what an environment showed', () => {
  const images = [{ t: 1, tokens: 3, src: PNG, alt: 'a cat' }];
  const seen = { pieces: ['go', 'image ×3', '', '', 'on'], kinds: 'tssst', images };

  it('stands before one chip for all of its tokens', () => {
    const tokens = row(seen).querySelector('.tokens');
    expect([...(tokens?.children ?? [])].map(one => one.textContent || one.className)).toEqual([
      'go',
      'picture',
      'image ×3',
      'on'
    ]);
    expect(tokens?.querySelector('img')?.alt).toBe('a cat');
    expect(tokens?.querySelector<HTMLElement>('[data-t="4"]')?.textContent).toBe('on');
  });

  it('is larger by a click where the completion is open', () => {
    const rows = known([head(0)], [sent(0, seen)]);
    rows.full.add(0);
    const node = nodeOf(ROW, rows, LOOK);
    node.querySelector<HTMLElement>('.picture')?.click();
    expect(node.querySelectorAll('.picture.large')).toHaveLength(1);
  });
});

describe('a prompt', () => {
  it.each([
    [{ text: 'a\nb' }, 'a⏎b2 completions   2 tok'],
    [{ n: 0, lengths: null }, 'say 0not started'],
    [{ mean: 0.5, right: 1, two: true, spread: 0.5 }, 'say 01/2 right   spread 0.50   2 tok'],
    [{ mean: 0.25, lengths: [5, 1200] }, 'say 0reward 0.25   spread 0.00   5–1,200 tok']
  ] as const)('with %j is the line %j', (change, line) => {
    expect(textOf(nodeOf(HEAD, known([head(0, change)]), LOOK), '.line')).toBe(`▸prompt 0${line}`);
  });

  it('shown whole has its messages, the role once for all parts of one', () => {
    const rows = known([head(0, { more: true })]);
    rows.spelt.add(0);
    expect(textOf(nodeOf(HEAD, rows, LOOK), '.whole')).toBe('…');
    const part = { role: 'user', text: 'look:', image: '', tokens: 0 };
    rows.prompts.set(0, [part, { ...part, text: 'a cat', image: PNG, tokens: 4 }]);
    const node = nodeOf(HEAD, rows, LOOK);
    expect(textOf(node, '.whole')).toBe('userlook:image ×4');
    node.querySelector<HTMLElement>('.picture')?.click();
    expect(node.querySelector('.picture.large img')?.getAttribute('alt')).toBe('a cat');
  });

  it('shown whole plays the sounds that Python encoded, behind their names', () => {
    const rows = known([head(0, { more: true })]);
    rows.spelt.add(0);
    const part = { role: 'user', text: '[sound, 1.5 s]', image: '', tokens: 0 };
    const sounds = ['data:audio/mpeg;base64,AAAA', 'data:text/html,x', '//127.0.0.1:9/a.mp3'];
    rows.prompts.set(
      0,
      sounds.map(sound => ({ ...part, sound }))
    );
    const node = nodeOf(HEAD, rows, LOOK);
    const players = [...node.querySelectorAll('audio')];
    expect(players.map(player => [player.getAttribute('src'), player.controls])).toEqual([
      [sounds[0], true]
    ]);
    expect(node.querySelectorAll('.said').length).toBe(3);
  });

  it.each([
    [PNG, PNG],
    ['data:image/svg+xml,<svg onload="1"/>', null],
    ['//127.0.0.1:9/seen.png', null]
  ])('shows of images those alone that Python encoded: %s', (src, loaded) => {
    const images = [{ src, alt: 'a cat', tokens: 0 }];
    const image = nodeOf(HEAD, known([head(0, { images })]), LOOK).querySelector('img');
    expect([image?.getAttribute('src'), image?.alt]).toEqual([loaded, 'a cat']);
  });
});

it('what models and users wrote stays text', () => {
  const line = head(0, { text: HOSTILE, images: [{ src: HOSTILE, alt: HOSTILE, tokens: 0 }] });
  const said = { pieces: [HOSTILE, HOSTILE], kinds: 'ts', text: HOSTILE, finish: HOSTILE };
  const rows = known([line], [sent(0, said)]);
  const nodes = [nodeOf(HEAD, rows, LOOK), nodeOf(ROW, rows, LOOK)];
  rows.spelt.add(0);
  rows.prompts.set(0, [{ role: HOSTILE, text: HOSTILE, image: '', tokens: 0 }]);
  for (const node of [...nodes, nodeOf(HEAD, rows, LOOK)]) {
    expect(node.querySelectorAll('script, img[src], [onerror]')).toHaveLength(0);
    expect(node.textContent).toContain(HOSTILE);
  }
});
