"""The notebook of three ways to a trainer asks for one set of options, without a run; its curves are held elsewhere."""

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest

from rlbench.options import options_in
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.options.methods import method_options
from rlbench.trainers.options.ppo_config import AGGREGATION, PPOConfig
from rlbench.trainers.options.trainer_options import read_options

GIVEN = ("options", "ppo_options", "OPTIONS", "CHANGED")
AS_HELD = "bf16"  # what the session's module computes in, which its trainers take over
OF_A_KL = "kl_estimator"  # without effect at kl_coef=0


def of_both(config: StrategyConfig, ppo: PPOConfig) -> dict[str, Any]:
    """Every option that acts, with the aggregation that is meant where none is named."""
    options = {**vars(config), **vars(ppo), "aggregation": ppo.aggregation or AGGREGATION}
    return {name: value for name, value in options.items() if name not in (AS_HELD, OF_A_KL)}


@pytest.fixture(scope="module")
def code(repository: Path) -> ast.Module:
    """The cells' Python, without their magics."""
    notebook = nbformat.read(repository / "notebooks/05_ranks_and_trainers.ipynb", as_version=4)
    cells = [cell.source.removeprefix("%%ranks") for cell in notebook.cells if cell.cell_type == "code"]
    return ast.parse("\n".join(cells))


@pytest.fixture(scope="module")
def given(code: ast.Module) -> dict[str, dict[str, Any]]:
    """The notebook's dicts of options, each as it is first assigned."""
    found: dict[str, dict[str, Any]] = {}
    for node in code.body:
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in GIVEN and name not in found:
            found[name] = eval(ast.unparse(node.value), {}, found)
    return found


@pytest.fixture(scope="module")
def keywords(code: ast.Module) -> list[dict[str, Any]]:
    """The options in each call of the trainer's class, in order; objects among the arguments left out."""
    calls = [
        node for node in ast.walk(code) if isinstance(node, ast.Call) and "SPMDPPOTrainer" in ast.unparse(node.func)
    ]
    options = options_in(PPOConfig)
    return [{k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg in options} for call in calls]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_trainer_by_hand_has_the_options_of_the_method_by_name(
    method: str, given: dict[str, dict[str, Any]], keywords: list[dict[str, Any]]
) -> None:
    critic = method == "ppo"
    made_with = StrategyConfig(**given["ppo_options" if critic else "options"])
    by_hand = read_options(made_with, keywords[critic], critic)
    chosen = method_options(method, given["OPTIONS"] | (given["CHANGED"] if critic else {}))
    own = {name: value for name, value in chosen.items() if name in options_in(StrategyConfig)}
    ppo = PPOConfig(**{name: value for name, value in chosen.items() if name in options_in(PPOConfig)})
    assert by_hand.ppo.kl_coef == ppo.kl_coef == 0
    assert of_both(by_hand.strategy, by_hand.ppo) == of_both(StrategyConfig(fsdp=True, **own), ppo)
