"""The usage blocks of the strategy guide and the trainers' page, as the documents print them, with the package's name
changed: in cells on the ranks (one and two), and in a script under `torchrun`. What is not here is refused by name."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rlbench as rb
from rlbench.tiny import tasks
from tests.ranks import said_by_fork

pytestmark = pytest.mark.engine

NAMES = """
import argparse, time
import torch, torch.distributed as dist
from transformers import AutoTokenizer
from rlbench.strategy import get_strategy
from rlbench.utils import add_arguments
from rlbench.trainer.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase
from rlbench.trainers import FastExperienceMaker, make_critic
from rlbench.data import PromptSet
from rlbench.tiny import tasks

ranks_own, actor, path = strategy, module, module.name_or_path
tokenizer = AutoTokenizer.from_pretrained(path)
prompts = tasks.prompts(16, seed=0)
"""
"""What the documents leave to the reader."""
ARGUMENTS = """
from rlbench.utils import add_arguments
import argparse

# Create parser
parser = argparse.ArgumentParser()

# Add LightRFT arguments
add_arguments(parser)

# Parse arguments
args = parser.parse_args()
"""
SETUP = """
def train(args):
    # Create strategy (automatically selects DeepSpeed or FSDP based on args)
    strategy = get_strategy(args)

    # Setup inference engine for generation
    strategy.setup_inference_engine(args, engine_type='vllm')

    # Access the engine if needed
    vllm_engine = strategy.inference_engine
    return strategy

guide = train(args)
critic = guide.prepare_model(make_critic(path), is_training=True)
critic_optim = guide.create_optimizer(critic, lr=1e-3, weight_decay=0.0)
actor_optim = module.optimizer
reward_model, initial_model, ema_model, actor_scheduler, critic_scheduler = tasks.reward, None, None, None, None
given = dict(prompts=PromptSet.of(prompts).stream(seed=0), rollout_batch_size=8, generate_max_len=6, init_kl_coef=0.0)
"""
STEPS = """
strategy = guide
model, optimizer, scheduler, local_value = torch.nn.Linear(2, 2), None, None, float(rank + 1)
optimizer = strategy.create_optimizer(model, lr=1e-2)
loss = model(torch.ones(1, 2)).sum()
# Backward pass
strategy.backward(loss, model, optimizer)

# Optimizer step with gradient clipping
strategy.optimizer_step(optimizer, model, scheduler, name="actor")

# Distributed communication
averaged_value = strategy.all_reduce(local_value, op="mean")
gathered_values = strategy.all_gather(local_value)
averaged_value, [float(value) for value in gathered_values]
"""
TRAINER = """
class Timed(SPMDPPOTrainer):
    def ppo_train(self, global_steps=0):
        torch.cuda.synchronize()
        train_begin = time.time()

        # Load optimizer states from CPU to GPU (FSDP only)
        self.strategy.maybe_load_optimizer(self.actor_optim)

        # Perform training
        train_ret = super().ppo_train(global_steps)

        # Offload optimizer states from GPU to CPU (FSDP only)
        self.strategy.maybe_offload_optimizer(self.actor_optim)

        torch.cuda.synchronize()
        self.strategy.print(f"PPO Train TIMECOST {time.time() - train_begin}")

        # Synchronize actor weights to inference engine
        self.strategy.update_engine_weights(self.actor)

        return train_ret

