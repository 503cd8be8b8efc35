"""Comparisons beside the ranking of a plan: other sizes and fields, today's layout, near misses."""

from typing import Any

from pydantic import computed_field

from planner.specs.estimate import Estimate, Violation
from planner.specs.layout import FieldValue, Layout
from planner.specs.validation import Value


class Labelled(Value):
    """Something about a layout, which has its label beside it for who only shows it."""

    layout: Layout

    @computed_field(description="The layout in one line, as every table shows it.")  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        """The layout in one line."""
        return self.layout.short()


class ParetoPoint(Labelled):
    """A layout that no other beats in both throughput and memory headroom."""

    tokens_per_second_per_gpu: float
    headroom_bytes: float
    step_seconds: float
    rank: int | None = None


class SizeOption(Labelled):
    """The best layout on one number of GPUs by the objective, for the tokens of its `run`.

    tokens_per_second: of the whole job, after goodput.
    cost: USD.
    on_front: no other size is both faster and cheaper.
    """

    num_gpus: int
    tokens_per_second: float
    step_seconds: float
    time_to_train_seconds: float
    cost: float
    energy_joules: float
    co2_grams: float
    on_front: bool


class SensitivityStep(Labelled):
    """Effect of one step in one field on layout number 1, all else equal.

    dp_shard makes room for a degree.
    step_ratio: its step time over number 1's, both as the search prices them.
    refused: the rule that forbids it, with its remedy; it has no price then.
    """

    field: str
    old: FieldValue
    new: FieldValue
    step_seconds: float | None = None
    step_ratio: float | None = None
    device_bytes: float | None = None
    fits: bool | None = None
    refused: str | None = None

    @property
    def times_as_fast(self) -> float:
        return 1.0 / (self.step_ratio or 1.0)


class Regret(Value):
    """How wrong the choice of number 1 among the shown layouts can be, as estimates are uncertain.

    Shares are of what the objective minimises (step time, cost, ...).
    probability_other_better: probability that another layout is truly better.
    expected_share: mean loss against the truly best.
    share_95: loss exceeded in 5 of 100 cases.
    correlation: of the deviations of numbers 1 and 2 under the calibration's posterior.
    """

    probability_other_better: float
    expected_share: float
    share_95: float
    time_sd: float
    correlation: float
    statement: str


class FittingChange(Labelled):
    """One change to the request that makes `layout` fit: field, new value, and a sentence."""

    field: str
    value: FieldValue
    sentence: str
    device_bytes: float


class NearestMiss(Labelled):
    """The layout that came closest to fitting, and the smallest changes that make one fit.

    Each change suffices by itself.
    """

    device_bytes: float
    usable_bytes: float
    missing_bytes: float
    remedy: str
    changes: list[FittingChange] = []


class VersusCurrent(Labelled):
    """The winner against the current layout.

    times_as_fast: its step time over the winner's, for the same batch; None where it cannot run.
        `speedup` is its older name.
    keep: whether the gain cannot be told from the model's uncertainty.
    gain_sd: standard deviation of the logarithm of times_as_fast.
    changed: fields that change what is run, as (today, winner).
    missing_bytes: by how much it would run out of memory; None where it fits.
    violations: what its trainer refuses.
    source: where it was read from, `format` and `name`; None for a layout without a file.
    measured: what its own log reports.
    diff: of its files, as `patch -p1` takes it.
    files: their new texts, and the modules that they then name.
    settings: the same change by the trainer's names.
    notes: what was read but is not priced, or what the files cannot express.
    """

    estimate: Estimate
    speedup: float | None
    changed: dict[str, tuple[FieldValue, FieldValue]]
    reasons: list[str]
    times_as_fast: float | None = None
    gain_sd: float | None = None
    keep: bool = False
    missing_bytes: float | None = None
    violations: list[Violation] = []
    source: dict[str, str] | None = None
    measured: dict[str, Any] | None = None
    diff: str = ""
    files: dict[str, str] = {}
    settings: dict[str, tuple[Any, Any]] = {}
    notes: list[str] = []


class FastestOnPaper(Labelled):
    """The layout with the lowest prediction, where a simpler one comes first.

    The two cannot be told apart (docs/decisions/0006).
    rank: its place; None where only the first is shown.
    times_as_fast: the first one's objective over its own.
    difference_sd: standard deviation of the logarithm of that; errors are correlated.
    adds: mechanisms that the first does without.
    unmeasured: those of them that no run behind the calibration used.
    """

    rank: int | None
    num_gpus: int
    step_seconds: float
    tokens_per_second_per_gpu: float
    oom_probability: float
    times_as_fast: float
    difference_sd: float
    adds: list[str]
    unmeasured: list[str]
    statement: str


class BestMeasured(Labelled):
    """The best layout that does without the unmeasured mechanisms of number 1.

    times_as_long: its objective over number 1's, both as predicted.
    """

    rank: int
    num_gpus: int
    step_seconds: float
    times_as_long: float
