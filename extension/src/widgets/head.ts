/**
 * Head of the dashboard: name, phase, one line of answers. A press of the controls around it is caught here, before
 * ipywidgets sees it, so that a toggle shows what was measured and never what was wished.
 */
import { readCommand } from '../wire';
import type { Command } from '../wire';
import { pageApi } from './connection';
import { add, setText } from './dom';
import { Listening, tell, unique } from './model';
import type { Context, Model } from './model';
import { answerOf, Server } from './press';
import type { Control } from './press';

/** The kernel says something every 5 s. */
const QUIET_MS = 9000;
const KERNEL_PATIENCE_MS = 1500;

interface State {
  readonly name: string;
  readonly head: {
    readonly model: string;
    readonly step: number;
    readonly version: number;
    readonly branch: string;
    readonly phase: {
      readonly text: string;
      readonly busy: boolean;
      readonly fraction: number | null;
      readonly left: string;
    };
    readonly error: string;
  };
  readonly controls: readonly Control[];
  /** What became of a press that went through the kernel. */
  readonly said: { readonly id?: string; readonly error?: string; readonly command?: unknown };
  readonly trouble: { readonly text: string; readonly since: number; readonly ended: boolean };
  readonly hears_while_busy: boolean;
}

interface Line {
  readonly text: string;
  readonly bad: boolean;
}

export default () => {
  let lastHeard = Date.now();
  return {
    initialize({ model }: Context<State>): void {
      const heard = (): void => {
        lastHeard = Date.now();
      };
      model.on('msg:custom', heard);
      for (const name of ['head', 'controls', 'said', 'trouble']) {
        model.on(`change:${name}`, heard);
      }
    },

    render({ model, el }: Context<State>): () => void {
      const head = new Head(model, el, () => lastHeard);
      return () => head.close();
    }
  };
};

class Head {
  constructor(
    private readonly model: Model<State>,
    private readonly el: HTMLElement,
    private readonly lastHeard: () => number
  ) {
    this.parts = makeHead(el);
    this.server = new Server(pageApi(), model.get('name'));
    this.listening = new Listening(model);
    this.error = model.get('head').error;
    requestAnimationFrame(this.claim);
    this.listening.on('change:head', this.draw);
    this.listening.on('change:trouble', this.draw);
    this.listening.on('change:controls', this.decorate);
    this.listening.on('change:said', this.hear);
    this.clock = setInterval(this.draw, 1000);
    window.addEventListener('pagehide', this.leave);
    void this.server.knows().then(this.decorate);
    tell(model, { here: true, page: this.page });
    this.draw();
  }

  close(): void {
    this.shown = false;
    clearInterval(this.clock);
    window.removeEventListener('pagehide', this.leave);
    this.frame?.removeEventListener('click', this.click, true);
    this.listening.close();
    this.leave();
  }

  private readonly draw = (): void => {
    const { head, trouble } = { head: this.model.get('head'), trouble: this.trouble() };
    drawHead(this.parts, this.model.get('name'), head);
    if (this.error !== head.error) {
      // newer than the answer to the last press
      this.error = head.error;
      this.status = { text: '', bad: false };
    }
    const said = this.status.text ? this.status : { text: this.error, bad: true };
    const lines = [trouble, said].filter(line => line?.text) as Line[];
    setText(this.parts.status, lines.map(line => line.text).join(' · '));
    this.parts.status.classList.toggle(
      'rlb-w',
      lines.some(line => line.bad)
    );
    this.parts.root.classList.toggle('rlb-stale', Boolean(trouble));
  };

  /** Why the numbers are old; null while they are new. */
  private trouble(): Line | null {
    const { text, since, ended } = this.model.get('trouble');
    if (ended) {
      return { text: `${text}: these are its last numbers`, bad: false };
    }
    if (text) {
      return { text: `stale ${ago(since * 1000)}: ${text}`, bad: true };
    }
    if (Date.now() - this.lastHeard() <= QUIET_MS) {
      return null;
    }
    const why = 'the kernel says nothing, it is held up or gone';
    const way = this.server.known ? '; the controls go on through the Jupyter server' : '';
    return { text: `stale ${ago(this.lastHeard())}: ${why}${way}`, bad: true };
  }

  private say(text: string, bad = false): void {
    this.status = { text, bad };
    this.draw();
  }

