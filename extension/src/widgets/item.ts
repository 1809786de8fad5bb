/** One line of the rollout viewer: a prompt, a completion, completions side by side, or where some continue another. */
import { add } from './dom';
import type { Head, Image, Row, Rows } from './rows';
import { addToken, number } from './tokens';
import type { Kind } from './tokens';
import type { Branch } from './tree';

/** A line of the list; its key starts with the prompt's or the first completion's. */
export interface Item {
  readonly key: string;
  readonly kind: 'head' | 'row' | 'cards' | 'branch';
  /** The prompt, of a line of that kind. */
  readonly head: number | null;
  /** The completions of the others. */
  readonly samples: readonly number[];
  /** The key of the branch, of a line of that kind. */
  readonly branch: string | null;
  /** So many branches deep. */
  readonly depth: number;
}

export interface Look {
  /** Begins the names of this drawing's elements. */
  readonly name: string;
  readonly whitespace: boolean;
  /** So many completions stand side by side. */
  readonly across: number;
  /** Colours the tokens of an element. */
  readonly paint: (tokens: HTMLElement) => void;
  /** An image has its size now: the list has to make room for it. */
  readonly sized: () => void;
}

const CUT: Readonly<Record<string, string>> = { length: '✂ length', abort: '■ aborted' };
const READ_ALOUD = 200;
/** Tokens of the completion it continues that a continuation's preview begins with. */
const SHARED_SHOWN = 8;
const LARGER = 'larger, or small again';

export function nodeOf(item: Item, rows: Rows, look: Look): HTMLElement {
  const node = document.createElement('div');
  node.className = `item ${item.kind}`;
  node.id = `${look.name}-${item.key}`;
  node.style.setProperty('--depth', String(item.depth));
  const [first] = item.samples;
  if (item.head !== null) {
    fillHead(node, item.head, rows, look);
  } else if (item.branch !== null) {
    fillBranch(node, item, rows);
  } else if (item.kind === 'cards') {
    node.setAttribute('role', 'presentation');
    node.style.gridTemplateColumns = `repeat(${look.across}, minmax(0, 1fr))`;
    for (const i of item.samples) {
      const card = add(node, 'div', 'card');
      card.id = `${look.name}-c${i}`;
      fillRow(card, i, item.depth, rows, look);
    }
  } else if (first !== undefined) {
    fillRow(node, first, item.depth, rows, look);
  }
  return node;
}

function fillHead(node: HTMLElement, p: number, rows: Rows, look: Look): void {
  const head = rows.heads.get(p);
  const open = rows.open.has(p);
  node.setAttribute('role', 'treeitem');
  node.setAttribute('aria-level', '1');
  node.setAttribute('aria-expanded', String(open));
  const line = add(node, 'div', 'line');
  add(line, 'span', 'twist', open ? '▾' : '▸').setAttribute('aria-hidden', 'true');
  add(line, 'span', 'number', `prompt ${p}`);
  const text = add(line, 'span', 'prompt', head?.text.replaceAll('\n', '⏎') ?? '…');
  if (!head) {
    return;
  }
  const facts = headFacts(head);
  const said = head.text.slice(0, READ_ALOUD);
  node.setAttribute('aria-label', `prompt ${p}: ${said}; ${facts.join(', ')}`);
  if (head.more) {
    const [label, title] = rows.spelt.has(p)
      ? ['less', 'show one line of the prompt']
      : ['whole prompt', 'show all messages of the prompt'];
    addButton(line, 'spell', label, title);
  }
  add(line, 'span', 'facts', facts.join('   '));
  text.title = head.more ? '' : head.text;
  if (rows.spelt.has(p)) {
    fillPrompt(node, p, rows, look);
  } else if (head.images.length) {
    const strip = add(node, 'div', 'images');
    head.images.forEach(image => addPicture(strip, image, 'the whole prompt', look.sized));
  }
}

function fillPrompt(node: HTMLElement, p: number, rows: Rows, look: Look): void {
  const whole = add(node, 'div', 'whole');
  const messages = rows.prompts.get(p);
  if (!messages) {
    whole.textContent = '…';
    return;
  }
  let before = '';
  for (const { role, text, image, tokens, sound } of messages) {
    if (role && role !== before) {
      add(whole, 'span', 'role', role);
    }
    before = role;
    if (image) {
      const shown = { src: image, alt: text, tokens };
      enlarges(addPicture(whole, shown, LARGER, look.sized), look);
    } else {
      add(whole, 'span', 'said', text);
    }
    if (sound?.startsWith('data:audio/mpeg;')) {
      const player = add(whole, 'audio', 'sound');
      Object.assign(player, { controls: true, preload: 'metadata', title: text, src: sound });
    }
  }
}

