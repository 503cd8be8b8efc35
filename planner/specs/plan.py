"""A plan: the contract's section 4, a ranked answer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, computed_field

from planner.charts import bars
from planner.charts.chart import Chart
from planner.charts.pareto import Point, pareto
from planner.charts.table import Tabled
from planner.specs.estimate import OOM_LIMIT, Estimate
from planner.specs.estimate_parts import MEMORY_PARTS, TIME_PARTS, memory_parts, time_parts
from planner.specs.layout import FieldValue, Layout
from planner.specs.plan_comparisons import (
    BestMeasured,
    FastestOnPaper,
    Labelled,
    NearestMiss,
    ParetoPoint,
    Regret,
    SensitivityStep,
    SizeOption,
    VersusCurrent,
)
from planner.specs.run import RunEstimate
from planner.specs.validation import Value
from planner.units import format_bytes, format_seconds

PlotKind = Literal["pareto", "memory", "time"]
Source = Literal["screened", "simulated", "emulated", "probed"]
SOURCES: Mapping[Source, str] = MappingProxyType({
    "screened": "priced by closed form",
    "simulated": "its pipeline played out action by action",
    "emulated": "smaller runs, or single ranks of it, measured in its place",
    "probed": "measured here",
})  # fmt: skip


class ShownFigures(Value):
    """Figures of a layout on every screen: of measurements and model together where probes ran.

    step_interval: of the prediction; null where the step is no prediction.
    predicted_step_seconds: where the step is no prediction, else null.
    cost, time_to_train_seconds: of the whole run, with the same step.
    """

    step_seconds: float | None
    tokens_per_second_per_gpu: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    device_bytes: float | None
    peak_allocated_bytes: float | None
    oom_probability: float | None
    step_interval: tuple[float, float] | None
    predicted_step_seconds: float | None
    cost: float | None
    time_to_train_seconds: float | None


LEAST_MOVED = 0.005  # what is shown as 1.01 or more; judgement


class RankedLayout(Labelled):
    """One layout of the answer, with its price, its reasons in words, and what to paste.

    measurement: what probes measured for it.
    expected_step_seconds: from measurements and model together, where probes ran.
    unmeasured: the mechanisms that it uses and no run behind the calibration used, in words.
    """

    rank: int
    num_gpus: int
    estimate: Estimate
    measurement: dict[str, Any] | None = None
    source: Source = Field(
        description="; ".join(f"{name}: {means}" for name, means in SOURCES.items())
    )
    reasons: list[str]
    export: dict[str, Any]
    run: RunEstimate | None = None
    expected_step_seconds: float | None = None
    unmeasured: list[str] = Field(default=[])

    @property
    def measured_step_seconds(self) -> float | None:
        """Seconds of the layout itself; None where only smaller runs or single ranks ran."""
        if self.measurement is None or self.source != "probed":
            return None
        seconds: float | None = self.measurement.get("step_seconds")
        return seconds

    @property
    def expected_speedup(self) -> float:
        """How much faster than the cost model predicts it should run; 1 without probes."""
        paper, expected = self.estimate.step_seconds, self.expected_step_seconds
        return paper / expected if paper and expected else 1.0

    @property
    def moved(self) -> float | None:
        """Expected over predicted seconds of what was not timed itself, where probes moved it."""
        factor = 1.0 / self.expected_speedup
        return factor if self.source != "probed" and abs(factor - 1.0) >= LEAST_MOVED else None

    @computed_field(description="What every screen shows of it.")  # type: ignore[prop-decorator]
    @property
    def shown(self) -> ShownFigures:
        """The figures of the command and of the page."""
        paper, faster, run = self.estimate, self.expected_speedup, self.run
        expected = self.expected_step_seconds

        def faster_than_paper(value: float | None) -> float | None:
            return None if value is None else value * faster

        rate = faster_than_paper(paper.tokens_per_second_per_gpu)
        return ShownFigures(
            step_seconds=expected or paper.step_seconds,
            tokens_per_second_per_gpu=rate,
            tokens_per_second=None if rate is None else rate * self.num_gpus,
            mfu=faster_than_paper(paper.mfu),
            hfu=faster_than_paper(paper.hfu),
            device_bytes=paper.device_bytes,
            peak_allocated_bytes=paper.peak_allocated_bytes,
            oom_probability=paper.oom_probability,
            step_interval=(
                None if expected or paper.interval is None else paper.interval.step_seconds
            ),
            predicted_step_seconds=paper.step_seconds if expected else None,
            cost=None if run is None else run.cost,
            time_to_train_seconds=None if run is None else run.time_to_train_seconds,
        )


class ConsideredLayout(Value):
    """A layout that the search priced or refused, for whoever looks at the study of a plan.

    changed: the fields in which it differs from number 1.
    rank: its place; None where it is not shown.
    objective: what the plan minimises, of this layout.
    cost, gpu_hours, time_to_train_seconds: of the whole run; cost in USD.
    sampled_by: the sampler that tried it, beyond enumeration.
    refused: the rule that forbids it; it has no numbers then.
    """

    changed: dict[str, FieldValue]
    num_gpus: int
    rank: int | None = None
    source: Source = "screened"
    step_seconds: float | None = None
    interval_seconds: tuple[float, float] | None = None
    device_bytes: float | None = None
    oom_probability: float | None = None
    objective: float | None = None
    time_to_train_seconds: float | None = None
    cost: float | None = None
    gpu_hours: float | None = None
    sampled_by: str | None = None
    refused: str | None = None


class Searched(Value):
    """How many layouts the search evaluated.

    simulated: the best that fit, and variants of them (memory budgets, layer splits) that were not
        priced before.
    study: the sampling of what enumeration leaves out (`planner.search.left_out`): sampler, seed,
        trials and, of them, pruned; gain, by how much its best is faster than the enumerated best;
        or reason, why there were no trials.
    """

    layouts: int
    valid: int
    fitting: int
    seconds: float
    simulated: int = 0
    priced: int = 0
    study: dict[str, Any] | None = None


class Plan(Value, Tabled):
    """A ranked answer; the same job, seed, calibration and model version give the same plan.

    Only id, times and dates differ.
    rests_on: what number 1 uses that no run behind the calibration used, as a sentence; None where
        runs used all of it.
    best_measured: the best layout that does without that, if anything that fits does.
    considered: the best of what the search priced, the front and the nearest that do not fit among
        them, and what a sampler tried; empty in plans that were stored before this field.
    num_parameters, num_active_parameters: of the model as parsed: all, and those that one token
        uses (without the experts it is not sent to). None in plans that were stored before these
        fields.
    """

    id: str
    job: dict[str, Any]
    created_at: str
    ranked: list[RankedLayout]
    pareto: list[ParetoPoint]
    rejected: dict[str, int]
    nearest_miss: NearestMiss | None
    searched: Searched
    versus_current: VersusCurrent | None
    headline: list[str]
    warnings: list[str]
    seed: int
    model_version: str
    calibration_id: str
    sizes: list[SizeOption] = []
    regret: Regret | None = None
    fastest_on_paper: FastestOnPaper | None = None
    rests_on: str | None = None
    best_measured: BestMeasured | None = None
    sensitivity: list[SensitivityStep] = []
    probing: dict[str, Any] | None = None
    considered: list[ConsideredLayout] = []
    num_parameters: int | None = None
    num_active_parameters: int | None = None

    # ---- looking at it -----------------------------------------------------------------------

    def points(self) -> list[Point]:
        """Throughput and memory of the ranked layouts, then of the others that were considered."""
        return [*map(_ranked_point, self.ranked), *self._considered_points()]

    def _considered_points(self) -> list[Point]:
        first = self.ranked[0]
        rate, step = first.estimate.tokens_per_second_per_gpu, first.estimate.step_seconds
        if rate is None or step is None:
            return []
        tokens, base = rate * step * first.num_gpus, first.layout.model_dump()
        return [
            Point(
                layout=Layout(**{**base, **one.changed}).short(),
                rank=None,
                num_gpus=one.num_gpus,
                tokens_per_second_per_gpu=tokens / one.step_seconds / one.num_gpus,
                interval=_rates(tokens / one.num_gpus, one.interval_seconds),
                device_bytes=one.device_bytes,
                memory_interval=None,
                fits=(one.oom_probability or 0.0) <= OOM_LIMIT,
            )
            for one in self.considered
            if one.rank is None and one.step_seconds and one.device_bytes is not None
        ]

    def plot(self, kind: PlotKind = "pareto") -> Chart:
        """A chart: `pareto` (throughput against memory), `memory` or `time` (what they consist of).

        A notebook shows it; `.svg()`, `.png()` and `.html()` draw it, with the extra `plot`.
        """
        usable = self.ranked[0].estimate.usable_bytes
        if kind == "pareto":
            title, first = "Throughput against memory", f"number 1: {self.ranked[0].label}"
            return Chart(pareto(self.points(), usable, title=title, subtitle=first))
        known = MEMORY_PARTS if kind == "memory" else TIME_PARTS
        colours = {part.name: part.colour for part in known}
        parts = memory_parts if kind == "memory" else time_parts
        drawn = [
            bars.Bar(rank=one.rank, layout=one.label, parts=parts(one.estimate))
            for one in self.ranked
        ]
        if kind == "memory":
            return Chart(bars.memory(drawn, colours, usable, title="Memory of the fullest GPU"))
        return Chart(bars.time(drawn, colours, title="Time of one step, as predicted"))

    def columns(self) -> dict[str, list[object]]:
        """The ranked layouts as columns: every field of the layout and the main figures, SI."""
        rows = [
            {
                "rank": one.rank,
                "label": one.label,
                "num_gpus": one.num_gpus,
                **one.layout.model_dump(mode="json"),
                **{name: getattr(one.estimate, name) for name in COLUMNS},
                "expected_step_seconds": one.expected_step_seconds,
                "measured_step_seconds": one.measured_step_seconds,
                "source": one.source,
            }
            for one in self.ranked
        ]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _shown(self) -> tuple[str, dict[str, list[str]], str, str]:
        cells = [
            (
                str(one.rank),
                one.label,
                f"{one.shown.tokens_per_second_per_gpu or 0.0:,.0f}",
                f"{one.shown.mfu or 0.0:.1%}",
                format_seconds(one.shown.step_seconds or 0.0),
                format_bytes(one.estimate.device_bytes or 0.0),
                one.source,
            )
            for one in self.ranked
        ]
        named = dict(zip(SHOWN, map(list, zip(*cells, strict=True)), strict=True))
        notes = "; ".join(self.warnings) or f"plan {self.id}, calibration {self.calibration_id}"
        return (self.headline or [self.id])[0], named, "layout", notes


MOST_RISK = 0.01  # judgement: of running out of memory, in what is launched without a probe
COLUMNS = (
    "fits", "oom_probability", "step_seconds", "tokens_per_second_per_gpu", "mfu", "hfu",
    "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes",
)  # fmt: skip
SHOWN = ("#", "layout", "tok/s/GPU", "MFU", "step", "memory", "source")


def _rates(tokens: float, interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """The interval of tokens a second from that of a step."""
    return None if interval is None else (tokens / interval[1], tokens / interval[0])


def _ranked_point(one: RankedLayout) -> Point:
    """Intervals of memory are those of what the allocator reserves; the rest is known."""
    estimate, interval = one.estimate, one.estimate.interval
    rate, step = estimate.tokens_per_second_per_gpu or 0.0, estimate.step_seconds or 1.0
    device = estimate.device_bytes or 0.0
    beside = device - (estimate.peak_reserved_bytes or 0.0)
    reserved = None if interval is None else interval.peak_reserved_bytes
    measured = one.measured_step_seconds
    return Point(
        layout=one.label,
        rank=one.rank,
        num_gpus=one.num_gpus,
        tokens_per_second_per_gpu=rate,
        interval=_rates(rate * step, None if interval is None else interval.step_seconds),
        device_bytes=device,
        memory_interval=None if reserved is None else (reserved[0] + beside, reserved[1] + beside),
        fits=bool(estimate.fits),
        measured_tokens_per_second_per_gpu=rate * step / measured if measured else None,
    )
