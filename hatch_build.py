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
from rlbench.setup.plan import SetupError
from scripts import panel

sys.path.pop(0)
MODE = os.environ.get("RLB_LABEXT", "auto")
if MODE not in ("auto", "require", "skip"):
    raise ValueError(f"RLB_LABEXT must be auto, require or skip, not {MODE!r}")


# Not hatch-jupyter-builder (0.10): where its build fails, as without node, wheel and source archive fail too (only an
# editable install may go on); it tells what is stale by times, not content; and what a target holds it leaves to tables
# of pyproject.toml, which cannot leave out a panel that is not there. It would replace the call of `panel.build` alone.
class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds what a wheel has beside the package; an editable install reads the checkout's own."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Name what building the panel needs, where it will be built."""
        builds = MODE != "skip" and not panel.is_built(Path(self.root)) and not panel.why_no_node()
        return ["jupyter-builder>=1.2,<2"] if builds else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add pins and panel before hatchling builds a target; `version` is `standard` or `editable`."""
        if version == "editable":
            return
        root = Path(self.root)
        missing = "RLB_LABEXT=skip" if MODE == "skip" else _why_not_built(root)
        if missing and MODE == "require":
            raise RuntimeError(f"the JupyterLab side panel was not built (RLB_LABEXT=require): {missing}")
        if missing:
            self.app.display_warning(f"rlbench: without the JupyterLab side panel: {missing}; all else is there")
        if self.target_name == "wheel":
            build_data["force_include"][str(root / "constraints")] = "rlbench/setup/constraints"
            if not missing:
                place = f"share/jupyter/labextensions/{panel.NAME}"
                build_data.setdefault("shared_data", {})[str(panel.output(root))] = place
        elif not missing:  # a source archive: git ignores the built panel, the archive holds it
            build_data["artifacts"].append("rlbench/labextension")


def _why_not_built(root: Path) -> str:
    """Build the panel of these sources if need be; return why that failed, in a line."""
    if panel.is_built(root):
        return ""
    if missing := panel.why_no_node():
        return missing
    try:
        panel.build(root)
    except SetupError as error:
        return str(error)
    return ""
