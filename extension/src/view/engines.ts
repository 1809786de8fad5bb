/** One row for each engine of a session: its parts and where they are, its memory now and over time. */
import { gib, short } from '../format';
import { timelineOf } from '../memory';
import type { OwnerNames } from '../memory';
import type { Entry } from '../sessions';
import type { Engine, SessionState } from '../wire';
import { heldBy } from './actions';
import { heldOf, saidOf } from './held';
import type { Action, Chip, EngineView, Trans } from './shape';

export function enginesOf(
  entry: Entry,
  state: SessionState,
  onGpu: boolean,
  trans: Trans
): readonly EngineView[] {
  const window = entry.samples;
  const lines = state.engines.map(engine =>
    timelineOf(
      window,
      engine.workers.map(worker => worker.name),
      !onGpu
    )
  );
  // one scale for all engines of a session, so that their heights can be compared
  const top = Math.max(0, ...lines.map(line => line.top));
  const held = heldBy(entry, state, trans);
  return state.engines.map((engine, index) => {
    const [note, warns] = noteOf(engine, state.version, trans);
    const kind = `${short(engine.executor || engine.kind || '?')}\u00a0×${engine.workers.length}`;
    return {
      name: short(engine.name),
      kind,
      memory: saidOf(heldOf(engine, entry, onGpu)),
      note,
      warns,
      chips: Object.entries(engine.parts).map(([part, where]) =>
        chipOf(engine, part, where, held, entry, trans)
      ),
      toggle: toggleOf(engine, held, entry, trans),
      timeline: { ...(lines[index] ?? timelineOf([], [])), top }
    };
  });
}

function noteOf(engine: Engine, version: number, trans: Trans): [string, boolean] {
  if (engine.broken) {
    return [trans.__('%1: session.heal()', short(engine.broken)), true];
  }
  if (!engine.ready) {
    return [trans.__('being built'), false];
  }
  if (engine.kind === 'inference' && engine.version !== null) {
    const behind = version - engine.version;
    const said = `v${engine.version}`;
    return behind
      ? [trans._n('%2, %1 version behind', '%2, %1 versions behind', behind, said), true]
      : [said, false];
  }
  return [engine.name === 'actor' ? `v${version}` : trans.__('frozen'), false];
}

/** What a reader calls the owners of memory, which are also the parts that can be moved. */
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

function partName(part: string, trans: Trans): string {
  const names: Readonly<Record<string, string>> = ownerNames(trans);
  return names[part] ?? part;
}

/** The sign of where a part is, and always the word. */
function wordOf(where: string, trans: Trans): readonly [string, string] {
  const words: Readonly<Record<string, readonly [string, string]>> = {
    cuda: ['●', trans.__('resident')],
    cpu: ['○', trans.__('host')],
    meta: ['◌', trans.__('released')],
    empty: ['◌', trans.__('empty')],
    torn: ['✕', trans.__('torn')]
  };
  return words[where] ?? ['?', short(where, 20)];
}

function chipOf(
  engine: Engine,
  part: string,
  where: string,
  held: string,
  entry: Entry,
  trans: Trans
): Chip {
  const said = partName(part, trans);
  const [sign, word] = wordOf(where, trans);
  const resident = where === 'cuda';
  const verb = resident ? 'offload' : 'onload';
  const key = `${verb} ${engine.name}/${part}`;
  const pending = entry.pending.has(key);
  return {
    key,
    verb,
    args: { engine: engine.name, parts: [part] },
    label: `${said} ${sign} ${word}`,
    command: commandOf(resident, said, engine, trans),
    title: held || moveTitle(engine, said, resident, engine.frees[part], trans),
    enabled: !held && !pending,
    pending,
    part: said,
    sign,
    word,
    resident
  };
}

function commandOf(resident: boolean, what: string, engine: Engine, trans: Trans): string {
  const name = short(engine.name);
  return resident
    ? trans.__('offload %1 of %2', what, name)
    : trans.__('onload %1 of %2', what, name);
}

function moveTitle(
  engine: Engine,
  what: string,
  resident: boolean,
  frees: number | undefined,
  trans: Trans
): string {
  const name = short(engine.name);
  if (!resident) {
    return trans.__('Make %1 of %2 resident again', what, name);
  }
  const away = trans.__('Offload %1 of %2', what, name);
  if (frees === undefined) {
    return away;
  }
  return frees
    ? trans.__('%1: frees %2', away, gib(frees))
    : trans.__('%1: here the device is host memory, nothing is freed', away);
}

function toggleOf(engine: Engine, held: string, entry: Entry, trans: Trans): Action | null {
  const parts = Object.keys(engine.parts);
  if (!parts.length) {
    return null;
  }
  const resident = parts.some(part => engine.parts[part] === 'cuda');
  const verb = resident ? 'offload' : 'onload';
  const key = `${verb} ${engine.name}`;
  const moved = parts.filter(part => (engine.parts[part] === 'cuda') === resident);
  const frees = moved.flatMap(part => engine.frees[part] ?? []);
  const what = moved.map(part => partName(part, trans)).join(', ');
  const total = frees.length ? frees.reduce((a, b) => a + b, 0) : undefined;
  const pending = entry.pending.has(key);
  return {
    key,
    verb,
    args: { engine: engine.name, parts: moved },
    label: resident ? trans.__('offload') : trans.__('onload'),
    command: commandOf(resident, what, engine, trans),
    title: held || moveTitle(engine, what, resident, total, trans),
    enabled: !held && !pending,
    pending
  };
}
