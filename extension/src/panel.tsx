/** The side panel itself: a Lumino widget that looks while it is seen. */
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import React from 'react';

import { Overview } from './components/overview';
import { panelIcon } from './icons';
import type { Polling } from './polling';
import type { Sessions } from './sessions';
import type { Action } from './view/shape';
import type { Trans } from './text';

/** How often ages are counted on, also where no answer comes. */
const CLOCK_MS = 1000;

export const PANEL_ID = 'rlbench-sessions';

export class Panel extends ReactWidget {
  constructor(
    private readonly sessions: Sessions,
    private readonly polling: Polling,
    private readonly handlers: {
      press: (name: string, action: Action) => void;
      begin: () => void;
    },
    private readonly trans: Trans
  ) {
    super();
    this.id = PANEL_ID;
    this.addClass('rlb-Panel');
    this.title.icon = panelIcon;
    this.title.caption = trans.__('RL sessions');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('RL sessions'));
  }

  protected override render(): React.JSX.Element {
    return (
      <UseSignal signal={this.sessions.changed}>
        {() => (
          <Overview
            sessions={this.sessions}
            interval={this.polling.interval}
            onPress={this.handlers.press}
            onNew={this.handlers.begin}
            trans={this.trans}
          />
        )}
      </UseSignal>
    );
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.look(this.isVisible);
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.look(true);
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.look(false);
  }

  protected override onBeforeDetach(message: Message): void {
    this.look(false);
    super.onBeforeDetach(message);
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.querySelector<HTMLElement>('.rlb-Session, button')?.focus();
  }

  private look(seen: boolean): void {
    window.clearInterval(this.tick);
    if (seen) {
      this.tick = window.setInterval(() => this.update(), CLOCK_MS);
    }
    this.polling.watch(seen);
  }

  private tick = 0;
}
