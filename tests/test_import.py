"""`import rlbench` is light: it is what the Jupyter server, the command line and every kernel pay."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "vllm", "transformers", "pandas", "plotly", "numpy"}


def modules_after(code: str) -> set[str]:
    """Names of the modules a new Python holds after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_rlbench_brings_none_of_the_heavy_packages():
    assert not modules_after("import rlbench") & HEAVY


@pytest.mark.parametrize(
    "room",
    [
        "dispatch",
        "runtime",
        "monitor",
        "engines",
        "data",
        "session",
        "notebook",
        "labapp",
        "cli",
        "errors",
        "rewards",
        "setup",
    ],
)
def test_rooms_of_the_kernel_import_neither_torch_nor_vllm(room):
    assert not modules_after(f"import rlbench.{room}") & {"torch", "vllm", "transformers"}


def test_a_ray_process_builds_no_grammar_of_jsonschemas():
    """It took 1 to 2 s of every worker's start, wherever Jupyter had brought the extra along (constraints say how)."""
    assert not modules_after("import ray") & {"rfc3987_syntax", "lark"}


def test_every_public_name_resolves():
    import rlbench

    for name in rlbench.__all__:
        assert getattr(rlbench, name) is not None
