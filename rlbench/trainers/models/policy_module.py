"""The module a session trains when it is given a path: the checkpoint's own architecture, with AdamW."""

from __future__ import annotations

from typing import Any

import torch

from rlbench.errors import BuildError, nearest
from rlbench.nn import HuggingFaceFsdp2TrainModule, device
from rlbench.nn.huggingface import check_path
from rlbench.trainers.models.policy_spec import PolicySpec, check_causal


class FrozenPolicy(HuggingFaceFsdp2TrainModule):
    """A policy that is only asked for log-probs."""

    spec: PolicySpec


class TrainedPolicy(HuggingFaceFsdp2TrainModule):
    """A policy with an optimizer."""

    spec: PolicySpec
    optimizer: torch.optim.Optimizer

    def on_weights_materialized(self) -> None:
        """Make the optimizer the spec asks for.

        Raises:
            BuildError: float16 weights with `use_mp_opt`: their gradients wait scaled, and the session shows them.
        """
        spec = self.spec
        if self.strategy.config.use_mp_opt and any(p.dtype == torch.float16 for p in self.parameters()):
            raise BuildError("use_mp_opt holds a session's weights in bfloat16, these are float16: dtype='bfloat16'.")
        self.optimizer = self.strategy.create_optimizer(
            self, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
        )
        self.strategy.max_norm = spec.max_norm


def make_policy(spec: PolicySpec) -> FrozenPolicy | TrainedPolicy:
    """Make the module of `spec` on meta.

    Raises:
        BuildError: no such model, not a causal language model, or an unknown dtype.
    """
    architecture = causal_class(spec.path, spec.revision)
    base = TrainedPolicy if spec.trainable else FrozenPolicy
    cls: Any = type(f"{base.__name__}{architecture.__name__}", (base, architecture), {"__module__": __name__})
    options: dict[str, Any] = {} if spec.dtype is None else {"dtype": floating_dtype(spec.dtype)}
    if spec.revision is not None:
        options["revision"] = spec.revision
    with device("meta"):
        module = cls.from_pretrained(spec.path, **options)
    module.spec = spec
    module.requires_grad_(spec.trainable)
    if spec.gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.train()
    return module  # type: ignore[no-any-return]


def causal_class(path: str, revision: str | None = None) -> type[Any]:
    """The transformers class that generates text for the checkpoint at `path`.

    Raises:
        BuildError: no config there, or no causal language model of its type.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    config = config_of(path, revision)
    check_causal(path, config.architectures or (), config.model_type)
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)  # type: ignore[no-any-return]
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise BuildError(f"{path!r} is a {config.model_type!r} model, which is no causal language model.")
    return mapping[type(config)]  # type: ignore[no-any-return]


def config_of(path: str, revision: str | None = None) -> Any:
    """The config of the checkpoint at `path`.

    Raises:
        BuildError: there is none, or of no known type.
    """
    from transformers import AutoConfig

    check_path(path)
    try:
        return AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{path!r} cannot be opened as a model: it is neither a folder with a config.json of a known "
            f"type nor a model that the hub or its local cache can serve now ({str(error).splitlines()[0]})"
        ) from error


def floating_dtype(given: str | torch.dtype) -> torch.dtype:
    """The floating dtype of that name. Raises BuildError for any other."""
    found = given if isinstance(given, torch.dtype) else getattr(torch, given, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = ("float32", "bfloat16", "float16")
        raise BuildError(f"dtype={given!r} is none{nearest(str(given), known)}; use {', '.join(known)}.")
    return found
