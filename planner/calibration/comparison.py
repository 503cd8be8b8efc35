"""All measured runs and their predictions, by calibrations that have seen them and that have not.

Reports are made from it, and it can be stored. The shipped one is
`catalog/calibrations/accuracy.json`; `planner-cli accuracy --recompute --save` writes it. Its stamp
(calibration, version of the model, digest of the rows) shows when it is stale.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from planner.catalog.files import text_of
from planner.version import MODEL_VERSION

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
    def mean(cls, parts: Sequence["OwnRuns"]) -> "OwnRuns":
        return cls(
            error=sum(part.error for part in parts) / len(parts),
            coverage=sum(part.coverage for part in parts) / len(parts),
        )


def rounded(value: float) -> float:
    """Rounds to DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def rounded_or_none(value: float | None) -> float | None:
    return None if value is None else rounded(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measured runs with their predictions.

    rows: as the calibration predicts them.
    left_out: the same rows in the same order, predicted by a fit without their source, model or
        GPU. Empty if the fit could not be repeated, because some of its runs are missing.
    own_runs: by number of own runs, by unit: how the rest of a unit is predicted after them.
    rows_digest: of the text that the rows were read from; see `digest_of`.
    """

    calibration_id: str
    model_version: str
    rows_digest: str
    rows: tuple[Compared, ...]
    left_out: Mapping[str, tuple[Compared, ...]]
    own_runs: Mapping[int, Mapping[str, OwnRuns]]

    def as_document(self) -> str:
        """JSON with one row per line; `from_document` reads it back without loss."""
        head = {"calibration_id": self.calibration_id, "model_version": self.model_version}
        places = range(len(self.rows))
        lines = [json.dumps(self._line(place), ensure_ascii=False) for place in places]
        own = {
            str(count): {
                unit: [rounded(one.error), rounded(one.coverage)] for unit, one in units.items()
            }
            for count, units in self.own_runs.items()
        }
        stamp = json.dumps({**head, "rows_digest": self.rows_digest, "own_runs": own})
        return f'{stamp[:-1]}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"

    def _line(self, place: int) -> dict[str, Any]:
        row = asdict(self.rows[place])
        out = {by: _time(found[place]) for by, found in self.left_out.items()}
        return {**row, "left_out": out}

    @classmethod
    def from_document(cls, text: str) -> "Comparison":
        document = json.loads(text)
        lines = document["rows"]
        rows = tuple(_row(line) for line in lines)
        names = lines[0]["left_out"] if lines else ()
        out = {
            by: tuple(
                _with_time(row, line["left_out"][by]) for row, line in zip(rows, lines, strict=True)
            )
            for by in names
        }
        return cls(
            **{key: document[key] for key in ("calibration_id", "model_version", "rows_digest")},
            rows=rows,
            left_out=out,
            own_runs={
                int(count): {
                    unit: OwnRuns(error=error, coverage=coverage)
                    for unit, (error, coverage) in units.items()
                }
                for count, units in document["own_runs"].items()
            },
        )

    def stale(self, calibration_id: str, rows_digest: str | None) -> list[str]:
        """Sentences on changes since the comparison was made.

        rows_digest: None if the rows are not available.
        """
        now = (
            ("calibration", self.calibration_id, calibration_id),
            ("model version", self.model_version, MODEL_VERSION),
            ("digest of the rows", self.rows_digest, rows_digest or self.rows_digest),
        )
        return [f"{name} {before}, now {after}" for name, before, after in now if before != after]


@cache
def shipped_comparison() -> Comparison:
    """The accuracy report that ships."""
    return Comparison.from_document(text_of("calibrations/accuracy.json"))


def digest_of(text: str) -> str:
    """A name for the rows of a text: the beginning of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _time(row: Compared) -> list[float] | None:
    """[predicted, low, high] seconds."""
    if row.predicted_seconds is None or row.interval_seconds is None:
        return None
    return [row.predicted_seconds, *row.interval_seconds]


def _with_time(row: Compared, time: Sequence[float] | None) -> Compared:
    if time is None:
        return row
    return replace(row, predicted_seconds=time[0], interval_seconds=(time[1], time[2]))


def _row(line: Mapping[str, Any]) -> Compared:
    values = {key: value for key, value in line.items() if key != "left_out"}
    interval = values["interval_seconds"]
    values |= {name: tuple(values[name]) for name in ("used", "rule")}
    values["interval_seconds"] = interval and (interval[0], interval[1])
    return Compared(**values)
