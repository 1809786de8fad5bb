/** The form below the list: continue the completion under the cursor from its token. */
import { add, copyText, setText } from './dom';
import type { Row } from './rows';

const UNDER_ONE =
  'by the weights that the engine has now; session.snapshot() keeps some to choose from';
const UNDER_MANY =
  'whose weights continue: an adapter, or a kept version; the policy: as it is in the engine now';
const NO_PLACE = 'Continue from a token: click one, or go to it with the arrow keys, then Tab.';
const NO_KERNEL = 'no kernel: nothing can be continued';

/** As rlbench/notebook/rollouts/continuing.py publishes it. */
export interface ForkState {
  /** Why nothing can be continued; "" where it can. */
  readonly why: string;
  /** What the rollouts are in a cell. */
  readonly name: string;
  /** Adapters; null before that is known. */
  readonly under: readonly string[] | null;
  readonly busy: boolean;
  readonly said: string;
  readonly bad: boolean;
}

export interface ForkAsked {
  readonly sample: number;
  readonly at: number;
  readonly n: number;
  readonly text: string;
  readonly under: string;
}

/** What the form does when it is told to; false where there is no kernel. */
export interface ForkActs {
  choices(): boolean;
  start(asked: ForkAsked): boolean;
  stop(): boolean;
  /** Back to the list. */
  leave(): void;
}

export class ForkForm {
  constructor(
    parent: Element,
    private state: ForkState,
    private readonly acts: ForkActs
  ) {
    this.parts = makeForm(parent);
    const { form, n, text, under, call, copy } = this.parts;
    form.addEventListener('submit', event => {
      event.preventDefault();
      this.press();
    });
    form.addEventListener('keydown', event => this.key(event));
    for (const field of [n, text, under]) {
      field.addEventListener('input', () => this.draw());
    }
    copy.addEventListener('click', () => void copyText(call, copy));
    this.show(state);
  }

  /** Draw what Python says. */
  show(state: ForkState): void {
    const { under } = this.parts;
    if (state.under !== this.state.under || !under.options.length) {
      const chosen = under.value;
      const names = ['', ...(state.under ?? [])];
      under.replaceChildren(...names.map(name => new Option(name || 'the policy', name)));
      under.value = names.includes(chosen) ? chosen : '';
      under.title = names.length > 1 ? UNDER_MANY : UNDER_ONE;
    }
    this.state = state;
    this.draw();
  }

  /** Continue from this token of this completion, or from none. */
  choose(row: Row | undefined, token: number | null): void {
    const at = row === undefined ? null : token;
    if (this.row === row && this.at === at) {
      return;
    }
    this.row = row;
    this.at = at;
    if (at !== null && !this.known) {
      this.known = this.acts.choices();
      this.dead = !this.known;
    }
    this.draw();
  }

  /** What the form asks for; null where it is not filled in. */
  private get asked(): ForkAsked | null {
    const { n, text, under } = this.parts;
    const count = Number(n.value);
    if (!this.row || this.at === null || !Number.isInteger(count) || count < 1) {
      return null;
    }
    const fields = { n: count, text: text.value, under: under.value };
    return { sample: this.row.i, at: this.at, ...fields };
  }

  private press(): void {
    const { asked } = this;
    if (this.state.busy) {
      this.dead = !this.acts.stop();
    } else if (asked) {
      this.dead = !this.acts.start(asked);
    }
    this.draw();
  }

  private key(event: KeyboardEvent): void {
    const [leaves, starts] = [event.key === 'Escape', isEnterInField(event)];
    if (!leaves && !starts) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    if (leaves) {
      this.acts.leave();
    } else if (!this.state.busy) {
      this.press();
    }
  }

