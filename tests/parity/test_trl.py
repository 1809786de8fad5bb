"""Our losses and gradients equal those that TRL's trainers compute, to 1e-5; `trl_values.py` wrote TRL's.

The losses of a policy go the way of a session's step, through a training rank; those of reward models and teachers are
functions. Where ours is another definition by design, the test says which and converts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlbench import rl
from rlbench.data.batches.batch import TrainBatch, of_texts
from rlbench.data.texts.preferences import of_pairs
from tests.modules import qwen_on_meta
from tests.parity import small
from tests.ranks import Ranks, ranks
from tests.trainers.policy_reference import forward_backward, gradients

KEPT = json.loads((Path(__file__).parent / "trl.json").read_text())
TRL, CASES, PHASES = KEPT["made_with"]["trl"], KEPT["cases"], KEPT["phases"]
CLOSE = 1e-5

Rows = tuple[list[list[int]], list[list[int]], list[np.ndarray]]


# -- TRL's batches as ours


def rows(ids: Any, attention: Any, trained: Any) -> Rows:
    """Padded arrays as prompts, responses and masks: a response begins with the first token that is trained."""
    prompts, responses, masks = [], [], []
    for tokens, there, mask in zip(np.array(ids), np.array(attention, bool), np.array(trained, bool), strict=True):
        begin, tokens, mask = int(mask[there].argmax()), tokens[there], mask[there]
        prompts.append(tokens[:begin].tolist())
        responses.append(tokens[begin:].tolist())
        masks.append(mask[begin:])
    return prompts, responses, masks


def interleaved(first: Rows, second: Rows) -> Rows:
    prompts, responses, masks = (
        [one for both in zip(*parts, strict=True) for one in both] for parts in zip(first, second, strict=True)
    )
    return prompts, responses, masks


def pairs(batch: Any) -> TrainBatch:
    """Chosen and rejected, as `DPOTrainer` stacks them, or as those of its kin name them."""
    if "chosen_input_ids" in batch:
        chosen, rejected = (
            rows(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], np.array(batch[f"{side}_labels"]) != -100)
            for side in ("chosen", "rejected")
        )
    else:
        names, half = ("input_ids", "attention_mask", "completion_mask"), len(batch["input_ids"]) // 2
        chosen, rejected = (
            rows(*(batch[name][at] for name in names))
            for at in (slice(half), slice(half, None))  # type: ignore[call-arg]
        )
    return of_pairs(*interleaved(chosen, rejected))


def labelled(batch: Any) -> TrainBatch:
    """Judged responses, each followed by TRL's response after its prompt, of which nothing is trained."""
    own = rows(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    others = rows(batch["KL_input_ids"], batch["KL_attention_mask"], batch["KL_completion_mask"])
    others = (others[0], others[1], [np.zeros_like(mask) for mask in others[2]])
    judged = np.array([mark for label in batch["label"] for mark in (1 if label else -1, 0)], np.int8)
    return of_texts(*interleaved(own, others), preference=judged)


def with_reference(batch: TrainBatch) -> TrainBatch:
    model = small.language_model(PHASES["reference"])
    found = []
    with torch.no_grad():
        for prompt, response in zip(batch.prompts, batch.responses, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
            logp = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
            found.append(logp[torch.arange(len(response)), ids[len(prompt) :]].numpy())
    return batch.replace(ref_logprobs=np.concatenate(found))


# -- comparing


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = str(tmp_path_factory.mktemp("small"))
    small.language_model().save_pretrained(folder)
    with ranks(1, qwen_on_meta(folder)) as engine:
        yield engine


def assert_as_trl(name: str, loss: float, found: dict[str, Tensor]) -> None:
    theirs = CASES[name]
    assert loss == pytest.approx(theirs["loss"], rel=CLOSE, abs=CLOSE), f"{name} of TRL {TRL}"
    assert found.keys() == theirs["gradients"].keys()
    for parameter, values in theirs["gradients"].items():
        ours = found[parameter].flatten()
        torch.testing.assert_close(
            ours, torch.tensor(values), rtol=CLOSE, atol=CLOSE, msg=lambda m, p=parameter: f"{name}, {p}: {m}"
        )


def assert_step(rank: Ranks, name: str, *parts: tuple[TrainBatch, Any]) -> None:
    """The losses of the parts, and their gradients, add up to TRL's."""
    total, summed = 0.0, dict[str, Tensor]()
    for batch, loss in parts:
        rank.call("policy_zero_grad")
        total += forward_backward(rank, batch, loss)[0]["metrics"]["loss"]
        summed = {n: gradient + summed.get(n, 0.0) for n, gradient in gradients(rank).items()}
    assert_as_trl(name, total, summed)


def meant(per_pair: Any) -> Any:
    """A loss of pairs, written as in a cell."""

    def loss(inputs: rl.LossInputs) -> Any:
        return inputs.of_pairs(per_pair(inputs)), {}

    loss.aggregation = "seq-mean-token-mean"  # type: ignore[attr-defined]
    return loss


@pytest.mark.long
def test_what_is_kept_is_what_trl_computes(repository: Path, tmp_path: Path) -> None:
    """In an environment of TRL's own, made once below build/; rows may come in another order."""
    from benchmarks import trl_environment

    command = [trl_environment.python(), "-m", "tests.parity.trl_values", str(tmp_path / "trl.json")]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "trl.json").read_text())
    assert found["made_with"]["trl"] == TRL == trl_environment.TRL
    for name, kept in CASES.items():
        assert found["cases"][name]["loss"] == pytest.approx(kept["loss"], rel=CLOSE), name


