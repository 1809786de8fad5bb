"""Code that would end its process, on one rank or all: an error with its line, and every rank lives on."""

import pytest

import rlbench as rb
from rlbench.errors import DataError, RemoteError
from rlbench.tiny import tasks
from rlbench.trainers import SPMDPPOTrainer

pytestmark = pytest.mark.engine
EXITS = ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()"]


@pytest.fixture
def train(session):
    """The ranks, which must be as alive and as level after the test as before it."""
    before = [session.core.link.state("engines")["engines"]["actor"]["pids"], session.train.world_size]
    yield session.train
    count = session.train.run_cell("strategy.all_reduce(1.0, op='sum')")
    assert count == ["2.0", "2.0"]
    assert before == [session.core.link.state("engines")["engines"]["actor"]["pids"], session.train.world_size]


@pytest.fixture(scope="module")
def batch(session):
    rollouts = session.rollout(tasks.prompts(4), n=2, max_tokens=4, progress=False)
    return rollouts.score([1.0, 0.0] * 4).batch(advantage=rb.rl.group_normalized())


def exits(error):
    raise eval(error)  # mine


def exits_on_rank_1(error):
    """A loss that raises on one rank alone, and not in the kernel's trial."""

    def loss(inputs):
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank() == 1:
            raise eval(error)  # of one rank
        return -inputs.logprobs * inputs.advantages, {}

    return loss


@pytest.mark.parametrize("error", EXITS)
def test_a_cell_and_a_function_fail_with_the_name_and_the_line(train, error):
    name = error.partition("(")[0]
    with pytest.raises(
        RemoteError, match=rf"(?s){name}.*line 2:   raise {name}.*rank [01]"
    ):  # the other may be stopped
        train.run_cell(f"value = 1\nraise {error}")
    with pytest.raises(RemoteError, match=rf"(?s){name}.*line 2:   raise {name}.*rank 1"):
        train.run_cell(f"if rank == 1:\n    raise {error}")
    with pytest.raises(RemoteError, match=rf"(?s){name}.*raise eval\(error\)  # mine"):
        train.run(exits, error)


@pytest.mark.parametrize("error", EXITS)
def test_a_loss_that_exits_on_one_rank_ends_the_step_on_all(session, train, batch, error):
    step = session.step
    with pytest.raises(RemoteError, match=rf"(?s){error.partition('(')[0]}.*raise eval\(error\)  # of one rank"):
        session.train_step(batch, loss=exits_on_rank_1(error))
    assert session.step == step


@pytest.mark.parametrize("error", EXITS)
def test_an_environment_and_a_tool_that_exit_end_their_sample_alone(session, error):
    class Leaves(rb.envs.Env):
        def step(self, turn):
            raise eval(error)

    before = session.core.link.state("engines")["engines"]["inference"]["pids"]
    with pytest.raises(DataError, match=f"failed for all 2 completions.*{error.partition('(')[0]}"):
        session.rollout(tasks.prompts(1), n=2, env=Leaves, max_tokens=4, progress=False)
    assert session.rollout(tasks.prompts(1), n=2, max_tokens=4, progress=False).samples == 2
    assert session.core.link.state("engines")["engines"]["inference"]["pids"] == before


def test_a_reward_and_a_trainer_of_ones_own_that_exit_end_their_iteration(session, train):
    class Leaves(SPMDPPOTrainer):
        def ppo_train(self, global_steps=0):
            exits("SystemExit(5)")

    options = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "generate_max_len": 4,
    }
    prompts = tasks.prompts(8)
    with pytest.raises(rb.RLBenchError, match=r"(?s)SystemExit: 3.*# mine"):
        session.trainer("grpo", prompts, lambda rollout: exits("SystemExit(3)"), **options).step()
    with pytest.raises(rb.RLBenchError, match=r"(?s)SystemExit: 5.*# mine"):
        session.trainer("grpo", prompts, lambda rollout: 1.0, trainer_class=Leaves, **options).step()
    session.train.call_all("drop_trainer").result()  # the files that share the session know of none
    session.core.trainer = None


