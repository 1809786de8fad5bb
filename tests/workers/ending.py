"""The end of a replica whose process goes on, as no replica's does in the product."""

import gc

from vllm.distributed import cleanup_dist_env_and_memory

from rlbench.weights.memory import return_free_memory
from rlbench.workers.replica.vllm import VllmReplica


def end_here(replica: VllmReplica) -> None:
    """Close a replica, then free what it leaves to the end of its process."""
    engine = replica.built
    replica.close()
    engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
    gc.collect()
    return_free_memory()
