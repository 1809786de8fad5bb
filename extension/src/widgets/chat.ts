/**
 * A chat with the policy: what was said, the answers to the last turn side by side, and a form to go on. Python's half
 * is rlbench/notebook/chat: Talking.hear says what can be asked for.
 */
import { add, copyText, setText } from './dom';
import { Listening, tell } from './model';
import type { Context, Model } from './model';

const EMPTY = 'Nothing was said yet.';
const NO_KERNEL = 'no kernel: the chat cannot go on';

export interface Turn {
  readonly role: string;
  readonly text: string;
}

export interface Answer {
  /** Who says it. */
  readonly head: string;
  readonly text: string;
  readonly note: string;
  /** Whether it is still drawn. */
  readonly growing: boolean;
}

export interface ChatState {
  readonly turns: readonly Turn[];
  readonly answers: readonly Answer[];
  /** The answer that is preferred. */
  readonly chosen: number | null;
  readonly busy: boolean;
  readonly said: string;
  readonly bad: boolean;
  readonly facts: string;
  /** What does something with the chat in a cell. */
  readonly code: string;
  /** The answer whose tokens are shown below. */
  readonly opened: number | null;
}

export class ChatDrawing {
  constructor(
    private readonly model: Model<ChatState>,
    el: HTMLElement
  ) {
    el.classList.add('rlbc', 'rlb-live');
    this.parts = makeParts(el);
    this.listening = new Listening(model);
    this.listening.on('change:turns', () => this.drawTurns());
    for (const name of ['answers', 'chosen', 'opened', 'busy']) {
      this.listening.on(`change:${name}`, () => this.drawAnswers());
    }
    for (const name of ['said', 'bad', 'facts', 'code']) {
      this.listening.on(`change:${name}`, () => this.drawForm());
    }
    this.listenToForm();
    this.drawTurns();
  }

  close(): void {
    this.listening.close();
  }

  private listenToForm(): void {
    const { form, text, again, code, copy } = this.parts;
    form.addEventListener('submit', event => {
      event.preventDefault();
      this.press();
    });
    form.addEventListener('keydown', event => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing && event.target === text) {
        event.preventDefault();
        event.stopPropagation();
        if (!this.model.get('busy')) {
          this.press();
        }
      }
    });
    text.addEventListener('input', () => this.drawForm());
    again.addEventListener('click', () => this.ask({ kind: 'again' }));
    copy.addEventListener('click', () => void copyText(code, copy));
  }

  /** Say what the field has, or stop what is drawn. */
  private press(): void {
    const { text } = this.parts;
    if (this.model.get('busy')) {
      this.ask({ kind: 'stop' });
    } else if (text.value.trim()) {
      const after = this.after === null ? {} : { after: this.after };
      if (this.ask({ kind: 'say', text: text.value, ...after })) {
        text.value = '';
        this.after = null;
      }
    }
    this.drawForm();
  }

  private ask(message: Readonly<Record<string, unknown>>): boolean {
    this.dead = !tell(this.model, message);
    if (this.dead) {
      this.drawAnswers();
    }
    return !this.dead;
  }

  /** The answer that the next words follow: the one chosen here, else the preferred one, else the first. */
  private get followed(): number {
    return this.after ?? this.model.get('chosen') ?? 0;
  }

  private drawTurns(): void {
    const turns = this.model.get('turns');
    this.after = null;
    this.parts.turns.replaceChildren();
    if (!turns.length) {
      add(this.parts.turns, 'div', 'hint', EMPTY);
    }
    for (const { role, text } of turns) {
      const line = add(this.parts.turns, 'div', `turn ${role === 'user' ? 'user' : 'other'}`);
      add(line, 'span', 'role', role);
      add(line, 'span', 'text', text);
    }
    this.drawAnswers();
  }

  /** Draw the answers; cards that are there stay, so that focus and selected text do while others grow. */
  private drawAnswers(): void {
    const answers = this.model.get('answers');
    const { cards } = this;
    while (cards.length > answers.length) {
      cards.pop()?.box.remove();
    }
    answers.forEach((answer, i) => {
      const card = (cards[i] ??= this.makeCard(i));
      this.drawCard(card, answer, i);
    });
    this.parts.answers.hidden = !answers.length;
    this.drawForm();
  }

  private makeCard(i: number): Card {
    const box = add(this.parts.answers, 'div', 'answer');
    box.setAttribute('role', 'group');
    const top = add(box, 'div', 'top');
    const head = add(top, 'span', 'head');
    const note = add(top, 'span', 'note');
    const text = add(box, 'div', 'text');
    const foot = add(box, 'div', 'foot');
    const button = (label: string, press: () => void): HTMLButtonElement => {
      const made = add(foot, 'button', '', label);
      made.type = 'button';
      made.addEventListener('click', press);
      return made;
    };
    const prefer = button('prefer', () => this.ask({ kind: 'prefer', answer: i }));
    const follow = button('reply', () => {
      this.after = i;
      this.drawAnswers();
      this.parts.text.focus();
    });
    const tokens = button('tokens', () => this.ask({ kind: 'tokens', answer: i }));
    return { box, head, note, text, prefer, follow, tokens };
  }

  private drawCard(card: Card, answer: Answer, i: number): void {
    const [chosen, opened] = [this.model.get('chosen') === i, this.model.get('opened') === i];
    card.box.classList.toggle('chosen', chosen);
    card.box.classList.toggle('followed', !answer.growing && this.followed === i);
    card.box.classList.toggle('growing', answer.growing);
    card.box.setAttribute('aria-label', `answer ${i}, ${answer.head}`);
    card.box.setAttribute('aria-busy', String(answer.growing));
    setText(card.head, `${chosen ? '✓ ' : ''}${i} · ${answer.head}`);
    setText(card.note, answer.note);
    setText(card.text, answer.text || (answer.growing ? '…' : '(nothing)'));
    card.text.classList.toggle('none', !answer.text);
    const held = answer.growing || this.dead || this.model.get('busy');
    for (const one of [card.prefer, card.follow, card.tokens]) {
      one.disabled = held;
    }
    card.prefer.setAttribute('aria-pressed', String(chosen));
    card.prefer.title = chosen
      ? 'take it back: no pairs of this turn'
      : 'prefer it: a pair with each other answer that differs is noted, and it is gone on from';
    card.follow.title = 'what is said next follows this answer; no pair is noted';
    card.tokens.setAttribute('aria-pressed', String(opened));
    card.tokens.title = opened
      ? 'close its tokens'
      : 'show its tokens below: their numbers, and a form that continues it from one of them';
  }

  private drawForm(): void {
    const { model, parts } = this;
    const [busy, answers, turns] = [model.get('busy'), model.get('answers'), model.get('turns')];
    setText(parts.facts, model.get('facts'));
    setText(parts.go, busy ? 'stop' : 'say');
    parts.go.disabled = this.dead || (!busy && !parts.text.value.trim());
    parts.go.title = busy ? 'stop: what is drawn so far stays' : 'say it: every speaker answers';
    parts.again.disabled = this.dead || busy || turns.at(-1)?.role !== 'user';
    parts.again.title =
      'have the weights that the engine has now answer the last turn once more, beside these';
    parts.text.disabled = this.dead;
    parts.text.placeholder = answers.length
      ? `say something to answer ${this.followed}`
      : 'say something';
    setText(parts.code, model.get('code'));
    parts.code.title = model.get('code');
    setText(parts.said, this.dead ? NO_KERNEL : model.get('said'));
    parts.said.classList.toggle('bad', this.dead || model.get('bad'));
  }

  private readonly parts: Parts;
  private readonly cards: Card[] = [];
  private readonly listening: Listening<ChatState>;
  private after: number | null = null;
  private dead = false;
}

