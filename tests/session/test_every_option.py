"""Every option of every door acts, or is refused: nobody can add one that nothing reads.

A door is where options are given: a trainer's keywords, a strategy's arguments, `session.trainer`, `rlbench train`,
`rb.Session`. Their names are taken from the classes, so a new one is walked from the day it is there: it must be read
by what acts on it while the door is used (a read that hands it on or checks it is none), change what comes out, or
raise.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbench.dispatch import context
from rlbench.engines import rank_session
from rlbench.errors import EngineError
from rlbench.options import Options, defaults, options_in
from rlbench.session.command import modelscope, run_data, train_command
from rlbench.strategies import FakeStrategy, FSDPV2Strategy, OptionError, StrategyConfig, get_fake_strategy
from rlbench.strategies import fsdp2 as fsdp2_room
from rlbench.strategies.base import ARGUMENTS
from rlbench.strategies.generation import engine as generation
from rlbench.strategies.options.config import default, need_fsdp
from rlbench.tiny import tasks
from rlbench.trainers import make_critic
from rlbench.trainers.experience.replay_buffer import NaiveReplayBuffer
from rlbench.trainers.models.policy_spec import OptimizerOptions
from rlbench.trainers.options.methods import method_options
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_config import DEFAULTS, HOMES, RunConfig
from rlbench.trainers.options.run_options import RunOptions
from rlbench.trainers.options.specs import TrainerSpec
from rlbench.trainers.options.trainer_options import SAMPLING, read_options
from rlbench.trainers.ppo import building
from rlbench.trainers.ppo.building import build_trainer
from rlbench.trainers.update.options import PolicyOptions
from rlbench.workers.replica.config import ReplicaOptions
from rlbench.workers.train.config import RankOptions
from tests.option_effects import EFFECTS
from tests.option_reads import loaded_fields, reads
from tests.trainers.command_lines import REFUSED_WHEN_SET, run, words
from tests.trainers.making import TableEngine, asked, last_token, qwen_of
from tests.trainers.small_trainer import OPTIONS as STRATEGY
from tests.trainers.small_trainer import Saved, Synced, trainer_of

pytestmark = pytest.mark.slow

OF_STRATEGIES, OF_TRAINERS = list(options_in(StrategyConfig)), list(options_in(PPOConfig))
REFUSAL = "cannot be honoured|no effect|it is one of"
TEXT = {
    "kl_estimator": "k2",
    "advantage_estimator": "rloo",
    "engine_type": "sglang",
    "head": "chunked",
    "aggregation": "token-mean",
    "template": '{"mood": "!"}',
    "tools": '[{"name": "look"}]',
}


def other(name: str, held: Any) -> Any:
    """A value that is not the default."""
    if name in TEXT:
        return TEXT[name]
    if isinstance(held, bool):
        return not held
    if isinstance(held, tuple):
        return tuple(value / 2 for value in held)
    return held + 1 if isinstance(held, int) else held / 2 + 0.2 if isinstance(held, float) else "other"


# -- a trainer's keywords


@pytest.fixture(scope="module")
def read_by_trainers(qwen: str, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What two trainers read of their own options, from being made to the end of a run: one of groups with all that can
    be switched on, one with a critic."""
    place, found = tmp_path_factory.mktemp("read"), set()
    folders = {"log_dir": str(place / "lengths"), "save_path": str(place / "saved"), "ckpt_path": str(place / "kept")}
    strategy = get_fake_strategy(STRATEGY)
    critic = strategy.prepare_model(make_critic(qwen), is_training=True)
    groups: dict[str, Any] = {
        "options": {"advantage_estimator": "group_norm"},
        "reference": qwen_of(qwen),
        "kl_coef": 0.1,
        "use_kl_loss": True,
        "kl_target": 0.1,
        "packing": True,
        "gradient_checkpointing": True,
        "head": "chunked",
        "overlong_buffer": True,
        "overlong_buffer_len": 2,
        "use_fire": True,
        "dynamic_sampling": True,
        "reward_running_norm": True,
        "save_trajectories": True,
        "mark_high_entropy_tokens": True,
        "use_tensorboard": str(place / "board"),
        "eval_prompts": asked(4),
        "eval_steps": 1,
        "save_steps": 1,
        "save_hf_ckpt": True,
        "ema": qwen_of(qwen),
        "ptx_coef": 0.1,
        "pretrain_prompts": ["5 6 7"] * 64,
        "max_norm": 1.0,
        "reward": lambda sample: float(last_token(sample) % 2),
    }
    values: dict[str, Any] = {
        "options": {"advantage_estimator": None},
        "critic": critic,
        "save_steps": 1,
        "load_checkpoint": True,
        "critic_optim": strategy.create_optimizer(critic, lr=1e-3),
    }
    with reads(StrategyConfig, PPOConfig) as noted:
        for given in (groups, values):
            trainer = trainer_of(qwen, tokenizer=Saved(), **folders, **given)
            trainer.fit(max_steps=2)
            own = trainer.options
            found |= noted[id(own.strategy)] | noted[id(own.ppo)]
            folders["ckpt_path"] += "2"
    return found


