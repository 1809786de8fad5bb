"""Run a notebook without a browser, as `make demo` does: `run_notebook.py NOTEBOOK EXECUTED [--show TAG]`.

Each cell's text goes to the terminal when the cell ends. The executed notebook is written in any case, with
the error in it where a cell failed. `--show TAG` prints the text of the cell tagged TAG once more at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def main() -> int:
    """Run the notebook named on the command line; 0 if all cells ran and the tagged one has text."""
    args = _arguments()
    if not args.notebook.is_file():
        print(f"run_notebook: there is no {args.notebook}", file=sys.stderr)
        return 1
    os.environ.setdefault("RLBENCH_LEASE_S", "120")  # an interrupted run leaves no engines behind for hours
    notebook = nbformat.read(args.notebook, as_version=4)
    started = time.monotonic()
    try:
        failure = execute(notebook, args.notebook.resolve().parent)
    finally:
        args.executed.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, args.executed)
    print(
        f"\n{args.executed}: {'failed' if failure else 'done'} after {time.monotonic() - started:.0f} s",
        flush=True,
    )
    if failure:
        print(failure, file=sys.stderr)
        return 1
    if args.show:
        text = tagged_text(notebook, args.show)
        if not text:
            print(f"run_notebook: no cell of {args.notebook} tagged {args.show!r} has text", file=sys.stderr)
            return 1
        print(f"\n{text}")
    return 0


def execute(notebook: NotebookNode, folder: Path) -> str | None:
    """Run all cells in `folder`, filling in their outputs; return the error's text where one failed."""
    began: dict[int, float] = {}

    def on_start(cell: NotebookNode, cell_index: int) -> None:
        began[cell_index] = time.monotonic()

    def on_end(cell: NotebookNode, cell_index: int, execute_reply: object) -> None:
        seconds = time.monotonic() - began[cell_index]
        first = (cell.source.strip().splitlines() or [""])[0]
        print(f"\n[{cell_index}] {first}   ({seconds:.1f} s)", flush=True)
        text = output_text(cell)
        if text:
            print(text, flush=True)

    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        extra_arguments=["--log-level=40"],  # no notice that a kernel on loopback is not encrypted
        on_cell_start=on_start,
        on_cell_executed=on_end,
    )
    try:
        client.execute()
    except (CellExecutionError, DeadKernelError) as error:
        return ANSI.sub("", str(error)).rstrip()
    return None


def output_text(cell: NotebookNode) -> str:
    """What a cell shows as plain text: its streams and the text side of its results, in order."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(_as_terminal(output.text))
        elif output.output_type in ("display_data", "execute_result"):
            parts.append(output.data.get("text/plain", ""))
    return "\n".join(part.rstrip() for part in parts if part.strip())


def tagged_text(notebook: NotebookNode, tag: str) -> str:
    """The text of all cells tagged `tag`."""
    tagged = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
    return "\n".join(filter(None, map(output_text, tagged)))


def _as_terminal(text: str) -> str:
    """Text as a terminal would leave it: of a line overwritten by carriage returns the last state."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path, help="the notebook to run; its folder is the working folder")
    parser.add_argument("executed", type=Path, help="where the executed notebook is written")
    parser.add_argument("--show", metavar="TAG", help="print the text of the cell tagged TAG at the end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