# -- a policy's losses


def test_sft(rank: Ranks) -> None:
    batch = CASES["sft"]["batch"]
    texts = rows(batch["input_ids"], batch["attention_mask"], np.array(batch["labels"]) != -100)
    assert_step(rank, "sft", (of_texts(*texts), "sft"))


@pytest.mark.parametrize(
    ("name", "loss"), [("dpo", rl.dpo(beta=0.1)), ("dpo_robust", rl.dpo(beta=0.1, label_smoothing=0.1, robust=True))]
)
def test_dpo(rank: Ranks, name: str, loss: Any) -> None:
    assert_step(rank, name, (with_reference(pairs(CASES[name]["batch"])), loss))


def test_simpo(rank: Ranks) -> None:
    assert_step(rank, "simpo", (pairs(CASES["simpo"]["batch"]), rl.simpo(beta=2.0, gamma=0.5)))


def test_kto(rank: Ranks) -> None:
    batch = with_reference(labelled(CASES["kto"]["batch"]))
    assert_step(rank, "kto", (batch, rl.kto(beta=0.1, undesirable_weight=1.5)))
    metrics = forward_backward(rank, batch, "kto")[0]["metrics"]
    assert metrics["point"] > 0, "so the reference point counts"


def test_ipo_is_trls_where_log_ratios_are_averaged_over_tokens(rank: Ranks) -> None:
    """Ours is the paper's, of sums; TRL divides each response's log-ratio by its tokens."""

    def averaged(inputs: rl.LossInputs) -> Tensor:
        chosen, rejected = inputs.chosen, inputs.rejected
        means = [side.mean_logprobs for side in (chosen, rejected)]
        reference = [side.ref_logprobs / side.tokens for side in (chosen, rejected)]
        return rl.ipo(beta=0.1).of(*means, *reference)[0]

    assert_step(rank, "ipo", (with_reference(pairs(CASES["ipo"]["batch"])), meant(averaged)))


def test_orpo_is_trls_where_the_chosen_texts_are_imitated_token_by_token_with_their_prompts(rank: Ranks) -> None:
    """Ours imitates each chosen response by the mean over its tokens, and each pair counts alike; TRL takes one mean
    over all tokens of prompts and chosen responses."""
    batch = CASES["orpo"]["batch"]
    whole = rows(batch["chosen_input_ids"], batch["chosen_attention_mask"], batch["chosen_attention_mask"])
    texts = of_texts([one[:1] for one in whole[1]], [one[1:] for one in whole[1]], [mask[1:] for mask in whole[2]])
    compared = pairs(batch)
    without_imitation = (compared, meant(lambda inputs: inputs.chosen.mean_logprobs))
    assert_step(rank, "orpo", (compared, rl.orpo(beta=0.1)), without_imitation, (texts, "sft"))


# -- reward models and teachers


@pytest.mark.parametrize(("name", "centring"), [("reward", 0.0), ("reward_margin_centred", 0.01)])
def test_reward(name: str, centring: float) -> None:
    batch, model = CASES[name]["batch"], small.reward_model()
    scores = model(torch.tensor(batch["input_ids"]), attention_mask=torch.tensor(batch["attention_mask"])).logits
    chosen, rejected = scores.squeeze(-1).chunk(2)
    margin = torch.tensor(batch["margin"]) if "margin" in batch else None
    loss = rl.bradley_terry_loss(chosen, rejected, margin)[0].mean()
    loss = loss + centring * rl.centering_penalty(chosen, rejected).mean()
    loss.backward()
    assert_as_trl(name, float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gkd_forward", {"divergence": "forward_kl"}),
        ("gkd_jsd", {"divergence": "jsd", "mixture": 0.3}),
        ("gkd_reverse", {"divergence": "reverse_kl"}),
    ],
)
def test_gkd(name: str, options: dict[str, Any]) -> None:
    batch, model = CASES[name]["batch"], small.language_model()
    given = {key: torch.tensor(batch[key]) for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        teacher = small.language_model(PHASES["teacher"])(**given).logits[:, :-1]
    mask = torch.tensor(batch["labels"])[:, 1:] != -100
    per_token = rl.distillation_loss(model(**given).logits[:, :-1], teacher, mask, **options)
    loss = per_token.sum() / mask.sum()
    loss.backward()
    assert_as_trl(name, float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
