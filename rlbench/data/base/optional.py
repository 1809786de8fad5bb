"""Packages that only some calls need: imported by those, with the mend where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from rlbench.errors import DataError


def needed(package: str, call: str) -> Any:
    """Import `package` for `call`; DataError naming what to install where it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        raise DataError(f"{call} needs {package}: pip install {package.partition('.')[0]}") from missing
