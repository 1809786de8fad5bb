"""`python -m rlbench.setup` in a checkout's `.venv`: rlbench, editable, with engines, notebooks, tests and checks."""

import os
import sys
from pathlib import Path

from rlbench.setup.install import install
from rlbench.setup.plan import SetupError, choose_engine

os.environ["RLB_LABEXT"] = "skip"  # an editable install has no panel of its own: `make panel` builds the checkout's
try:
    install(choose_engine(), checkout=Path(__file__).resolve().parents[2])
except SetupError as error:
    sys.exit(f"rlbench: {error}")
