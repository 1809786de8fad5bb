/** Made from rlbench/monitor/schema.py and view.py by scripts/panel_schema.py: change those. */
import type { Trans } from './text';

/** Data, or a template with `%1`, `%2` and its arguments; `[one, many]` where the first of them, a count, decides. */
export type Text = string | number | readonly [string | readonly [string, string], ...Text[]];

export interface Phase {
  readonly what: readonly Text[];
  readonly busy: boolean;
  readonly fraction: number | null;
  readonly left: Text;
}

export interface Control {
  readonly key: string;
  readonly verb: string;
  readonly args: Readonly<Record<string, unknown>>;
  readonly label: Text;
  readonly name: Text;
  readonly command: Text;
  readonly title: Text;
  readonly enabled: boolean;
  readonly drives: boolean;
  readonly pressed: boolean | null;
}

export interface Part {
  readonly name: string;
  readonly shown: Text;
  readonly sign: string;
  readonly word: Text;
  readonly resident: boolean;
  readonly toggle: Control;
}

export interface EngineView {
  readonly name: string;
  readonly kind: string;
  readonly parts: readonly Part[];
  readonly toggle: Control | null;
  readonly bytes: number | null;
  readonly note: Text;
  readonly warns: boolean;
}

export interface Failure {
  readonly time: number | null;
  readonly text: string;
}

export interface SessionView {
  readonly condition: 'lost' | 'paused' | 'running' | 'idle';
  readonly status: Text;
  readonly facts: readonly Text[];
  readonly phase: Phase;
  readonly engines: readonly EngineView[];
  readonly controls: readonly Control[];
  readonly failure: Failure | null;
}

/** Never called: here the tools that collect what is to be translated find the texts of the view. */
export function catalogue(trans: Trans): void {
  trans.__('%1 left');
  trans.__('%1 of %2: %3');
  trans.__('%1 runs: stop it first, or wait for it');
  trans.__('%1/%2 samples · %3 tokens');
  trans.__('%1: frees %2');
  trans.__('%1: here the device is host memory, nothing is freed');
  trans.__('%1: session.heal()');
  trans.__('Hold generation after its current step; nothing is lost');
  trans.__('KV cache');
  trans.__('Keep weights, optimizer, step and history in host memory');
  trans.__('Let generation go on with the same tokens');
  trans.__('Make %1 of %2 resident again');
  trans.__('Offload %1 of %2 to host');
  trans.__('Offload %1 of %2');
  trans.__('Release the %1 of %2');
  trans.__('Send the weights (v%1) to the replicas, verified');
  trans.__('Stop %1: what is finished is kept');
  trans.__('activations');
  trans.__('being built');
  trans.__('empty');
  trans.__('ends in %1');
  trans.__('frozen');
  trans.__('gradients');
  trans.__('host');
  trans.__('idle');
  trans.__('kernel gone');
  trans.__('none');
  trans.__('nothing runs that could be stopped');
  trans.__('offload %1 of %2');
  trans.__('offload');
  trans.__('onload %1 of %2');
  trans.__('onload');
  trans.__('optimizer');
  trans.__('other');
  trans.__('parked in %1');
  trans.__('pause');
  trans.__('paused');
  trans.__('released');
  trans.__('resident');
  trans.__('resume');
  trans.__('running');
  trans.__('script ended');
  trans.__('snapshot');
  trans.__('step %1');
  trans.__('stop');
  trans.__('sync');
  trans.__('the engines are being built');
  trans.__('torn');
  trans.__('weights');
  trans._n('%2, %1 version behind', '%2, %1 versions behind', 1);
}
