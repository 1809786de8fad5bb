"""What a worker needs, imported: the warm process (`rlbench.runtime.warm`) imports this, and forks.

Not vLLM's worker for a host without a GPU: it replaces parts of torch that a training rank's code may look at. What
that worker imports is here, and what it does once to vLLM's own modules.
"""

import jsonschema  # noqa: F401  (Ray imports this, pyarrow and pydantic.v1)
import peft  # noqa: F401
import pyarrow.json  # noqa: F401
import pydantic.v1  # noqa: F401
import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401  (the tiny model's family)
import vllm.distributed.elastic_ep.elastic_execute
import vllm.lora.resolver
import vllm.model_executor.layers.quantization.online.base
import vllm.renderers.hf
import vllm.v1.core.sched.scheduler
import vllm.v1.engine.llm_engine
import vllm.v1.pool.late_interaction_runner
import vllm.v1.worker.gpu_model_runner
import vllm.v1.worker.gpu_worker  # noqa: F401
from vllm.platforms import current_platform

import rlbench.workers.replica.vllm
import rlbench.workers.replica.vllm_requests
import rlbench.workers.train.rank  # noqa: F401

torch.distributions.Distribution.set_default_validate_args(__debug__)  # vLLM compiles, which turns it off
# A host's kernels in the place of Triton's: by a walk over every value of every module, which in a fork copies the
# pages that it reads. A worker of vLLM would walk again.
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides = lambda: None
