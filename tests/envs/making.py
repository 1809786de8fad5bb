"""Hooks that tests of environments share."""

from rlbench.envs import IndexedGenerationHistory


def post_generation_hook(generation, input_queue, output_queue):
    """Here, we rollout for twice."""
    if len(generation.outputs) < 2:
        new_input_text = generation.inputs[-1] + generation.outputs[-1].outputs[0].text
        input_queue.put(
            IndexedGenerationHistory(
                index=generation.index, inputs=[*generation.inputs, new_input_text], outputs=generation.outputs
            )
        )
    else:
        output_queue.put(generation)
