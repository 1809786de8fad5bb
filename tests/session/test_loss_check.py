"""A loss is tried in the kernel before any rank sees it: what is wrong with it shows where it was typed."""

import threading

import cloudpickle
import numpy as np
import pytest
import torch

from rlbench.errors import LossError
from rlbench.rl import grpo, token_tis
from rlbench.session.training.loss_check import ship, trial_inputs, trusts_old_logprobs, weighs_by_advantages
from tests.data.values import rollouts


@pytest.fixture(scope="module")
def batch():
    return rollouts().score(range(6)).batch(lambda rewards, group: rewards - 2.0)


def mine(inputs):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return -ratio * inputs.advantages, {"ratio": ratio.detach(), "count": 3, "mean": ratio.mean().detach()}


def refused(loss, batch):
    with pytest.raises(LossError) as error:
        ship(loss, batch)
    return str(error.value)


class Brittle(torch.autograd.Function):
    """The log-probs times the advantages, whose backward refuses advantages that are no numbers, or any."""

    @staticmethod
    def forward(ctx, logprobs, advantages, always):
        ctx.save_for_backward(advantages)
        ctx.always = always
        return -logprobs * advantages

    @staticmethod
    def backward(ctx, gradient):
        (advantages,) = ctx.saved_tensors
        if ctx.always or advantages.isnan().any():
            raise ValueError("no numbers")
        return -gradient * advantages, None, None


# -- what is taken


def test_a_loss_whose_backward_takes_no_nan_is_taken_and_weighs_by_advantages(batch):
    shipped = ship(lambda inputs: (Brittle.apply(inputs.logprobs, inputs.advantages, False), {}), batch)
    assert weighs_by_advantages(shipped, batch)
    assert not weighs_by_advantages(ship(lambda inputs: (-inputs.logprobs, {}), batch), batch)


@pytest.mark.parametrize(
    "loss", ["grpo", "reinforce", grpo(clip_high=0.28), mine], ids=["name", "another", "value", "function"]
)
def test_names_values_and_functions_are_taken_and_arrive_as_they_are(loss, batch):
    shipped = ship(loss, batch)
    assert len(shipped.hash) == 12 and not shipped.needs_reference
    inputs = trial_inputs(batch)
    resolved = cloudpickle.loads(shipped.blob)
    assert resolved(inputs)[0].shape == inputs.logprobs.shape


@pytest.mark.parametrize("loss", ["grpo", "importance_sampling", "reinforce"])
def test_a_batch_without_an_advantage_is_refused_by_losses_that_weigh_by_one(loss):
    without = rollouts().score(range(6)).batch()
    with pytest.raises(LossError, match="without an advantage"):
        ship(loss, without)
    ship("sft", without)
    ship(loss, without.replace(advantages=without.advantages + 1.0))
    ship(loss, rollouts().score(range(6)).batch(lambda rewards, group: 0.0 * rewards))  # a reward that says nothing


def test_it_is_called_by_what_the_user_wrote(batch):
    assert ship("grpo", batch).name == "grpo" and ship(mine, batch).name == "mine"
    assert "clip_high=0.28" in ship(grpo(clip_high=0.28), batch).name


