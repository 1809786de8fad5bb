"""Products of adapters in vLLM's CPU kernels: against plain matrix products, token by token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlbench.weights.vllm_cpu_lora import AdapterProducts, grouped

TOKENS, IN, RANK, WIDTHS = 7, 12, 4, (6, 10)


def products(places: list[int]) -> AdapterProducts:
    """Products for a step whose tokens are of adapters at these places."""
    found = AdapterProducts(64, 8, "cpu")
    found._groups = grouped(torch.tensor(places))
    return found


def by_hand(places: list[int], x: Tensor, downs: list[Tensor], ups: list[Tensor], scale: float) -> Tensor:
    """(tokens, out): what adapters add to each token, zero where it has none."""
    rows = []
    for place, token in zip(places, x, strict=True):
        parts = [up[place, 0] @ (down[place, 0] @ token) * scale for down, up in zip(downs, ups, strict=True)]
        rows.append(torch.cat(parts) * (place >= 0))
    return torch.stack(rows)


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize(
    "places", [[0] * 7, [1] * 7, [-1] * 7, [0, 0, -1, 1, 1, -1, 0], [-1, 2, 2, 2, 2, 2, 2]], ids=str
)
def test_each_token_gets_what_its_adapter_adds_and_none_where_it_has_none(places: list[int], is_prefill: bool) -> None:
    torch.manual_seed(0)
    x, base = torch.randn(TOKENS, IN), torch.randn(TOKENS, sum(WIDTHS))
    downs = [torch.randn(3, 1, RANK, IN) for _ in WIDTHS]
    ups = [torch.randn(3, 1, width, RANK) for width in WIDTHS]
    found = products(places)
    found.is_prefill = is_prefill
    y = base.clone()
    found.add_lora_linear(y, x, tuple(downs), tuple(ups), 0.5, WIDTHS)
    torch.testing.assert_close(y, base + by_hand(places, x, downs, ups, 0.5))


def test_an_adapter_that_comes_into_a_place_is_computed_with_from_then_on() -> None:
    torch.manual_seed(0)
    x, base = torch.randn(TOKENS, IN), torch.zeros(TOKENS, sum(WIDTHS))
    downs, ups = [torch.randn(2, 1, RANK, IN) for _ in WIDTHS], [torch.randn(2, 1, width, RANK) for width in WIDTHS]
    found, given = products([1] * TOKENS), (tuple(downs), tuple(ups))
    for _ in range(2):
        y = base.clone()
        found.add_lora_linear(y, x, *given, 1.0, WIDTHS)
        torch.testing.assert_close(y, by_hand([1] * TOKENS, x, downs, ups, 1.0))
        for held in (*downs, *ups):
            held[1].normal_()  # as vLLM puts one in: into the buffers that are there
    other = tuple(torch.randn_like(down) for down in downs), tuple(torch.randn_like(up) for up in ups)
    y = base.clone()
    found.add_lora_linear(y, x, *other, 1.0, WIDTHS)
    torch.testing.assert_close(y, by_hand([1] * TOKENS, x, *map(list, other), 1.0))


def test_in_half_precision_products_are_those_of_the_outputs_precision() -> None:
    torch.manual_seed(0)
    places = [0, 1, -1, 1, 0, 0, 1]
    x, base = torch.randn(TOKENS, IN).bfloat16(), torch.randn(TOKENS, WIDTHS[0]).bfloat16()
    down, up = torch.randn(2, 1, RANK, IN).bfloat16(), torch.randn(2, 1, WIDTHS[0], RANK).bfloat16()
    y = base.clone()
    products(places).add_lora_linear(y, x, (down,), (up,), 1.0, WIDTHS[:1])
    wanted = base.float() + by_hand(places, x.float(), [down.float()], [up.float()], 1.0)
    torch.testing.assert_close(y.float(), wanted, atol=0.15, rtol=0.02)


def test_the_places_of_a_step_are_taken_in_before_it() -> None:
    found = AdapterProducts(64, 8, "cpu")
    mapping = SimpleNamespace(index_mapping=(1, 1, 0, 2), prompt_mapping=(1, 0, 2), is_prefill=True)
    found.update_metadata(mapping, [1, 2], 2, 100)
    assert [(place, rows.tolist()) for place, rows in found._groups if isinstance(rows, Tensor)] == [
        (0, [0, 1]),
        (1, [3]),
    ]
