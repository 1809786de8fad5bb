"""Options of trainers of texts. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbench.options import OptionError, Options, canonical, options_in, section
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.options.loop_options import LoopOptions

passes = section("Passes")
OF_STRATEGY = (
    *("train_batch_size", "max_norm", "seed", "packing", "share_prompts", "head", "lr"),
    *("lr_warmup_ratio", "adam_offload"),
    *("fsdp", "bf16", "fp16", "use_mp_opt", "fsdp_cpu_offload", "tensor_parallel", "sequence_parallel"),
)
"""Options of the strategy that act where texts are trained on."""


class TextConfig(Options):
    """How texts are trained on: demonstrations, pairs, judged responses."""

    token_budget: int | None = passes(
        None,
        "tokens of a micro-batch of texts on one rank; None: activations near 4 GiB, or an eighth of a larger GPU",
        least=1,
    )


@dataclass(frozen=True)
class TextOptions:
    """Options of the strategy, of the loop and of texts; `given`: those that were set, by our names."""

    strategy: StrategyConfig
    loop: LoopOptions
    texts: TextConfig
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, config: StrategyConfig, given: Mapping[str, Any]) -> TextOptions:
        """Sort the keyword arguments of a trainer, by name or alias; what the strategy was made with counts there."""
        named = canonical(given, TextConfig, LoopOptions, StrategyConfig)
        check_of_texts(named)
        for name in named.keys() & options_in(StrategyConfig).keys():
            if (held := getattr(config, name)) != named[name]:
                raise OptionError(f"{name}={named[name]!r} cannot be honoured: the strategy was made with {held!r}.")
        loop, texts = (
            {name: value for name, value in named.items() if name in options_in(cls)}
            for cls in (LoopOptions, TextConfig)
        )
        return cls(config, LoopOptions(**loop), TextConfig(**texts), named)

    def told(self) -> dict[str, Any]:
        """Return all options that act."""
        return {**vars(self.loop), **vars(self.texts), **{name: getattr(self.strategy, name) for name in OF_STRATEGY}}


def check_of_texts(given: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
    """Refuse options, by our names, that have no effect on texts; `also` have one."""
    known = {*OF_STRATEGY, *options_in(TextConfig, LoopOptions), *also}
    if idle := [name for name in given if name not in known]:
        more = ": micro-batches of texts are by token_budget" if idle[0] == "micro_train_batch_size" else ""
        raise OptionError(f"{idle[0]} has no effect on texts{more}. Leave it out.")
