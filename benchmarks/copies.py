"""A side that copies memory: what a weight sync is compared with."""

from __future__ import annotations

from benchmarks.turns import Record, Requests, serve, timed


class Copies:
    """Copies as many bytes as each request says, from memory that is in use to memory that is."""

    def turn(self, size: int) -> Record:
        """Copy three times; the least seconds."""
        import numpy as np

        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        return {"s": min(timed(lambda: np.copyto(target, source)) for _ in range(3))}


def main() -> None:
    """Serve turns."""
    serve(Requests(), Copies)


if __name__ == "__main__":
    main()
