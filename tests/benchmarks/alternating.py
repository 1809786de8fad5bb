"""A side that notes each of its turns in a file that the sides share; asked to fail, it does."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.turns import Record, Requests, serve


class Noting:
    def turn(self, fail: bool = False) -> Record:
        print("what a library prints is no answer")
        if fail:
            raise ValueError("no such turn\nand a second line")
        with Path(sys.argv[1]).open("a") as file:
            file.write(sys.argv[2])
        return {"s": 1.0 if sys.argv[2] == "a" else 2.0}


if __name__ == "__main__":
    serve(Requests(), Noting)
