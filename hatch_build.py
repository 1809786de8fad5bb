"""Build hook: pins travel inside the wheel, so that `rlbench setup` installs the same set as `make`; so does the panel.

`RLB_LABEXT` says how the panel gets there: `auto` (default) takes the built one, or builds it where node is, or leaves
it out with one line; `require` fails instead; `skip` leaves it out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from rlbench.setup import panel
from rlbench.setup.plan import SetupError

sys.path.pop(0)
BUILDER = "jupyter-builder>=1.2,<2"


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds what a wheel has beside the package; an editable install reads the checkout's own."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What building the panel needs, where it will be built."""
        return [BUILDER] if self._to_build() and not panel.why_no_node() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a target; `version` is `standard` or `editable`."""
        if version == "editable":
            return
        has_panel = self._has_panel()
        root = Path(self.root)
        if self.target_name == "wheel":
            build_data["force_include"][str(root / "constraints")] = "rlbench/setup/constraints"
            if has_panel:
                place = f"share/jupyter/labextensions/{panel.NAME}"
                build_data.setdefault("shared_data", {})[str(panel.output(root))] = place
        elif has_panel:  # a source archive: git ignores the built panel, the archive holds it
            build_data["artifacts"].append("rlbench/labextension")

    def _to_build(self) -> bool:
        return _mode() != "skip" and not panel.is_built(Path(self.root))

    def _has_panel(self) -> bool:
        """Whether the panel of these sources is there, after building it if need be."""
        missing = "RLB_LABEXT=skip" if _mode() == "skip" else ""
        if self._to_build():
            missing = panel.why_no_node() or _built(Path(self.root))
        if missing and _mode() == "require":
            raise RuntimeError(f"the JupyterLab side panel was not built (RLB_LABEXT=require): {missing}")
        if missing:
            self.app.display_warning(f"rlbench: without the JupyterLab side panel: {missing}; all else is there")
        return not missing


def _built(root: Path) -> str:
    """Build it; why that failed, in a line."""
    try:
        panel.build(root)
    except SetupError as failed:
        return str(failed)
    return ""


def _mode() -> str:
    mode = os.environ.get("RLB_LABEXT", "auto")
    if mode not in ("auto", "require", "skip"):
        raise ValueError(f"RLB_LABEXT must be auto, require or skip, not {mode!r}")
    return mode