  private async press(control: Control): Promise<void> {
    const what = control.command;
    this.say(`${what} …`);
    try {
      const command = await this.server.press(control);
      if (command) {
        this.answer(control, command);
        return;
      }
    } catch (error) {
      this.say(error instanceof Error ? error.message : String(error), true);
      return;
    }
    const id = unique();
    this.waiting.set(id, control);
    if (!tell(this.model, { do: control.key, id, page: this.page })) {
      this.waiting.delete(id);
      this.say(`${what}: neither the kernel nor the Jupyter server reaches the session`, true);
      return;
    }
    setTimeout(() => {
      if (this.waiting.has(id)) {
        this.say(`${what}: the kernel is busy; takes effect when the cell ends`);
      }
    }, KERNEL_PATIENCE_MS);
  }

  private answer(control: Control, command: Command): void {
    this.say(answerOf(control, command), command.state === 'failed');
  }

  private readonly hear = (): void => {
    const { id = '', error, command } = this.model.get('said');
    const control = this.waiting.get(id);
    if (!control) {
      return;
    }
    this.waiting.delete(id);
    if (error) {
      this.say(error, true);
    } else {
      this.answer(control, readCommand({ command }));
    }
  };

  private readonly click = (event: Event): void => {
    const node = (event.target as Element).closest<HTMLButtonElement>('.rlb-control');
    const found = /\brlb-control-(\d+)\b/.exec(node?.className ?? '')?.[1];
    const control = this.model.get('controls')[Number(found)];
    if (node && control && !node.disabled) {
      event.preventDefault();
      event.stopPropagation();
      void this.press(control);
    }
  };

  /** The frame is known once the head has been put into it. */
  private readonly claim = (): void => {
    this.frame = this.el.closest('.rlb-dashboard');
    if (this.frame) {
      this.frame.classList.add('rlb-live');
      this.frame.addEventListener('click', this.click, true);
      this.decorate();
    } else if (this.shown) {
      requestAnimationFrame(this.claim);
    }
  };

  private readonly decorate = (): void => {
    requestAnimationFrame(() => {
      const late = !this.server.known && !this.model.get('hears_while_busy');
      const delay = late ? ' (during a cell: takes effect when the cell ends)' : '';
      this.model.get('controls').forEach((control, i) => {
        const nodes = this.frame?.querySelectorAll<HTMLElement>(`.rlb-control-${i}`) ?? [];
        for (const node of nodes) {
          node.title = control.title + (control.enabled ? delay : '');
          node.setAttribute('aria-label', control.name); // its text begins with the glyph of its icon
          if (control.pressed !== null) {
            node.setAttribute('aria-pressed', String(control.pressed));
          }
        }
      });
    });
  };

  private readonly leave = (): void => {
    tell(this.model, { gone: true, page: this.page });
  };

  private readonly page = unique();
  private readonly parts: Parts;
  private readonly server: Server;
  private readonly listening: Listening<State>;
  private readonly waiting = new Map<string, Control>();
  private readonly clock: ReturnType<typeof setInterval>;
  private status: Line = { text: '', bad: false };
  private error: string;
  private frame: Element | null = null;
  private shown = true;
}

interface Parts {
  readonly root: Element;
  readonly title: Element;
  readonly model: Element;
  readonly place: Element;
  readonly phase: Element;
  readonly bar: HTMLProgressElement;
  readonly left: Element;
  readonly status: Element;
}

function makeHead(el: Element): Parts {
  const root = add(el, 'div', 'rlb-head');
  const top = add(root, 'div', 'rlb-head-line');
  const phase = add(root, 'div', 'rlb-phase');
  const parts = {
    root,
    title: add(top, 'b'),
    model: add(top, 'span', 'rlb-q'),
    place: add(top, 'span'),
    phase: add(phase, 'span'),
    bar: add(phase, 'progress'),
    left: add(phase, 'span', 'rlb-q'),
    status: add(root, 'div', 'rlb-status')
  };
  parts.bar.max = 1;
  parts.bar.setAttribute('aria-label', 'progress of what runs');
  parts.status.setAttribute('role', 'status');
  return parts;
}

function drawHead(parts: Parts, name: string, head: State['head']): void {
  const { text, busy, fraction, left } = head.phase;
  setText(parts.title, `rlbench · ${name}`);
  setText(parts.model, head.model);
  const branch = head.branch === 'main' ? '' : ` · ${head.branch}`;
  setText(parts.place, `step ${head.step} · v${head.version}${branch}`);
  setText(parts.phase, `${busy ? '▶' : '■'} ${text}`);
  parts.bar.hidden = !busy || fraction === null;
  if (fraction !== null) {
    parts.bar.value = fraction;
  }
  setText(parts.left, left && `~${left}`);
}

function ago(since: number): string {
  return since ? `${Math.round((Date.now() - since) / 1000)} s` : '';
}
