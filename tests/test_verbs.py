"""Workers are asked by the names of their verbs: each name in the sources is one that there is, and takes what it is
given."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlbench.workers.replica.sglang import SglangReplica
from rlbench.workers.replica.verbs import BorrowingVerbs, ReplicaVerbs
from rlbench.workers.replica.vllm import VllmReplica
from rlbench.workers.train.rank import TrainRank
from rlbench.workers.train.verbs import RankVerbs

SOURCES = Path(__file__).parents[1] / "rlbench"
ROOMS = ("engines", "monitor", "session", "weights", "workers")
PROTOCOLS = {"rank": RankVerbs, "replica": BorrowingVerbs}
ASKING = {"call_all": 0, "ask_ranks": 0, "control": 0, "remote": 0, "asked": 1, "_call": 1}
"""Functions that take a verb, and at which place; behind it come the verb's own arguments."""
PACKED = {"call": 0, "submit": 3, "_run_text": 0, "_send": 1}
"""Those that have its arguments in other forms."""
OWNERS = {"call": ("self", "inference", "train"), "submit": ("link",), "remote": ("control",)} | dict.fromkeys(
    ("asked", "_call", "_send"), ("",)
)
"""What these are called on: other functions have their names."""
ASKED = dict.fromkeys(("train", "reference", "source", "target"), ("rank",)) | dict.fromkeys(
    ("infer", "inference"), ("replica",)
)
OWN = {"train.py": ("rank",), "inference.py": ("replica",), "base.py": ("rank", "replica")}
"""Whom a module asks by `self`."""
BY_VARIABLE = {
    *("Engine._asked", "Engine.call", "Engine.call_all", "SessionCore.ask_ranks", "asked", "_call", "_send"),
    "TrainEngine._run_text",
    "define_again",  # what `_send` sent, from a file
}
"""Where the verb is what a caller gave."""


@dataclass(frozen=True)
class Asked:
    """A call in the sources that names a verb; "": one that cannot be seen there. `of`: who is asked, () for either."""

    place: str
    function: str
    how: str
    verb: str
    of: tuple[str, ...]
    given: tuple[ast.expr, ...]

    def fits(self) -> bool:
        every = all if self.of else any
        return every(self.fits_one(PROTOCOLS[one]) for one in self.of or PROTOCOLS)

    def fits_one(self, protocol: type) -> bool:
        if self.verb not in verbs_of(protocol):
            return False
        signature = inspect.signature(getattr(protocol, self.verb))
        plain = [value for value in self.given if not isinstance(value, ast.Starred)]
        whole = self.how in ASKING and len(plain) == len(self.given)
        try:
            (signature.bind if whole else signature.bind_partial)(None, *plain)
        except TypeError:
            return False
        return True


def verbs_of(protocol: type) -> set[str]:
    return {name for name in dir(protocol) if not name.startswith("_")}


def all_asked() -> Iterator[Asked]:
    for path in (path for room in ROOMS for path in sorted((SOURCES / room).rglob("*.py"))):
        for name, function in functions(ast.parse(path.read_text())):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield from asked_by(node, path, name, function)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions of a module by qualified name; those inside of one belong to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions(child, f"{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}", child


def asked_by(node: ast.Call, path: Path, name: str, function: ast.AST) -> Iterator[Asked]:
    how, owner = last_name(node.func), last_name(getattr(node.func, "value", None))
    at = (ASKING | PACKED).get(how)
    if at is None or len(node.args) <= at or owner not in OWNERS.get(how, (owner,)):
        return
    if how in ("asked", "_call"):
        owner = last_name(node.args[0])
    own = OWN.get(path.name, ()) if owner in ("self", "link") else ()
    of = ("rank",) if how in ("ask_ranks", "_run_text", "_send") else ASKED.get(owner.removeprefix("_"), own)
    given = tuple(node.args[at + 1 :]) if how in ASKING else ()
    for verb in texts(node.args[at], function):
        yield Asked(f"{path.relative_to(SOURCES)}:{node.lineno}", name, how, verb, of, given)


def last_name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def texts(value: ast.expr, function: ast.AST) -> set[str]:
    """Return the texts that a value may be, "" among them where not all of that is to be seen."""
    match value:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp():
            return texts(value.body, function) | texts(value.orelse, function)
        case ast.Name(id=name):
            assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
            values = [one for node in assignments for one in given_to(name, node.targets[0], node.value)]
            return set().union(*(texts(one, function) for one in values)) or {""}
    return {""}


def given_to(name: str, target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    """What an assignment gives to a name."""
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.IfExp):
        yield from given_to(name, target, value.body)
        yield from given_to(name, target, value.orelse)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from given_to(name, one, its)


ALL = list(all_asked())


def test_what_workers_are_asked_by_name_is_a_verb_of_theirs_and_takes_the_arguments():
    named = [one for one in ALL if one.verb]
    assert [one for one in named if not one.fits()] == [] and len(named) > 90


def test_a_verb_is_in_a_variable_where_a_caller_gave_it_and_nowhere_else():
    assert {one.function for one in ALL if not one.verb} == BY_VARIABLE


def test_no_verb_is_listed_that_nobody_asks_for():
    named = {one.verb for one in ALL} | {"close"}  # by `Engine.close`, with a ticket of its own
    assert verbs_of(RankVerbs) | verbs_of(BorrowingVerbs) <= named


@pytest.mark.parametrize(
    ("worker", "kind", "protocol"),
    [(TrainRank, "rank", RankVerbs), (VllmReplica, "replica", ReplicaVerbs), (SglangReplica, "replica", ReplicaVerbs)],
)
def test_what_is_asked_of_busy_workers_is_on_their_control_lane(worker, kind, protocol):
    asked = {one.verb for one in ALL if one.how in ("control", "remote", "asked") and kind in (one.of or PROTOCOLS)}
    assert asked & verbs_of(protocol) <= worker.CONTROL <= verbs_of(protocol)


def test_a_rank_has_the_verbs_of_its_components():
    assert [verb for verb in verbs_of(RankVerbs) if verb not in TrainRank.VERBS and verb not in vars(TrainRank)] == []
