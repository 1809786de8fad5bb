"""LoRA: small trained matrices beside frozen weights; a plain value, importable without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rlbench.errors import BuildError
from rlbench.options import Options, refuse, section

ALL_LINEAR, BASES = "all-linear", ("nf4", "int8")
lora = section("LoRA")
UNLIKE = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "lora_bias",
    "exclude_modules",
    "trainable_token_indices",
)
"""Settings of peft's under which an adapter is something else than W + alpha / rank · B A on each of its layers."""


class Lora(Options):
    """Adapters that are trained in place of the weights: `rb.Train(lora=rb.Lora(rank=32))`."""

    rank: int = lora(32, "inner size of an adapter: rows of A, columns of B", least=1)
    alpha: float | None = lora(None, "what computes is W + alpha / rank · B A; None: 2 · rank")
    targets: tuple[str, ...] = lora(
        (ALL_LINEAR,), f"names of linear layers, as q_proj; {ALL_LINEAR}: all but the output layer"
    )
    base: str | None = lora(
        None, "hold the frozen weights of linear layers quantised, by bitsandbytes; None: as they are", choices=BASES
    )
    dropout: float = lora(0.0, "share of an adapter's input that passes with a gradient drop", least=0, most=0.99)
    path: str | None = lora(
        None, "folder of an adapter of peft's to go on from; its rank, alpha and targets count, others are refused"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (self.alpha is not None and self.alpha <= 0, f"alpha={self.alpha}: an adapter needs a weight above 0"),
            (not self.targets, "targets: name a layer at least"),
            (
                ALL_LINEAR in self.targets and len(self.targets) > 1,
                f"targets={self.targets}: {ALL_LINEAR} says all of them",
            ),
        )

    @property
    def scale(self) -> float:
        """What alpha is, also where it was not given."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def opened(self, base: str) -> Lora:
        """Return these options as the adapter in folder `path` has them; BuildError where it is none of `base`."""
        folder = Path(self.path or "").expanduser().resolve()
        what = f"rb.Lora(path={self.path!r})"
        try:
            kept = json.loads((folder / "adapter_config.json").read_text())
        except (OSError, ValueError) as error:
            raise BuildError(
                f"{what}: {folder} holds no adapter of peft's, as session.export(path, adapter=True) writes ({error})"
            ) from error
        theirs = str(kept.get("base_model_name_or_path"))
        if Path(theirs).name != Path(base).name:
            raise BuildError(
                f"{what}: the adapter is of {theirs!r}, the session's model is {base!r}: give that one; if they are "
                "the same, write its name into adapter_config.json"
            )
        unlike = [name for name in UNLIKE if kept.get(name)]
        unlike += ["bias"] if kept.get("bias", "none") != "none" else []
        if kept.get("peft_type") != "LORA" or unlike or isinstance(kept["target_modules"], str):
            raise BuildError(f"{what}: the adapter is no plain LoRA ({', '.join(unlike) or 'see its config'})")
        found = {
            "rank": kept["r"],
            "alpha": float(kept["lora_alpha"]),
            "targets": tuple(sorted(kept["target_modules"])),
        }
        for name, value in self.overridden().items():
            if found.get(name, value) != value:
                raise BuildError(f"{what}: its {name} is {found[name]!r}, not {value!r}: leave {name}= out")
        return replace(self, path=str(folder), **found)
