/** The status bar's item: memory and phase of the sessions, in one line. */
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import type { Polling } from './polling';
import type { Sessions } from './sessions';
import { nowOf } from './view/condition';
import type { Trans } from './text';
import { summaryOf } from './view/summary';

/** How often ages are counted on, also where no answer comes. */
const CLOCK_MS = 1000;

export class StatusItem extends ReactWidget {
  constructor(
    private readonly sessions: Sessions,
    private readonly polling: Polling,
    private readonly open: () => void,
    private readonly trans: Trans
  ) {
    super();
    this.addClass('rlb-StatusItem');
    this.tick = window.setInterval(() => this.update(), CLOCK_MS);
  }

  override dispose(): void {
    window.clearInterval(this.tick);
    super.dispose();
  }

  protected override render(): React.JSX.Element {
    const { sessions, polling, trans } = this;
    return (
      <UseSignal signal={sessions.changed}>
        {() => {
          const now = nowOf(sessions, polling.interval, trans);
          const text = summaryOf(sessions.entries, now, trans);
          return text ? (
            <button
              type="button"
              className="jp-StatusBar-TextItem"
              title={trans.__('RL sessions: open the panel')}
              onClick={this.open}
            >
              {trans.__('RL %1', text)}
            </button>
          ) : (
            <></>
          );
        }}
      </UseSignal>
    );
  }

  private readonly tick: number;
}
