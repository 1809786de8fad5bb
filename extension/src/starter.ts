/** The notebook behind the launcher's card: a session from its first rollout to its first step. */
import type { Trans } from './text';

type Cell = readonly ['markdown' | 'code', string];

function cellsOf(trans: Trans): readonly Cell[] {
  const title = trans.__('RL session');
  const about = trans.__(
    'A session holds workers for training and inference outside this kernel. The side panel shows it, whatever this notebook does; after a restart of the kernel `rb.attach()` finds it again.'
  );
  return [
    ['markdown', `# ${title}\n\n${about}`],
    [
      'code',
      'import rlbench as rb\nfrom rlbench.tiny import tasks\n\n' +
        'session = rb.Session("tiny", train={"lr": 1e-4})  # or the name of a model, "Qwen/Qwen2.5-0.5B-Instruct"\nsession'
    ],
    ['code', 'rollouts = session.rollout(tasks.prompts(8), n=4, max_tokens=16)\nrollouts'],
    [
      'code',
      'def reward(rollout):\n    digits = rollout.prompt[-1]["content"].split()[-1]\n' +
        '    return float(rollout.text == "".join(sorted(digits)))\n\nscored = rollouts.score(reward)\nscored'
    ],
    [
      'code',
      'session.train_step(scored.batch(advantage=rb.rl.group_normalized()), loss="grpo")\nsession.sync_weights()'
    ],
    [
      'markdown',
      trans.__('Close the session when its weights are not needed any more: `session.close()`.')
    ]
  ];
}

/** The notebook's content in Jupyter's format, version 4.5. */
export function starterNotebook(trans: Trans): Record<string, unknown> {
  return {
    cells: cellsOf(trans).map(([kind, source], index) => ({
      cell_type: kind,
      id: `rl-${index}`,
      metadata: {},
      source,
      ...(kind === 'code' ? { outputs: [], execution_count: null } : {})
    })),
    metadata: {},
    nbformat: 4,
    nbformat_minor: 5
  };
}

/** The cell that attaches a notebook to a session; the name becomes a Python string whatever it holds. */
export function attachSource(name: string): string {
  // what JSON escapes Python reads alike, once no character is left that needs two \u
  const quoted = Array.from(JSON.stringify(name), character => {
    const point = character.codePointAt(0) ?? 0;
    return point > 0xffff ? `\\U${point.toString(16).padStart(8, '0')}` : character;
  }).join('');
  return `import rlbench as rb\n\nsession = rb.attach(${quoted})\nsession`;
}
