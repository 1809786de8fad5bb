"""Bases over transformers' architectures: names, splits and sources come from the model itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from rlbench.errors import BuildError
from rlbench.nn.base import BaseTrainModule, Fsdp2TrainModule, FsdpTrainModule, making_on_meta

HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")


class BaseHuggingFaceTrainModule(BaseTrainModule):
    """For a transformers class as the second base: `class Mine(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM)`."""

    _source_revision: str | None = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; inside `rlbench.nn.device("meta")` no weight is read, only the config."""
        if not making_on_meta():
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]
        path = str(pretrained_model_name_or_path)
        hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        options = {name: kwargs.pop(name) for name in ("dtype", "attn_implementation") if name in kwargs}
        if "torch_dtype" in kwargs:
            options.setdefault("dtype", kwargs.pop("torch_dtype"))
        if options.get("dtype") == "auto":
            del options["dtype"]
        config = kwargs.pop("config", None) or _read_config(cls, path, hub, kwargs)
        module = cls._from_config(config, **attention_options(config) | options)  # type: ignore[attr-defined]
        module.name_or_path = config._name_or_path = path
        module._source_revision = hub.get("revision")
        return module.eval()

    def materialization_source(self) -> str:
        """The folder or hub id the module was made from."""
        path = getattr(self, "name_or_path", "") or getattr(getattr(self, "config", None), "_name_or_path", "")
        if not path:
            raise BuildError(f"{type(self).__name__} was made from a config alone: use from_pretrained(path).")
        return str(path)

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        """The architecture's own `_no_split_modules`; else the type of its first decoder layer; else none."""
        names = set(getattr(self, "_no_split_modules", None) or ())
        types = {type(module) for module in self.modules() if type(module).__name__ in names}
        if not types:
            layers = getattr(getattr(self, "model", None), "layers", None)
            types = {type(layers[0])} if isinstance(layers, nn.ModuleList) and len(layers) else set()
        return types


class HuggingFaceFsdp2TrainModule(BaseHuggingFaceTrainModule, Fsdp2TrainModule):
    """A transformers architecture trained with FSDP2."""


class HuggingFaceFsdpTrainModule(BaseHuggingFaceTrainModule, FsdpTrainModule):
    """A transformers architecture trained with FSDP1."""


def attention_options(config: Any) -> dict[str, str]:
    """The attention to ask for where transformers' SDPA leaves out the architecture's cap on scores (Gemma 2)."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def _read_config(cls: type, path: str, hub: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Read the config of `path` as the class wants it, and check that it belongs to the class."""
    check_path(path)
    config_class = cls.config_class  # type: ignore[attr-defined]
    try:
        raw, _ = config_class.get_config_dict(path, **hub)
    except OSError as error:
        raise BuildError(
            f"no config of {path!r} could be read: it is neither a folder with a config.json nor a model "
            f"that the hub or its local cache can serve now ({str(error).splitlines()[0]})"
        ) from error
    held, wanted = raw.get("model_type"), config_class.model_type
    if held and wanted and held != wanted:
        raise BuildError(
            f"{path!r} holds a {held!r} model, and {cls.__name__} is a {wanted!r} one; inherit from the "
            f"class of {held!r}."
        )
    return config_class.from_pretrained(path, **hub, **overrides)


def check_path(path: str) -> None:
    """Refuse a path that is neither there nor shaped like a hub id, before anything asks the network."""
    if not Path(path).expanduser().exists() and not HUB_ID.match(path):
        raise BuildError(f"no model at {path!r}: there is no such file or folder on this machine; check the path.")
