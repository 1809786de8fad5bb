"""Make the pictures of `docs/img/`: the views of two notebooks in a real JupyterLab and Chromium.

python scripts/pictures.py            # needs a Chromium of the system, or one named in RLB_CHROMIUM
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.lab import CHROMIUM, CHROMIUM_ARGS, Lab, Notebook  # noqa: E402

NOTEBOOKS = {
    "02_seeing": {
        "dashboard": ("light", "session.dashboard()"),
        "rollouts": ("dark", "with_batch"),
        "history": ("light", "history.plot"),
        "session": ("light", "rb.Session("),
    },
    "04_loss_lab": {"loss-lab": ("light", "session.loss_lab("), "rewards": ("dark", "scored.compare(")},
}
"""Notebook: name of the picture: theme, and what the cell it shows holds."""
TALL = {"width": 1200, "height": 1500}


def main() -> int:
    """Run each notebook, then take its pictures; names on the command line take those notebooks alone."""
    folder = ROOT / "docs" / "img"
    folder.mkdir(exist_ok=True)
    lab = Lab(Path(tempfile.mkdtemp()) / "lab")
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
            for name in sys.argv[1:] or NOTEBOOKS:
                take(lab, browser, name, folder)
    finally:
        lab.close()
    return 0


def take(lab: Lab, browser: Browser, name: str, folder: Path) -> None:
    """The pictures of one notebook."""
    made = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    cells = [cell.source for cell in made.cells if cell.cell_type == "code"]
    notebook = Notebook(lab, browser, cells)
    for i, _ in enumerate(cells[:-1]):  # the last one ends the cluster
        notebook.run(i, timeout=180.0)
    notebook.page.set_viewport_size(TALL)
    for picture, (theme, wanted) in NOTEBOOKS[name].items():
        notebook.theme(theme)
        notebook.screenshot(folder / f"{picture}.png", next(i for i, source in enumerate(cells) if wanted in source))
    notebook.run(len(cells) - 1, timeout=60.0)
    notebook.close()


if __name__ == "__main__":
    sys.exit(main())
