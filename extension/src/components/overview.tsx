import React from 'react';

import { duration } from '../format';
import { bandsOf } from '../memory';
import type { Bands } from '../memory';
import type { Sessions } from '../sessions';
import { nowOf } from '../view/condition';
import { ownerNames } from '../view/engines';
import { ordered, viewOf } from '../view/session';
import type { Action, Now } from '../view/shape';
import type { Trans } from '../text';
import { troubleSaid } from '../view/trouble';
import { Legend } from './charts';
import { Devices } from './devices';
import { SessionBlock } from './session';

interface Props {
  sessions: Sessions;
  /** Seconds between two looks. */
  interval: number;
  onPress: (name: string, action: Action) => void;
  onNew: () => void;
  trans: Trans;
}

/** All of the panel: the machine's memory, then a block for each session. */
export function Overview({ sessions, interval, onPress, onNew, trans }: Props): React.JSX.Element {
  const now = nowOf(sessions, interval, trans);
  const entries = ordered(sessions.entries);
  return (
    <div className="rlb-Overview" onKeyDown={moveBetween}>
      <ServerLine sessions={sessions} now={now} trans={trans} />
      <Devices sessions={sessions} now={now} stale={Boolean(sessions.trouble)} trans={trans} />
      {entries.length || !sessions.heard ? null : <NoSession onNew={onNew} trans={trans} />}
      {entries.map(entry => (
        <SessionBlock
          key={entry.listed.name}
          view={viewOf(entry, now, trans)}
          seconds={sessions.history}
          selected={entries.length > 1 && sessions.selected === entry.listed.name}
          onSelect={() => sessions.select(entry.listed.name)}
          onPress={action => onPress(entry.listed.name, action)}
          trans={trans}
        />
      ))}
      <Legend bands={bands(sessions)} names={ownerNames(trans)} trans={trans} />
    </div>
  );
}

/** Says where not even the server answers: nothing below is new then. */
function ServerLine(props: {
  sessions: Sessions;
  now: Now;
  trans: Trans;
}): React.JSX.Element | null {
  const { sessions, now, trans } = props;
  if (!sessions.trouble) {
    return sessions.heard ? null : <div className="rlb-quiet">{trans.__('looking …')}</div>;
  }
  const since = sessions.heard
    ? trans.__(
        'the Jupyter server does not answer, last heard %1 ago',
        duration(now.clock - sessions.heard)
      )
    : trans.__('the Jupyter server does not answer');
  return (
    <div className="rlb-Trouble" role="status">
      {trans.__('%1: %2', since, troubleSaid(sessions.trouble, trans))}
    </div>
  );
}

function NoSession(props: { onNew: () => void; trans: Trans }): React.JSX.Element {
  const { trans } = props;
  return (
    <div className="rlb-Empty">
      <p>{trans.__('No session. Begin one in a notebook:')}</p>
      <pre>{'import rlbench as rb\nsession = rb.Session("tiny")'}</pre>
      <button type="button" className="rlb-Chip" onClick={props.onNew}>
        {trans.__('New RL session')}
      </button>
    </div>
  );
}

/** The owners that the newest ends of the timelines show. */
function bands(sessions: Sessions): Bands {
  const newest = sessions.entries.flatMap(entry => entry.samples.slice(-1));
  return bandsOf(newest.flatMap(sample => Object.values(sample.owners)));
}

/** Arrow keys go from one session's block to the next. */
function moveBetween(event: React.KeyboardEvent<HTMLElement>): void {
  const blocks = [...event.currentTarget.querySelectorAll<HTMLElement>('.rlb-Session')];
  const at = blocks.findIndex(block => block.contains(document.activeElement));
  const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
  const next = to === undefined ? undefined : blocks[to];
  if (next) {
    event.preventDefault();
    next.focus();
  }
}
