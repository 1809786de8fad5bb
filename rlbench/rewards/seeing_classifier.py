"""A vision-language backbone of Qwen-VL's kind under a head, where transformers has no sequence classifier of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn


def seeing_classifier(config: Any) -> type[Any] | None:
    """Return the sequence classifier of a vision-language configuration; None of another.

    It is the family's own `PreTrainedModel` with the backbone as `model` and the head as `score`, (labels, width).
    """
    from transformers import AutoModel, AutoModelForImageTextToText

    kind = type(config)
    if kind not in AutoModelForImageTextToText._model_mapping or not hasattr(config, "vision_config"):
        return None
    backbone = AutoModel._model_mapping[kind]
    return _classifier(backbone) if hasattr(backbone, "get_rope_index") else None


@lru_cache(maxsize=8)
def _classifier(backbone: type[Any]) -> type[Any]:
    family: Any = backbone.__mro__[1]  # its PreTrainedModel

    class SeeingClassifier(family):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = backbone(config)
            self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
            self.post_init()

    SeeingClassifier.__name__ = backbone.__name__.removesuffix("Model") + "ForSequenceClassification"
    SeeingClassifier.__qualname__ = SeeingClassifier.__name__
    SeeingClassifier.__module__ = backbone.__module__  # the architecture that saved files name
    return SeeingClassifier
