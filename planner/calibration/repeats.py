"""How far apart runs of the same job are, by other releases of its trainer or in other reports.

A prediction that does not know the software cannot be closer than that to all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from planner.calibration.outcome import Compared

# fields of `training` and `layout` that a release decides where a published row does not
SOFTWARE = ("trainer_version", "attention_kernel", "cuda_graphs", "overlap", "moe_dispatcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Jobs of one class, or of all, that were measured at least twice.

    off: mean of |measured / geometric mean of its job - 1|.
    """

    name: str
    jobs: int
    rows: int
    off: float

    @classmethod
    def of(cls, jobs: Sequence[Sequence["Compared"]], name: str) -> "Repeats":
        logs = [np.log([row.measured_seconds or np.nan for row in one]) for one in jobs]
        off = np.concatenate([np.abs(np.expm1(one - one.mean())) for one in logs])
        return cls(name=name, jobs=len(jobs), rows=len(off), off=float(off.mean()))


def repeats(rows: Sequence["Compared"]) -> list[Repeats]:
    """All rows, then each class in alphabetical order; empty where no job was measured twice."""
    jobs: dict[str, list[Compared]] = {}
    for row in rows:
        if row.measured_seconds:
            jobs.setdefault(row.question, []).append(row)
    again = [one for one in jobs.values() if len(one) > 1]
    labels = [one[0].label("class") for one in again]
    groups = {name: [again[n] for n, label in enumerate(labels) if label == name]
              for name in sorted(set(labels))}  # fmt: skip
    return [Repeats.of(alike, name) for name, alike in {"all": again, **groups}.items() if alike]