def test_the_hash_tells_an_edited_loss_from_the_same_one(batch):
    assert ship(grpo(), batch).hash == ship("grpo", batch).hash != ship(grpo(clip_high=0.3), batch).hash
    cell = "def loss(inputs):\n    return -{} * inputs.advantages * inputs.logprobs, {{}}"
    hashes = []
    for factor in (1.0, 1.0, 2.0):
        names: dict = {}
        exec(cell.format(factor), names)
        hashes.append(ship(names["loss"], batch).hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_loss_with_a_kl_penalty_says_that_it_needs_a_reference(batch):
    assert ship(grpo(kl_coef=0.1), batch).needs_reference


@pytest.mark.parametrize(("loss", "mend"), [(grpo(kl_coef=0.1), "kl_coef=0"), ("dpo", "'simpo'")])
def test_where_there_is_no_reference_the_mend_is_one_that_the_loss_has(batch, loss, mend):
    with pytest.raises(LossError, match=mend):
        ship(loss, batch, has_reference=False)


def test_a_loss_with_an_entropy_bonus_finds_an_entropy_that_carries_a_gradient(batch):
    bonus = grpo(entropy_coef=0.01)
    assert ship(bonus, batch).name == repr(bonus)
    inputs = trial_inputs(batch)
    (gradient,) = torch.autograd.grad(bonus(inputs)[0].sum(), [inputs.entropy])
    assert torch.allclose(gradient[inputs.mask], torch.tensor(-0.01))


# -- the trial


def test_the_trial_is_two_short_sequences_of_the_batch_itself(batch):
    inputs = trial_inputs(batch.rows([5, 3, 2]))
    assert inputs.logprobs.shape == (2, 4)
    assert inputs.mask.tolist() == [[True] * 3 + [False], [True] * 4]
    assert inputs.sampler_logprobs[1].tolist() == pytest.approx([0.0, -0.01, -0.02, -0.03])
    assert inputs.advantages[0].tolist() == [0.0, 0.0, 0.0, 0.0] and inputs.advantages[1, 0] == 1.0


def test_the_trial_has_ratios_beside_one_so_that_clipping_and_logs_are_exercised(batch):
    inputs = trial_inputs(batch)
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()[inputs.mask]
    assert (ratio != 1).all() and (ratio - 1).abs().max() < 0.1


def test_the_trial_is_the_same_each_time(batch):
    assert torch.equal(trial_inputs(batch).logprobs, trial_inputs(batch).logprobs)


def test_a_batch_of_one_sequence_is_enough(batch):
    assert ship(mine, batch.rows([4])).name == "mine"


def test_padding_may_hold_anything(batch):
    def careless(inputs):
        return torch.where(inputs.mask, inputs.logprobs, float("nan")), {}

    assert ship(careless, batch).name == "careless"


# -- what is refused


def test_a_loss_that_raises_shows_its_error_and_its_line(batch):
    def broken(inputs):
        wrong = inputs.logprob  # not a field
        return wrong, {}

    said = refused(broken, batch)
    assert "`broken` raised AttributeError: 'LossInputs' object has no attribute 'logprob'" in said
    assert "Engines are untouched" in said and "wrong = inputs.logprob  # not a field" in said
    assert "\n  broken, " in said and "test_loss_check.py, line " in said


def test_a_loss_whose_backward_raises_shows_its_error(batch):
    def broken(inputs):
        return Brittle.apply(inputs.logprobs, inputs.advantages, True), {}

    said = refused(broken, batch)
    assert "`broken` raised ValueError in its backward: no numbers" in said and "Engines are untouched" in said


def test_the_line_shown_is_the_users_not_that_of_the_library_it_called(batch):
    def broken(inputs):
        return torch.nn.functional.cross_entropy(inputs.logprobs, "labels"), {}

    assert 'cross_entropy(inputs.logprobs, "labels")' in refused(broken, batch)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (lambda i: i.logprobs, "tensor"),
        (lambda i: (i.logprobs,), "tuple"),
        (lambda i: (i.logprobs, 3.0), "tuple"),
        (lambda i: None, "NoneType"),
    ],
    ids=["tensor", "one value", "no dict", "nothing"],
)
def test_what_is_no_pair_of_loss_and_metrics_is_refused(given, seen, batch):
    said = refused(given, batch)
    assert f"returned {seen}" in said.replace("a tensor", "tensor") and "(per_token, metrics)" in said


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (lambda i: i.logprobs.sum(-1), "(2,)"),
        (lambda i: i.logprobs.mean(), "()"),
        (lambda i: i.logprobs.T, "(3, 2)"),
        (lambda i: 3.0, "float"),
    ],
    ids=["per sequence", "aggregated", "transposed", "number"],
)
def test_a_loss_that_is_not_per_token_is_refused_naming_both_shapes(given, seen, batch):
    said = refused(lambda inputs: (given(inputs), {}), batch.rows([0, 2]))
    assert seen in said and "must be (2, 3)" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(value, batch):
    assert "not finite" in refused(lambda i: (i.logprobs * 0 + value, {}), batch)


@pytest.mark.parametrize(
    "given",
    [
        lambda i: -i.advantages * i.logprobs.detach(),
        lambda i: -i.advantages * i.old_logprobs,
        lambda i: -i.entropy,
    ],
    ids=["detached", "old log-probs", "entropy alone"],
)
def test_a_loss_that_gives_the_log_probs_no_gradient_is_refused(given, batch):
    assert "no gradient" in refused(lambda i: (given(i), {}), batch)


def test_a_gradient_that_is_not_finite_is_refused(batch):
    def root(inputs):
        return torch.sqrt((inputs.logprobs - inputs.logprobs).abs()), {}

    assert "gradient of `root`" in refused(root, batch)


