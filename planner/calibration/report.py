"""The accuracy of the model over rows of measured runs, as one record that is printed, stored and compared."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.calibration.accuracy import REGRET_AT, Row, Summary, by_label, mean_over_sweeps, rank_correlation, regret, summarise, sweeps

GROUPINGS = ("complete", "trainer", "gpu", "group", "precision", "ac")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Errors of all rows and of every group. regret: mean over sweeps of the loss of our first 1, 3, 5 picks, by their number."""

    overall: Summary
    groups: dict[str, list[Summary]]
    num_sweeps: int
    regret: dict[int, float | None]
    spearman: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe form."""
        return asdict(self)


def report(rows: Sequence[Row]) -> Report:
    """All figures over rows that hold a job, its estimate and what was measured."""
    return Report(
        overall=summarise(rows, "all rows"),
        groups={key: by_label(rows, key) for key in GROUPINGS},
        num_sweeps=len(sweeps(rows)),
        regret={first: mean_over_sweeps(rows, _regret_at(first)) for first in REGRET_AT},
        spearman=mean_over_sweeps(rows, rank_correlation),
    )


def _regret_at(first: int) -> Callable[[Sequence[Row]], float]:
    return lambda members: regret(members, first)
