"""`rb.RewardModel`: a scalar head over a language model, trained from comparisons on ranks of its own.

It is a session without replicas: undo, snapshots, history, healing and parking are the session's. It is a reward as
well: `rollouts.score(rm)` asks its ranks; where it goes to other processes it goes as its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlbench import rewards
from rlbench.data.texts.rendering import Renderer
from rlbench.engines.paths import model_name
from rlbench.errors import BuildError, RLBenchError
from rlbench.rewards import Board, Failure, Scorer
from rlbench.rewards.reward_model import media_of, read_tokens, refuse_videos, reward_of
from rlbench.runtime import registry
from rlbench.runtime.starting import starting
from rlbench.session import building
from rlbench.session.handle import Handle, check_undo, opened
from rlbench.session.options import REWARD, SessionOptions, Train, model_at
from rlbench.session.planning.check import need_room
from rlbench.session.training import pair_evaluation, reward_steps
from rlbench.session.verb import direct, verb
from rlbench.trainers.models.policy_spec import RewardSpec

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

POLL_S = 0.05


class RewardModel(Handle, Scorer):
    """A reward model that is trained from pairs, cell by cell, and used as a reward at once.

        rm = rb.RewardModel("tiny", train=rb.Train(lr=1e-3))
        pairs = rb.data.pairs(rows, rm)
        rm.train_step(pairs[:64], loss=rb.rl.bradley_terry())
        rm.evaluate(unseen)
        rollouts.score(rm)

    Args:
        model: `"tiny"`, a folder, or a hub id: a causal language model, whose head is drawn from `seed`, or a reward
            model (a sequence classifier of one number) to go on from.
        name: as of `rb.Session`.
        train: `rb.Train(lr=1e-5, shards=2, lora=rb.Lora(rank=16))`: how it is trained, and on how many ranks.
        seed: of the head, where the model has none, and of the ranks.
        pooling: what the head reads: "last", the response's last token, or "attention", all tokens up to it, pooled by
            a learned query; None: as the model's head does, which without one is "last".
        probing_layer: of which layer, counted as transformers' `hidden_states` (0: the embedding); None: as the model's
            head does, else -1, the last. The layers above it are kept, and do not train.
        heads: several heads on the one backbone, by name: {"quality": 0.7, "style": 0.3}, with the weight of each in
            the score, or names alone, of equal parts of 1. Pairs say of each which response is better there. None: as
            the model has, else one without a name.
        lease_s, park, undo: as of `rb.Session`.
    """

    def __init__(
        self,
        model: str = "tiny",
        name: str | None = None,
        *,
        train: Train | dict[str, Any] | None = None,
        seed: int = 0,
        pooling: str | None = None,
        probing_layer: int | None = None,
        heads: Mapping[str, float] | Sequence[str] | None = None,
        lease_s: float | None = None,
        park: bool | None = None,
        undo: int | None = None,
    ) -> None:
        check_undo(undo)
        train = Train.of(train)
        if train.lora is not None and train.lora.path is not None:
            raise BuildError(
                "rb.Lora(path=…) is a policy's adapter: rm.save(folder) keeps a reward model, to go on from"
            )
        named = model_name(model, "rb.RewardModel")
        with starting(f"reward model {named}"):
            path = model_at(named)
            building.check_models(path, classifiers=True)
            read: dict[str, Any] = {"pooling": pooling, "probing_layer": probing_layer, "heads": heads}
            shape = RewardSpec(path, **read).shape()  # or it is refused before anything is started
            read["heads"] = dict(shape.heads) or None
            options = SessionOptions(named, path, seed, train, undo=undo, kind=REWARD, **read)
            self._hold(opened(options, name, lease_s, park, need_room))

    # -- verbs

    train_step = verb(reward_steps.train_step)
    forward_backward = verb(reward_steps.forward_backward)
    evaluate = verb(pair_evaluation.evaluate)
    scores = verb(reward_steps.scores)
    save = verb(reward_steps.save)
    trainer = direct(reward_steps.trainer)

    # -- as a reward

    @property
    def __name__(self) -> str:
        """What it is called in a record, and among other rewards."""
        return f"RewardModel({self.name!r})"

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Ask the ranks, once for all completions; see `Scorer.score_all`."""
        rows: dict[int, list[int]] = {}
        longest = Renderer.of(self.tokenizer).context
        refuse_videos(rollouts, f"the reward model {self.name!r}")
        for i, rollout in enumerate(rollouts):
            try:
                ids = read_tokens(rollout, self.tokenizer)
            except RLBenchError as error:
                board.put(i, Failure.of(error), 0.0)
                continue
            if longest is not None and len(ids) > longest:
                said = f"the reward model takes {longest} tokens, prompt and completion are {len(ids)}"
                board.put(i, Failure(said, "leave it out by rollouts.select"), 0.0)
            else:
                rows[i] = ids
        if not rows:
            return
        media = [media_of(rollouts[i]) for i in rows]
        pending = reward_steps.ask_scores(self.core, list(rows.values()), media)
        try:
            while True:
                board.check()
                try:
                    found = pending.result(timeout=POLL_S)
                    break
                except TimeoutError:
                    continue
        except KeyboardInterrupt:
            pending.stop()
            raise
        for i, scores in zip(rows, found.parts, strict=True):
            board.put(i, reward_of(scores, self.core.options.heads or {}), 0.0)

    def frozen(self) -> rewards.model:
        """This model as it is now, as a reward apart from it: what trainers and other processes are given.

        Its weights lie in the session's folder until it is closed; `rm.save(folder)` writes them to stay.
        """
        folder = registry.snapshot_folder(self.name) / f"frozen-v{self.version}"
        if not folder.is_dir():
            self.core.run("frozen", reward_steps.save(self.core, str(folder))).blocking_result()
        return rewards.model(folder, as_sampled=True)

    def __identity__(self) -> str:
        """What tells it from another, for a record of what made a batch."""
        return f"{self.__name__} v{self.version}"

    def __reduce__(self) -> Any:
        """Go to another process as what `frozen` gives: ranks of one session do not wait for those of another."""
        return partial(rewards.model, as_sampled=True), (self.frozen().path,)
