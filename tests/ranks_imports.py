"""What ranks of tests need, imported once per process of tests: `tests.ranks` forks them from here."""

import gc

import peft  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import rlbench.dispatch.context
import rlbench.workers.train.rank  # noqa: F401

gc.collect()
gc.freeze()  # what is collected is written to, and so copied into each rank