@pytest.mark.parametrize(
    ("metrics", "seen"),
    [
        ({"kl": "small"}, "'kl' is str"),
        ({"kl": np.zeros(2)}, "'kl' is ndarray"),
        ({3: 1.0}, "3 is float"),
        ({"lengths": torch.zeros(2)}, "'lengths' has shape (2,)"),
    ],
    ids=["text", "array", "unnamed", "per sequence"],
)
def test_a_metric_the_trainer_could_not_average_is_refused_by_its_name(metrics, seen, batch):
    assert seen in refused(lambda i: (i.logprobs, metrics), batch.rows([2, 2]))


@pytest.mark.parametrize(
    ("loss", "said"),
    [("grop", "nearest: grpo"), (grpo, "call it to get a loss: grpo()"), (3, "got int")],
    ids=["typo", "class", "number"],
)
def test_what_is_no_loss_at_all_is_refused_with_what_to_write(loss, said, batch):
    assert said in refused(loss, batch)


def test_a_loss_that_cannot_travel_is_refused_in_the_cell(batch):
    lock = threading.Lock()

    def holds(inputs):
        with lock:
            return inputs.logprobs, {}

    said = refused(holds, batch)
    assert "`holds` cannot be sent to the ranks" in said and "lock" in said


def test_our_own_loss_errors_pass_as_they_are(batch):
    def own(inputs):
        raise LossError("say it my way")

    assert refused(own, batch) == "say it my way"


# -- state


class Soft:
    """Subtracts a moving average of the advantages."""

    def __init__(self) -> None:
        self.baseline, self.calls = 0.0, 0

    def __call__(self, inputs):
        self.baseline = 0.9 * self.baseline + 0.1 * float(inputs.advantages[inputs.mask].mean())
        self.calls += 1
        return -(inputs.advantages - self.baseline) * inputs.logprobs, {}


SEEN: dict[str, int] = {}


def counting(inputs):
    SEEN["calls"] = SEEN.get("calls", 0) + 1
    return mine(inputs)


def enclosed():
    calls = 0

    def closure(inputs):
        nonlocal calls
        calls += 1
        return mine(inputs)

    return closure


def test_a_loss_that_changes_itself_is_refused_and_left_as_it_was(batch):
    soft = Soft()
    for loss, names in (
        (soft, ("baseline", "calls")),
        (soft.__call__, ("calls",)),
        (counting, ("SEEN",)),
        (enclosed(), ("calls",)),
    ):
        said = refused(loss, batch)
        assert "changes itself" in said and all(name in said for name in names)
    assert (soft.baseline, soft.calls, SEEN) == (0.0, 0, {}), "the trial called copies"


def test_a_loss_that_holds_values_and_leaves_them_is_taken(batch):
    table = {"scale": torch.ones(3), "names": ["a", "b"]}

    def scaled(inputs):
        per_token, metrics = mine(inputs)
        return per_token * table["scale"].sum(), metrics | {"names": len(table["names"])}

    first, again = ship(scaled, batch), ship(scaled, batch)
    assert first.hash == again.hash and first.name == "scaled"


def only_logs_the_sampler(inputs):
    per_token, metrics = mine(inputs)
    return per_token, metrics | {"gap": (inputs.logprobs - inputs.sampler_logprobs).detach()}


@pytest.mark.parametrize(
    ("loss", "trusts"),
    [
        (only_logs_the_sampler, True),
        ("grpo", True),
        ("gspo", True),
        (mine, True),
        ("reinforce", False),
        (grpo(anchor="sampler"), False),
        (grpo(mismatch=token_tis()), False),
    ],
    ids=["logs it", "grpo", "gspo", "own", "no ratio", "anchored at the sampler", "reweighed"],
)
def test_a_loss_whose_ratio_is_to_the_old_log_probs_alone_is_known(batch, loss, trusts):
    assert trusts_old_logprobs(ship(loss, batch), batch) is trusts


class Planned:
    """Looks at the whole step first, and reads what it planned."""

    needs_plan = True

    def plan(self, whole):
        return {"scale": whole.advantages.abs() + 1.0}

    def __call__(self, inputs):
        per_token, metrics = mine(inputs)
        return per_token * inputs.channels["scale"], metrics


def test_a_loss_with_a_plan_is_asked_with_its_plan(batch):
    assert trusts_old_logprobs(ship(Planned(), batch), batch)
