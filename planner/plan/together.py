"""Prices that the sentences about a plan's layouts ask for, of all its layouts at once.

A price of one layout takes nearly as long as one of ten, and every layout's sentences ask alike.
"""

from collections.abc import Callable, Hashable, Sequence

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.price import Pricer, Prices
from planner.specs.layout import Layout


class Together:
    """The layouts of a plan that share a pricer, and what was asked of them so far."""

    def __init__(self, pricer: Pricer, layouts: Sequence[Layout]) -> None:
        self.pricer, self.layouts = pricer, tuple(dict.fromkeys(layouts))
        self._prices: dict[Hashable, tuple[Prices, dict[Layout, int]]] = {}
        self._steps: dict[Hashable, tuple[FloatColumn, dict[Layout, int]]] = {}

    def price(
        self,
        layout: Layout,
        name: Hashable = "itself",
        change: Callable[[Layout], Layout] = lambda layout: layout,
        *,
        concerns: Callable[[Layout], bool] = lambda layout: True,
    ) -> tuple[Prices, int]:
        """(prices of all ranks, row) of a changed layout, which is one of `layouts`.

        name: of the change, which is asked of all layouts that it concerns at once.
        """
        if name not in self._prices:
            batch, rows = self._those(concerns, change)
            self._prices[name] = self.pricer.price(batch, every_rank=True), rows
        prices, rows = self._prices[name]
        return prices, rows[layout]

    def steps(
        self, layout: Layout, name: Hashable, concerns: Callable[[Layout], bool], pricer: Pricer
    ) -> tuple[FloatColumn, int]:
        """(step seconds, row) of a layout with another pricer.

        name: of this pricer, asked about all layouts that it concerns at once.
        """
        if name not in self._steps:
            batch, rows = self._those(concerns, lambda one: one)
            self._steps[name] = pricer.step_seconds(batch), rows
        steps, rows = self._steps[name]
        return steps, rows[layout]

    def _those(
        self, concerns: Callable[[Layout], bool], change: Callable[[Layout], Layout]
    ) -> tuple[LayoutBatch, dict[Layout, int]]:
        those = [one for one in self.layouts if concerns(one)]
        batch = LayoutBatch.from_layouts([change(one) for one in those])
        return batch, {one: row for row, one in enumerate(those)}
