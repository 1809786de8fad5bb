/** What anywidget hands to a widget's module: its synced state, messages to and from Python, an element to draw into. */

type Handler = (content: unknown, buffers: readonly DataView[]) => void;

export interface Model<State> {
  get<Name extends keyof State>(name: Name): State[Name];
  /** `change:NAME` of what Python or another control set; `msg:custom` for messages. */
  on(event: string, handler: Handler): void;
  off(event: string, handler: Handler): void;
  send(content: unknown): void;
}

export interface Context<State> {
  readonly model: Model<State>;
  readonly el: HTMLElement;
}

/** Listens to a model until the drawing is gone. */
export class Listening<State> {
  constructor(private readonly model: Model<State>) {}

  on(event: string, handler: Handler): void {
    this.model.on(event, handler);
    this.handlers.push([event, handler]);
  }

  close(): void {
    for (const [event, handler] of this.handlers) {
      this.model.off(event, handler);
    }
  }

  private readonly handlers: [string, Handler][] = [];
}

/** Send Python a message; false where the kernel is gone, and its comm with it. */
export function tell<State>(model: Model<State>, message: unknown): boolean {
  try {
    model.send(message);
    return true;
  } catch {
    return false;
  }
}

/** A name nobody else has; crypto.randomUUID is not there on pages without https. */
export function unique(): string {
  return Math.random().toString(36).slice(2) + Date.now().toString(36);
}
