"""Prices that the sentences about a plan's layouts ask for, of all its layouts at once.

A price of one layout takes nearly as long as one of ten, and every layout's sentences ask alike.
"""

from collections.abc import Callable, Hashable, Sequence

from planner.columns import LayoutBatch
from planner.cost.price import Pricer, Prices
from planner.specs.layout import Layout


class Together:
    """The layouts of a plan that share a pricer, and what was asked of them so far."""

    def __init__(self, pricer: Pricer, layouts: Sequence[Layout]) -> None:
        self.pricer, self.layouts = pricer, tuple(dict.fromkeys(layouts))
        self._prices: dict[Hashable, tuple[Prices, dict[Layout, int]]] = {}

    def price(
        self,
        layout: Layout,
        name: Hashable = "itself",
        change: Callable[[Layout], Layout] = lambda layout: layout,
        *,
        concerns: Callable[[Layout], bool] = lambda layout: True,
        pricer: Pricer | None = None,
    ) -> tuple[Prices, int]:
        """(prices of all ranks, row) of a changed layout, which is one of `layouts`.

        name: of the change, which is asked of all layouts that it concerns at once.
        pricer: another one, which the name stands for too.
        """
        if name not in self._prices:
            rows = {one: row for row, one in enumerate(filter(concerns, self.layouts))}
            batch = LayoutBatch.from_layouts([change(one) for one in rows])
            self._prices[name] = (pricer or self.pricer).price(batch, every_rank=True), rows
        prices, rows = self._prices[name]
        return prices, rows[layout]
