"""What a worker needs, imported: the warm process (`rlbench.runtime.warm`) imports this, and forks.

Not vLLM's worker for a host without a GPU: it replaces parts of torch that a training rank's code may look at.
"""

import torch
import vllm.v1.engine.llm_engine  # noqa: F401

import rlbench.workers.replica.vllm
import rlbench.workers.train.rank  # noqa: F401

torch.distributions.Distribution.set_default_validate_args(__debug__)  # vLLM compiles, which turns it off
