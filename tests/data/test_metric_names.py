"""One name for one number: the table, the page about it, a trainer's names and those of other systems."""

from __future__ import annotations

from pathlib import Path

from rlbench.data.record.metric_names import METRICS, of_trainer, table, with_aliases

PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(table())


def test_no_name_stands_for_two_numbers() -> None:
    names = [name for one in METRICS for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))


def test_a_trainers_numbers_are_on_record_under_a_sessions_names() -> None:
    found = of_trainer({"policy_loss": 0.5, "kl": 0.1, "ref_kl": 0.2, "actor_lr": 1e-6})
    assert found == {"loss": 0.5, "lr": 1e-6}


def test_trackers_get_the_names_of_other_systems_beside_ours() -> None:
    found = with_aliases({"kl": 0.1, "ref_kl": 0.2, "mine": 3.0})
    assert found["actor/ppo_kl"] == found["kl"] == 0.1 and found["objective/kl"] == 0.2 and found["mine"] == 3.0
