"""`rlbench train`: what a run's options make of session and trainer, and whole runs as a user starts them."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbench import cli
from rlbench.data import PromptSet
from rlbench.engines import paths
from rlbench.session import Inference, Train
from rlbench.session.command import run_data, train_command
from rlbench.session.session import Session
from rlbench.strategies.options.config import OptionError
from rlbench.tiny import tasks
from rlbench.trainers.models import policy_module
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.options.methods import method_options
from rlbench.trainers.options.run_config import RunConfig

REWARDS = """
def score(rollout):
    return float(rollout.text == "".join(sorted(rollout.prompt[0]["content"].removeprefix("sort "))))

def both(model_rewards, labels, queries, refs, label_map):
    return sum(model_rewards)
"""
OPTIONS = """
pretrain: tiny
prompt_data: tiny
reward: my_rewards.py:score
max_steps: 2
lr_schedule: constant
actor_learning_rate: 5e-5
rollout_batch_size: 8
n_samples_per_prompt: 4
train_batch_size: 32
micro_train_batch_size: 16
micro_rollout_batch_size: 32
generate_max_len: 8
packing_samples: true
kv_cache_bytes: 67108864
ckpt_path: kept
freeze_prefix: model.embed_tokens
save_path: saved
seed: 0
"""


def config(method: str = "grpo", **given: Any) -> RunConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RunConfig.load(method, None, given)


def stream(count: int) -> Any:
    return PromptSet.of(tasks.prompts(count)).stream(seed=0)


def arguments(given: RunConfig, wanted: int = 10) -> dict[str, Any]:
    """What `session.trainer` is given; all of it is something it takes."""
    found = train_command.trainer_arguments(given, stream(8), wanted)
    named = inspect.signature(Session.trainer).parameters
    method_options(given.method, {name: value for name, value in found.items() if name not in named})
    return found


# -- how long


def test_a_run_is_as_long_as_its_episodes_or_its_steps() -> None:
    def count(**given: Any) -> int:
        return train_command.iterations(config(rollout_batch_size=4, **given), stream(10))

    assert (count(), count(num_episodes=3), count(max_steps=100)) == (2, 7, 100)
    assert (count(max_steps=5, num_episodes=3), count(max_steps=50, num_episodes=3)) == (5, 7)
    assert train_command.iterations(config(rollout_batch_size=32), stream(10)) == 1


def test_a_mixture_has_no_end_of_its_own() -> None:
    def count(**given: Any) -> int:
        wanted = config(prompt_data="tiny,more", **given)
        mixture = run_data.mix({"tiny": tasks.prompts(8), "more": tasks.prompts(8, seed=1)})
        return train_command.iterations(wanted, mixture)

    assert count(max_steps=7) == 7
    for given in ({}, {"num_episodes": 2}, {"num_episodes": 2, "max_steps": 7}):
        with pytest.raises(OptionError, match="a mixture of prompts has no episode"):
            count(**given)


# -- what session and trainer are made with


def test_adapters_are_trained_where_a_rank_is_given() -> None:
    given = {"prompt_data": "p.jsonl", "reward": "math"}
    lora = {"lora_rank": 4, "lora_alpha": 6.0, "target_modules": "q_proj,v_proj", "lora_dropout": 0.1}
    made = train_command.session_options(config(**given, **lora), on_gpu=False)
    assert made["train"].lora == Lora(rank=4, alpha=6.0, targets=("q_proj", "v_proj"), dropout=0.1)
    assert train_command.session_options(config(**given), on_gpu=False)["train"].lora is None
    held = train_command.session_options(config(**given, lora_rank=4, load_in_4bit=True), on_gpu=False)
    assert held["train"].lora == Lora(rank=4, base="nf4")


def test_the_session_is_made_with_the_options_that_concern_it() -> None:
    made = train_command.session_options(
        config(
            ranks=3,
            replicas=2,
            kv_cache_bytes=5_000_000,
            engine_tp_size=2,
            engine_type="sglang",
            bf16=False,
            actor_learning_rate=1e-4,
            adam_betas=(0.8, 0.9),
            l2=0.1,
            max_norm=0.5,
            seed=7,
            pretrain="a/model",
            prompt_data="p.jsonl",
            reward="math",
            train_batch_size=96,
            rollout_batch_size=33,
        ),
        on_gpu=True,
    )
    assert (made["model"], made["seed"]) == ("a/model", 7)
    assert made["train"] == Train(lr=1e-4, betas=(0.8, 0.9), weight_decay=0.1, max_norm=0.5, bf16=False, shards=3)
    assert made["inference"] == Inference(
        executor="sglang",
        tensor_parallel_size=2,
        data_parallel_size=2,
        kv_cache_bytes=5_000_000,
        dtype="float32",
    )


def test_an_engine_keeps_room_for_as_many_pictures_as_are_asked_for() -> None:
    made = train_command.session_options(config(limit_mm_image_per_prompt=3), on_gpu=False)
    assert made["inference"] == Inference(engine_kwargs={"limit_mm_per_prompt": {"image": 3}}, data_parallel_size=1)
    assert "limit_mm_image_per_prompt" not in arguments(config(limit_mm_image_per_prompt=3))
    with pytest.raises(OptionError, match="limit_mm_image_per_prompt cannot be honoured with engine_type='sglang'"):
        config(limit_mm_image_per_prompt=3, engine_type="sglang")


def test_trackers_are_started_as_the_options_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(**given: Any) -> list[Any]:
        calls: list[Any] = []
        session: Any = SimpleNamespace(track=lambda *asked, **options: calls.append((*asked, options)))
        train_command.tracked(session, config(**given))
        return calls

    wandb = {"wandb_project": "p", "wandb_org": "o", "wandb_group": "g", "wandb_run_name": "r"}
    asked = ("wandb", "p", {"entity": "o", "group": "g", "name": "r"})
    assert started() == [] and started(track="tensorboard,wandb", **wandb) == [("tensorboard", {}), asked]
    assert started(use_wandb=True) == [("wandb", None, {})]
    keys: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda key: keys.append(key)))
    assert started(use_wandb="a key", **wandb) == [asked] and keys == ["a key"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(OptionError, match="use_wandb needs wandb, which is not installed"):
        started(use_wandb="a key")


def test_head_of_the_critic_and_shards_of_the_reference_reach_the_trainer() -> None:
    found = arguments(config("ppo", value_head_prefix="value", initial_model_shard_size=1))
    assert (found["value_head_prefix"], found["reference_shard_size"]) == ("value", 1)
    assert not {"value_head_prefix", "reference_shard_size"} & arguments(config("grpo")).keys()


def test_what_does_not_train_is_named_by_its_beginning() -> None:
    assert train_command.frozen(config()) == []
    assert train_command.frozen(config(freeze_prefix="model.embed_tokens, model.layers.0")) == [
        "model.embed_tokens*",
        "model.layers.0*",
    ]
    assert train_command.frozen(config(freeze_prefix=True)) == ["*visual"]


def test_the_engine_takes_a_share_of_the_gpus_memory_or_of_the_hosts_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(on_gpu: bool, **given: Any) -> dict[str, Any]:
        made = train_command.session_options(config(engine_mem_util=0.25, **given), on_gpu)
        return {name: made["inference"][name] for name in ("gpu_memory_utilization", "kv_cache_bytes")}

    monkeypatch.setattr(train_command.psutil, "virtual_memory", lambda: SimpleNamespace(available=8000))
    assert engine(True) == {"gpu_memory_utilization": 0.25, "kv_cache_bytes": None}
    assert engine(False) == {"gpu_memory_utilization": 0.5, "kv_cache_bytes": 2000}
    assert engine(False, replicas=2)["kv_cache_bytes"] == 1000
    with pytest.raises(OptionError, match="gpu_memory_utilization has no effect with kv_cache_bytes"):
        config(engine_mem_util=0.3, kv_cache_bytes=5_000_000)


@pytest.mark.parametrize("name", ["use_mp_opt", "fsdp_cpu_offload"])
def test_how_the_actor_is_held_is_said_to_the_session_and_the_trainer_asks_for_no_other(name: str) -> None:
    given = config(**{name: True})
    made = train_command.session_options(given, on_gpu=False)
    assert made["train"][name] is True and arguments(given)[name] is True
    assert not train_command.session_options(config(), on_gpu=False)["train"][name]


def test_half_precision_weights_are_not_asked_for_in_float32() -> None:
    with pytest.raises(OptionError, match="use_mp_opt has no effect with bf16=False"):
        config(use_mp_opt=True, bf16=False)


def test_float16_is_the_sessions_and_its_engine_follows() -> None:
    given = config(fp16=True)
    made = train_command.session_options(given, on_gpu=False)
    assert made["train"].fp16 and made["train"].bf16 is None and made["inference"].dtype == "auto"
    assert "fp16" not in arguments(given)
    with pytest.raises(OptionError, match="bf16=True and fp16=True cannot be honoured together"):
        config(fp16=True, bf16=True)


def test_what_is_not_said_is_left_to_the_session() -> None:
    made = train_command.session_options(config(), on_gpu=True)
    assert made["train"].shards is None and made["train"].bf16 is None and made["model"] == "tiny"
    assert made["inference"] == Inference(data_parallel_size=1)


def test_the_trainer_is_given_what_concerns_it_and_nothing_of_the_session(tmp_path: Path) -> None:
    (tmp_path / "rewards_of_run.py").write_text(REWARDS)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"input": "some text"}))
    found = arguments(
        config(
            "dapo",
            bf16=False,
            engine_tp_size=1,
            engine_mem_util=0.3,
            seed=3,
            enable_ema=True,
            eval_data="tiny",
            max_eval_samples=5,
            reward_fn=f"{tmp_path}/rewards_of_run.py:both",
            ptx_coef=0.1,
            pretrain_data=str(tmp_path / "texts.jsonl"),
            remote_rm_url="http://reward.example",
        )
    )
    assert (found["method"], found["seed"], found["ema"], len(found["eval_prompts"])) == ("dapo", 3, True, 5)
    assert found["clip_high"] == 0.28 and found["aggregation"] == "token-mean"
    assert not set(found) & {"bf16", "engine_tp_size", "gpu_memory_utilization", "fsdp", "enable_ema", "eval_data"}
    given = found["arguments"]
    assert given["remote_rm_url"] == ["http://reward.example"] and given["reward_fn"]([1.0, 2.0], *[None] * 4) == 3.0
    assert len(given["pretrain_prompts"]) == 1 and found["reward"] is None
    sys.modules.pop("rewards_of_run", None)


def test_without_options_there_is_no_average_no_evaluation_and_the_tasks_own_reward() -> None:
    found = arguments(config())
    assert found["ema"] is False and found["eval_prompts"] is None and found["reward"] is tasks.reward


def test_a_schedule_lasts_for_the_optimizer_steps_of_the_run_or_there_is_none() -> None:
    given: dict[str, Any] = {"rollout_batch_size": 16, "n_samples_per_prompt": 4, "train_batch_size": 32}
    given["max_epochs"] = 3
    assert arguments(config(**given), wanted=5)["schedule_steps"] == 30  # 5 iterations of 3 · 64 sequences, 32 a step
    assert arguments(config(**given, lr_schedule="constant"), wanted=5)["schedule_steps"] is None


def test_a_run_on_texts_is_as_long_as_its_passes_and_gives_the_trainer_what_acts(tmp_path: Path) -> None:
    def made(**given: Any) -> tuple[int, dict[str, Any]]:
        asked = config("dpo", max_samples=60, train_batch_size=8, logging_steps=3, **given)
        texts = run_data.data_of(asked)
        wanted = train_command.iterations(asked, texts)
        found = train_command.trainer_arguments(asked, texts, wanted)
        named = inspect.signature(Session.trainer).parameters
        method_options("dpo", {name: value for name, value in found.items() if name not in named})
        assert wanted == (given.get("max_steps") or given.get("num_episodes", 1) * len(texts.stream()) // 8)
        return wanted, found

    once, found = made(betas=(0.8, 0.9), lr=1e-4, seed=3, eval_steps=2, loss="ipo(beta=0.2)")
    assert found["schedule_steps"] == once and len(found["eval_data"]) > 100 and found["loss"].beta == 0.2
    assert not {"betas", "lr", "logging_steps", "prompts", "reward", "num_episodes"} & set(found)
    assert made(num_episodes=3, lr_schedule="constant")[1]["schedule_steps"] is None
    assert made(max_steps=4)[0] == 4
    session = train_command.session_options(config("sft", lora_rank=2, lr=1e-3), on_gpu=False)
    assert session["train"].lr == 1e-3 and session["train"].lora.rank == 2


def test_places_are_those_of_the_command_wherever_the_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text("")
    found = arguments(config(ckpt_path="kept", log_dir="lengths", remote_rm_url=["judge.py", "http://reward.example"]))
    assert (found["ckpt_path"], found["log_dir"]) == (f"{tmp_path}/kept", f"{tmp_path}/lengths")
    assert found["save_path"] == f"{tmp_path}/ckpt" and "use_tensorboard" not in found
    assert found["arguments"]["remote_rm_url"] == [f"{tmp_path}/judge.py", "http://reward.example"]


def test_names_in_a_file_are_found_from_where_the_command_runs_not_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("recipes", "project"):
        (tmp_path / place / "judge").mkdir(parents=True)
        (tmp_path / place / "judge" / "config.json").write_text("{}")
    (tmp_path / "recipes" / "run.yaml").write_text("reward_pretrain: judge\nckpt_path: kept\nmetrics_file: m.jsonl\n")
    monkeypatch.chdir(tmp_path / "project")
    read = RunConfig.load("grpo", "../recipes/run.yaml")
    found = arguments(read)
    assert (found["reward"], found["ckpt_path"]) == (f"{tmp_path}/project/judge", f"{tmp_path}/project/kept")
    assert train_command.run(Scripted(), read, 1) == 0  # type: ignore[arg-type]
    assert (tmp_path / "project" / "m.jsonl").is_file()


def test_a_critic_is_found_as_the_policy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "config_of", lambda path: None)  # in the place of the hub
    monkeypatch.setattr(paths, "_need_served", lambda hub_id, folder: None)
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert arguments(config("ppo", critic_pretrain="critic"))["critic_pretrain"] == str((tmp_path / "critic").resolve())
    assert arguments(config("ppo", critic_pretrain="tiny"))["critic_pretrain"] == run_data.model_at("tiny")
    assert arguments(config("ppo", critic_pretrain="an-org/critic"))["critic_pretrain"] == "an-org/critic"
    assert arguments(config("ppo"))["critic_pretrain"] is True
    with pytest.raises(OptionError, match=f"critic_pretrain='./crtic': there is no folder {tmp_path}/crtic"):
        arguments(config("ppo", critic_pretrain="./crtic"))


# -- iterations


class Scripted:
    """In the place of a session's trainer: iterations from `at` on, one of which may be stopped."""

    def __init__(self, at: int = 0, stopped_at: int | None = None) -> None:
        self.at, self.stopped_at, self.finished = at, stopped_at, False

    def where(self) -> dict[str, int]:
        return {"iterations": self.at}

    def step(self) -> dict[str, float]:
        if self.at + 1 == self.stopped_at:
            raise KeyboardInterrupt
        self.at += 1
        return {"reward": self.at / 10}

    def finish(self) -> None:
        self.finished = True