@pytest.mark.parametrize("name", [*OF_STRATEGIES, *OF_TRAINERS])
def test_a_trainers_keyword_is_read_by_the_trainer_or_refused(qwen: str, read_by_trainers: set[str], name: str) -> None:
    config = get_fake_strategy(STRATEGY).config
    held = getattr(config, name) if name in OF_STRATEGIES else getattr(PPOConfig(), name)
    assert not {"adam_offload", "bf16", "fp16", "use_mp_opt", "seed"} & read_by_trainers  # they act in a strategy
    if name not in read_by_trainers:
        with pytest.raises(OptionError, match=REFUSAL):
            trainer_of(qwen, **{name: other(name, held)})


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_a_trainers_keyword_of_sampling_reaches_the_engine(name: str) -> None:
    options = read_options(StrategyConfig(), {name: 0.5})
    assert options.sampling[SAMPLING[name]] == 0.5


@pytest.mark.parametrize(("name", "value"), [("packing_samples", True), ("cpu_offload", False)])
def test_a_buffers_option_is_refused(name: str, value: bool) -> None:
    with pytest.raises(OptionError, match=REFUSAL):
        NaiveReplayBuffer(2, **{name: value})
    with pytest.raises(TypeError):
        NaiveReplayBuffer(2, anything=value)  # type: ignore[call-arg]


# -- a strategy's options


class Replicas:
    """In the place of the replicas: no engine is built."""

    engine = "engine"

    def __init__(self, *_: Any) -> None: ...

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def generate(self, *_: Any) -> list[Any]:
        return [SimpleNamespace(output_token_ids=[1, 2, 3])]


def used(config: StrategyConfig, qwen: str, monkeypatch: pytest.MonkeyPatch) -> FakeStrategy:
    """A strategy that has done what a script does with one."""
    strategy = get_fake_strategy(config)
    own = strategy.config
    here = SimpleNamespace(replicas=lambda *_: Replicas())
    monkeypatch.setattr(generation, "session_of_ranks", lambda: here)
    context.set_current(context.CallContext(worker="here"))
    try:
        strategy.setup_inference_engine(own)
        strategy.gather_and_generate({"max_tokens": 4}, all_prompt_token_ids=[[1, 2]])
    finally:
        context.set_current(None)
    critic = make_critic(qwen)
    actor, _, _, _ = strategy.prepare_models_and_optimizers(qwen_of(qwen), critic, None, None, own, max_steps=4)
    strategy.maybe_load_optimizer(strategy.maybe_offload_optimizer(actor[1]))
    rank = SimpleNamespace(config=own, device=strategy.device)
    FSDPV2Strategy._offload(rank, True)  # type: ignore[arg-type]
    fsdp2_room.local_rank(own)
    monkeypatch.setattr(rank_session.cluster, "current", lambda: SimpleNamespace(gpus=0))
    place, trainer = SimpleNamespace(engine="actor", link=None), {"info": {"dtype": "float32", "source": qwen}}
    monkeypatch.setattr(rank_session, "InferenceEngine", _no_engine)
    with pytest.raises(EngineError, match="none here"):
        rank_session._build(place, {"actor": trainer}, strategy, own, None)  # type: ignore[arg-type]
    return strategy


def _no_engine(*_: Any, **__: Any) -> None:
    raise EngineError("none here")


HANDED_ON = {"seed", "max_norm", "micro_train_batch_size", "train_batch_size", "bf16"}
"""Arguments of a strategy too, which the test below proves."""


