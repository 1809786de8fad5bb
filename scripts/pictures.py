"""Make the pictures of `docs/img/`: the views of notebooks/02_seeing.ipynb in a real JupyterLab and Chromium.

    python scripts/pictures.py            # needs a Chromium of the system, or one named in RLB_CHROMIUM
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.lab import CHROMIUM, CHROMIUM_ARGS, Lab, Notebook  # noqa: E402

PICTURES = {
    "dashboard": "session.dashboard()", "rollouts": "with_batch", "history": "history.plot", "session": "rb.Session(",
}  # fmt: skip
"""Name of the picture: what the cell it shows holds."""
THEMES = {"light": ("dashboard", "history", "session"), "dark": ("rollouts",)}


def main() -> int:
    """Run the notebook, then take each picture in its theme."""
    folder = ROOT / "docs" / "img"
    folder.mkdir(exist_ok=True)
    made = nbformat.read(ROOT / "notebooks" / "02_seeing.ipynb", as_version=4)
    cells = [cell.source for cell in made.cells if cell.cell_type == "code"]
    lab = Lab(Path(tempfile.mkdtemp()) / "lab")
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
            notebook = Notebook(lab, browser, cells)
            for i, _ in enumerate(cells[:-1]):  # the last one ends the session
                notebook.run(i, timeout=180.0)
            for theme, names in THEMES.items():
                notebook.theme(theme)
                for name in names:
                    index = next(i for i, source in enumerate(cells) if PICTURES[name] in source)
                    notebook.screenshot(folder / f"{name}.png", index)
            notebook.run(len(cells) - 1, timeout=60.0)
            notebook.close()
    finally:
        lab.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
