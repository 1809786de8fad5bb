"""The verb of a session that makes a trainer: on its ranks, of a reward model on ranks of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlbench.data.prompts.chat import schemas
from rlbench.errors import SessionError
from rlbench.options import OptionError
from rlbench.rewards.rules import zero
from rlbench.session.core import SessionCore
from rlbench.session.reward_model import RewardModel
from rlbench.session.teachers import teachers
from rlbench.session.teachers.teachers import OnRanks, Teacher
from rlbench.session.training import trainer_places
from rlbench.session.training.make_trainer import made, text_trainer
from rlbench.session.training.session_trainer import SessionTrainer
from rlbench.session.training.text_data import pretraining_of, texts_of


def trainer(
    core: SessionCore,
    method: str = "grpo",
    prompts: Any = None,
    reward: Any = None,
    *,
    data: Any = None,
    eval_data: Any = None,
    eval_prompts: Any = None,
    critic: str | bool | None = None,
    reference: str | bool | None = None,
    teacher: str | Teacher | None = None,
    ema: bool = False,
    loss: Any = None,
    lr: float | None = None,
    critic_lr: float | None = None,
    schedule_steps: int | None = None,
    value_head_prefix: str | None = None,
    reference_shard_size: int | None = None,
    trainer_class: type | None = None,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> SessionTrainer:
    """Make a trainer on the session's ranks, around the session's own policy, optimizer and replicas.

        trainer = session.trainer("grpo", prompts, reward, rollout_batch_size=32, n=8)
        trainer.fit(30)
        session.history.plot("reward")

        trainer = session.trainer("sft", data=rows, eval_data=unseen, train_batch_size=64, eval_steps=10)
        trainer.fit(epochs=2)

        trainer = session.trainer("distill", prompts, teacher="path/to/larger")
        trainer = session.trainer("reward", data=comparisons)

    Args:
        method: "grpo", "ppo" (with a critic), "dapo", "gspo", "rloo", …: a set of options, see
            `rlbench.trainers.options.methods`; those given here count first. "distill": on-policy, from a teacher; a
            reward may join in. On texts "sft", "dpo", "ipo", "simpo", "orpo", "kto": those take data, eval_data,
            reference, loss, lr, schedule_steps and options, nothing else. "reward" is `rb.RewardModel.trainer` of a
            reward model of the session's model (as that was at first), on ranks of its own, under the session's name
            and "-reward"; it is the trainer's `session`. With it `heads`, `pooling` and `probing_layer` as of
            `rb.RewardModel`.
        data: what a method on texts trains on: rows, a file, a dataset as `rb.data.demonstrations` ("sft"), `pairs` or
            `labelled` ("kto") reads them, a batch of these, or a stream of one. The trainer keeps the place.
        eval_data: texts that are held out, likewise: of `trainer.evaluate()` and `eval_steps`.
        prompts: a `PromptSet`, a stream or mixture, or what `rollout` takes. The trainer keeps the place.
        reward: as of `rollouts.score`; also the folder of a reward model, the address of a service, or several of
            such with `arguments={"reward_fn": …}`.
        eval_prompts: of `trainer.evaluate()` and `eval_steps`.
        critic: folder of the critic's checkpoint, or hub id; True: the session's model; None: as the method needs.
        reference: of the reference policy likewise; None: where the options ask for KL. The session's own
            (`rb.Session(reference=…)`) is asked where it is of that model, and for None: it is held once.
        teacher: of "distill": a folder, a hub id, or what `session.teacher` gave; held until its `close()`.
        ema: keep a moving average of the policy.
        loss: a loss of your own in place of the method's.
        lr, critic_lr: learning rates; None: the policy's stays as it is, the critic's is at its default.
        schedule_steps: optimizer steps over which the rates warm up and fall; None: they stay.
        value_head_prefix: what the critic's head is called in its checkpoint; None: "score".
        reference_shard_size: ranks over which the reference's parameters are split, the others hold copies; None: all.
        trainer_class: a subclass of `SPMDPPOTrainer` with methods of your own.
        arguments: further arguments of the trainer by name (`reward_fn`, …).
        pretrain_data: of `ptx_coef`: demonstrations as `rb.data.demonstrations` reads them, or a list of plain texts.
        template, tools: what chats are written with, as in `rollout`; on texts as of `rb.data.demonstrations`.
        options: of `StrategyConfig` and `PPOConfig`, on texts of `TextConfig`, see docs/options.md; `seed` and
            `max_norm` are the session's unless given. Folders and files, here and above, are found from the kernel's
            working directory.

    Returns:
        An `ExperienceTrainer`, on texts a `TextTrainer` (both are `SessionTrainer`s). It takes the place of the one
        before, which stays where the new one is refused.
    """
    from rlbench.trainers.options.methods import DISTILL, REWARD, TEXTS, method_options, warn_of
    from rlbench.trainers.options.specs import TrainerSpec

    if (follows := core.options.train.reference) is not None and method != REWARD:
        raise OptionError(
            f"rb.Train(reference={follows!r}) follows session.train_step and optim_step, and has no "
            "effect on a trainer, which takes its own steps: leave it out, and session.update_reference() between them."
        )
    if isinstance(options.get("tools"), list | tuple):
        options["tools"] = schemas(options["tools"])
    if method in TEXTS:
        of_samples = {
            "prompts": prompts,
            "reward": reward,
            "eval_prompts": eval_prompts,
            "critic": critic,
            "ema": ema or None,
            "critic_lr": critic_lr,
            "value_head_prefix": value_head_prefix,
            "reference_shard_size": reference_shard_size,
            "trainer_class": trainer_class,
            "arguments": arguments,
        }
        if idle := [name for name, given in of_samples.items() if given is not None]:
            raise OptionError(f"{idle[0]} has no effect with {method!r}, which trains on texts: data=…")
        given = {"data": data, "eval_data": eval_data, "loss": loss, "lr": lr, "schedule_steps": schedule_steps}
        if teacher is not None:
            raise OptionError(f"teacher has no effect with {method!r}: it is of {DISTILL!r}")
        if method == REWARD and reference is None:
            return _reward_model(core, given, options).trainer(**given, **options)
        return text_trainer(core, method, reference, **given, **options)
    if (teacher is None) == (method == DISTILL):
        which = f"which teacher? trainer({DISTILL!r}, prompts, teacher=…)"
        raise SessionError(which if teacher is None else f"teacher has no effect with {method!r}: it is of {DISTILL!r}")
    if data is not None or eval_data is not None:
        raise OptionError(f"data and eval_data have no effect with {method!r}, which samples: give prompts")
    if prompts is None:
        raise SessionError("session.trainer: which prompts? trainer(method, prompts, reward)")
    if (texts := options.pop("pretrain_data", None)) is not None:
        arguments = {"pretrain_prompts": pretraining_of(texts, core), **(arguments or {})}
    rates = {name: rate for name, rate in (("lr", lr), ("critic_lr", critic_lr)) if rate is not None}
    chosen = core.options.of_trainers | method_options(method, {**options, **rates}, loss is not None)
    lr = chosen.pop("lr", None)
    if chosen.get("advantage_estimator") == "gae":
        also = chosen.pop("critic_pretrain", None)
        if critic is not None and also is not None:
            raise OptionError(f"critic={critic!r} and critic_pretrain={also!r} say the same: give one of them.")
        critic = (also or True) if critic is None else critic
    needs_reference = float(chosen.get("kl_coef", 0.0)) > 0
    if teacher is None:
        wanted = needs_reference if reference is None else reference
        compared_with = trainer_places.reference_here(core, wanted, reference is None)
    elif reference is not None:
        raise OptionError(f"reference={reference!r} has no effect with {method!r}, which compares with the teacher")
    else:
        compared_with = _teacher(core, teacher)
        scored = {"reward_fn", "remote_rm_url"} & {*chosen, *(arguments or {})}
        reward = zero if reward is None and not scored else reward
    spec = TrainerSpec(
        core.options.path,
        chosen,
        trainer_class,
        critic or False,
        compared_with,
        ema,
        reward,
        lr,
        schedule_steps,
        prompts,
        eval_prompts,
        loss,
        dict(arguments or {}),
        value_head_prefix,
        reference_shard_size,
    )
    warn_of(chosen, bool(spec.critic), ema)
    return made(core, method, trainer_places.from_here(spec), load_checkpoint=bool(chosen.get("load_checkpoint")))


def _reward_model(core: SessionCore, given: dict[str, Any], options: dict[str, Any]) -> RewardModel:
    """Find the reward model that goes with a session, or make one of the session's model; texts are read into `given`,
    and `options` looked at, before anything is started."""
    from rlbench.trainers.options.methods import OF_REWARD_RUNS, REWARD, method_options, of_writing

    writing = of_writing(options)
    head = {name: options.pop(name) for name in OF_REWARD_RUNS if name in options}
    method_options(REWARD, options)
    for name in ("data", "eval_data"):
        if given[name] is not None:
            given[name] = texts_of(REWARD, given[name], core, **writing)
    train = replace(core.options.train, reference=None)
    if train.lora is not None:
        train = replace(train, lora=replace(train.lora, path=None))
    seed, undo = core.options.seed, core.options.undo
    return RewardModel(core.options.model, f"{core.name}-{REWARD}", train=train, seed=seed, undo=undo, **head)


def _teacher(core: SessionCore, given: Any) -> Any:
    """Return what a trainer asks in the place of a reference: an engine of the session's, or the policy's own base."""
    from rlbench.trainers.options.specs import SessionEngine

    teacher = given if isinstance(given, Teacher) else teachers.teacher(core, str(given))
    if teacher.core is not core:
        raise SessionError("teacher: it is another session's; session.teacher(model) holds one here")
    if not isinstance(teacher.source, OnRanks):
        raise OptionError(f"teacher={teacher.model!r}: the ranks of a trainer ask a teacher that they hold: a folder.")
    return SessionEngine(teacher.source.engine) if teacher.source.adapters else True
