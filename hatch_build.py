"""Build hook: the pins travel inside the wheel, so that `rlbench setup` installs the same set as `make`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PinsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts `constraints/` beside the code that reads it; an editable install reads the checkout's own."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a target; `version` is `standard` or `editable`."""
        if self.target_name == "wheel" and version != "editable":
            build_data["force_include"][str(Path(self.root) / "constraints")] = "rlbench/setup/constraints"