interface Card {
  readonly box: HTMLElement;
  readonly head: HTMLElement;
  readonly note: HTMLElement;
  readonly text: HTMLElement;
  readonly prefer: HTMLButtonElement;
  readonly follow: HTMLButtonElement;
  readonly tokens: HTMLButtonElement;
}

interface Parts {
  readonly facts: HTMLElement;
  readonly turns: HTMLElement;
  readonly answers: HTMLElement;
  readonly form: HTMLFormElement;
  readonly text: HTMLTextAreaElement;
  readonly go: HTMLButtonElement;
  readonly again: HTMLButtonElement;
  readonly code: HTMLElement;
  readonly copy: HTMLButtonElement;
  readonly said: HTMLElement;
}

function makeParts(el: HTMLElement): Parts {
  const top = add(el, 'div', 'title');
  add(top, 'b', '', 'chat');
  const facts = add(top, 'span', 'facts');
  const turns = add(el, 'div', 'turns');
  turns.setAttribute('role', 'log');
  const answers = add(el, 'div', 'answers');
  const form = add(el, 'form', 'form');
  form.noValidate = true;
  form.setAttribute('aria-label', 'say something');
  form.dataset['lmSuppressShortcuts'] = 'true'; // what is typed is no command of JupyterLab's
  const text = add(form, 'textarea', '');
  Object.assign(text, { rows: 2, title: 'Enter says it, Shift+Enter begins a line' });
  text.setAttribute('aria-label', 'what is said next');
  const buttons = add(form, 'span', 'buttons');
  const go = add(buttons, 'button', 'go', 'say');
  go.type = 'submit';
  const again = add(buttons, 'button', '', 'again');
  again.type = 'button';
  const foot = add(el, 'div', 'foot');
  const said = add(foot, 'span', 'said');
  said.setAttribute('role', 'status');
  const code = add(foot, 'code', 'code');
  const copy = add(foot, 'button', 'copy', 'copy');
  Object.assign(copy, { type: 'button', title: 'copy what does this in a cell' });
  return { facts, turns, answers, form, text, go, again, code, copy, said };
}

export default {
  render({ model, el }: Context<ChatState>): () => void {
    const drawing = new ChatDrawing(model, el);
    return () => drawing.close();
  }
};
