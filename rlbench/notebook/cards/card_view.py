"""A card with a chart below it, and where there is more than both can say, a piece of HTML of its own."""

from __future__ import annotations

from dataclasses import dataclass

from rlbench.notebook.cards.card import Card
from rlbench.notebook.charts.chart import Chart
from rlbench.notebook.charts.svg import page


@dataclass(frozen=True)
class CardView:
    """`detail`: ready-made HTML between card and chart, escaped by who made it; a reader of text does without."""

    card: Card
    chart: Chart
    detail: str = ""

    def bundle(self) -> dict[str, str]:
        """All of it, as IPython takes it."""
        return {
            "text/html": "\n".join(filter(None, [self.card.html(), self.detail, page(self.chart)])),
            "text/plain": "\n".join(filter(None, [self.card.text(), repr(self.chart)])),
        }
