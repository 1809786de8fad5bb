"""The named losses: which there are, how they read, that they are values."""

import dataclasses
import importlib
import pickle
import pkgutil

import cloudpickle
import pytest

import rlbench.rl
from rlbench import rl
from rlbench.errors import LossError
from rlbench.rl.aggregate import Aggregation, BatchTotals
from rlbench.rl.clipped import dapo, decoupled_ppo, grpo, ppo
from rlbench.rl.distillation import DistillationLoss
from rlbench.rl.losses import DISTILLATION, NAMED, PREFERENCE, REWARD, check_sampled_as_trained, presets, resolve
from rlbench.rl.policy import PolicyLoss
from rlbench.rl.sequence import gspo
from rlbench.rl.weighted import dro
from tests.rl.reference import make_inputs

EACH = pytest.mark.parametrize("kind", NAMED.values(), ids=lambda kind: kind.__name__)


def subclasses(kind: type) -> set[type]:
    return {kind} | {below for child in kind.__subclasses__() for below in subclasses(child)}


def test_every_policy_loss_of_the_package_has_its_name():
    for module in pkgutil.iter_modules(rlbench.rl.__path__):
        importlib.import_module(f"rlbench.rl.{module.name}")
    found = {kind for kind in subclasses(PolicyLoss) if kind.__module__.startswith("rlbench.")}
    assert found - {PolicyLoss, DistillationLoss} == {*NAMED.values(), *DISTILLATION.values()}
    assert all(name == kind.__name__ for name, kind in NAMED.items())


@EACH
def test_a_loss_reads_as_it_is_typed(kind):
    assert repr(kind()) == f"{kind.__name__}()"
    changed = kind(kl_coef=0.25)
    assert repr(changed) == f"{kind.__name__}(kl_coef=0.25)"
    assert eval(repr(changed), dict(NAMED)) == changed


def test_own_fields_are_shown_before_the_shared_ones():
    shown = repr(gspo(kl_coef=0.1, level="token", aggregation="token-mean"))
    assert shown == "gspo(level='token', kl_coef=0.1, aggregation='token-mean')"
    assert repr(dapo(clip_high=0.28)) == "dapo()"
    assert repr(ppo(clip_high=0.28)) == "ppo(clip_high=0.28)"


@EACH
def test_losses_are_values_that_travel(kind):
    loss = kind(kl_coef=0.25)
    assert loss == kind(kl_coef=0.25) != kind()
    assert hash(loss) == hash(kind(kl_coef=0.25))
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert cloudpickle.loads(cloudpickle.dumps(loss)) == loss
    assert dataclasses.replace(loss, kl_coef=0.0) == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.kl_coef = 1.0


def test_losses_of_other_names_are_other_values():
    assert ppo() != grpo()
    assert len({kind() for kind in NAMED.values()}) == len(NAMED.values())


@EACH
def test_names_stand_for_defaults_and_go_through_the_aggregation_they_name(kind):
    loss = resolve(kind.__name__)
    assert loss == kind()
    x = make_inputs(0)
    weights = Aggregation.of(loss.aggregation).weights(x.mask, BatchTotals.of(x.mask, x.group), x.group)
    assert loss(x)[0].shape == weights.shape


def test_presets_have_the_bounds_and_aggregations_of_their_papers():
    seen = {name: kind() for name, kind in NAMED.items()}
    assert {name: loss.aggregation for name, loss in seen.items() if loss.aggregation != "token-mean"} == {
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "gspo": "seq-mean-token-mean",
        "luspo": "seq-mean-token-sum",
        "gmpo": "seq-mean-token-mean",
        "sapo": "seq-mean-token-mean",
        "cpgd": "seq-mean-token-mean",
    }
    bounds = {name: (x.clip_low, x.clip_high) for name, x in seen.items() if hasattr(x, "clip_low")}
    assert {name: bound for name, bound in bounds.items() if bound != (0.2, 0.2)} == {
        "dapo": (0.2, 0.28),
        "gspo": (3e-4, 4e-4),
        "luspo": (2e-3, 2.5e-3),
        "gmpo": (0.4, 0.4),
        "cispo": (1.0, 4.0),
    }
    assert {name for name, loss in seen.items() if loss.anchor == "sampler"} == {
        "importance_sampling",
        "dppo_tv",
        "dppo_kl",
    }


def test_what_is_no_loss_is_refused():
    with pytest.raises(LossError, match="nearest: gspo"):
        resolve("gsop")
    with pytest.raises(LossError, match=r"dapo\(\)"):
        resolve(dapo)
    with pytest.raises(LossError, match="got float"):
        resolve(0.5)

    def mine(inputs):
        return inputs.logprobs, {}

    assert resolve(mine) is mine
    assert resolve(dro(beta=1.0)) == dro(beta=1.0)


def test_the_table_has_a_row_for_each_name_with_paper_and_fields():
    table = presets()
    rows = {row.name: row for row in table}
    assert list(rows) == [*NAMED, *DISTILLATION, *PREFERENCE, *REWARD] and len(table) == len(rows)
    for row in rows.values():
        assert row.what and row.paper and row.aggregation
        assert row.name in repr(table) and row.what in repr(table)
    assert rows["reinforce"].fields == ""
    assert rows["dro"].fields == "beta=0.05"
    assert rows["dapo"].fields == "clip_low=0.2, clip_high=0.28, dual_clip=None, delta=None"
    assert "anchor='sampler'" in rows["dppo_tv"].fields
    assert "mismatch=" in rows["decoupled_ppo"].fields
    assert max(len(line) for line in repr(table).splitlines()) < 200


def test_decoupled_ppo_shows_another_correction_than_its_default():
    default = decoupled_ppo().mismatch
    other = dataclasses.replace(default, cap=2.0)
    assert repr(decoupled_ppo(mismatch=other)) == f"decoupled_ppo(mismatch={other!r})"


# -- a sampler of another distribution


@pytest.mark.parametrize(
    ("loss", "weighs"),
    [
        (rl.grpo(), False),
        (rl.clip_cov(), False),
        (rl.grpo(mismatch=rl.token_tis()), True),
        (rl.grpo(anchor="sampler"), True),
        (rl.decoupled_ppo(), True),
        (rl.importance_sampling(), True),
        (rl.grpo(mismatch=rl.off_policy_sequence_mask(0.5)), True),
        (rl.grpo(mismatch=rl.off_policy_sequence_mask(0.5, against="old")), False),
        (rl.grpo(mismatch=rl.off_policy_sequence_mask(0.5, against="old") + rl.icepop()), True),
    ],
)
def test_what_weighs_by_the_sampler_refuses_log_probs_of_a_reshaped_distribution(loss, weighs):
    check_sampled_as_trained(loss, "it", ())
    if weighs:
        with pytest.raises(LossError, match="top_p"):
            check_sampled_as_trained(loss, "it", ("top_p=0.9",))
    else:
        check_sampled_as_trained(loss, "it", ("top_p=0.9",))


def test_a_function_weighs_by_what_it_reads_unless_it_says_otherwise():
    def loss(inputs):
        raise AssertionError("not called")

    with pytest.raises(LossError, match="top_k=5"):
        check_sampled_as_trained(loss, "loss", ("top_k=5",), reads_sampler=True)
    loss.needs_sampler = False
    check_sampled_as_trained(loss, "loss", ("top_k=5",), reads_sampler=True)