def run(trainer: Scripted, wanted: int, **given: Any) -> int:
    return train_command.run(trainer, config(**given), wanted)  # type: ignore[arg-type]


def test_each_iteration_has_its_line_unless_logging_steps_says_less(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Scripted()
    assert run(trainer, 3) == 0 and trainer.finished
    assert capsys.readouterr().out.splitlines() == [f"iteration {i}: reward 0.{i}" for i in (1, 2, 3)]
    run(Scripted(), 5, logging_steps=2)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["iteration 2", "iteration 4"]


def test_a_run_goes_on_where_its_checkpoint_is_and_one_that_is_done_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Scripted(at=2), 3) == 0
    assert capsys.readouterr().out.splitlines() == ["going on after iteration 2", "iteration 3: reward 0.3"]
    done = Scripted(at=3)
    assert run(done, 3) == 0 and done.at == 3


def test_a_stop_ends_with_130_and_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Scripted(stopped_at=3)
    assert run(trainer, 5) == train_command.STOPPED == 130 and not trainer.finished
    assert capsys.readouterr().out.splitlines()[-1] == "stopped after 2 of 5 iterations"


def test_all_metrics_of_each_iteration_are_kept_as_lines_where_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "new" / "metrics.jsonl"
    run(Scripted(), 2, metrics_file=str(file), logging_steps=9)
    run(Scripted(at=2), 3, metrics_file="~/new/metrics.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records == [{"iteration": i, "reward": i / 10} for i in (1, 2, 3)]


# -- the command


def test_help_and_mistakes_come_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0 and "--rollout_batch_size N" in capsys.readouterr().out
    monkeypatch.setattr(train_command, "Session", None)  # nothing may come so far
    for line, said in (
        ("grpo --max_step 3", "no option '--max_step'; nearest: max_steps"),
        ("gropo", "no method 'gropo'"),
        ("grpo none.yaml", "none.yaml cannot be read"),
        ("--seed 3 grpo --reward nowhere:f", "reward='nowhere:f'"),
        ("grpo --prompt_data none.jsonl --max_steps 1", "no file none.jsonl"),
        ("grpo --reward_pretrain none", "reward_pretrain='none'"),
        ("grpo --train_batch_size 3 --ranks 2", "train_batch_size must be divisible"),
    ):
        assert cli.main(["train", *line.split()]) == 1, line
        shown = capsys.readouterr()
        assert shown.err.startswith("rlbench train: ") and said in shown.err, shown.err
    assert not list(tmp_path.rglob("*.json"))


@pytest.fixture
def place(tmp_path: Path, tiny_path: Path) -> Iterator[SimpleNamespace]:
    """A folder with a run's files, and a state folder of its own that must be left without a cluster and sessions."""
    (tmp_path / "run.yaml").write_text(OPTIONS)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    state = tmp_path / "state" / "rlbench"

    def check_left() -> None:
        assert not (state / "cluster.json").exists() and not list((state / "sessions").glob("*.json"))

    def saved() -> set[str]:
        return {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "kept").glob("global_step*")}

    env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    yield SimpleNamespace(folder=tmp_path, env=env, check_left=check_left, saved=saved)
    check_left()


