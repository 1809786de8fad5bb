"""In an executed notebook: an error in a user's code shows that line of the cell, once; the rest is on request."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.engine

START = """
import rlbench as rb
from rlbench.tiny import tasks
rb.init()
session = rb.Session("tiny", name="errors", undo=0)
rollouts = session.rollout(tasks.prompts(2), n=2, max_tokens=4, progress=False)
batch = rollouts.score([1.0, 0.0, 1.0, 0.0]).batch(advantage=rb.rl.group_normalized())
"""
MODULE = """
import torch

class Mine(rb.nn.Fsdp2TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    @property
    def non_split_modules(self):
        return set()

    def materialization_source(self):
        return {name: (lambda t: t.zero_()) for name, _ in self.named_parameters()}

    def forward(self, x):
        return self.layer(x)

    def scores(self, width):
        return self(torch.ones(1, width)).sum().item()

with rb.device("meta"):
    engine = rb.TrainEngine(Mine(), name="mine")
engine.build(tensor_parallel_size=1, data_parallel_size=1)
"""
ON_RANKS = """
def picky(inputs):
    if len(inputs.logprobs) > 2:  # the trial in the kernel has two
        raise ValueError("more than <two> rows")  # mine
    return -inputs.logprobs * inputs.advantages, {}
"""
SHOWN = {
    "loss on the ranks": (
        ON_RANKS + "session.train_step(batch, loss=picky)",
        "picky, cell {n}, line 3:   raise ValueError",
        "ValueError: more than <two> rows",
    ),
    "loss in the trial": (
        "def wrong(inputs):\n    return inputs.logprob, {}  # no such field\nsession.train_step(batch, loss=wrong)",
        "wrong, cell {n}, line 2:   return inputs.logprob, {{}}",
        "AttributeError",
    ),
    "reward": (
        "def reward(rollout):\n    return {}[rollout.text]  # unknown\nrollouts.score(reward)",
        "reward, cell {n}, line 2:   return {{}}[rollout.text]",
        "on completion 0",
    ),
    "function on the ranks": (
        "def look():\n    return module.no_such_layer\nsession.train.run(look)",
        "look, cell {n}, line 2:   return module.no_such_layer",
        "no_such_layer",
    ),
    "cell on the ranks": (
        'session.train.run("a = 1\\na / 0")',
        "<rank cell 1>, line 2:   a / 0",
        "ZeroDivisionError",
    ),
    "exit in a cell on the ranks": (
        "%%ranks --args '--bad 1'\nimport argparse\nargparse.ArgumentParser().parse_args()",
        "<rank cell 2>, line 2:   argparse.ArgumentParser().parse_args()",
        "SystemExit: 2 (argparse: unrecognized arguments: --bad 1)",
    ),
    "exit by IPython's name": (
        "def leave():\n    exit()\nsession.train.run(leave)",
        "leave, cell {n}, line 2:   exit()",
        "SystemExit",
    ),
    "script on the ranks": (
        "%ranks actor fails.py --loud",
        "fails.py, line 2:   raise ValueError(sys.argv[1])",
        "ValueError: --loud",
    ),
    "isolated reward": (
        "def reward(rollout):\n    import sys\n    sys.exit(3)\nrollouts.score(reward, isolate=True)",
        "reward, cell {n}, line 3:   sys.exit(3)",
        "SystemExit: 3",
    ),
    "method": (
        "engine.scores(3)",
        "forward, cell {module}, line 16:   return self.layer(x)",
        "RuntimeError",
    ),
}
PLAIN = {  # no user's code raised: what is said, and the line of the cell
    "session": ('rb.attach("nobody")', "SessionError: no session 'nobody'", 2),
    "environment": (
        "class Env(rb.envs.Env):\n    def step(self, turn): ...\nsession.rollout(tasks.prompts(1), env=Env, n=1)",
        "step() returned NoneType",
        2,
    ),
    "a worker that died": (
        "import os\nsession.train.run(lambda: os._exit(7))",
        "its own code ended it: os._exit(7) was called in <lambda>, cell",
        4,
    ),
    "a call to a dead worker": ("session.train_step(batch)", "WorkerDied: rank 0 of actor died", 4),
}


@pytest.fixture(scope="module")
def executed(cluster, tiny_path, tmp_path_factory):
    """All cells run, failing ones too; each is followed by one that shows the last traceback."""
    cells = [START, MODULE]
    for source, _, _ in SHOWN.values():
        cells += [source, "rb.last_traceback()"]
    cells += [source for source, _, _ in PLAIN.values()]
    cells += ["engine.close()", "session.close()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c.strip("\n")) for c in cells])
    folder = tmp_path_factory.mktemp("errors")
    (folder / "fails.py").write_text("import sys\nraise ValueError(sys.argv[1])\n")
    environment = os.environ | {"RLBENCH_LEASE_S": "120"}
    client = NotebookClient(notebook, timeout=240, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    for cell in [*notebook.cells[:2], *notebook.cells[-2:]]:
        assert not [o.traceback for o in cell.outputs if o.output_type == "error"], cell.source
    return notebook.cells


@pytest.fixture(params=list(SHOWN))
def case(request, executed):
    """What a failing cell showed, what it had to, and what `rb.last_traceback()` gave after it."""
    place = 2 + 2 * list(SHOWN).index(request.param)
    _, line, said = SHOWN[request.param]
    (error,) = (o for o in executed[place].outputs if o.output_type == "error")
    (after,) = (o for o in executed[place + 1].outputs if o.output_type == "execute_result")
    return "\n".join(error.traceback), line.format(n=place + 1, module=2), said, after.data["text/plain"]


def test_the_users_line_shows_once_with_its_cell(case):
    shown, line, said, _ = case
    source = line.partition(":   ")[2]
    assert shown.count(line) == 1 and shown.count(source) == 1 and said in shown


def test_nothing_of_the_plumbing_shows(case):
    shown, _, _, _ = case
    assert "Traceback" not in shown and "File " not in shown and len(shown.splitlines()) <= 8
    for plumbing in ("site-packages", "/rlbench/", "rlbench/session", "dispatch", "host.py", "ipykernel"):
        assert plumbing not in shown


def test_the_rest_is_in_the_last_traceback_with_the_users_source_in_it(case):
    _, line, said, after = case
    source = line.partition(":   ")[2]
    assert "Traceback (most recent call last)" in after and source in after and "File " in after
    assert said.partition(":")[0] in after or "KeyError" in after


@pytest.mark.parametrize("name", ["loss on the ranks", "function on the ranks", "method"])
def test_the_rank_is_named_where_there_was_one(executed, name):
    place = 2 + 2 * list(SHOWN).index(name)
    (after,) = (o for o in executed[place + 1].outputs if o.output_type == "execute_result")
    assert after.data["text/plain"].startswith("rank 0:\nTraceback")
    assert "raised on rank 0; rb.last_traceback() has the rest" in executed[place].outputs[-1].traceback[0]


@pytest.mark.parametrize("name", PLAIN)
def test_other_errors_are_as_short(executed, name):
    place = 2 + 2 * len(SHOWN) + list(PLAIN).index(name)
    _, said, most = PLAIN[name]
    (error,) = (o for o in executed[place].outputs if o.output_type == "error")
    lines = "\n".join(error.traceback).splitlines()
    assert said in lines[0] and len(lines) <= most, lines
    assert "Traceback" not in "".join(lines) and "site-packages" not in "".join(lines)