  private draw(): void {
    const { state, asked, parts } = this;
    const { busy, why } = state;
    parts.form.hidden = why !== '';
    parts.said.hidden = why !== '';
    setText(parts.place, this.row && this.at !== null ? placeOf(this.row, this.at) : NO_PLACE);
    parts.form.classList.toggle('placed', this.at !== null);
    setText(parts.go, busy ? 'stop' : 'continue');
    parts.go.disabled = this.dead || (!busy && !asked);
    parts.go.title = busy ? 'stop it: what is drawn so far stays' : titleOf(asked, parts.n.value);
    const code = asked ? state.name + callOf(asked) : '';
    setText(parts.call, code);
    parts.call.title = code;
    parts.copy.disabled = !code;
    for (const field of [parts.n, parts.text, parts.under]) {
      field.disabled = this.dead;
    }
    setText(parts.said, this.dead ? NO_KERNEL : state.said);
    parts.said.classList.toggle('bad', this.dead || state.bad);
  }

  private readonly parts: Parts;
  private row: Row | undefined;
  private at: number | null = null;
  /** Whether the adapters were asked for. */
  private known = false;
  private dead = false;
}

interface Parts {
  readonly form: HTMLFormElement;
  readonly place: HTMLElement;
  readonly n: HTMLInputElement;
  readonly text: HTMLInputElement;
  readonly under: HTMLSelectElement;
  readonly go: HTMLButtonElement;
  readonly call: HTMLElement;
  readonly copy: HTMLButtonElement;
  readonly said: HTMLElement;
}

function makeForm(parent: Element): Parts {
  const form = add(parent, 'form', 'fork');
  form.noValidate = true;
  form.setAttribute('aria-label', 'continue from a token');
  form.dataset['lmSuppressShortcuts'] = 'true'; // what is typed is no command of JupyterLab's
  const place = add(form, 'span', 'place');
  const fields = add(form, 'span', 'fields');
  const n = add(labelled(fields, 'n'), 'input');
  Object.assign(n, { type: 'number', min: '1', value: '16', title: 'so many continuations' });
  const text = add(labelled(fields, 'text'), 'input');
  const title = 'written in place of the token and all behind it, before what is drawn';
  Object.assign(text, { type: 'text', placeholder: 'none', title });
  const under = add(labelled(fields, 'under'), 'select');
  const go = add(fields, 'button', 'go', 'continue');
  go.type = 'submit';
  const call = add(form, 'code', 'call');
  const copy = add(form, 'button', 'copy', 'copy');
  Object.assign(copy, { type: 'button', title: 'copy the call that does the same in a cell' });
  const said = add(parent, 'div', 'forksaid');
  said.setAttribute('role', 'status');
  return { form, place, n, text, under, go, call, copy, said };
}

function labelled(parent: Element, text: string): HTMLElement {
  return add(parent, 'label', '', text);
}

/** Enter in a field, which starts a fork and stops none; JupyterLab's page does not submit forms by it. */
function isEnterInField({ key, target, isComposing }: KeyboardEvent): boolean {
  return key === 'Enter' && !isComposing && target instanceof HTMLInputElement;
}

function placeOf({ p, k }: Row, at: number): string {
  return `Continue from token ${at} of completion ${k} of prompt ${p}`;
}

function titleOf(asked: ForkAsked | null, n: string): string {
  if (!asked) {
    return Number(n) >= 1 ? NO_PLACE : 'n: a whole number, at least 1';
  }
  const kept = asked.at ? `keep its first ${asked.at} tokens` : 'keep nothing of it but its prompt';
  const text = asked.text ? ', then the text,' : '';
  return `draw ${asked.n} completions that ${kept}${text} and show them below it`;
}

/** The same in a cell; JSON's strings are Python's. */
export function callOf({ sample, at, n, text, under }: ForkAsked): string {
  const options = [`at=${at}`, `n=${n}`];
  if (text) {
    options.push(`text=${JSON.stringify(text)}`);
  }
  if (under) {
    options.push(`under=${JSON.stringify(under)}`);
  }
  return `.fork(${sample}, ${options.join(', ')})`;
}
