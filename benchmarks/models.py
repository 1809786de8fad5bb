"""The models that figures are measured on: four sizes of one architecture, with random weights.

"bench-10m" is the workbench's own (`rlbench.tiny`); the others are made here, once, into build/benchmarks/models.
Byte-level vocabulary of 262, embeddings tied, float32; the largest has the shape of Qwen2.5-0.5B (its public config),
vocabulary and bfloat16 too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.turns import ROOT

SHAPES = {
    "bench-0.8m": {"hidden": 192, "intermediate": 448, "layers": 2, "heads": 6, "kv_heads": 3},
    "bench-100m": {"hidden": 768, "intermediate": 2816, "layers": 12, "heads": 12, "kv_heads": 6},
    "bench-0.5b": {"hidden": 896, "intermediate": 4864, "layers": 24, "heads": 14, "kv_heads": 2},
}
"""0.79 M, 99.3 M and 494 M parameters."""
WIDE = {"bench-0.5b": 151_936}
"""Tokens of the vocabulary where it is not the tiny one."""


def model_folder(name: str) -> str:
    """Return the folder of a model: "tiny", "bench-0.8m", "bench-10m", "bench-100m", "bench-0.5b"; others stay."""
    from rlbench.tiny.cache import NAMES, ensure

    if name in NAMES:
        return str(ensure(name))
    if name not in SHAPES:
        return name
    target = ROOT / "build" / "benchmarks" / "models" / name
    if not (target / "shape.json").exists() or json.loads((target / "shape.json").read_text()) != SHAPES[name]:
        _make(name, target)
    return str(target)


def _make(name: str, target: Path) -> None:
    from rlbench.tiny.tokenizer import build_tokenizer
    from rlbench.tiny.warmup import TinyShape, build_model

    shape = TinyShape(**SHAPES[name])
    tokenizer = build_tokenizer(shape.context)
    shutil.rmtree(target, ignore_errors=True)
    aside = target.with_name(f".{name}")
    wide = WIDE.get(name)
    model = build_model(shape, tokenizer, seed=0, vocabulary=wide)
    (model if wide is None else model.bfloat16()).save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "shape.json").write_text(json.dumps(SHAPES[name]))
    aside.rename(target)