def test_a_redefinition_that_exits_changes_nothing(train):
    class Leaves:
        def __reduce__(self):
            return exits, ("SystemExit(4)",)

    held = Leaves()

    def looks(self):
        return held

    with pytest.raises(rb.errors.EngineError, match="SystemExit"):
        train.method(looks)
    with pytest.raises(RemoteError, match="SystemExit"):
        train.run(looks, None)


def test_a_name_that_exits_when_it_is_completed_harms_nobody(train):
    train.run_cell("class Odd:\n    @property\n    def exits(self): raise SystemExit(1)\nodd = Odd()")
    assert train.complete_names("odd.exits.") == []


# -- a command line of its own


def test_a_parser_reads_the_arguments_of_its_cell(train):
    cell = (
        "import argparse, sys\np = argparse.ArgumentParser()\np.add_argument('--lr', default='1')\n"
        "p.parse_args().lr, sys.argv"
    )
    assert train.run_cell(cell) == ["('1', ['cell'])"] * 2
    assert train.run_cell(cell, args=["--lr", "1e-5"]) == ["('1e-5', ['cell', '--lr', '1e-5'])"] * 2
    with pytest.raises(RemoteError, match=r"(?s)SystemExit: 2 \(argparse: unrecognized arguments: --bad\).*line 4"):
        train.run_cell(cell, args=["--bad"])
    worker = train.run_cell("sys.argv")
    assert worker == ["['cell']"] * 2


def parsed():
    import argparse
    import sys

    return argparse.ArgumentParser().parse_args(), sys.argv


def test_a_function_has_its_name_for_a_program_and_the_process_keeps_its_own(session, train):
    assert [argv for _, argv in train.run(parsed)] == [["parsed"]] * 2
    after = train.run_cell(
        "import sys, threading\nprogram = None\ndef look():\n    global program\n    "
        "program = sys.argv\ntimer = threading.Timer(0.3, look)\ntimer.start()"
    )
    assert after == [None, None]
    names = train.run_cell("timer.join()\nprogram[0]")  # inside of this cell it is the cell's
    assert names == ["'cell'"] * 2


# -- scripts

SCRIPT = """
import argparse, os, sys
import near

class Thing:
    pass

def main():
    import pickle
    parser = argparse.ArgumentParser()
    parser.add_argument("--fails", action="store_true")
    args = parser.parse_args()
    if args.fails:
        raise ValueError("mine")  # of the script
    pickle.loads(pickle.dumps(Thing()))  # __main__ is the script
    print("loud", os.environ["RANK"], os.environ["WORLD_SIZE"], near.value, file=sys.stderr)
    return strategy.all_reduce(float(rank), op="sum")

if __name__ == "__main__":
    found = main()
(found, os.path.basename(__file__), near.value)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "near.py").write_text("value = 1\n")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_a_script_is_a_program_of_its_own_on_every_rank(train, script, capsys):
    assert train.run(script) == [(1.0, "train.py", 1)] * 2
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] loud 0 2 1", "[rank 1] loud 1 2 1"]
    assert train.run_cell("found, __name__, 'near' in sys.path[0]") == ["(1.0, '__rank__', False)"] * 2
    (script.parent / "near.py").write_text("value = 22\n")
    assert train.run(str(script), args=[]) == [(1.0, "train.py", 22)] * 2, "modules beside it are read anew"
    assert train.run_cell("import os; os.environ.get('LOCAL_RANK')") == [None, None]


def test_a_scripts_error_has_its_line_and_its_exit_its_code(train, script):
    with pytest.raises(RemoteError, match=r"(?s)ValueError: mine.*main, .*train\.py, line 14:.*# of the script"):
        train.run(script, args=["--fails"])
    with pytest.raises(RemoteError, match="unrecognized arguments: --bad"):
        train.run(script, args=["--bad"])
    script.write_text("import sys\nsys.exit(0)")
    assert train.run(script) == [None, None]
    script.write_text("import sys\nsys.exit('no data')")
    with pytest.raises(RemoteError, match="SystemExit: no data"):
        train.run(script)
    with pytest.raises(rb.errors.EngineError, match=r"no script 'absent\.py'"):
        train.run("absent.py")
