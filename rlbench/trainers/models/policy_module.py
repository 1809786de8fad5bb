"""The module a session trains when it is given a path: the checkpoint's own architecture, with AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlbench.errors import BuildError, nearest
from rlbench.nn import HuggingFaceFsdp2TrainModule, device, lora
from rlbench.nn.huggingface import check_path
from rlbench.nn.quantised import quantise
from rlbench.options import OptionError
from rlbench.trainers.models.policy_spec import PolicySpec, check_causal, check_unquantised


class FrozenPolicy(HuggingFaceFsdp2TrainModule):
    """A policy that is only asked for log-probs."""

    spec: PolicySpec


class TrainedPolicy(HuggingFaceFsdp2TrainModule):
    """A policy with an optimizer."""

    spec: PolicySpec
    optimizer: torch.optim.Optimizer

    def on_weights_materialized(self) -> None:
        """Make the optimizer the spec asks for; not over float16 with `use_mp_opt`, whose gradients wait scaled."""
        spec = self.spec
        if self.strategy.config.use_mp_opt and any(p.dtype == torch.float16 for p in self.parameters()):
            raise BuildError("use_mp_opt holds a session's weights in bfloat16, these are float16: dtype='bfloat16'.")
        self.optimizer = self.strategy.create_optimizer(
            self, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
        )
        self.strategy.max_norm = spec.max_norm


@dataclass(frozen=True)
class BasePolicy:
    """A policy as it is with its adapters off: a reference that takes no memory."""

    module: nn.Module


def make_policy(spec: PolicySpec) -> FrozenPolicy | TrainedPolicy:
    """Make the module of `spec` on meta."""
    architecture = causal_class(spec.path, spec.revision)
    base = TrainedPolicy if spec.trainable else FrozenPolicy
    cls: Any = type(f"{base.__name__}{architecture.__name__}", (base, architecture), {"__module__": __name__})
    module = on_meta(cls, spec.path, spec.dtype, revision=spec.revision)
    module.spec = spec
    for parameter in module.parameters():  # positions of an audio tower are fixed by its architecture
        parameter.requires_grad_(spec.trainable and parameter.requires_grad)
    as_trained(module, spec)
    return module  # type: ignore[no-any-return]


def as_trained(module: Any, spec: PolicySpec, whole: tuple[str, ...] = ()) -> None:
    """Put the adapters of `spec` into a module on meta, and have it recompute activations where that is asked for.

    `whole`: layers that are trained as they are, without an adapter.
    """
    if spec.lora is not None and spec.trainable:
        lora.inject(module, spec.lora.rank, spec.lora.scale, spec.lora.targets, spec.lora.dropout, whole)
        if spec.lora.base is not None:
            quantise(module, spec.lora.base)
    if spec.gradient_checkpointing:
        recompute_activations(module)
        module.train()


def recompute_activations(model: nn.Module, reentrant: bool = False) -> None:
    """Have a model compute its activations again in the backward instead of holding them; `reentrant`: by torch's
    checkpoints of that kind, which pass gradients on where what enters a layer has one, so embeddings are given one."""
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise OptionError(f"gradient_checkpointing: {type(model).__name__} does not offer it.")
    if reentrant and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def on_meta(cls: Any, path: str, dtype: str | torch.dtype | None, **options: Any) -> Any:
    """Make a module of a checkpoint without memory; options that are None are not given."""
    options["dtype"] = None if dtype is None else floating_dtype(dtype)
    with device("meta"):
        return cls.from_pretrained(path, **{name: value for name, value in options.items() if value is not None})


def causal_class(path: str, revision: str | None = None) -> type[Any]:
    """The transformers class that generates text for the checkpoint at `path`."""
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
    """The config of the checkpoint at `path`."""
    from transformers import AutoConfig

    check_path(path)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{path!r} cannot be opened as a model: it is neither a folder with a config.json of a known "
            f"type nor a model that the hub or its local cache can serve now ({str(error).splitlines()[0]})"
        ) from error
    check_unquantised(path, getattr(config, "quantization_config", None))
    return config


def floating_dtype(given: str | torch.dtype) -> torch.dtype:
    """The floating dtype of that name."""
    found = given if isinstance(given, torch.dtype) else getattr(torch, given, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = ("float32", "bfloat16", "float16")
        raise BuildError(f"dtype={given!r} is none{nearest(str(given), known)}; use {', '.join(known)}.")
    return found
