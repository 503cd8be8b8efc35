"""The model's accuracy over measured runs, as one record to print, store, compare and draw."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from planner.calibration.accuracy import Summary, by_label, by_technique, summarise
from planner.calibration.comparison import Compared, Comparison, OwnRuns
from planner.calibration.sweeps import AgainstRule, Repeats, against_rule, repeats, sweeps
from planner.charts.accuracy import RunPoint, accuracy
from planner.charts.chart import Chart

REGRET_AT = (1, 3, 5)
MODELS = ("dense", "experts")
GROUPINGS = ("kind", "complete", "trainer", "platform", "gpu", "family", "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Errors of all rows and of every group of them.

    regret: mean over sweeps of the loss of our first 1, 3, 5 picks, by their number.
    against_rule: number one beside a rule of thumb, over all sweeps and by class.
    repeats: how far the same job is from itself in other releases and reports, of all and by class.
    """

    overall: Summary
    groups: dict[str, list[Summary]]
    num_sweeps: int
    regret: dict[int, float | None]
    spearman: float | None
    against_rule: list[AgainstRule]
    repeats: list[Repeats]

    @classmethod
    def of(cls, rows: Sequence[Compared], name: str) -> "Figures":
        found = sweeps(rows)
        picks = {first: [one.regret(first) for one in found] for first in REGRET_AT}
        return cls(
            overall=summarise(rows, name),
            groups={
                **{key: by_label(rows, key) for key in GROUPINGS},
                "platform": by_platform(rows),
                "technique": by_technique(rows),
            },
            num_sweeps=len(found),
            regret={first: fmean(losses) if losses else None for first, losses in picks.items()},
            spearman=fmean(one.rank_correlation() for one in found) if found else None,
            against_rule=against_rule(rows),
            repeats=repeats(rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterOwnRuns:
    """How the rest of a unit is predicted after `runs` runs of one's own in it, mean over units.

    kinds: the error by trainer, GPU, format and whether with experts, mean over sources.
    classes: by trainer, generation of GPUs and whether with experts, mean over units.
    """

    runs: int
    units: int
    error: float
    median: float
    coverage: float
    kinds: dict[str, float]
    classes: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The accuracy report.

    headline: of predictions that have not seen the run.
    in_sample: of the shipped calibration; None if it was fitted to none of the rows.
    num_fitted: rows that the calibration was fitted to.
    own_runs: how far the rest is off after runs of one's own.
    left_out: summary of all rows by what was left out (source, model, GPU). Empty if the fit could
        not be repeated; headline then covers only the unseen rows.
    """

    calibration_id: str
    num_fitted: int
    headline: Figures
    in_sample: Figures | None
    left_out: dict[str, Summary]
    complete: dict[str, Summary]
    own_runs: list[AfterOwnRuns]
    rows: tuple[Compared, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe form, without the rows."""
        found = asdict(replace(self, rows=()))
        del found["rows"]
        return found


def report(found: Comparison, keep: Callable[[Compared], bool] = lambda _: True) -> Report:
    """Computes all figures. keep: rows to report; what was left out of the fit does not change."""
    rows = [row for row in found.rows if keep(row)]
    num_fitted = sum(row.seen for row in found.rows)
    if not found.left_out:
        unseen = [row for row in rows if not row.seen]
        seen = Figures.of(rows, "all rows, in sample") if num_fitted else None
        return Report(
            calibration_id=found.calibration_id,
            num_fitted=num_fitted,
            headline=Figures.of(unseen, "rows not seen"),
            in_sample=seen,
            left_out={},
            complete={},
            own_runs=[],
            rows=tuple(unseen),
        )
    out = {by: [row for row in members if keep(row)] for by, members in found.left_out.items()}
    return Report(
        calibration_id=found.calibration_id,
        num_fitted=num_fitted,
        headline=Figures.of(out["group"], "left out by source"),
        in_sample=Figures.of(rows, "in sample"),
        left_out={by: summarise(members, f"left out by {by}") for by, members in out.items()},
        complete={
            by: summarise(complete(members), f"left out by {by}, complete rows")
            for by, members in out.items()
        },
        own_runs=_after_own_runs(found, out["group"]),
        rows=tuple(out["group"]),
    )


def _after_own_runs(found: Comparison, rows: Sequence[Compared]) -> list[AfterOwnRuns]:
    labels = {key: {row.label("unit"): row.label(key) for row in rows} for key in ("kind", "class")}
    results = []
    for count, units in found.own_runs.items():
        known = {unit: one for unit, one in units.items() if unit in labels["kind"]}
        if not known:
            continue
        mean = OwnRuns.mean(list(known.values()))
        every = {unit: f"all {labels['kind'][unit].rpartition(', ')[2]}" for unit in known}
        found_after = AfterOwnRuns(
            runs=count,
            units=len(known),
            error=mean.error,
            median=median(one.error for one in known.values()),
            coverage=mean.coverage,
            kinds=_mean_errors(known, labels["kind"]),
            classes=_mean_errors(known, labels["class"]) | _mean_errors(known, every),
        )
        results.append(found_after)
    return results


def _mean_errors(known: Mapping[str, OwnRuns], names: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for unit, one in known.items():
        found.setdefault(names[unit], []).append(one.error)
    return {name: fmean(errors) for name, errors in found.items()}


def complete(rows: Sequence[Compared]) -> list[Compared]:
    """Rows whose publisher states all settings."""
    return [row for row in rows if row.label("complete") == "True"]


def by_platform(rows: Sequence[Compared]) -> list[Summary]:
    """One summary for each trainer on a family of GPUs, most rows first.

    One of its complete rows follows if there are any.
    """
    stated = {summary.name: summary for summary in by_label(complete(rows), "platform")}
    found = []
    for summary in by_label(rows, "platform"):
        found.append(summary)
        if summary.name in stated:
            found.append(replace(stated[summary.name], name=f"{summary.name}, complete"))
    return found


def runs_of(rows: Iterable[Compared]) -> list[RunPoint]:
    """A point for every row with a measured and a predicted step time."""
    return [
        RunPoint(
            id=row.id,
            layout=row.layout,
            model=row.label("model"),
            trainer=row.label("trainer"),
            gpu=row.label("gpu"),
            measured_seconds=row.measured_seconds,
            predicted_seconds=row.predicted_seconds,
        )
        for row in rows
        if row.measured_seconds and row.predicted_seconds
    ]


def chart_of(rows: Iterable[Compared], title: str) -> Chart:
    return Chart(accuracy(runs_of(rows), title=title))
