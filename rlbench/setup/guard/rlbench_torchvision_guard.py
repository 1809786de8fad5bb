"""Let torchvision's CUDA wheel be imported beside a CPU build of torch.

Registries carry torchvision as a CUDA build only. Its image transforms are plain Python and run anywhere, but
its import fails beside a CPU torch ("operator torchvision::nms does not exist"), because the library that
declares two operators cannot be loaded. Processors of vision-language models and vLLM's model files import
it, also in subprocesses. So a `.pth` file loads this module when Python starts; it costs nothing until
torchvision is imported, declares the two missing operators then, and does so only where torch is a CPU build
and torchvision is not.

Calling one of the operators still raises: there is no kernel behind them. Standard library alone; no part of
rlbench is imported, since this runs at the start of every Python process of the environment.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` is not imported: this module is loaded whenever Python starts
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _Finder:
    """Finds torchvision as usual and puts the declaration of its operators before its own code runs."""

    _library: Any = None  # keeps the declarations alive: they end with this object

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not _is_cuda_build(spec.origin):
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            cls._declare_operators()
            run(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec

    @classmethod
    def _declare_operators(cls) -> None:
        import torch

        if torch.version.cuda is not None or cls._library is not None:
            return
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        cls._library = library


def _is_cuda_build(origin: str | None) -> bool:
    """True if the torchvision whose `__init__.py` is `origin` says it was built for CUDA (`0.28.0+cu130`)."""
    if not origin:
        return False
    import os
    import re

    try:
        with open(os.path.join(os.path.dirname(origin), "version.py"), encoding="utf-8") as file:
            return re.search(r"__version__ = '[^']*\+cu\d", file.read()) is not None
    except OSError:
        return False


def install() -> None:
    """Put the finder in front of Python's own; once per process."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