my_strategy, actor_model, actor_optimizer, reference_model = guide, actor, actor_optim, initial_model
critic_model, critic_optimizer, training_steps = critic, critic_optim, 2
trainer = Timed(
    strategy=my_strategy, actor=actor_model, critic=critic_model, reward_model=reward_model,
    initial_model=reference_model, ema_model=ema_model, actor_optim=actor_optimizer,
    critic_optim=critic_optimizer, actor_scheduler=actor_scheduler, critic_scheduler=critic_scheduler,
    tokenizer=tokenizer,
    # Additional PPO parameters
    max_epochs=5, micro_train_batch_size=16 // world_size, **given)

# Train for multiple iterations
for step in range(training_steps):
    trainer.make_experience()
    metrics = trainer.ppo_train(step)
"""
BASE = """
trainer_base = SPMDPPOTrainerBase(
    guide, actor_model, critic_model, reward_model, initial_model, ema_model, actor_optim, critic_optim,
    actor_scheduler, critic_scheduler, loss_agg_mode="seq-mean-token-mean", VLM=False, packing_samples=True, **given)
trainer = SPMDPPOTrainer(
    guide, actor_model, critic_model, reward_model, reference_model, ema_model, actor_optimizer, critic_optimizer,
    actor_scheduler, critic_scheduler, tokenizer=tokenizer, loss_agg_mode="seq-mean-token-mean", packing_samples=True,
    max_epochs=5, micro_train_batch_size=16 // world_size, **given)
type(trainer_base).__name__
"""
MAKER = """
class Maker(FastExperienceMaker):
    def drawn_from(self, all_prompts, sampling_params):
        # Tokenize prompts (without padding for efficiency)
        all_prompt_token_ids = self.tokenize_fn(
            all_prompts, self.prompt_max_len, padding=False
        )["input_ids"]

        # Generate responses with automatic distribution
        all_outputs = self.strategy.gather_and_generate(
            sampling_params=sampling_params,
            all_prompt_token_ids=all_prompt_token_ids,
            sleep_engine=True  # Automatically sleep engine after generation
        )

        if dist.get_rank(self.vllm_mp_group) == 0:
            self.strategy.print(f"Generated {len(all_outputs)} outputs")
        return all_outputs

maker = Maker(actor, critic, reward_model, None, tokenizer, 64, 0.0, guide)
drawn = maker.drawn_from(["sort 52143", "sort 9071"], {"max_tokens": 4, "n": 2})
padded = maker.tokenize_fn(["sort 52143", "sort 1"], 64)["input_ids"].shape
len(drawn), guide.inference_engine_status.name, padded[0]
"""
LIFE = """
# Engine lifecycle management
strategy.setup_inference_engine(args, engine_type='vllm')  # Creates and wakes engine
strategy.maybe_sleep_inference_engine()                    # Sleep to save memory
strategy.wakeup_inference_engine()                         # Wake for generation
strategy.inference_engine_status.name
"""
FSDP = (
    "--fsdp --no-bf16 --advantage_estimator gae --train_batch_size 16 --n_samples_per_prompt 2 "
    "--micro_rollout_batch_size 8"
)
BLOCKS = [
    (NAMES, "", None),
    (ARGUMENTS, FSDP, None),
    (SETUP, "", None),
    (STEPS, "", None),
    (TRAINER, "", None),
    ("print(f\"Policy loss: {metrics['policy_loss']}\")\nprint(f\"Critic loss: {metrics['critic_loss']}\")", "", None),
    (BASE, "", "'SPMDPPOTrainerBase'"),
    ("# Update inference engine with latest actor weights\nstrategy.update_engine_weights(actor)", "", None),
    (MAKER, "", "(4, 'SLEEPED', 2)"),
    (LIFE, "", "'WAKEUP'"),
    ('strategy.report_memory(prefix="checkpoint_name")', "", None),
]
"""Text, the cell's command line, and the value of its last line where it has one that is equal on all ranks."""
REFUSED = {
    "images": (
        "all_outputs = strategy.gather_and_generate(sampling_params={}, all_prompts=['a'], all_images=[[1]], "
        "images_num=[1], sleep_engine=True)",
        "image 0 is a int",
    ),
    "sequence parallelism": ("get_strategy(parser.parse_args(['--fsdp', '--sp_size', '4']))", "4 does not divide"),
    "eight ranks": ("[strategy.prepare_model(rm, shard_size=8) for rm in [make_critic(path)]]", "8 does not divide"),
    "an engine of tensor parallel ranks": (
        "strategy.setup_inference_engine(parser.parse_args(['--fsdp', '--engine_tp_size', '2']))",
        "engine_tp_size",
    ),
    "vision-language trainers": (
        "from rlbench.trainer.spmd_ppo_trainer import SPMDPPOTrainerVL\nSPMDPPOTrainerVL(\n"
        "    strategy=my_strategy, actor=actor_model, critic=critic_model, reward_model=reward_model,\n"
        "    tokenizer=tokenizer, processor=object(), max_epochs=5, micro_train_batch_size=16, **given)",
        "sees no images and hears no sounds",
    ),
}


@pytest.fixture(scope="module")
def alone(cluster, tiny_path):
    with rb.Session("tiny", name="alone", train={"lr": 1e-5}, undo=0) as made:
        yield made


@pytest.fixture(params=["shared_session", "alone"], ids=["2 ranks", "1 rank"])
def ran(request):
    """A session on whose ranks all blocks ran."""
    session = request.getfixturevalue(request.param)
    for text, args, wanted in BLOCKS:
        found = session.train.run_cell(text, args=args.split())
        assert wanted is None or found == [wanted] * session.train.world_size, text
    yield session
    session.train.run_cell(
        "strategy = ranks_own\nguide = my_strategy = trainer = trainer_base = maker = None\n"
        "critic = critic_model = critic_optim = critic_optimizer = None"
    )


def test_the_blocks_run_as_printed_and_what_is_not_here_says_so(ran, capsys):
    train = ran.train
    assert train.run_cell("averaged_value") == [str((train.world_size + 1) / 2)] * train.world_size
    losses = train.run_cell("[round(float(metrics[name]), 9) for name in ('policy_loss', 'critic_loss')]")
    assert len(set(losses)) == 1 and set(train.run_cell("trainer.options.ppo.max_epochs")) == {"5"}
    for name, (text, reason) in REFUSED.items():
        with pytest.raises(rb.RLBenchError) as refused:
            train.run_cell(text)
        assert reason in str(refused.value), name
    assert train.run_cell("1 + 1") == ["2"] * train.world_size


SCRIPT = """
import argparse, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlbench.strategy import get_strategy
from rlbench.utils import add_arguments

parser = argparse.ArgumentParser()
add_arguments(parser)
parser.add_argument("--pretrain")
args = parser.parse_args()
strategy = get_strategy(args)
with strategy.init_model_context():
    torch.manual_seed(3)
    actor = AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32)
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(0.05 * torch.randn_like(p))
actor = strategy.prepare_model(actor, is_training=True)
optimizer = strategy.create_optimizer(actor, lr=1e-2)
strategy.backward(actor(torch.arange(8).view(1, 8)).logits.float().logsumexp(-1).mean(), actor, optimizer)
strategy.step_now(optimizer, actor)
strategy.setup_inference_engine(args, engine_type="vllm")
found = strategy.update_engine_weights(actor)
ids = AutoTokenizer.from_pretrained(args.pretrain)("sort 52143")["input_ids"]
mine = [ids] * (1 + strategy.rank)
outputs = strategy.gather_and_generate({"max_tokens": 4, "temperature": 0.0}, all_prompt_token_ids=mine)
with torch.no_grad():
    one = outputs[0]
    whole = torch.tensor([one.prompt_token_ids + one.output_token_ids])
    own = actor(whole).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    own = own.gather(-1, whole[0, len(ids) :, None])[:, 0]
gap = float((own - torch.tensor(one.logprobs)).abs().max())
print(f"rank {strategy.rank}: {len(outputs)} outputs, near {gap < 1e-3}, version {one.weight_version}", flush=True)
"""


def torchrun(file: Path, ranks: int, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--master_port=0",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=127.0.0.1:0",
        str(file),
        *args,
    ]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)


def rank_alone() -> dict[str, str]:
    """Return what torchrun says to the one rank of a script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    return names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.curve
@pytest.mark.parametrize("kind", [("--fsdp",), ("--zero_stage", "3")], ids=" ".join)
def test_a_script_under_torchrun_uses_the_replicas_of_a_session(session, tmp_path, kind):
    if "--fsdp" not in kind:
        pytest.importorskip("deepspeed", reason="deepspeed is not installed: make env")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    args = (*kind, "--no-bf16", "--pretrain", session.options.path)
    before = session.rollout(tasks.prompts(1), n=1, max_tokens=2, progress=False)
    try:
        done = torchrun(file, 2, *args, RLBENCH_SESSION=session.name)
    finally:
        session.inference.cuda()  # the guide's call had it sleep
    said = re.findall(r"rank (\d): (\d) outputs, near (\w+)", done.stdout)  # two processes write to one pipe
    assert sorted(said) == [("0", "1", "True"), ("1", "2", "True")], done.stderr[-3000:]
    assert session.train.run_cell("rank") == ["0", "1"], "its kernel drives the session as before"
    session.sync_weights()
    after = session.rollout(tasks.prompts(1), n=1, max_tokens=2, progress=False)
    assert before.samples == after.samples == 1


def test_a_script_that_finds_no_session_is_told_how(session):
    """One rank asks for a session that does not run, goes on, and asks for one that nobody named."""
    setup = 'strategy.setup_inference_engine(args, engine_type="vllm")'
    assert setup in SCRIPT
    before = SCRIPT.partition(setup)[0]
    args = ["train.py", "--fsdp", "--no-bf16", "--pretrain", session.options.path]
    said = said_by_fork(f"""
import os, sys
sys.argv = {args}
os.environ.update({rank_alone()})
{before}
for named in ("absent", ""):
    os.environ["RLBENCH_SESSION"] = named
    try:
        {setup}
    except Exception as error:
        print(error)
    else:
        sys.exit("it found one")
""")
    first, last = (line for line in said.splitlines() if "RLBENCH_SESSION" in line)
    assert "RLBENCH_SESSION=absent: no such session runs; there are" in first and "RLBENCH_SESSION=demo" in last
