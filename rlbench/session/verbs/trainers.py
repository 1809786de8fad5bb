"""The verb of a session that makes a trainer on its ranks."""

from __future__ import annotations

from typing import Any

from rlbench.dispatch import by_value
from rlbench.engines.base import shared
from rlbench.errors import SessionError, Stopped, WorkerDied
from rlbench.options import OptionError
from rlbench.session.core import SessionCore
from rlbench.session.training import trainer_places
from rlbench.session.training.session_trainer import SessionTrainer


def trainer(
    core: SessionCore,
    method: str = "grpo",
    prompts: Any = None,
    reward: Any = None,
    *,
    eval_prompts: Any = None,
    critic: str | bool | None = None,
    reference: str | bool | None = None,
    ema: bool = False,
    loss: Any = None,
    lr: float | None = None,
    critic_lr: float | None = None,
    schedule_steps: int | None = None,
    trainer_class: type | None = None,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> SessionTrainer:
    """Make an `SPMDPPOTrainer` on the session's ranks, around the session's own policy, optimizer and replicas.

        trainer = session.trainer("grpo", prompts, reward, rollout_batch_size=32, n=8)
        trainer.fit(30)
        session.history.plot("reward")

    Args:
        method: "grpo", "ppo" (with a critic), "dapo", "gspo", "rloo", …: a set of options, see
            `rlbench.trainers.options.methods`; those given here count first.
        prompts: a `PromptSet`, a stream or mixture, or what `rollout` takes. The trainer keeps the place.
        reward: as of `rollouts.score`; also the folder of a reward model, the address of a service, or several of
            such with `arguments={"reward_fn": …}`.
        eval_prompts: of `trainer.evaluate()` and `eval_steps`.
        critic: folder of the critic's checkpoint, or hub id; True: the session's model; None: as the method needs.
        reference: of the reference policy likewise; None: where the options ask for KL. The session's own
            (`rb.Session(reference=…)`) is asked where it is of that model, and for None: it is held once.
        ema: keep a moving average of the policy.
        loss: a loss of your own in place of the method's.
        lr, critic_lr: learning rates; None: the policy's stays as it is, the critic's is at its default.
        schedule_steps: optimizer steps over which the rates warm up and fall; None: they stay.
        trainer_class: a subclass of `SPMDPPOTrainer` with methods of your own.
        arguments: further arguments of the trainer by name (`reward_fn`, …).
        options: of `StrategyConfig` and `PPOConfig`, see docs/options.md; `seed` and `max_norm` are the session's
            unless given. Folders and files, here and above, are found from the kernel's working directory.

    Returns:
        A `SessionTrainer`. It takes the place of the one before, which stays where the new one is refused.

    Raises:
        OptionError: an option that means nothing, cannot be honoured or would have no effect, or a folder that is
            not there (then the trainer before stays). SessionError: no prompts.
    """
    from rlbench.trainers.options.methods import method_options, warn_of
    from rlbench.trainers.ppo.building import TrainerSpec

    if prompts is None:
        raise SessionError("session.trainer: which prompts? trainer(method, prompts, reward)")
    rates = {name: rate for name, rate in (("lr", lr), ("critic_lr", critic_lr)) if rate is not None}
    held = {"seed": core.options.seed, "max_norm": core.options.train.max_norm}
    chosen = held | method_options(method, {**options, **rates})
    lr = chosen.pop("lr", None)
    needs_critic: str | bool = chosen.get("advantage_estimator") == "gae"
    if needs_critic:
        also = chosen.pop("critic_pretrain", None)
        if critic is not None and also is not None:
            raise OptionError(f"critic={critic!r} and critic_pretrain={also!r} say the same: give one of them.")
        critic = also if critic is None else critic
    needs_reference = float(chosen.get("kl_coef", 0.0)) > 0
    spec = TrainerSpec(
        core.options.path,
        chosen,
        trainer_class,
        needs_critic if critic is None else critic,
        _reference(core, needs_reference if reference is None else reference, reference is None),
        ema,
        reward,
        lr,
        schedule_steps,
        prompts,
        eval_prompts,
        loss,
        dict(arguments or {}),
    )
    warn_of(chosen, bool(spec.critic), ema)
    blob = by_value.dumps(trainer_places.from_here(spec), "trainer")
    made = core.train.call_all(
        "make_trainer", method, shared(blob), what="trainer", finish=lambda found: found[0], track=True
    )
    try:
        core.trainer = SessionTrainer(core, made.blocking_result(), blob)
    except WorkerDied:
        raise
    except (Exception, Stopped):
        if chosen.get("load_checkpoint"):
            _note_loaded(core)
        raise
    return core.trainer


def _note_loaded(core: SessionCore) -> None:
    """Give the weights a version of their own where a refused trainer had loaded its checkpoint already."""
    if core.train.call_all("take_left_loaded", finish=any, what="trainer").result():
        core.link.set(version=int(core.link.state("highest")["highest"]) + 1)


def _reference(core: SessionCore, wanted: str | bool, any_model: bool) -> Any:
    """Return the reference policy of a trainer: the session's own, where that is what is wanted.

    Args:
        wanted: True: of the session's model; a folder or hub id; False: none.
        any_model: the session's own will do whatever it is of.
    """
    from rlbench.trainers.ppo.building import SessionEngine

    if not wanted or core.reference is None or not core.reference.built:
        return wanted
    path = core.options.path if wanted is True else trainer_places.model_here("reference", wanted)
    return SessionEngine("reference") if any_model or path == core.options.reference else wanted
