"""A reward model: a Hugging Face sequence classifier that reads prompt and completion and gives one number.

One that sees, or hears, as `rb.RewardModel` saves it of a model of Qwen-VL's or Qwen2-Audio's kind, takes images or
sounds too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.data.prompts.images import unplaced
from rlbench.data.prompts.lengths import open_tokenizer, text_ids
from rlbench.data.texts.rendering import Renderer
from rlbench.data.texts.rows import Reading
from rlbench.errors import DataError
from rlbench.rewards.hearing import HearingReader
from rlbench.rewards.kinds import Board, Failure, Outcome, Reward, Scorer, shown
from rlbench.rewards.last_tokens import padded, padding_for, padding_is, padding_token
from rlbench.rewards.seeing import SeeingReader

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout


@dataclass(eq=False, repr=False)
class model(Scorer):
    """Rewards from a sequence-classification model, run in this process; loaded when first needed, freed by `close()`.

    A completion too long for the model has an error; none is cut. Texts are tokenised by its own tokenizer. A model of
    Qwen-VL's kind, as `rb.RewardModel` saves it, sees the images, by its own processor: the prompts', and those that an
    environment showed; one of Qwen2-Audio's hears the prompts' sounds. One of text alone refuses both. Of several
    heads, as `rb.RewardModel(heads=…)` has them, the reward is their weighted sum, and each is a component by its name.

    Args:
        path: folder or Hugging Face id of a model with a trained head of one output.
        batch_size: completions per forward.
        device: of torch; None takes a GPU where there is one. `dtype` of the weights is a name of torch.
        output: which number is the reward, of a model that gives several.
        as_sampled: read the tokens that were sampled, end token too, where the model has the policy's tokenizer, else
            the texts as `rb.data.pairs` encodes them: what a model that `rb.RewardModel` trained has seen.
        chat: put the whole conversation, what an environment said in its place, through the model's chat template; None
            does where the prompt is messages.
    """

    path: str | Path
    _: KW_ONLY
    batch_size: int = 8
    device: str | None = None
    dtype: str = "float32"
    output: int | None = None
    as_sampled: bool = False
    chat: bool | None = None
    _loaded: tuple[Any, Any, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"model: batch_size is 1 or more, got {self.batch_size}")
        if self.as_sampled and self.chat is not None:
            raise DataError(f"model: chat={self.chat} has no effect with as_sampled=True, which says what is read")
        folder = Path(self.path).expanduser()
        self.path = str(folder if folder.is_dir() else self.path)

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Score in batches, long ones first, so that little is padded; see `Scorer.score_all`."""
        import torch

        from rlbench.rewards.shaped_head import HeadShape

        model, tokenizer, reader = self._load()
        heads = HeadShape.of(model.config).heads
        self._check_takes(rollouts, reader)
        rows: list[tuple[int, list[int], tuple[Any, ...]]] = []
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        for i, rollout in enumerate(rollouts):
            try:
                ids, media = self.token_ids(rollout, tokenizer), media_of(rollout)
                if reader is not None and not self.as_sampled:  # which has them expanded
                    media = (*unplaced(rollout.all_images), *rollout.sounds)
                    ids = reader.expanded(ids, media)
            except Exception as error:  # a chat template refuses roles and orders in its own ways
                board.put(i, Failure.of(error), 0.0)
                continue
            if longest is not None and len(ids) > longest:
                said = f"the reward model takes {longest} tokens, prompt and completion are {len(ids)}"
                board.put(i, Failure(said, "leave it out by rollouts.select"), 0.0)
            else:
                rows.append((i, ids, media))
        rows.sort(key=lambda row: -len(row[1]))
        for first in range(0, len(rows), self.batch_size):
            board.check()
            chosen = rows[first : first + self.batch_size]
            started = time.perf_counter()
            with torch.inference_mode():
                values = self._forward([ids for _, ids, _ in chosen], [media for _, _, media in chosen])
            outcomes = [reward_of(own, heads, "wanted a finite number") for own in values]
            board.put_all([i for i, _, _ in chosen], outcomes, time.perf_counter() - started)

    def token_ids(self, rollout: Rollout, tokenizer: Any) -> list[int]:
        """What the model reads of one completion: through its chat template, or prompt and completion in a row.

        An image, or a sound, is one placeholder there; as sampled, all of its tokens.
        """
        if self.as_sampled:
            return read_tokens(rollout, tokenizer)
        content = rollout.prompt
        chat = self.chat if self.chat is not None else not isinstance(content, str)
        if isinstance(content, list) and not isinstance(content[0], dict):
            raise DataError("the prompt is token ids, the reward model has its own tokenizer: give texts or messages")
        if not chat:
            return text_ids([rollout.source.text + rollout.transcript], tokenizer)[0]
        return list(tokenizer.apply_chat_template(rollout.messages, tokenize=True, return_dict=True)["input_ids"])

    def shares_vocabulary(self, tokenizer: Any) -> bool:
        """Whether the model was trained on tokens of the same numbers."""
        return _same_vocabulary(str(self.path), tokenizer)

    def close(self) -> None:
        """Free the weights; the next scoring loads them again."""
        self._loaded = None
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self) -> tuple[Any, Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

            from rlbench.rewards.media_classifier import hears, media_classifier
            from rlbench.rewards.shaped_head import HeadShape, shaped_classifier

            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            try:
                tokenizer = AutoTokenizer.from_pretrained(self.path)
                config = AutoConfig.from_pretrained(self.path)
                with_media = kind = media_classifier(config)
                if not HeadShape.of(config).plain:
                    kind = shaped_classifier(
                        with_media or AutoModelForSequenceClassification._model_mapping[type(config)]
                    )
                model, report = (kind or AutoModelForSequenceClassification).from_pretrained(
                    self.path, dtype=getattr(torch, self.dtype), output_loading_info=True
                )
            except (OSError, ValueError) as error:
                raise DataError(f"{self.path} is no reward model that can be loaded: {error}") from error
            self._check(model, sorted(report["missing_keys"]))
            # keys and values of all layers, for tokens that never come
            model.config.get_text_config().use_cache = False
            reading = HearingReader if hears(config) else SeeingReader
            reader = reading(model, str(self.path)) if with_media else None
            self._loaded = model.to(device).eval(), tokenizer, reader
        return self._loaded

    def _check_takes(self, rollouts: Sequence[Rollout], reader: SeeingReader | HearingReader | None) -> None:
        """Refuse images or sounds that the model would not take, whatever its template writes in their place, and
        videos."""
        refuse_videos(rollouts, f"the reward model {self.path}")
        for held, does, kind, wanted in (
            ("images", "sees", SeeingReader, "Qwen-VL's"),
            ("sounds", "hears", HearingReader, "Qwen2-Audio's"),
        ):
            count = sum(bool(one.all_images if held == "images" else one.sounds) for one in rollouts)
            if count and not isinstance(reader, kind):
                raise DataError(
                    f"{count} of {len(rollouts)} completions have {held}, and the reward model {self.path} {does} "
                    f"none: take one that does (rb.RewardModel trains and saves them of models of {wanted} kind), or "
                    "leave those completions out by rollouts.select"
                )

    def _check(self, model: Any, missing: list[str]) -> None:
        """Refuse a classifier whose head was never trained, and an output that it does not have."""
        if missing:
            raise DataError(f"{self.path} has no weights for {', '.join(missing[:3])}: its head would be random")
        outputs, heads = int(model.config.num_labels), getattr(model.config, "scalar_head", {}).get("heads")
        if self.output is not None and heads:
            raise DataError(
                f"model: output={self.output} has no effect: the reward of {self.path} is the sum of its heads, "
                f"{', '.join(heads)}"
            )
        if self.output is None and outputs != 1:
            raise DataError(f"{self.path} gives {outputs} numbers: say which is the reward by model(…, output=0)")
        if self.output is not None and not 0 <= self.output < outputs:
            raise DataError(f"model: output={self.output}, but {self.path} gives {outputs} numbers, counted from 0")

    def _forward(self, rows: Sequence[Sequence[int]], media: Sequence[Sequence[Any]]) -> list[list[float]]:
        """Return for each row the reward; of several heads what each says."""
        from rlbench.rewards.shaped_head import SHAPED, HeadShape, scores_at_the_ends

        model, _, reader = self._load()
        if reader is not None:
            logits = reader.outputs(rows, media)
        else:
            padding = padding_for(rows, padding_token(model))
            ids, mask = padded(rows, padding)
            device = next(model.parameters()).device
            ids, mask = ids.to(device), mask.to(device)
            if hasattr(model, SHAPED):
                logits = scores_at_the_ends(model, ids, mask)
            else:
                with padding_is(model, padding):
                    logits = model(input_ids=ids, attention_mask=mask).logits
        chosen = logits if HeadShape.of(model.config).heads else logits[:, self.output or 0][:, None]
        return chosen.float().cpu().tolist()  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    def __repr__(self) -> str:
        changed = {f.name: v for f in fields(self)[1:-1] if (v := getattr(self, f.name)) != f.default}
        return shown("model", self.path, **changed)


def reward_of(scores: Sequence[float], heads: Mapping[str, float], hint: str = "") -> Outcome:
    """Return the reward of a completion: the one score; of several `heads` their weighted sum, each a component."""
    total = sum(w * v for w, v in zip(heads.values(), scores, strict=True)) if heads else scores[0]
    if total - total != 0.0:
        return Failure(f"the reward model gave {total}", hint)
    return Reward(total, dict(zip(heads, scores, strict=True)) if heads else {})


def read_tokens(rollout: Rollout, tokenizer: Any) -> list[int]:
    """What a model trained on `rb.data.pairs` or `rollouts.pairs` reads of a completion: its tokens as they were
    sampled, where the tokenizer is of the same vocabulary and its model gives images and sounds as many tokens, else
    its texts as pairs are encoded, up to the end token."""
    renderer, ids = Renderer.of(tokenizer), [*map(int, rollout.prompt_token_ids), *rollout.token_ids]
    if len(rollout.prompt_token_ids) and _same_vocabulary(rollout.tokenizer, tokenizer):
        media = media_of(rollout)
        if not media or renderer.media_tokens(media).hold(ids, media, len(rollout.prompt_token_ids)):
            return ids
    if rollout.observed_images:
        raise DataError("an environment showed it images, which only a model with the policy's own tokens reads")
    shown = rollout.source.media
    rendered = Reading().continued(renderer, rollout.prompt, rollout.transcript, "completion", None, shown)
    return rendered.tokens[: int(rendered.trained.nonzero()[0][-1]) + 1].tolist()  # type: ignore[no-any-return]


def media_of(rollout: Rollout) -> tuple[Any, ...]:
    """Return a completion's images, its prompt's and those that an environment showed, or its prompt's sounds."""
    return rollout.all_images or rollout.sounds


def _same_vocabulary(name: str, tokenizer: Any) -> bool:
    """Whether the tokenizer called `name` (folder or hub id; "" where not known) gives tokens the same numbers."""
    other = str(tokenizer.name_or_path)
    return name in ("", other) or _vocabulary(name) == _vocabulary(other)


@lru_cache(maxsize=8)
def _vocabulary(name: str) -> dict[str, int]:
    return dict(open_tokenizer(name).get_vocab())


def refuse_videos(rollouts: Iterable[Rollout], who: str) -> None:
    """Refuse completions whose prompts have videos, which no reward model here watches."""
    if count := sum(bool(rollout.videos) for rollout in rollouts):
        raise DataError(
            f"{count} completions are of prompts with videos, and {who} watches none: score them by a function, which "
            "finds rollout.videos, or leave them out by rollouts.select"
        )
