import React from 'react';

import type { OwnerNames } from '../memory';
import { ownerNames } from '../view/engines';
import type { Action, EngineView, View } from '../view/shape';
import type { Trans } from '../text';
import { ChipButton, IconButton, Toolbar } from './buttons';
import { MemoryTimeline, Sparkline } from './charts';

interface Props {
  view: View;
  /** Seconds that a timeline is wide. */
  seconds: number;
  selected: boolean;
  onSelect: () => void;
  onPress: (action: Action) => void;
  trans: Trans;
}

/** One block of the panel. All text is text: names and messages were written by others. */
export function SessionBlock(props: Props): React.JSX.Element {
  const { view, trans } = props;
  const names = ownerNames(trans);
  const classes = ['rlb-Session', `rlb-mod-${view.condition}`];
  if (view.staleFor !== null || view.condition === 'gone') {
    classes.push('rlb-mod-stale');
  }
  if (props.selected) {
    classes.push('rlb-mod-selected');
  }
  return (
    <section
      className={classes.join(' ')}
      tabIndex={0}
      aria-label={trans.__('session %1, %2', view.name, view.status)}
      aria-current={props.selected}
      data-session={view.name}
      onFocus={props.onSelect}
      onClick={props.onSelect}
    >
      <header>
        <b className="rlb-name">{view.name}</b>
        <span className={`rlb-Status rlb-mod-${view.condition}`} role="status">
          {view.status}
        </span>
        {view.stale ? <span className="rlb-Stale">{view.stale}</span> : null}
      </header>
      <div className="rlb-numbers">
        {view.facts ? <div className="rlb-Facts rlb-quiet">{view.facts}</div> : null}
        <PhaseLine view={view} />
      </div>
      <Toolbar
        label={trans.__('what can be done with %1', view.name)}
        actions={view.actions}
        onPress={props.onPress}
      />
      {view.notice ? (
        <div
          className={view.noticeFailed ? 'rlb-Notice rlb-mod-failed' : 'rlb-Notice'}
          role="status"
        >
          {view.notice}
        </div>
      ) : null}
      {view.trouble ? <div className="rlb-Trouble">{view.trouble}</div> : null}
      <div className="rlb-numbers">
        {view.engines.map(engine => (
          <EngineRow
            key={engine.name}
            engine={engine}
            seconds={props.seconds}
            names={names}
            onPress={props.onPress}
          />
        ))}
        {view.curves.length ? (
          <div className="rlb-Curves">
            {view.curves.map(curve => (
              <Sparkline key={curve.label} curve={curve} />
            ))}
          </div>
        ) : null}
      </div>
      {view.error ? (
        <div className="rlb-Error" title={view.error}>
          {view.error}
        </div>
      ) : null}
    </section>
  );
}

function PhaseLine({ view }: { view: View }): React.JSX.Element | null {
  const { text, share, left } = view.phase;
  if (!text) {
    return null;
  }
  return (
    <div className="rlb-Phase">
      <span className="rlb-what">▶ {text}</span>
      {share === null ? null : <progress max={1} value={share} aria-label={text} />}
      {left ? <span className="rlb-quiet rlb-number">{left}</span> : null}
    </div>
  );
}

function EngineRow(props: {
  engine: EngineView;
  seconds: number;
  names: OwnerNames;
  onPress: (action: Action) => void;
}): React.JSX.Element {
  const { engine, onPress } = props;
  return (
    <div className="rlb-Engine" role="group" aria-label={engine.name}>
      <div className="rlb-Engine-head">
        <span className="rlb-Engine-title">
          <b className="rlb-name">{engine.name}</b> <span className="rlb-quiet">{engine.kind}</span>{' '}
          {engine.warns ? null : <span className="rlb-quiet">{engine.note}</span>}
        </span>
        <span className="rlb-number">{engine.memory}</span>
        {engine.toggle ? <IconButton action={engine.toggle} onPress={onPress} /> : null}
      </div>
      {engine.warns ? <div className="rlb-warns">⚠ {engine.note}</div> : null}
      <div className="rlb-Chips">
        {engine.chips.map(chip => (
          <ChipButton key={chip.part} action={chip} onPress={onPress} />
        ))}
      </div>
      {engine.timeline.top ? (
        <MemoryTimeline timeline={engine.timeline} seconds={props.seconds} names={props.names} />
      ) : null}
    </div>
  );
}