function enlarges(picture: HTMLElement, look: Look): void {
  picture.addEventListener('click', () => {
    picture.classList.toggle('large');
    look.sized();
  });
}

/** The line above what continues from a place. */
function fillBranch(node: HTMLElement, { branch: key, depth }: Item, rows: Rows): void {
  const branch = rows.tree.named(key ?? '');
  if (!branch) {
    return;
  }
  const open = !rows.tree.closed.has(branch.key);
  node.setAttribute('role', 'treeitem');
  node.setAttribute('aria-level', String(1 + 2 * depth));
  node.setAttribute('aria-expanded', String(open));
  const line = add(node, 'div', 'line');
  add(line, 'span', 'twist', open ? '▾' : '▸').setAttribute('aria-hidden', 'true');
  const place = placeOf(branch, rows);
  add(line, 'span', 'place', `↳ ${place}`);
  if (branch.text) {
    add(line, 'span', 'written', JSON.stringify(branch.text)).title =
      `written there: ${branch.text}`;
  }
  const facts = branchFacts(branch).join('   ');
  add(line, 'span', 'facts', facts).title =
    'mean reward of what continues there, and its standard error';
  node.setAttribute('aria-label', `${place}: ${facts}`);
}

function placeOf({ of, kept }: Branch, rows: Rows): string {
  const row = rows.rows.get(of);
  const completion = of < 0 ? 'a completion that is not shown' : `completion ${row?.k ?? of}`;
  return `from token ${kept} of ${completion}`;
}

function branchFacts({ samples, under, said }: Branch): readonly string[] {
  const several = `${samples.length} continuation${samples.length === 1 ? '' : 's'}`;
  return [several, ...(under ? [`under ${under}`] : []), said];
}

function fillRow(node: HTMLElement, i: number, depth: number, rows: Rows, look: Look): void {
  const row = rows.rows.get(i);
  node.dataset['i'] = String(i);
  node.setAttribute('role', 'treeitem');
  node.setAttribute('aria-level', String(2 + 2 * depth));
  if (!row) {
    add(node, 'span', 'mark', '');
    add(node, 'span', 'tokens wait', '…');
    add(node, 'span', 'meta', '');
    return;
  }
  const full = rows.full.has(i);
  addMark(node, row);
  addTokens(node, row, full, rows, look);
  addMeta(node, row, full, rows.openTokens);
  node.setAttribute('aria-expanded', String(full));
  node.setAttribute('aria-label', aloud(row));
}

function addMark(node: HTMLElement, { reward, right, k, p }: Row): void {
  const place = `completion ${k} of prompt ${p}`;
  if (reward === null) {
    add(node, 'span', 'mark', '').title = place;
    return;
  }
  const text = `${right ? '✓' : '✗'} ${signed(reward)}`;
  const mark = add(node, 'span', `mark ${right ? 'right' : 'wrong'}`, text);
  mark.title = `reward ${number(reward)}, ${place}`;
}

function addTokens(node: HTMLElement, row: Row, full: boolean, rows: Rows, look: Look): void {
  const tokens = add(node, 'span', `tokens${full ? ' full' : ''}`);
  tokens.dataset['i'] = String(row.i);
  const begin = full ? 0 : Math.max(0, row.born - SHARED_SHOWN);
  if (begin) {
    add(tokens, 'span', 'rest', `${thousands(begin)} tok … `);
  }
  if (row.text !== undefined) {
    add(tokens, 'span', 'plain', full ? row.text : row.text.replaceAll('\n', '⏎'));
  }
  const images = new Map(row.images.map(image => [image.t, image]));
  let end = 0; // of the tokens that stand for an image, of which the first says how many they are
  row.pieces.forEach((piece, t) => {
    const image = images.get(t);
    if (t < begin) {
      return;
    }
    if (image) {
      const pressed = full ? LARGER : 'the whole text';
      const picture = addPicture(tokens, { ...image, tokens: 0 }, pressed, look.sized);
      if (full) {
        enlarges(picture, look);
      }
      end = t + image.tokens;
    }
    if (image || t >= end) {
      addToken(tokens, piece, kindOf(row, t), t, look.whitespace, full);
    }
  });
  look.paint(tokens);
  markPlaces(tokens, row, rows);
  if (!full && row.pieces.length < row.n) {
    add(tokens, 'span', 'rest', ` … +${thousands(row.n - row.pieces.length)} tok`);
  }
  tokens.title = full ? '' : 'click between the tokens, or Enter: the whole text';
}

