"""Predicted against measured: errors of step time and memory over rows of measurements.

Rows can be grouped by any label, and are never dropped: a row without an estimate is counted as
unanswered. The one-line baseline is 40% of the dense peak.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.calibration.classes import class_of, interval_score
from planner.calibration.comparison import Compared, rounded, rounded_or_none
from planner.calibration.mechanisms import used_by
from planner.calibration.sweeps import SOFTWARE, rule_of_thumb
from planner.columns import LayoutBatch
from planner.cost.machine.stacks import stack_name, unit_name
from planner.trainers.registry import code_of

if TYPE_CHECKING:  # reading a stored report does not need the modules that price layouts
    from planner.specs.estimate import Estimate
    from planner.specs.job import Job

BASELINE_MFU = 0.40
SWEEP_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured run and its estimate; the job's labels hold `measured`."""

    job: "Job"
    estimate: "Estimate"

    @property
    def measured(self) -> Mapping[str, Any]:
        return self.job.labels.get("measured") or {}

    @property
    def status(self) -> str:
        return str(self.measured.get("status", "ok"))

    @property
    def measured_seconds(self) -> float | None:
        return self.measured.get("step_seconds")

    @property
    def sweep(self) -> str:
        """Name of the runs of one source that share all but the layout, and the number format.

        It is made of the row as written, so that a field added to a spec does not change it.
        """
        asked = [self.job.request.get(name) for name in ("model", "cluster", "training")]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        precision = self.job.layout.precision if self.job.layout else "-"
        return f"{self.label('group')} {digest[:SWEEP_DIGITS]} {precision}"

    @property
    def question(self) -> str:
        """Digest of job and layout without the software that ran them (`repeats`)."""
        request = self.job.request
        asked = [
            {key: value for key, value in (request.get(name) or {}).items() if key not in SOFTWARE}
            for name in ("training", "layout")
        ]
        text = json.dumps([request.get("model"), request.get("cluster"), asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:SWEEP_DIGITS]

    def compared(self, *, seen: bool) -> Compared:
        """The row's numbers, rounded to DIGITS. seen: whether the calibration was fitted to it."""
        estimate, measured = self.estimate, self.measured
        interval = None if estimate.interval is None else estimate.interval.step_seconds
        return Compared(
            id=str(self.job.id),
            layout=self.job.layout.short() if self.job.layout else "-",
            labels={key: self.label(key) for key in LABELS},
            used=tuple(self.techniques()),
            seen=seen,
            status=self.status,
            valid=estimate.valid,
            fits=bool(estimate.fits),
            measured_seconds=self.measured_seconds,
            measured_allocated_bytes=measured.get("peak_allocated_bytes"),
            measured_reserved_bytes=measured.get("peak_reserved_bytes"),
            predicted_seconds=rounded_or_none(estimate.step_seconds),
            interval_seconds=interval and (rounded(interval[0]), rounded(interval[1])),
            predicted_allocated_bytes=rounded_or_none(self.predicted("peak_allocated_bytes")),
            predicted_reserved_bytes=rounded_or_none(self.predicted("peak_reserved_bytes")),
            peak_allocated_bytes=rounded_or_none(estimate.peak_allocated_bytes),
            peak_reserved_bytes=rounded_or_none(estimate.peak_reserved_bytes),
            baseline_seconds=rounded_or_none(self.baseline_seconds),
            sweep=self.sweep,
            question=self.question,
            rule=self._rule(),
        )

    def predicted(self, field: str) -> float | None:
        """A predicted peak of the rank that the run reported.

        It is the worst one, or the last pipeline rank if the row is of that one (`memory_of`).
        """
        memory, last = self.estimate.memory, self.measured.get("memory_of") == "last-rank"
        of_rank = memory.stages[-1] if last and memory else self.estimate
        found: float | None = getattr(of_rank, field)
        return found

    @property
    def baseline_seconds(self) -> float | None:
        """Step time at 40% of the dense bf16 peak, by TorchTitan's count of flops."""
        model, cluster, training = self.job.model, self.job.cluster, self.job.training
        peak = cluster.gpu.dense_peak
        if not peak:
            return None
        tokens = training.global_batch_size * training.seq_len / cluster.num_gpus
        flops = model.torchtitan_flops_per_token(training.seq_len)
        return tokens * flops / (BASELINE_MFU * peak)

    def techniques(self) -> list[str]:
        """The mechanisms that the job and its layout use."""
        if self.job.layout is None:
            return []
        return [one.name for one in used_by(self.job.layout, self.job) if one.name != "compute"]

    def _rule(self) -> tuple[float, ...]:
        """`sweeps.rule_of_thumb` of its layout; empty without one."""
        layout = self.job.layout
        if layout is None:
            return ()
        return tuple(rule_of_thumb(LayoutBatch.from_layouts([layout]))[0].tolist())

    def label(self, key: str) -> str:
        return LABELS[key](self)


LABELS: dict[str, Callable[[Row], str]] = {
    "trainer": lambda row: row.job.training.trainer,
    "platform": lambda row: f"{row.job.training.trainer} on {row.job.cluster.gpu.family}",
    "gpu": lambda row: row.job.cluster.gpu.name,
    "group": lambda row: str(row.job.labels.get("group", "-")),
    "complete": lambda row: str(row.job.labels.get("complete", "-")),
    "model": lambda row: row.job.model.name,
    "family": lambda row: family_of(row.job.model.name),
    "class": lambda row: (
        f"{row.job.training.trainer}: {class_of(row.job.model, row.job.cluster.gpu.family)}"
    ),
    "kind": lambda row: _unit(row, ""),
    "unit": lambda row: _unit(row, str(row.job.labels.get("group", "-"))),
}
# group is the source; family the model's; platform the trainer on the GPU's family; class that of
# `calibration.classes` by trainer; unit and kind are those of `cost.machine.stacks`, with and
# without the source


def _unit(row: Row, source: str) -> str:
    stack = stack_name(code_of(row.job.training), row.job.cluster.gpu.name, source)
    precision = row.job.layout.precision if row.job.layout else "-"
    return unit_name(stack, precision, row.job.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitErrors:
    """Errors of step time over units, each counting once (`cost.machine.stacks`).

    coverage: mean over units of the share of their steps inside the 90% interval.
    offset_known: error left once each unit's mean error is known, over the `several` units of two
        rows or more: log(predicted / measured) less its mean over the unit. No number of own runs
        comes below it; one run, which is off by as much itself, comes to about sqrt(2) times it.
    """

    units: int
    mape: float
    median: float
    coverage: float
    offset_known: float | None
    several: int

    @classmethod
    def of(cls, rows: Sequence[Compared]) -> "UnitErrors | None":
        """None where no row has a measured step."""
        by_unit: dict[str, list[Compared]] = {}
        for row in rows:
            if row.predicted_seconds and row.measured_seconds:
                by_unit.setdefault(row.label("unit"), []).append(row)
        if not by_unit:
            return None
        ratios = [
            np.array([(r.predicted_seconds or 0) / (r.measured_seconds or 1) for r in unit])
            for unit in by_unit.values()
        ]
        errors = [np.abs(ratio - 1).mean() for ratio in ratios]
        several = [np.log(ratio) for ratio in ratios if len(ratio) > 1]
        left = [np.abs(np.expm1(logs - logs.mean())).mean() for logs in several]
        covered = [np.mean([bool(_inside(row)) for row in unit]) for unit in by_unit.values()]
        return cls(
            units=len(errors),
            mape=float(np.mean(errors)),
            median=float(np.median(errors)),
            coverage=float(np.mean(covered)),
            offset_known=float(np.mean(left)) if left else None,
            several=len(left),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one quantity over rows: |predicted / measured - 1|, and signed bias."""

    rows: int
    mape: float
    median: float
    p90: float
    worst: float
    bias: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[float | None, float | None]]) -> "Errors | None":
        """From (predicted, measured) pairs; None when no pair is complete."""
        relative = np.array([p / m - 1.0 for p, m in pairs if p is not None and m is not None])
        if not len(relative):
            return None
        size = np.abs(relative)
        return cls(
            rows=len(size),
            mape=float(size.mean()),
            median=float(np.median(size)),
            p90=float(np.quantile(size, 0.9)),
            worst=float(size.max()),
            bias=float(relative.mean()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors of one group of rows.

    coverage: share of measured steps inside the 90% interval.
    half_width: mean over rows of half the interval of log seconds.
    interval_score: mean over rows (`classes.interval_score`).
    unanswered: rows without an estimate.
    """

    name: str
    rows: int
    unanswered: int
    time: Errors | None
    units: UnitErrors | None
    baseline: Errors | None
    allocated: Errors | None
    reserved: Errors | None
    coverage: float | None
    half_width: float | None
    interval_score: float | None
    out_of_memory_missed: int
    refused: int


def family_of(model: str) -> str:
    """The letters that a model's name starts with: llama of llama3.1-8b, qwen of qwen3-30b-a3b."""
    return "".join(takewhile(str.isalpha, model.lower())) or "-"


def summarise(rows: Sequence[Compared], name: str) -> Summary:
    answered = [row for row in rows if row.valid]
    inside = [_inside(row) for row in answered]
    covered = [flag for flag in inside if flag is not None]
    ran = [row for row in answered if row.status == "ok"]
    half_widths, scores = _widths(answered)
    return Summary(
        name=name,
        rows=len(rows),
        unanswered=len(rows) - len(answered),
        time=Errors.of((row.predicted_seconds, row.measured_seconds) for row in answered),
        units=UnitErrors.of(answered),
        baseline=Errors.of((row.baseline_seconds, row.measured_seconds) for row in answered),
        allocated=Errors.of(
            (row.predicted_allocated_bytes, row.measured_allocated_bytes) for row in answered
        ),
        reserved=Errors.of(
            (row.predicted_reserved_bytes, row.measured_reserved_bytes) for row in answered
        ),
        coverage=float(np.mean(covered)) if covered else None,
        half_width=float(half_widths.mean()) if covered else None,
        interval_score=float(scores.mean()) if covered else None,
        out_of_memory_missed=sum(row.status == "oom" and row.fits for row in answered),
        refused=sum(not row.fits for row in ran),
    )


def by_label(rows: Sequence[Compared], key: str) -> list[Summary]:
    """One summary for each value of a label, most rows first."""
    return _grouped(rows, key, lambda row: (row.label(key),))


def by_technique(rows: Sequence[Compared]) -> list[Summary]:
    """One summary for each technique, most rows first.

    A row counts under every one that it uses.
    """
    return _grouped(rows, "technique", lambda row: row.used)


def _grouped(
    rows: Sequence[Compared], key: str, names_of: Callable[[Compared], Iterable[str]]
) -> list[Summary]:
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        for name in names_of(row):
            groups.setdefault(name, []).append(row)
    return [
        summarise(members, f"{key} {name}")
        for name, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _widths(rows: Sequence[Compared]) -> tuple[np.ndarray, np.ndarray]:
    """Half widths and interval scores of the measured rows that have an interval."""
    found = [
        (np.log(high / low) / 2.0, np.log(row.measured_seconds / row.predicted_seconds))
        for row in rows
        if row.interval_seconds and row.measured_seconds and row.predicted_seconds
        for low, high in [row.interval_seconds]
    ]
    half, misses = np.array(found).reshape(-1, 2).T
    return half, interval_score(misses, half)


def _inside(row: Compared) -> bool | None:
    if row.interval_seconds is None or row.measured_seconds is None:
        return None
    low, high = row.interval_seconds
    return low <= row.measured_seconds <= high
