"""What a rank leaves out of a sync: by what it sent before, and by what its peers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlbench.weights.manifest import Handover
from rlbench.weights.unchanged import Record
from rlbench.workers.train.sent import Sent, SyncPart, record_of

ALL = frozenset({"embed_tokens.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"})
FROZEN = ALL - {"layers.1.weight", "layers.1.bias"}
STAGE = ("shm", "prefix", 1000)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class Votes:
    """A control group of this rank and one that votes as it is told."""

    def __init__(self) -> None:
        self.peer: set[str] | None = set()

    def together(self, doing: str, work: Callable[[], Any]) -> Any:
        return work()

    def gather(self, value: Any) -> list[Any]:
        return [value, self.peer]


@pytest.fixture
def votes() -> Votes:
    return Votes()


@pytest.fixture
def sent(votes: Votes) -> Sent:
    made: Any = votes
    return Sent(made)


@pytest.fixture
def model() -> Model:
    made = Model()
    made.requires_grad_(False)
    made.layers[1].requires_grad_(True)
    return made


def went(sent: Sent, model: nn.Module, held: str, token: str, to: str = "replicas", stage: Any = None) -> SyncPart:
    """One sync that succeeds."""
    part = sent.part(model, Handover(to, held, token), stage)
    sent.note(part)
    return part


def test_what_is_frozen_goes_once(sent: Sent, model: Model) -> None:
    assert went(sent, model, "", "1").left_out == frozenset()
    part = went(sent, model, "1", "2")
    assert part.left_out == FROZEN and part.follows == "1"
    with torch.no_grad():
        model.layers[1].weight.add_(1)
        model.embed_tokens.weight.data[4, 3] += 1
    assert went(sent, model, "2", "3").left_out == {"layers.0.weight", "layers.0.bias"}
    assert went(sent, model, "3", "4").left_out == FROZEN


def test_what_is_frozen_now_goes_once_more_and_what_trains_again_goes_each_time(sent: Sent, model: Model) -> None:
    went(sent, model, "", "1")
    model.layers[1].requires_grad_(False)
    assert went(sent, model, "1", "2").left_out == FROZEN
    assert went(sent, model, "2", "3").left_out == ALL
    model.layers[0].bias.requires_grad_(True)
    assert went(sent, model, "3", "4").left_out == ALL - {"layers.0.weight", "layers.0.bias"}


@pytest.mark.parametrize("held", ["", "another's"])
def test_replicas_that_hold_anything_else_get_all(sent: Sent, model: Model, held: str) -> None:
    went(sent, model, "", "1")
    part = went(sent, model, held, "2")
    assert part.left_out == frozenset() and part.follows == ""
    assert went(sent, model, "2", "3").left_out == FROZEN


def test_after_a_sync_that_failed_here_all_go(sent: Sent, model: Model) -> None:
    went(sent, model, "", "1")
    sent.part(model, Handover("replicas", "1", "2"), None)
    assert went(sent, model, "1", "3").left_out == frozenset(), "the replicas hold what they held"


def test_each_engine_has_its_own_token(sent: Sent, model: Model) -> None:
    went(sent, model, "", "1")
    assert went(sent, model, "", "2", to="others").left_out == frozenset()
    assert went(sent, model, "1", "3").left_out == FROZEN
    assert went(sent, model, "2", "4", to="others").left_out == FROZEN


def test_what_a_stage_does_not_have_is_written_though_the_replicas_have_it(sent: Sent, model: Model) -> None:
    went(sent, model, "", "1", stage=STAGE)
    with torch.no_grad():
        model.layers[0].weight.add_(1)
    went(sent, model, "1", "2")  # by broadcast
    assert went(sent, model, "2", "3", stage=STAGE).left_out == {"embed_tokens.weight"}
    assert went(sent, model, "3", "4", stage=STAGE).left_out == FROZEN
    sent.forget(STAGE)
    assert went(sent, model, "4", "5", stage=STAGE).left_out == frozenset()


def test_what_changed_on_one_rank_goes_from_all(sent: Sent, model: Model, votes: Votes) -> None:
    went(sent, model, "", "1")
    votes.peer = {"embed_tokens.weight"}
    assert went(sent, model, "1", "2").left_out == {"layers.0.weight", "layers.0.bias"}
    votes.peer = None
    assert went(sent, model, "2", "3").left_out == frozenset()


def test_a_parameter_more_and_a_hook_of_the_users_send_all(sent: Sent, model: Model) -> None:
    went(sent, model, "", "1")
    model.register_buffer("scale", torch.ones(1))
    assert went(sent, model, "1", "2").left_out == frozenset()
    assert went(sent, model, "2", "3").left_out == FROZEN | {"scale"}, "a buffer is frozen"

    def hook(*_: Any) -> None: ...

    model.postprocess_output_named_parameters = hook  # type: ignore[assignment]
    assert record_of(model, "4") is None
    assert went(sent, model, "3", "4").left_out == frozenset()
    del model.postprocess_output_named_parameters
    assert went(sent, model, "4", "5").left_out == frozenset(), "nothing is known of what the hook sent"


def test_a_full_training_reads_no_weight() -> None:
    model = Model().to("meta")
    assert record_of(model, "1") == Record("1")
