import React from 'react';

import { gib } from '../format';
import { OWNERS } from '../memory';
import type { Bands, Owner, OwnerNames, Timeline } from '../memory';
import type { Curve } from '../view/shape';
import type { Trans } from '../text';

const WIDTH = 200;
const TIMELINE_HEIGHT = 24;
const CURVE_HEIGHT = 20;

/** Memory by owner over time, stacked; the newest at the right edge, `seconds` wide. */
export function MemoryTimeline(props: {
  timeline: Timeline;
  seconds: number;
  names: OwnerNames;
}): React.JSX.Element {
  const { times, edges, top, last } = props.timeline;
  const said = OWNERS.flatMap(owner => {
    const bytes = last[owner];
    return bytes ? [`${props.names[owner]} ${gib(bytes)}`] : [];
  }).join(', ');
  const end = times[times.length - 1] ?? 0;
  const x = times.map(time => WIDTH * Math.max(0, 1 - (end - time) / props.seconds));
  const y = (bytes: number): number => TIMELINE_HEIGHT * (1 - (top ? bytes / top : 0));
  return (
    <svg
      className="rlb-Timeline"
      viewBox={`0 0 ${WIDTH} ${TIMELINE_HEIGHT}`}
      preserveAspectRatio="none"
      role="img"
      aria-label={said}
    >
      <title>{said}</title>
      {edges.map((edge, index) => {
        const below = edges[index - 1] ?? edge.map(() => 0);
        if (edge.every((bytes, at) => bytes === below[at])) {
          return null;
        }
        const upper = edge.map((bytes, at) => point(x[at], y(bytes)));
        const lower = below.map((bytes, at) => point(x[at], y(bytes))).reverse();
        const owner = OWNERS[index] ?? 'other';
        return (
          <polygon key={owner} points={[...upper, ...lower].join(' ')} fill={colourOf(owner)} />
        );
      })}
    </svg>
  );
}

/** Which colour is whose, for the owners that can be seen, and which are there but cannot. */
export function Legend(props: {
  bands: Bands;
  names: OwnerNames;
  trans: Trans;
}): React.JSX.Element {
  const { bands, names, trans } = props;
  const thin = bands.thin.map(owner => names[owner]).join(', ');
  return (
    <div className="rlb-Legend">
      {bands.seen.map(owner => (
        <span key={owner}>
          <i style={{ background: colourOf(owner) }} />
          {names[owner]}
        </span>
      ))}
      {thin ? <span className="rlb-quiet">{trans.__('too thin to see: %1', thin)}</span> : null}
    </div>
  );
}

/** A metric over the last steps, with its newest value in front. */
export function Sparkline({ curve }: { curve: Curve }): React.JSX.Element {
  const { values } = curve;
  const low = Math.min(...values);
  const extent = Math.max(...values) - low;
  const points = values.map((value, index) =>
    point(
      values.length > 1 ? (WIDTH * index) / (values.length - 1) : WIDTH,
      1 + (CURVE_HEIGHT - 2) * (1 - (extent ? (value - low) / extent : 0.5))
    )
  );
  return (
    <div className="rlb-Curve">
      <span className="rlb-quiet">{curve.label}</span> <b>{curve.last}</b>
      <svg
        viewBox={`0 0 ${WIDTH} ${CURVE_HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={curve.title}
      >
        <title>{curve.title}</title>
        {values.length > 1 ? <polyline points={points.join(' ')} /> : null}
      </svg>
    </div>
  );
}

function colourOf(owner: Owner): string {
  return `var(--rlb-${owner.replace('_', '-')})`;
}

function point(x: number | undefined, y: number): string {
  return `${(x ?? 0).toFixed(1)},${y.toFixed(1)}`;
}
