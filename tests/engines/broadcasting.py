"""What the tests of weight broadcasts share: engines with small buckets, a hook that fails or waits where told."""

import rlbench as rb
from rlbench.trainers.models.policy_spec import PolicySpec

ENDS_S = 120.0  # far more than a failure takes to end both sides, far less than a wait for a member that is silent


def small_buckets():
    from rlbench.workers.train import stage as train_stage

    train_stage.DEFAULT_BUCKET_BYTES = 100_000


def sabotage(fail=None, wait=None, on_rank=0):
    """From now on parameter number `fail` raises on one rank, and number `wait` waits for a file to vanish on it.

    Parameters are counted over both passes of a broadcast: announcing asks for each once, sending once more.
    """
    import time
    from pathlib import Path

    from rlbench.nn import BaseTrainModule

    seen = 0

    def hook(self, name, param, full_state_dict):
        nonlocal seen
        full = param.full_tensor()
        seen += 1
        if rank == on_rank and fail is not None and seen == fail:
            raise KeyError("the hook has had enough")
        if rank == on_rank and wait is not None and seen == wait[0]:
            Path(wait[1]).touch()
            while Path(wait[1]).exists():
                time.sleep(0.02)
        return name, full

    base = BaseTrainModule.postprocess_output_named_parameters
    type(module).postprocess_output_named_parameters = hook if fail or wait else base
    return sum(1 for _ in module.parameters())


def states(infer):
    return [s["weights"] for s in infer.control("status")]


def tokens(infer):
    return [dict(f.channels).get("") for f in infer.control("sync_facts")]


def build_replicas(folder, count, name, **options):
    options = {"dtype": "float32", "kv_cache_bytes": 64 << 20, "max_num_seqs": 16} | options
    engine = rb.InferenceEngine(str(folder), name=name, **options)
    return engine.build(tensor_parallel_size=1, data_parallel_size=count)


def build_ranks(folder, count, name):
    engine = rb.TrainEngine(PolicySpec(str(folder)), name=name).build(tensor_parallel_size=count, data_parallel_size=1)
    engine.run(small_buckets)
    return engine
