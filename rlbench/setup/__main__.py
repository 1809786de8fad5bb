"""`python3 -m rlbench.setup`: make the checkout's environment, `.venv`; `make` runs it first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlbench.setup.install import ensure_checkout
from rlbench.setup.plan import SetupError, check_this_machine, choose_engine, has_nvidia_gpu, plan_checkout


def main() -> int:
    """Make the environment of the checkout this file lies in; `RLBENCH_ENGINE` overrules what the machine
    has.
    """
    root = Path(__file__).resolve().parents[2]
    os.environ["RLB_LABEXT"] = "skip"  # an editable install has no panel of its own: `make panel` builds the checkout's
    try:
        check_this_machine()
        engine = choose_engine(os.environ.get("RLBENCH_ENGINE"), has_nvidia_gpu())
        ensure_checkout(root, plan_checkout(engine, root))
    except SetupError as missing:
        print(f"rlbench: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
