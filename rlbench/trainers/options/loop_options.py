"""Options that the loops of all trainers have. Importable without torch."""

from __future__ import annotations

from rlbench.options import Options, section

memory, files = map(section, ("Memory", "Files"))


class LoopOptions(Options):
    """What a trainer keeps on disk, how often it evaluates, and what of a pass it computes twice."""

    gradient_checkpointing: bool = memory(False, "recompute activations in the backward")
    save_path: str = files("./ckpt", "folder of the saved model and of trajectories")
    save_steps: int = files(0, "iterations between checkpoints; -1: at the end alone, 0: none")
    ckpt_path: str = files("./ckpt/checkpoints_ppo", "folder of checkpoints")
    max_ckpt_num: int = files(3, "checkpoints kept")
    max_ckpt_mem: float = files(1000.0, "gigabytes of checkpoints kept")
    load_checkpoint: bool = files(False, "go on from the newest checkpoint")
    save_hf_ckpt: bool = files(False, "save the model for transformers beside each checkpoint")
    eval_steps: int = files(-1, "iterations between evaluations; -1: none")