def test_a_strategys_option_is_read_by_it_or_by_a_trainer_on_it_or_refused(
    qwen: str, read_by_trainers: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = StrategyConfig(fsdp=True, adam_offload=True, bf16=False, log_dir=str(tmp_path), critic_pretrain=True)
    with reads(StrategyConfig) as noted:
        strategy = used(config, qwen, monkeypatch)
    assert (tmp_path / "gen_len.jsonl").read_text().startswith('{"step": 0, "total_samples": 1, "min_length": 3')
    found = noted[id(strategy.config)] | read_by_trainers | HANDED_ON
    for name in OF_STRATEGIES:
        if name in ("pretrain_data", "remote_rm_url"):
            continue  # a trainer refuses the one without its texts, and the other is an argument of it
        if name not in found:
            with pytest.raises(OptionError, match=REFUSAL):
                need_fsdp(StrategyConfig.of({"fsdp": True, name: other(name, name == "fsdp" or default(name))}))


@pytest.mark.parametrize("name", sorted(HANDED_ON))
def test_what_a_strategy_is_given_as_argument_and_in_args_is_one_thing(name: str) -> None:
    own = {"seed": 7, "max_norm": 0.5, "micro_train_batch_size": 2, "train_batch_size": 4, "bf16": False}
    assert own.keys() == HANDED_ON == ARGUMENTS.keys()
    value = own[name]
    rest = {"train_batch_size": 8} if name == "micro_train_batch_size" else {}
    for made in (FakeStrategy(args={name: value, **rest}), FakeStrategy(**{name: value, **rest})):
        assert getattr(made, name) == getattr(made.config, name) == value
    if name != "bf16":  # of whose two values one is the default, which says nothing
        with pytest.raises(OptionError, match=name):
            FakeStrategy(**{name: value, **rest}, args={name: 16})


# -- session.trainer

OF_THE_VERB = {"lr", "critic_pretrain"}
"""Taken by `session.trainer` itself, as other names of arguments; proved on a real session in `test_trainer`."""


class Built(FakeStrategy):
    """In the place of FSDP2, on no ranks."""

    def setup_inference_engine(self, args: Any = None, engine_type: str = "vllm", actor: Any = None) -> Any:
        engine = {"info": {"tensor_parallel_size": 1, "max_model_len": 64}}
        rank_session._check_fits(args, "inference", engine)  # that of the session
        self.generation.sleeps = args.enable_engine_sleep
        self.gather_and_generate = TableEngine()  # type: ignore[method-assign]
        self.update_engine_weights = Synced()  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def read_when_built(tiny_path: Path) -> set[str]:
    """What `build_trainer` and the trainer's strategy read of the options of `session.trainer("ppo")`."""
    options = {
        **method_options("ppo", {}),
        "max_tokens": 8,
        "train_batch_size": 16,
        "adam_offload": True,
        "rollout_batch_size": 4,
        "n": 4,
        "kl_coef": 0.0,
    }
    spec = TrainerSpec(
        str(tiny_path), options, critic=True, reward=last_token, schedule_steps=4, prompts=tasks.prompts(8)
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(building, "FSDPV2Strategy", Built)
    try:
        with reads(StrategyConfig) as noted:
            actor = qwen_of(str(tiny_path))
            optimizer = get_fake_strategy({"bf16": False}).create_optimizer(actor, lr=1e-3)
            trainer = build_trainer(actor, optimizer, spec, half=None)
            assert trainer.make_experience(asked(4))
            trainer.ppo_train()
            return set().union(*noted.values())
    finally:
        patch.undo()


@pytest.mark.parametrize("name", OF_STRATEGIES)
def test_an_option_of_a_sessions_trainer_is_read_or_refused(
    read_when_built: set[str], read_by_trainers: set[str], name: str, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in OF_THE_VERB | read_by_trainers:
        return
    held_by_the_session = {"fsdp", "bf16", "fp16", "use_mp_opt", "fsdp_cpu_offload"}
    if name in held_by_the_session or name not in read_when_built:
        monkeypatch.setattr(building, "FSDPV2Strategy", Built)
        value = other(name, {"fsdp": True, "bf16": False}.get(name, default(name)))
        with pytest.raises(OptionError, match=REFUSAL):
            built_with(str(tiny_path), {name: value})


def built_with(path: str, options: dict[str, Any]) -> Any:
    actor = qwen_of(path)
    spec = TrainerSpec(path, method_options("grpo", options), reward=last_token)
    return build_trainer(actor, FakeStrategy(bf16=False).create_optimizer(actor, lr=1.0), spec, half=None)


@pytest.mark.parametrize("value", [2, 3])
def test_a_stage_of_deepspeed_is_refused_wherever_it_is_said(value: int) -> None:
    for given in ({"zero_stage": value}, {"zero_stage": value, "fsdp": True}):
        with pytest.raises(OptionError, match="zero_stage"):
            method_options("grpo", given)
        with pytest.raises(OptionError, match="zero_stage"):
            RunConfig.load("grpo", None, given)


@pytest.mark.parametrize("name", ["critic_pretrain", "critic_lr", "betas", "weight_decay", "lr_warmup_ratio"])
def test_an_option_that_needs_a_critic_or_a_schedule_is_refused_without(name: str) -> None:
    with pytest.raises(OptionError, match=REFUSAL):
        TrainerSpec("path", {name: default(name)})


# -- rlbench train


def outcome(config: RunConfig) -> str:
    """All that a run makes of its options, for two kinds of hosts."""
    prompts = run_data.prompts_of(config) if config.run.prompt_data == "tiny" else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = train_command.trainer_arguments(config, None, 3)  # type: ignore[arg-type]
    sessions = [train_command.session_options(config, on_gpu=on_gpu) for on_gpu in (False, True)]
    for one in sessions:
        size = one["inference"].kv_cache_bytes
        one["inference"] = {**one["inference"], "kv_cache_bytes": size and size >> 30}  # of free memory, which changes
    return repr((arguments, sessions, getattr(prompts, "seed", None)))


@pytest.mark.parametrize("name", sorted(set(OF_STRATEGIES) | set(OF_TRAINERS)))
def test_an_option_of_a_run_changes_what_session_and_trainer_are_given_or_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "texts_of", lambda config: config.strategy.pretrain_data)
    monkeypatch.setattr(run_data, "TINY_PROMPTS", 64)  # of which only the seed is looked at
    monkeypatch.setattr(train_command.trainer_places, "model_here", lambda _, named: named)
    if name in REFUSED_WHEN_SET or name in ("zero_stage", "local_rank"):
        with pytest.raises(OptionError, match=REFUSAL):
            RunConfig.load("grpo", None, {name: other(name, DEFAULTS[name])})
        return
    method = "ppo" if name in ("critic_lr", "critic_pretrain") else "grpo"
    line = [word for word in words(name) if word != "gae"] if method == "ppo" else words(name)
    line = [word for word in line if word != "--advantage_estimator" or method != "ppo"]
    assert outcome(run(*line, method=method)) != outcome(run(method=method))


def test_an_option_of_the_run_alone_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"input": "a", "label": "b", "ref": "c"}\n' * 4)
    given = {
        "prompt_data": str(tmp_path / "p.jsonl"),
        "eval_data": str(tmp_path / "p.jsonl"),
        "reference_key": "ref",
        "prompt_data_probs": (1.0,),
        "max_steps": 2,
        "kv_cache_bytes": 1 << 20,
    }
    mixed = {**given, "prompt_data": f"{tmp_path}/p.jsonl,tiny", "prompt_data_probs": (0.5, 0.5)}
    with reads(RunOptions) as noted:
        found: set[str] = set()
        (tmp_path / "q.jsonl").write_text('{"input": "d"}\n' * 4)
        texts_of = {"pretrain_data": f"{tmp_path}/p.jsonl,{tmp_path}/q.jsonl", "pretrain_data_probs": (0.5, 0.5)}
        texts_of["ptx_coef"] = 0.1
        seen = {"metrics_file": str(tmp_path / "m.jsonl"), "track": "wandb", "use_wandb": True}
        critic = {"advantage_estimator": "gae", "value_head_prefix": "value"}
        for one in (given, mixed, seen, {"lora_rank": 4}, texts_of, critic):
            config = RunConfig.load("grpo", None, one)
            assert modelscope.fetched(config) is config
            prompts = run_data.prompts_of(config)
            train_command.session_options(config, on_gpu=False)
            train_command.frozen(config)
            train_command.tracked(SimpleNamespace(track=lambda *_, **__: None), config)  # type: ignore[arg-type]
            train_command.iterations(config, prompts)
            train_command.trainer_arguments(config, prompts, 1)
            trainer: Any = SimpleNamespace(where=lambda: {"iterations": 0}, step=lambda: {"reward": 1.0}, finish=int)
            train_command.run(trainer, config, 1)
            found |= noted[id(config.run)]
        (tmp_path / "t.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
        texts = RunConfig.load("sft", None, {"data": str(tmp_path / "t.jsonl"), "max_length": 9})
        train_command.trainer_arguments(texts, run_data.data_of(texts), 1)
        found |= noted[id(texts.run)]
    assert set(options_in(RunOptions)) - found == set()


def test_every_option_has_a_test_that_shows_its_effect() -> None:
    assert set(EFFECTS) == set(HOMES)


# -- rb.Session, engines and single steps


@pytest.mark.parametrize("kind", [OptimizerOptions, RankOptions, ReplicaOptions])
def test_an_option_of_a_sessions_engine_is_read_where_it_runs(kind: type[Options]) -> None:
    assert set(defaults(kind)) - loaded_fields("workers", "trainers", "engines", "strategies") == set()


def test_an_option_of_a_step_is_read() -> None:
    assert {field.name for field in dataclasses.fields(PolicyOptions)} - loaded_fields("trainers") == set()


def test_an_option_that_nothing_reads_would_be_noticed() -> None:
    @dataclasses.dataclass
    class Options:
        read: int = 1
        handed_on: int = 2

        def __post_init__(self) -> None:
            assert self.handed_on

    def check_it(options: Options) -> None:
        assert options.handed_on

    with reads(Options) as noted:
        options = Options()
        check_it(options)
        assert options.read and noted[id(options)] == {"read"}
    assert "handed_on_to_nobody" not in loaded_fields("trainers")
