"""The numbers of a measured run and its prediction, from which accuracy reports are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DIGITS = 8  # digits in a report, so that a stored one and a recomputed one are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The numbers of a measured run and its prediction, as a stored report holds them.

    Seconds and bytes; None if not measured, not answered, or without an interval.
    layout: its short text, "-" without one.
    labels: values by the keys of `accuracy.LABELS`.
    seen: whether the calibration was fitted to this run.
    peak_*_bytes: predicted, of the worst rank; `predicted_*_bytes` of the one that
        the run reported.
    sweep: name of its job; runs of the same one differ by nothing but the layout (`sweeps`).
    question: digest of its job and layout without the software (`repeats`).
    rule: where its layout comes by the rule of thumb (`sweeps.rule_of_thumb`).
    """

    id: str
    layout: str
    labels: Mapping[str, str]
    used: tuple[str, ...]
    seen: bool
    status: str
    valid: bool
    fits: bool
    measured_seconds: float | None
    measured_allocated_bytes: float | None
    measured_reserved_bytes: float | None
    predicted_seconds: float | None
    interval_seconds: tuple[float, float] | None
    predicted_allocated_bytes: float | None
    predicted_reserved_bytes: float | None
    peak_allocated_bytes: float | None
    peak_reserved_bytes: float | None
    baseline_seconds: float | None
    sweep: str
    question: str
    rule: tuple[float, ...]

    def label(self, key: str) -> str:
        """Value of a grouping key, one of LABELS."""
        return self.labels[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRuns:
    """The rest of a unit after some runs of one's own in it.

    error: mean of |predicted / measured - 1| of the step time.
    coverage: share inside the 90% interval.
    """

    error: float
    coverage: float

    @classmethod
    def mean(cls, parts: "Sequence[OwnRuns]") -> "OwnRuns":
        return cls(
            error=sum(part.error for part in parts) / len(parts),
            coverage=sum(part.coverage for part in parts) / len(parts),
        )


def rounded(value: float) -> float:
    """Rounds to DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def rounded_or_none(value: float | None) -> float | None:
    return None if value is None else rounded(value)
