"""Rollouts and batches that must be equal, and some to compare."""

from dataclasses import fields, replace

import numpy as np

from rlbench.data import EncodedImage, Prompt, PromptSet, Ragged, Rollouts, TrainBatch
from rlbench.data.base.ragged import offsets_of
from rlbench.data.prompts.images import PlacedImage
from rlbench.data.rollouts.scoring import RewardError, RewardErrors
from tests.data.values import generated, rollouts

PICTURE = EncodedImage.from_any(np.full((4, 4, 3), 7, np.uint8))


def same(a, b):
    """Equal to the last bit, dtypes too."""
    for f in fields(Rollouts):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, Ragged):
            assert x.values.dtype == y.values.dtype and x.offsets.tolist() == y.offsets.tolist()
            x, y = x.values, y.values
        if f.name in ("channels", "columns", "components"):
            assert list(x) == list(y)
            for name in x:
                np.testing.assert_array_equal(x[name], y[name])
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, f.name
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=f.name)
        else:
            assert x == y and type(x) is type(y), f.name
    return True


def cut_short():
    parts = [generated([(0, 0, [1, 2], "stop"), (0, 1, [3], "abort"), (1, 0, [4], "stop"), (1, 1, [], "stop")])]
    return Rollouts.merge([Prompt("a"), Prompt("b")], parts, {}).score([1, 2, 3, 4])


def centred(rewards, group):
    return rewards - rewards.mean()


def full(made=None):
    """Rollouts in which every field says something."""
    made = rollouts() if made is None else made
    tokens, samples = len(made.logprobs), made.samples
    place = np.concatenate([np.arange(n) for n in made.lengths])
    return replace(
        made.score(np.arange(samples)).with_channels(entropy=np.arange(tokens)),
        logprobs=np.where(place % 2 == 0, made.logprobs, np.float32(0)),  # an observed token has none
        number=7,
        stats={"tokens": 21.0, "seconds": 2.0, "peak_bytes": 5.0},
        tokenizer="some/folder",
        components={"format": np.arange(samples) / 2.0},
        columns={"weight": np.arange(tokens, dtype=np.float32)},
        reward_seconds=np.arange(samples) / 4.0,
        reward_errors=RewardErrors((RewardError(1, "p", "said", "line"),)),
        mask=place % 2 == 0,
        turns=((place + 1) // 2).astype(np.int32),
        turn_rewards=Ragged.from_rows([[1.0, np.nan]] * samples, np.float64),
        env_rewards=np.arange(samples) * 1.0,
        infos=tuple({"turns": i} for i in range(samples)),
        observed_images=tuple(
            (PlacedImage.of(PICTURE, i), PlacedImage.of(PICTURE, i + 1))[: i % 3] for i in range(samples)
        ),
        notes=("drawn by hand",),
        routing=experts_of(made.prompt_ids.lengths[made.group] + made.lengths),
    )


def experts_of(lengths, layers=3, chosen=2):
    """Experts of sequences of these lengths, each number another."""
    offsets = offsets_of(lengths)
    values = np.arange(int(offsets[-1]) * layers * chosen, dtype=np.int16)
    return Ragged(values.reshape(-1, layers, chosen), offsets)


def batch(made=None):
    return (rollouts().score(range(6)) if made is None else made).batch(centred)


def equal(a, b):
    """Every field of two batches, types too."""
    for field in fields(TrainBatch):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, Ragged):
            assert x.offsets.tolist() == y.offsets.tolist()
            x, y = x.values, y.values
        if isinstance(x, dict):
            assert list(x) == list(y)
            for name in x:
                np.testing.assert_array_equal(x[name], y[name])
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, field.name
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=field.name)
        else:
            assert x == y, field.name
    return True


def numbered(count, name="numbers"):
    return PromptSet(tuple(Prompt(f"p{i}", i, {"even": i % 2 == 0}) for i in range(count)), name)


def labels(prompts):
    return [p.label for p in prompts]
