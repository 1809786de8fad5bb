/** One row for each engine of a session: its parts and where they are, its memory now and over time. */
import { timelineOf } from '../memory';
import type { OwnerNames } from '../memory';
import type { Part } from '../schema';
import type { Entry } from '../sessions';
import { say } from '../text';
import type { Trans } from '../text';
import type { SessionState } from '../wire';
import { actionOf } from './actions';
import { heldOf, saidOf } from './held';
import type { Chip, EngineView } from './shape';

export function enginesOf(
  entry: Entry,
  state: SessionState,
  onGpu: boolean,
  trans: Trans
): readonly EngineView[] {
  const lines = state.engines.map(({ workers }) =>
    timelineOf(
      entry.samples,
      workers.map(worker => worker.name),
      !onGpu
    )
  );
  // one scale for all engines of a session, so that their heights can be compared
  const top = Math.max(0, ...lines.map(line => line.top));
  return state.view.engines.map((engine, index) => {
    const held = state.engines[index];
    return {
      name: engine.name,
      kind: engine.kind.replace(' ', '\u00a0'),
      memory: held ? saidOf(heldOf(held, entry, onGpu)) : '',
      note: say(engine.note, trans),
      warns: engine.warns,
      chips: engine.parts.map(part => chipOf(part, entry, trans)),
      toggle: engine.toggle && actionOf(engine.toggle, entry, trans),
      timeline: { ...(lines[index] ?? timelineOf([], [])), top }
    };
  });
}

function chipOf({ toggle, shown, sign, word, resident }: Part, entry: Entry, trans: Trans): Chip {
  const action = actionOf(toggle, entry, trans);
  return { ...action, part: say(shown, trans), sign, word: say(word, trans), resident };
}

/** What a reader calls the owners of memory. */
export function ownerNames(trans: Trans): OwnerNames {
  return {
    weights: trans.__('weights'),
    gradients: trans.__('gradients'),
    optimizer: trans.__('optimizer'),
    kv_cache: trans.__('KV cache'),
    activations: trans.__('activations'),
    other: trans.__('other')
  };
}
