"""Options that the loops of all trainers have. Importable without torch."""

from __future__ import annotations

from rlbench.options import Options, refuse, section

memory, loss, files = map(section, ("Memory", "Policy loss", "Files"))


class LoopOptions(Options):
    """What a trainer keeps on disk, how often it evaluates, and what of a pass it computes twice."""

    gradient_checkpointing: bool = memory(False, "recompute activations in the backward")
    gradient_checkpointing_use_reentrant: bool = memory(
        False,
        "by torch's reentrant checkpoints, whose first forward keeps no graph; gradients are the same",
        needs={"gradient_checkpointing": False},
    )
    aux_loss_coef: float = loss(
        0.0,
        "of a mixture of experts: weight in the loss of how unevenly its routers spread each sequence's tokens over "
        "the experts (transformers' load balancing loss of one sequence); 0: none",
        least=0,
    )
    save_path: str = files("./ckpt", "folder of the saved model and of trajectories")
    save_steps: int = files(0, "iterations between checkpoints; -1: at the end alone, 0: none")
    ckpt_path: str = files("./ckpt/checkpoints_ppo", "folder of checkpoints")
    max_ckpt_num: int = files(3, "checkpoints kept")
    max_ckpt_mem: float = files(1000.0, "gigabytes of checkpoints kept")
    load_checkpoint: bool = files(False, "go on from the newest checkpoint")
    save_hf_ckpt: bool = files(False, "save the model for transformers beside each checkpoint")
    disable_ds_ckpt: bool = files(
        False, "save_steps keeps models for transformers alone, from which no run goes on", needs={"save_steps": 0}
    )
    eval_steps: int = files(-1, "iterations between evaluations; -1: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (
                self.disable_ds_ckpt and self.save_steps and not self.save_hf_ckpt,
                "disable_ds_ckpt leaves nothing to save without save_hf_ckpt: save_steps=0 saves nothing",
            ),
            (
                self.aux_loss_coef and self.gradient_checkpointing and self.gradient_checkpointing_use_reentrant,
                "aux_loss_coef and gradient_checkpointing_use_reentrant cannot be honoured together: what the routers "
                "choose in a first forward without a graph has no gradient; leave the latter out",
            ),
        )
