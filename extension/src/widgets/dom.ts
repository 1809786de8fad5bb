/** Elements and shapes, made and named; text goes through textContent alone. */
import { digits, gib } from '../format';

const SVG = 'http://www.w3.org/2000/svg' as const;
/** Pixels of a letter, at most: of the drawings' larger and smaller type. */
const PER_LETTER = 6.2;
export const PER_SMALL = 5.6;
const MIB = 2 ** 20;
const COPIED_MS = 1500;

type Attributes = Readonly<Record<string, string | number>>;

export function add<Tag extends keyof HTMLElementTagNameMap>(
  parent: Element,
  tag: Tag,
  className = '',
  text?: string
): HTMLElementTagNameMap[Tag] {
  const node = document.createElement(tag);
  if (className) {
    node.className = className;
  }
  if (text !== undefined) {
    node.textContent = text;
  }
  parent.append(node);
  return node;
}

export function svg(
  parent: Element,
  tag: string,
  attributes: Attributes,
  text?: string
): SVGElement {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    node.setAttribute(name, String(value));
  }
  if (text !== undefined) {
    node.textContent = text;
  }
  parent.append(node);
  return node;
}

/** A drawing of that size; `label` says in words what it shows. */
export function picture(parent: Element, width: number, height: number, label: string): SVGElement {
  const viewBox = `0 0 ${width} ${height}`;
  return svg(parent, 'svg', { width, height, viewBox, role: 'img', 'aria-label': label });
}

/** What a panel says while there is nothing to draw, and the code that changes that. */
export function empty(box: Element, text: string, code = ''): HTMLElement {
  box.replaceChildren();
  const note = add(box, 'div', 'rlb-q rlb-empty');
  note.append(text);
  if (code) {
    add(note, 'code', '', code);
  }
  return note;
}

export function setText(node: Element, text: string): void {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** A text cut to so many pixels; the number of a worker, at its end, stays. */
export function fitted(text: string, pixels: number, each = PER_LETTER): string {
  const most = Math.floor(pixels / each);
  if (text.length <= most) {
    return text;
  }
  const end = / \d+$/.exec(text)?.[0] ?? '';
  return most < 3 ? '' : `${text.slice(0, most - 1 - end.length)}…${end}`;
}

/** Copy a node's text, or where the page may not, choose it, to be copied by hand; the button that did says so. */
export async function copyText(node: Element, button: Element): Promise<void> {
  try {
    await navigator.clipboard.writeText(node.textContent ?? '');
  } catch {
    window.getSelection()?.selectAllChildren(node);
    return;
  }
  setText(button, 'copied');
  setTimeout(() => setText(button, 'copy'), COPIED_MS);
}

/** Three significant digits; a dash where nothing is known. */
export function number(value: number | null | undefined): string {
  return value === null || value === undefined || !Number.isFinite(value) ? '–' : digits(value);
}

/** MiB with their unit; nothing where nothing is known. */
export function mebibytes(mib: number | null): string {
  return mib === null ? '' : gib(mib * MIB);
}
