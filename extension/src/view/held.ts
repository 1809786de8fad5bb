/** What engines hold of their device's memory now: on GPUs the GPUs', elsewhere the host's. */
import { gib } from '../format';
import type { Entry } from '../sessions';
import type { Engine, Sample } from '../wire';

/** A sample that much older than the state, in seconds, does not tell what is held now. */
const SAME_MOMENT_S = 5;

export interface Held {
  readonly bytes: number;
  /** False where what an engine holds beside its parts is not known. */
  readonly whole: boolean;
}

/** What an engine holds; null while nobody has told. */
export function heldOf(engine: Engine, entry: Entry, onGpu: boolean): Held | null {
  if (!onGpu) {
    return summed(
      engine.workers.flatMap(worker => worker.resident ?? []),
      true
    );
  }
  // the process's own memory is the host's: what lies on the device its workers alone can tell
  const sample = entry.samples.at(-1);
  const fresh = sample && (entry.state?.time ?? Infinity) - sample.time < SAME_MOMENT_S;
  const owners = fresh ? told(engine, sample.owners) : [];
  return owners.length
    ? summed(
        owners.flatMap(held => Object.values(held)),
        true
      )
    : summed(Object.values(engine.bytes), false);
}

/** What all engines of a session hold. */
export function sessionHeld(entry: Entry, onGpu: boolean): Held | null {
  const known = (entry.state?.engines ?? []).flatMap(engine => heldOf(engine, entry, onGpu) ?? []);
  return joined(known);
}

/** The sum of several; null where there is none. */
export function joined(known: readonly Held[]): Held | null {
  return summed(
    known.map(held => held.bytes),
    known.every(held => held.whole)
  );
}

/** `6.4 GiB`, `~6.4 GiB` where it is not all, nothing where it is not known. */
export function saidOf(held: Held | null): string {
  return held ? `${held.whole ? '' : '~'}${gib(held.bytes)}` : '';
}

function told(engine: Engine, owners: Sample['owners']): readonly Record<string, number>[] {
  return engine.workers.flatMap(worker => {
    const held = owners[worker.name];
    return held ? [held] : [];
  });
}

function summed(bytes: readonly number[], whole: boolean): Held | null {
  return bytes.length ? { bytes: bytes.reduce((a, b) => a + b, 0), whole } : null;
}
