import React from 'react';

import { gib, percent } from '../format';
import type { Sessions } from '../sessions';
import { joined, sessionHeld } from '../view/held';
import { age } from '../view/condition';
import type { Now } from '../view/shape';
import type { Trans } from '../text';
import type { Machine } from '../wire';

/** One bar per device, and the host's. The sessions' part is told where all they hold lies on that one device. */
export function Devices(props: {
  sessions: Sessions;
  now: Now;
  stale: boolean;
  trans: Trans;
}): React.JSX.Element {
  const { sessions, now, trans } = props;
  const { gpus, memory } = sessions;
  const onGpu = gpus.length > 0;
  const live = sessions.entries.filter(
    entry => entry.listed.state === 'live' && age(entry, now) === null
  );
  const held = joined(live.flatMap(entry => sessionHeld(entry, onGpu) ?? []))?.bytes ?? 0;
  const shared = trans.__(
    'The coloured part: workers of the sessions, libraries they share counted each time'
  );
  return (
    <div className={props.stale ? 'rlb-Devices rlb-mod-stale' : 'rlb-Devices'}>
      {gpus.map((gpu, index) => (
        <DeviceBar
          key={index}
          name={trans.__('GPU %1', index)}
          device={gpu}
          {...(gpus.length === 1 ? { ours: held } : {})}
          title={gpu.name}
          trans={trans}
        />
      ))}
      {sessions.gpusError ? (
        <div className="rlb-Trouble">{trans.__('GPU memory: %1', sessions.gpusError)}</div>
      ) : null}
      {memory ? (
        <DeviceBar
          name={trans.__('host')}
          device={memory}
          {...(onGpu ? {} : { ours: held })}
          title={onGpu ? '' : shared}
          trans={trans}
        />
      ) : null}
    </div>
  );
}

/** A device's memory: how much of it is used, by all processes and, where that is known, by the sessions. */
function DeviceBar(props: {
  name: string;
  device: Machine;
  /** The part of it that the sessions hold, in bytes; left out where it is not known. */
  ours?: number;
  title: string;
  trans: Trans;
}): React.JSX.Element {
  const { name, ours, trans } = props;
  const { used, total } = props.device;
  if (!total) {
    return <div className="rlb-Device">{name}</div>; // it does not tell
  }
  const own = Math.min(ours ?? 0, used);
  const width = (bytes: number): React.CSSProperties => ({
    width: `${Math.min(100, (100 * bytes) / total)}%`
  });
  const said = trans.__('%1 of %2 used', gib(used), gib(total));
  const parts = ours === undefined ? said : trans.__('%1, %2 by the sessions', said, gib(own));
  return (
    <div className="rlb-Device" title={[props.title, parts].filter(text => text).join('. ')}>
      <span>{name}</span>
      <span
        className="rlb-Bar"
        role="meter"
        aria-label={[name, props.title].filter(text => text).join('. ')}
        aria-valuemin={0}
        aria-valuemax={total}
        aria-valuenow={used}
        aria-valuetext={parts}
      >
        <i className="rlb-mod-ours" style={width(own)} />
        <i className="rlb-mod-others" style={width(used - own)} />
      </span>
      <span className="rlb-number" aria-hidden="true">
        {gib(used)} / {gib(total)} <span className="rlb-quiet">{percent(used / total)}</span>
      </span>
    </div>
  );
}