/** Mark what a continuation has from another completion, and where others continue this one. */
function markPlaces(tokens: HTMLElement, { i, born }: Row, rows: Rows): void {
  for (const token of tokens.querySelectorAll<HTMLElement>('.t')) {
    token.classList.toggle('shared', Number(token.dataset['t']) < born);
  }
  for (const branch of rows.tree.from(i)) {
    const token = tokens.querySelector<HTMLElement>(`[data-t="${branch.kept}"]`);
    if (token) {
      token.classList.add('forked');
      token.title = branchFacts(branch).join(', ');
    }
  }
}

function addMeta(node: HTMLElement, row: Row, full: boolean, openTokens: number): void {
  const { finish, n, pieces, wanted } = row;
  const meta = add(node, 'span', 'meta');
  add(meta, 'span', 'length', `${thousands(n)} tok`);
  const cut = Object.hasOwn(CUT, finish);
  add(meta, 'span', cut ? 'warn' : 'finish', cut ? CUT[finish] : finish);
  if (full && pieces.length < wanted) {
    add(node, 'span', 'more', '…'); // on its way
  } else if (full && pieces.length < n) {
    const next = `next ${thousands(Math.min(openTokens, n - pieces.length))} of ${thousands(n)} tokens`;
    addButton(node, 'more', next, 'show more of this completion');
  }
}

/** The row for who hears it read. */
function aloud(row: Row): string {
  const said = row.text ?? row.pieces.filter((_, t) => kindOf(row, t) === 't').join('');
  const scored =
    row.reward === null ? '' : `${row.right ? 'right' : 'wrong'}, reward ${number(row.reward)}, `;
  const ended = `${scored}${row.n} tokens, ended by ${row.finish}`;
  return `completion ${row.k}, ${ended}: ${said.slice(0, READ_ALOUD)}`;
}

export function kindOf(row: Row, t: number): Kind {
  return row.kinds[t] as Kind;
}

export function headFacts(head: Head): readonly string[] {
  if (!head.n || !head.lengths) {
    return ['not started'];
  }
  const [low, high] = head.lengths.map(thousands);
  const range = low === high ? `${low} tok` : `${low}–${high} tok`;
  const tokens = head.continuations ? `${range}   +${head.continuations} continued` : range;
  if (head.mean === undefined) {
    return [`${head.n} completions`, tokens];
  }
  const right = head.two ? `${head.right ?? 0}/${head.n} right` : `reward ${number(head.mean)}`;
  return [right, `spread ${(head.spread ?? 0).toFixed(2)}`, tokens];
}

function addButton(parent: Element, className: string, text: string, title: string): void {
  const node = add(parent, 'button', className, text);
  Object.assign(node, { title, type: 'button', tabIndex: -1 });
}

/** An image that Python encoded, and a chip for its run of tokens; `pressed`: what a click shows. */
function addPicture(
  parent: Element,
  picture: Image,
  pressed: string,
  sized: () => void
): HTMLElement {
  const { src, alt, tokens } = picture;
  const button = add(parent, 'button', 'picture');
  Object.assign(button, { title: `${alt}: click for ${pressed}`, type: 'button', tabIndex: -1 });
  const image = add(button, 'img');
  image.addEventListener('load', sized);
  if (src.startsWith('data:image/png;') || src.startsWith('data:image/jpeg;')) {
    image.src = src;
  }
  image.alt = alt;
  if (tokens) {
    const title = `${tokens} tokens stand for this image`;
    add(button, 'span', 'chip', `image ×${tokens}`).title = title;
  }
  return button;
}

function signed(value: number): string {
  return value > 0 ? `+${value.toFixed(2)}` : value < 0 ? `−${(-value).toFixed(2)}` : '0.00';
}

function thousands(value: number): string {
  return value.toLocaleString('en');
}
