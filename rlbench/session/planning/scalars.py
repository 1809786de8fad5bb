"""What a trainer makes on the policy's ranks beside it, on meta: its critic, and frozen reward models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rlbench.errors import BuildError
from rlbench.session.planning.model import Model, made, stamp_of
from rlbench.session.planning.request import CRITIC, SCORER, Request, numbered
from rlbench.trainers.models.policy_module import config_of
from rlbench.trainers.models.reward_heads import make_reward_model
from rlbench.trainers.models.scalar_model import HEAD
from rlbench.trainers.models.value_model import make_critic

CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
"""How the names of architectures end."""


@dataclass(frozen=True)
class ScalarSpec:
    """A critic, which is `trainable`, or a frozen reward model, as a trainer makes them; `dtype`: None, as stored."""

    path: str
    trainable: bool
    dtype: str | None = None

    def __call__(self) -> Any:
        """Make the module, on meta."""
        return make_critic(self.path) if self.trainable else make_reward_model(self.path, dtype=self.dtype)


def critic_of(request: Request, policy: Model) -> Model | None:
    """The critic that a trainer would make beside the policy, in whose precision it computes; None where there is
    none."""
    if request.critic is None:
        return None
    return _beside(request, ScalarSpec(request.critic, trainable=True), policy)


def scorers_of(request: Request, policy: Model) -> dict[str, Model]:
    """Its reward models, by role."""
    named = numbered(SCORER, request.rewards)
    return {role: _beside(request, ScalarSpec(r.path, False, r.dtype), policy) for role, r in named.items()}


def _beside(request: Request, spec: ScalarSpec, policy: Model) -> Model:
    """Make a critic or a reward model as `build_trainer` does. Raises BuildError for a checkpoint that can be none, and
    for one that would not see the pictures."""
    train, path, role = request.train, spec.path, CRITIC if spec.trainable else SCORER
    whole = spec.dtype is not None
    half = (policy.half == "bfloat16", policy.half == "float16") if not whole else (False, False)
    together = 1 if whole else train.tensor_parallel
    try:
        if not spec.trainable:
            _need_head(path, any_number=whole)
        model = made(spec, None, half, None, train.use_mp_opt, together, stamp_of(path))
    except BuildError as error:
        raise BuildError(f"no {role} can be planned of {path!r}: {error}") from error
    if request.images is not None and not model.sees:
        raise BuildError(f"images={request.images}: the {role} {path!r} sees none; give one that does, or no images=")
    return model


def _need_head(path: str, any_number: bool) -> None:
    """Raise BuildError where a checkpoint has no scalar head, by its config and the names of the weights that are
    here, or, unless it may have `any_number` of outputs, one of several."""
    config = config_of(path)
    named = config.architectures or ()
    if any(name.endswith(CLASSIFIER) for name in named) and config.num_labels != 1 and not any_number:
        raise BuildError(
            f"its head gives {config.num_labels} numbers, and a trainer's reward model gives one: give a checkpoint "
            "of one label, or rb.rewards.model(path, output=0)"
        )
    if any(name.endswith(CAUSAL) for name in named) and not _holds_head(path):
        raise BuildError(
            f"it is a causal language model ({', '.join(named)}) without a scalar head: give a sequence classifier of "
            "one label, as rb.RewardModel saves it; critic= takes a causal model"
        )


def _holds_head(path: str) -> bool:
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            if f"{HEAD}.weight" in tensors.keys():
                return True
    return False
