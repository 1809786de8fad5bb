/**
 * The exported page's controls: colour by any channel, show some completions, read a token's numbers. The page reads
 * without them. Text of models is in the page already; nothing here writes markup.
 */
import { colour, describeToken, drawLegend } from './tokens';
import type { Kind, Scale } from './tokens';

interface Facts {
  readonly channels: readonly Scale[];
  readonly colour: number;
  readonly rows: Readonly<
    Record<
      string,
      {
        readonly right: boolean;
        readonly cut: boolean;
        readonly ids: readonly number[];
        /** Base64 of float32, (channels, tokens). */
        readonly values: string;
      }
    >
  >;
}

function byId(id: string): HTMLElement {
  const node = document.getElementById(id);
  if (!node) {
    throw new Error(`the page has no #${id}`);
  }
  return node;
}

const facts = JSON.parse(byId('facts').textContent ?? '') as Facts;
const completions = [...document.querySelectorAll<HTMLElement>('[data-i]')];
const readout = byId('readout');
const [select, filter, search] = [
  byId('colour') as HTMLSelectElement,
  byId('filter') as HTMLSelectElement,
  byId('search') as HTMLInputElement
];
const numbers = new Map<Element, readonly Float32Array[]>();
/** The keyboard's token: left and right go through a completion, up and down to the next one that is shown. */
let cursor: Element | null = null;

function factsOf(completion: HTMLElement): Facts['rows'][string] | undefined {
  return facts.rows[completion.dataset['i'] ?? ''];
}

/** A completion's values by channel, decoded when first asked for. */
function numbersOf(completion: HTMLElement): readonly Float32Array[] {
  const known = numbers.get(completion);
  if (known) {
    return known;
  }
  const bytes = Uint8Array.from(atob(factsOf(completion)?.values ?? ''), c => c.charCodeAt(0));
  const flat = new Float32Array(bytes.buffer);
  const count = completion.querySelectorAll('i').length;
  const made = facts.channels.map((_, c) => flat.subarray(c * count, (c + 1) * count));
  numbers.set(completion, made);
  return made;
}

function recolour(): void {
  const chosen = Number(select.value);
  const scale = facts.channels[chosen];
  drawLegend(byId('legend'), facts.channels, chosen);
  for (const completion of completions) {
    const values = numbersOf(completion)[chosen];
    completion.querySelectorAll('i').forEach((token, t) => {
      token.style.background = (scale && colour(scale, values?.[t] ?? NaN)) ?? '';
      token.style.background ||= 'none';
      token.removeAttribute('title');
    });
  }
}

function show(): void {
  const text = search.value.trim().toLowerCase();
  const holds = (node: Element | null): boolean =>
    Boolean(node?.textContent?.toLowerCase().includes(text));
  for (const group of document.querySelectorAll<HTMLElement>('.g')) {
    const prompt = holds(group.querySelector('.h'));
    let shown = 0;
    for (const completion of group.querySelectorAll('tr')) {
      completion.hidden = !(fits(completion) && (prompt || holds(completion)));
      shown += Number(!completion.hidden);
    }
    group.hidden = !shown;
  }
}

function fits(completion: HTMLElement): boolean {
  const row = factsOf(completion);
  switch (filter.value) {
    case 'right':
      return Boolean(row?.right);
    case 'wrong':
      return !row?.right;
    case 'cut':
      return Boolean(row?.cut);
    default:
      return true;
  }
}

function say(token: Element): void {
  const completion = token.closest<HTMLElement>('[data-i]');
  if (!completion) {
    return;
  }
  const t = [...completion.querySelectorAll('i')].indexOf(token as HTMLElement);
  const values = numbersOf(completion);
  const kind: Kind = token.classList.contains('s')
    ? 's'
    : token.classList.contains('b')
      ? 'b'
      : 't';
  const piece = (token.textContent ?? '').replace('⏎\n', '\n');
  const id = factsOf(completion)?.ids[t];
  const value = (c: number): number => values[c]?.[t] ?? NaN;
  readout.textContent = describeToken(t, piece, kind, id, facts.channels, value);
}

function goTo(token: Element): void {
  cursor?.classList.remove('at');
  cursor = token;
  cursor.classList.add('at');
  cursor.scrollIntoView({ block: 'nearest' });
  say(cursor);
}

/** The completion's text that an event is in. */
function cellOf(event: Event): Element | null {
  return (event.target as Element).closest('[data-i] .t');
}

function key(event: KeyboardEvent): void {
  const cell = cellOf(event);
  if (!cell || event.ctrlKey || event.metaKey || event.altKey) {
    return;
  }
  const tokens = [...cell.querySelectorAll('i')];
  const t = cursor ? tokens.indexOf(cursor as HTMLElement) : -1;
  const wanted = { ArrowLeft: t - 1, ArrowRight: t + 1, Home: 0, End: tokens.length - 1 }[
    event.key
  ];
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (by !== undefined) {
    const shown = completions.filter(one => !one.hidden && !one.closest<HTMLElement>('.g')?.hidden);
    const at = shown.findIndex(one => one.contains(cell)) + by;
    shown[at]?.querySelector<HTMLElement>('.t')?.focus();
  } else if (wanted === undefined) {
    return;
  } else {
    const token = tokens[wanted];
    if (token) {
      goTo(token);
    }
  }
  event.preventDefault();
}

for (const completion of completions) {
  const cell = completion.querySelector<HTMLElement>('.t');
  if (cell) {
    cell.tabIndex = 0;
    cell.setAttribute('role', 'group');
    const number = completion.dataset['i'] ?? '';
    cell.setAttribute('aria-label', `completion ${number}; arrow keys read its tokens`);
  }
}
facts.channels.forEach(({ name }, c) =>
  select.add(new Option(name.replaceAll('_', ' '), String(c), false, c === facts.colour))
);
select.addEventListener('change', recolour);
filter.addEventListener('change', show);
search.addEventListener('input', show);
document.addEventListener('mouseover', event => {
  const token = (event.target as Element).closest('[data-i] i');
  if (token) {
    say(token);
  }
});
document.addEventListener('keydown', key);
document.addEventListener('focusin', event => {
  const cell = cellOf(event);
  const token = cell?.contains(cursor) ? cursor : cell?.querySelector('i');
  if (token) {
    goTo(token);
  }
});
byId('controls').hidden = false;
recolour();
