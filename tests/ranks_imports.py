"""What ranks of tests need, imported once per process of tests: `tests.ranks` forks them from here."""

import gc

gc.disable()  # a third of the time would go to looking for garbage, of which imports make little

import peft  # noqa: E402, F401
import pytest  # noqa: E402, F401  # functions that tests send to ranks name their modules, which import it
import transformers.models.qwen2.modeling_qwen2  # noqa: E402, F401

import rlbench.dispatch.context  # noqa: E402
import rlbench.workers.train.rank  # noqa: E402, F401

gc.collect()
gc.freeze()  # what is collected is written to, and so copied into each rank
gc.enable()
