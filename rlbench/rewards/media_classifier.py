"""A backbone that sees or hears under a head, where transformers has no sequence classifier of it: of Qwen-VL's kind
and of Qwen2-Audio's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn


def media_classifier(config: Any) -> type[Any] | None:
    """Return the sequence classifier of a vision-language or an audio-language configuration; None of another.

    It is the family's own `PreTrainedModel` with the backbone as `model` and the head as `score`, (labels, width).
    """
    from transformers import AutoModel

    kind = type(config)
    backbone = AutoModel._model_mapping[kind] if kind in AutoModel._model_mapping else None
    return _classifier(backbone) if sees(config, backbone) or hears(config) else None


def sees(config: Any, backbone: Any) -> bool:
    """Whether a configuration is of a vision-language model of Qwen-VL's kind; `backbone`: its class."""
    from transformers import AutoModelForImageTextToText

    known = type(config) in AutoModelForImageTextToText._model_mapping and hasattr(config, "vision_config")
    return known and hasattr(backbone, "get_rope_index")


def hears(config: Any) -> bool:
    """Whether a configuration is of an audio-language model of Qwen2-Audio's kind."""
    return (
        hasattr(config, "audio_config") and hasattr(config, "audio_token_id") and not hasattr(config, "vision_config")
    )


@lru_cache(maxsize=8)
def _classifier(backbone: type[Any]) -> type[Any]:
    family: Any = backbone.__mro__[1]  # its PreTrainedModel

    class MediaClassifier(family):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = backbone(config)
            self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
            self.post_init()

    MediaClassifier.__name__ = backbone.__name__.removesuffix("Model") + "ForSequenceClassification"
    MediaClassifier.__qualname__ = MediaClassifier.__name__
    MediaClassifier.__module__ = backbone.__module__  # the architecture that saved files name
    return MediaClassifier
