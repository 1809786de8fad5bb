/** Tokens as coloured, readable spans, for the viewer and the exported page. */
import { digits } from '../format';
import { add } from './dom';

/** As in rlbench/notebook/base/palette.py. */
const STRONGEST = 0.62;
const STOPS = 13;
const LONGEST = 60;

/** How strongly a channel colours a token; rlbench/notebook/rollouts/channel_scale.py makes it. */
export interface Scale {
  readonly name: string;
  readonly label: string;
  readonly unit: string;
  readonly kind: 'signed' | 'ratio' | 'size' | 'flag';
  readonly about: string;
  readonly low: number;
  readonly high: number;
  readonly bound: number;
  /** Whether some values lie beyond the bound. */
  readonly saturated: boolean;
}

/** Of a piece of text: a token's text, a special token, a byte of a character, an id without text. */
export type Kind = 't' | 's' | 'b' | 'i';

/** A token's value in a channel, by the channel's number. */
export type Value = (channel: number) => number;

const KIND_CLASS = { t: 't', s: 't pill', b: 't byte', i: 't byte' } as const;
const KIND_TITLE = {
  t: '',
  s: 'special token',
  b: 'byte of a character that a later token completes',
  i: 'token id'
} as const;

/** Three significant digits with a real minus sign; "–" where not known. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) {
    return '–';
  }
  if (!Number.isFinite(value)) {
    return value > 0 ? '∞' : '−∞';
  }
  const size = Math.abs(value);
  const text = size && size < 1e-4 ? size.toExponential(1) : digits(size);
  return (value < 0 ? '−' : '') + text;
}

/** −1 to 1 (0 to 1 without a sign): how strongly a value colours its token. */
export function share({ kind, bound }: Scale, value: number): number {
  if (!Number.isFinite(value) || !bound) {
    return 0;
  }
  const log = value > 0 ? Math.log(value) : -bound;
  const off = kind === 'signed' ? value : kind === 'ratio' ? log : Math.abs(value);
  return Math.max(-1, Math.min(1, off / bound));
}

export function colour(scale: Scale, value: number): string {
  const part = share(scale, value);
  if (Math.abs(part) < 0.02) {
    return '';
  }
  const unsigned = scale.kind === 'size' || scale.kind === 'flag';
  const hue = unsigned ? 'magnitude' : part < 0 ? 'negative' : 'positive';
  const strength = (Math.abs(part) * STRONGEST * 100).toFixed(0);
  return `color-mix(in srgb, var(--rlb-${hue}) ${strength}%, transparent)`;
}

/** What a piece is drawn as: line feeds always visible, spaces and tabs on request. */
export function drawnText(
  piece: string,
  kind: Kind,
  whitespace: boolean,
  breakLines: boolean
): string {
  if (kind !== 't') {
    return piece;
  }
  if (piece === '') {
    return '∅';
  }
  const ends = piece.replaceAll('\n', breakLines ? '⏎\n' : '⏎');
  return whitespace ? ends.replaceAll(' ', '·').replaceAll('\t', '→\t') : ends;
}

export function addToken(
  parent: Element,
  piece: string,
  kind: Kind,
  at: number,
  whitespace: boolean,
  breakLines: boolean
): void {
  const text = drawnText(piece, kind, whitespace, breakLines);
  add(parent, 'span', KIND_CLASS[kind], text).dataset['t'] = String(at);
}

/** Colour one token by its values over all channels, and mark what colour alone must not say. */
export function paintToken(
  span: HTMLElement,
  scales: readonly Scale[],
  chosen: number,
  value: Value
): void {
  const scale = scales[chosen];
  span.style.background = scale ? colour(scale, value(chosen)) : '';
  scales.forEach(({ name }, c) => {
    if (name === 'clipped') {
      span.classList.toggle('clip', value(c) > 0);
    }
    if (name === 'mask') {
      span.classList.toggle('off', value(c) === 0);
    }
  });
}

/** `token 3  '3'  id 21  sampler −0.12  trainer −0.11  ratio 1.01  adv −0.87  H 0.4`. */
export function describeToken(
  at: number,
  piece: string,
  kind: Kind,
  id: number | undefined,
  scales: readonly Scale[],
  value: Value
): string {
  const shown = piece.length > LONGEST ? `${piece.slice(0, LONGEST)}…` : piece;
  const quoted = `'${shown.replaceAll('\n', '\\n').replaceAll('\t', '\\t')}'`;
  const parts = [`token ${at}`, quoted, `id ${id ?? '–'}`];
  if (KIND_TITLE[kind]) {
    parts.push(`(${KIND_TITLE[kind]})`);
  }
  const flag = (label: string, one: number): string =>
    one > 0 ? label : one === 0 ? `not ${label}` : `${label} –`;
  const said = scales.map((scale, c) =>
    scale.kind === 'flag' ? flag(scale.label, value(c)) : `${scale.label} ${number(value(c))}`
  );
  return [...parts, ...said].join('  ');
}

/** The colours of a channel between its real least and largest value, with both in figures. */
export function drawLegend(element: Element, scales: readonly Scale[], chosen: number): void {
  element.replaceChildren();
  const scale = scales[chosen];
  if (!scale) {
    return;
  }
  const { low, high } = scale;
  const unit = scale.unit ? ` (${scale.unit})` : '';
  add(element, 'span', 'name', scale.name.replaceAll('_', ' ') + unit).title = scale.about;
  if (low === high) {
    add(element, 'span', 'figure', `${number(low)} everywhere`);
  } else {
    add(element, 'span', 'figure', number(low));
    const bar = add(element, 'span', 'bar');
    const stops = stopsOf(scale).map(value => colour(scale, value) || 'transparent');
    bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(',')})`;
    add(element, 'span', 'figure', number(high));
    if (scale.saturated) {
      add(element, 'span', 'note', `full colour from ${boundOf(scale)}`);
    }
  }
  if (scales.some(one => one.name === 'clipped')) {
    add(add(element, 'span', 'note'), 'span', 't clip', 'clipped');
  }
  if (scales.some(one => one.name === 'mask' && one.low === 0)) {
    add(add(element, 'span', 'note'), 'span', 't off', 'not trained');
  }
}

function stopsOf({ kind, low, high }: Scale): readonly number[] {
  return Array.from({ length: STOPS }, (_, k) => {
    const part = k / (STOPS - 1);
    return kind === 'ratio' && low > 0 ? low * (high / low) ** part : low + part * (high - low);
  });
}

function boundOf({ kind, bound }: Scale): string {
  switch (kind) {
    case 'ratio':
      return `×${number(Math.exp(bound))}`;
    case 'signed':
      return `±${number(bound)}`;
    default:
      return number(bound);
  }
}