def command(*line: str) -> list[str]:
    return [sys.executable, "-m", "rlbench.cli", "train", "grpo", "run.yaml", *line]


@pytest.mark.curve
@pytest.mark.engine
def test_a_run_is_stopped_by_ctrl_c_leaves_nothing_and_a_second_one_goes_on_to_its_end(place: SimpleNamespace) -> None:
    """The first keeps a checkpoint of each iteration; the second, one iteration longer, of its end alone."""
    asked = ("--load_checkpoint", "--enable_ema", "--metrics_file", "m.jsonl", "--track", "tensorboard")
    with subprocess.Popen(
        command(*asked, "--max_steps", "5000", "--save_steps", "1"),
        cwd=place.folder,
        env=place.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        first = []
        for line in process.stdout:
            first.append(line.rstrip("\n"))
            if line.startswith("iteration 2"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=120)[0]
    assert process.returncode == 130, "\n".join(first[-20:]) + rest
    stopped = re.search(r"^stopped after (\d+) of 5000 iterations$", rest, re.MULTILINE)
    assert stopped is not None and "Traceback" not in rest, rest
    place.check_left()
    done = int(stopped[1])
    assert done >= 2 and "  max_steps: 5000 (Overridden)" in first and "  temperature: 1.0 (Default)" in first
    assert [line.split(":")[0] for line in first if line.startswith("iteration")] == ["iteration 1", "iteration 2"]
    assert f"kept/global_step{done}" in place.saved()

    line = command(*asked, "--max_steps", str(done + 1), "--save_steps", "-1")
    ran = subprocess.run(line, cwd=place.folder, env=place.env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    second = ran.stdout.splitlines()
    assert f"going on after iteration {done}" in second
    assert [line.split(":")[0] for line in second if line.startswith("iteration")] == [f"iteration {done + 1}"]
    assert f"kept/global_step{done + 1}" in place.saved()
    records = [json.loads(line) for line in (place.folder / "m.jsonl").read_text().splitlines()]
    assert [one["iteration"] for one in records] == [*range(1, done + 2)]
    assert all(0 <= one["reward"] <= 1 for one in records)
    assert list((place.folder / "runs").rglob("events.out.tfevents.*"))
    assert len({one["actor_lr"] for one in records}) == 1, "lr_schedule: constant"


@pytest.mark.curve
@pytest.mark.engine
def test_a_run_distils_from_its_teacher_and_another_trains_a_reward_model(place: SimpleNamespace) -> None:
    def done(*line: str) -> list[dict[str, Any]]:
        asked = [sys.executable, "-m", "rlbench.cli", "train", *line, "--max_steps", "2", "--metrics_file", "m.jsonl"]
        ran = subprocess.run(asked, cwd=place.folder, env=place.env, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
        return [json.loads(one) for one in (place.folder / "m.jsonl").read_text().splitlines()][-2:]

    sizes = ("--rollout_batch_size", "4", "--n", "2", "--train_batch_size", "8", "--max_tokens", "8")
    distilled = done("distill", "--teacher", "tiny", "--kv_cache_bytes", "67108864", *sizes)
    assert [one["iteration"] for one in distilled] == [1, 2] and distilled[0]["reward"] == 0
    assert abs(distilled[0]["rollout_ref_kl"]) < 1e-4, "policy and teacher are one yet"
    files = ("--save_steps", "-1", "--save_hf_ckpt", "--save_path", "saved", "--ckpt_path", "kept", "--shards", "2")
    files = (*files, "--pooling", "attention", "--probing_layer", "1", "--heads_types", "right=0.75", "brief=0.25")
    compared = done("reward", "--train_batch_size", "32", "--eval_steps", "2", "--loss", "log_exp()", *files)
    assert 0 <= compared[1]["eval/reward_accuracy"] <= 1 and compared[0]["loss"] > 0
    saved = json.loads((place.folder / "saved" / "global_step2_hf" / "config.json").read_text())
    heads = {"right": 0.75, "brief": 0.25}
    assert saved["scalar_head"] == {"pooling": "attention", "probing_layer": 1, "heads": heads}
