"""From a job with a layout to the contract's estimate.

Rules come first, then the price of a batch of one, then its simulated schedule.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from planner.calibration.basis import basis, memory_basis
from planner.calibration.intervals import (
    MOSTLY_HIDDEN,
    Spread,
    hidden_share,
    oom_probability,
    spread,
)
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.communication import communication, unslowed
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.stacks import stack_name, unit_name
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.cost.step_seconds import PARTS
from planner.errors import Fault, PlannerError, fault
from planner.intake.current import own_run
from planner.intake.recipes import recipe_note
from planner.rules import violations_of
from planner.rules.cuda_graphs import captured
from planner.rules.experts import overlaps_exchange
from planner.rules.support import obstacles
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import (
    COMMUNICATION_AXES,
    OOM_LIMIT,
    Estimate,
    Interval,
    LearnedFactor,
    Memory,
    StageMemory,
    TimeBreakdown,
    Violation,
)
from planner.specs.estimate_parts import MEMORY_PARTS
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import CUDA_GRAPHS
from planner.trainers.registry import code_of, training_release
from planner.units import counted, format_seconds
from planner.version import MODEL_VERSION
from planner.work.axes import busiest_load

COVERAGE = 0.9
MOST_PRICERS = 8  # each remembers units of up to some ten megabytes; judgement
MOST_RANKS = 2**14  # pipeline ranks priced at once, so that a column stays in a core's cache

CalibrationOf = Callable[[Job], Calibration | None]
Rates = TypeVar("Rates", float, FloatColumn)  # of one layout or of many


def estimate_jobs(
    jobs: Sequence[Job], calibration_of: CalibrationOf = lambda _: None
) -> list[Estimate]:
    """One estimate per job, in order, each under its calibration (None: the shipped one).

    Raises SpecError when a job has no layout.
    """
    answers = []
    for answer in Estimator(calibration_of).estimates(jobs):
        if isinstance(answer, PlannerError):
            raise answer
        answers.append(answer)
    return answers


def estimate_job(job: Job, calibration: Calibration | None = None) -> Estimate:
    """The estimate of the job's layout; an impossible layout gets an estimate with `valid` false.

    Raises SpecError when the job has no layout.
    """
    return estimate_jobs([job], lambda _: calibration)[0]


class Estimator:
    """Estimates of one batch of jobs after another.

    Jobs that share the objects of model, cluster, training and calibration, as those of one
    `JobReader` do, are priced together. The pricers of the last MOST_PRICERS such groups are kept:
    they remember what their units cost. Every answer is that of the job alone, to the last bit.
    calibration_of: what to price each job with; None for the shipped calibration.
    """

    def __init__(self, calibration_of: CalibrationOf = lambda _: None) -> None:
        self.calibration_of = calibration_of
        self._pricer = lru_cache(maxsize=MOST_PRICERS)(_Parts.pricer)

    def estimates(self, jobs: Sequence[Job]) -> list[Estimate | PlannerError]:
        """One answer a job, in order; the error of a job that cannot be priced."""
        groups: dict[_Parts, list[int]] = {}
        answers: list[Estimate | PlannerError | None] = [None] * len(jobs)
        for place, job in enumerate(jobs):
            groups.setdefault(_Parts(job, self.calibration_of(job)), []).append(place)
        for parts, places in groups.items():
            found = self._of_group(parts, [jobs[place] for place in places])
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return [answer for answer in answers if answer is not None]

    def _of_group(self, parts: "_Parts", jobs: Sequence[Job]) -> Sequence[Estimate | PlannerError]:
        try:
            layouts = [_layout(job) for job in jobs]
            priced = estimate_layouts(self._pricer(parts), layouts, [job.id for job in jobs])
            return [_as_asked(job, one) for job, one in zip(jobs, priced, strict=True)]
        except PlannerError as error:
            if len(jobs) == 1:
                return [error]
            return [answer for job in jobs for answer in self._of_group(parts, [job])]


class _Parts:
    """Parts shared by the jobs of a group, distinguished by identity, which costs no look."""

    def __init__(self, job: Job, calibration: Calibration | None) -> None:
        self.job, self.calibration = job, calibration
        self.key = (id(job.model), id(job.cluster), id(job.training), id(calibration))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parts) and self.key == other.key

    def pricer(self) -> Pricer:
        job = self.job
        return Pricer.build(job.model, job.cluster, job.training, self.calibration)


def _as_asked(job: Job, estimate: Estimate) -> Estimate:
    """The estimate with what the job itself says besides: a recipe's values, a trainer's file."""
    note = recipe_note(job)
    if note is not None:
        estimate = estimate.model_copy(update={"warnings": [note, *estimate.warnings]})
    return _as_written(job, estimate)


def _as_written(job: Job, estimate: Estimate) -> Estimate:
    """The estimate of a trainer's own file: what the trainer refuses in it, what is not priced."""
    if job.layout is None or job.request.get("current") is None:
        return estimate
    run = own_run(job.request, job.model, job.layout.num_gpus)
    if run is None:
        return estimate
    notes = [*run.notes, *estimate.warnings]
    if not run.refusals:
        return estimate.model_copy(update={"warnings": notes})
    faults = [*estimate.violations, *as_violations(run.refusals)]
    kept = ("id", "unsupported", "model_version", "calibration_id")
    values = {name: getattr(estimate, name) for name in kept}
    return Estimate(**values, valid=False, violations=faults, warnings=notes)


def as_violations(faults: Sequence[Fault]) -> list[Violation]:
    """Refusals of a user's file by its trainer, as an estimate lists them."""
    return [Violation(**asdict(one)) for one in faults]


def _layout(job: Job) -> Layout:
    if job.layout is None:
        remedy = "add the layout to price, or ask for a plan"
        raise fault("layout", None, "is required to estimate", remedy)
    return job.layout


def estimate_layouts(
    pricer: Pricer, layouts: Sequence[Layout], job_ids: Sequence[str | int | None] = ()
) -> list[Estimate]:
    """Estimates of many layouts of one job, in order; the legal ones are priced together.

    job_ids: of each layout; all None unless given.
    """
    context = pricer.rules_context
    lacking = obstacles(context)
    ids = job_ids or [None] * len(layouts)
    note = training_release(pricer.training).note
    batch = LayoutBatch.from_layouts(layouts)
    broken = violations_of(layouts, batch, context)
    answers = [
        _refused(faults, job_id, pricer, lacking, note)
        for faults, job_id in zip(broken, ids, strict=True)
    ]
    legal = np.array([row for row, faults in enumerate(broken) if not faults], dtype=np.int64)
    for rows in _priced_together(batch, legal):
        columns = _Columns(pricer, [layouts[row] for row in rows], batch.take(rows))
        for place, row in enumerate(rows):
            if np.isfinite(columns.refined.step_seconds[place]):
                answers[row] = columns.estimate(place, ids[row], lacking)
            else:
                stuck = [_deadlock(layouts[row])]
                answers[row] = _refused(stuck, ids[row], pricer, lacking, note)
    return answers


def _deadlock(layout: Layout) -> Violation:
    return Violation(
        field="pp_schedule",
        value=layout.pp_schedule,
        rule="its ranks wait for each other for good under this trainer's sends, so it cannot be "
        "simulated",
        remedy="choose another schedule, pp or virtual_stages",
    )


def _priced_together(batch: LayoutBatch, rows: IntColumn) -> Iterator[IntColumn]:
    """Rows in parts whose columns of every rank hold at most MOST_RANKS numbers, padding with it.

    Pipelines of one length stand together, so that little is padded.
    """
    rows = rows[np.argsort(batch.pp[rows], kind="stable")]
    while len(rows):
        held = batch.pp[rows] * np.arange(1, len(rows) + 1)
        count = max(1, int(np.searchsorted(held, MOST_RANKS, side="right")))
        yield rows[:count]
        rows = rows[count:]


def simulated_columns(
    pricer: Pricer, layouts: Sequence[Layout]
) -> list[tuple[float, float, float]]:
    """Columns of the simulated steps of legal layouts, one tuple per layout, in order.

    (step seconds, probability of running out of memory, device bytes / usable bytes - 1)
    """
    if not layouts:
        return []
    batch = LayoutBatch.from_layouts(layouts)
    prices = pricer.price(batch)
    step = refine(pricer, batch, prices).step_seconds
    oom = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
    share = prices.device_bytes / pricer.cluster.usable_memory_bytes - 1.0
    return [(float(a), float(b), float(c)) for a, b, c in zip(step, oom, share, strict=True)]


def _refused(
    faults: Sequence[Violation],
    job_id: str | int | None,
    pricer: Pricer,
    lacking: Sequence[Violation],
    note: str | None,
) -> Estimate:
    return Estimate(
        id=job_id,
        valid=False,
        violations=list(faults),
        unsupported=list(lacking),
        warnings=[note] if note else [],
        model_version=MODEL_VERSION,
        calibration_id=pricer.calibration.id,
    )


def _unpriced(model: ModelSpec) -> Iterator[str]:
    """Parts of the model's config that the estimate leaves out."""
    if model.left_out:
        yield (
            f"the language model alone is priced: {', '.join(model.left_out)} of its config left "
            "out"
        )
    if model.unread_keys:
        yield (
            "unknown keys of its config.json, which may change the network: "
            f"{', '.join(model.unread_keys)}"
        )


class _Columns:
    """Priced and simulated columns, read row by row into estimates.

    What a row shares with many (its mechanisms' basis, the job's warnings) is said once.
    """

    def __init__(self, pricer: Pricer, layouts: Sequence[Layout], batch: LayoutBatch) -> None:
        self.pricer, self.layouts, self.batch = pricer, layouts, batch
        self.prices = pricer.price(batch, every_rank=True)
        self.refined = refine(pricer, batch, self.prices)
        self.spread: Spread = spread(pricer, batch, self.prices, self.refined.step_seconds)
        training, cluster = pricer.training, pricer.cluster
        tokens = training.global_batch_size * training.seq_len / cluster.num_gpus
        self.tokens_per_second_per_gpu = tokens / self.refined.step_seconds
        self.mfu = model_flops_utilisation(
            pricer.model, cluster, self.tokens_per_second_per_gpu, training.seq_len
        )
        peak = cluster.gpu.dense_peak
        flops = self.prices.stage_seconds.hardware_flops
        self.hfu = flops / (self.refined.step_seconds * peak) if peak else None
        self.communication = communication(pricer, self.prices, self.refined)
        self.unslowed = self._unslowed()
        self.hidden_share = hidden_share(self.prices)
        self.graphs = captured(batch, pricer.rules_context)
        self.overlaps = overlaps_exchange(batch, pricer.rules_context)
        self.memory_parts = self.prices.memory.parts()
        self.basis = basis(pricer.calibration, pricer, batch)
        self.memory_basis = memory_basis(pricer.calibration, code_of(pricer.training))
        notes = (training_release(training).note, cluster.gpu.unknown_family, self._stale())
        self.warnings = [text for text in (*notes, *_unpriced(pricer.model)) if text]
        self.busiest_load = (
            busiest_load(batch, pricer.model, pricer.training) if pricer.model.is_moe else None
        )

    def estimate(
        self, row: int, job_id: str | int | None, lacking: Sequence[Violation]
    ) -> Estimate:
        pricer, prices = self.pricer, self.prices
        mfu, hfu = (None if some is None else float(some[row]) for some in (self.mfu, self.hfu))
        probability = float(self.spread.oom_probability[row])
        load = self._moe_imbalance(row)
        return Estimate(
            id=job_id,
            valid=True,
            violations=[],
            unsupported=list(lacking),
            fits=probability <= OOM_LIMIT,
            oom_probability=probability,
            oom_probability_full_card=float(self.spread.oom_probability_full_card[row]),
            step_seconds=float(self.refined.step_seconds[row]),
            tokens_per_second_per_gpu=float(self.tokens_per_second_per_gpu[row]),
            mfu=mfu,
            hfu=hfu,
            peak_allocated_bytes=float(prices.peak_allocated_bytes[row]),
            peak_reserved_bytes=float(prices.peak_reserved_bytes[row]),
            device_bytes=float(prices.device_bytes[row]),
            reclaimable_bytes=float(prices.device_bytes[row] - prices.least_device_bytes[row]),
            usable_bytes=float(pricer.cluster.usable_memory_bytes),
            interval=self._interval(row),
            memory=self._memory(row),
            time=self._time(row),
            communication=self.communication[row],
            basis={**self.basis[row], "memory": self.memory_basis},
            moe_imbalance=load,
            learned=self._learned(row),
            warnings=[
                *self.warnings,
                *self._by_itself(row),
                *self._predicted_load(load),
                *self.unslowed[row],
                *self._mostly_hidden(row),
            ],
            model_version=MODEL_VERSION,
            calibration_id=pricer.calibration.id,
        )

    def _unslowed(self) -> list[list[str]]:
        """Reasons why a stated oversubscription does not slow each layout."""
        job = self.pricer
        levels = job.cluster.fabric
        if all(level.oversubscription == 1 for level in levels):
            return [[] for _ in self.layouts]
        fabric = tuple(level.model_copy(update={"oversubscription": 1.0}) for level in levels)
        cluster = job.cluster.model_copy(update={"fabric": fabric})
        even = job.variant(
            "even", partial(Pricer.build, job.model, cluster, job.training, job.calibration)
        )
        return unslowed(job, self.prices, even, even.price(self.batch))

    def _moe_imbalance(self, row: int) -> float | None:
        if self.busiest_load is None or self.layouts[row].ep == 1:
            return None
        return float(self.busiest_load[row])

    def _predicted_load(self, load: float | None) -> Iterator[str]:
        """Load of the busiest expert rank behind the numbers, where the job states none."""
        training = self.pricer.training
        if load is not None and training.moe_imbalance is training.moe_capacity_factor is None:
            yield (
                f"the busiest expert rank takes {load:.2f} times the mean load, as random routing "
                "gives; training.moe_imbalance states another"
            )

    def _by_itself(self, row: int) -> Iterator[str]:
        """CUDA graphs and an overlapped exchange of experts that trainer or recipe decides."""
        training, title = self.pricer.training, self.pricer.rules.title
        graphs = CUDA_GRAPHS[int(self.graphs[row])]
        if graphs != "none" and training.cuda_graphs is None:
            of = "the whole step" if graphs == "full" else "layers"
            yield f"{title} captures CUDA graphs of {of} unless training.cuda_graphs is set"
        if self.overlaps[row] and training.overlap.ep is None:
            yield (
                f"{title} runs the exchange of experts under another microbatch's compute, as "
                "NVIDIA's recipe does, unless training.overlap.ep is false"
            )

    def _mostly_hidden(self, row: int) -> Iterator[str]:
        """A warning with the step's seconds if nothing were hidden, where most is."""
        if self.hidden_share[row] > MOSTLY_HIDDEN:
            seconds = float(self.prices.stage_seconds.hidden[row])
            yield (
                f"{format_seconds(seconds)} of communication are taken to hide under compute, "
                f"{self.hidden_share[row]:.0%} of it, more than in any published run: the interval "
                "is wider"
            )

    @cached_property
    def _as_shipped(self) -> FloatColumn:
        """Step seconds under the calibration that ships, (N,)."""
        job = self.pricer
        shipped = job.variant(
            "shipped", partial(Pricer.build, job.model, job.cluster, job.training)
        )
        return refine(shipped, self.batch, shipped.price(self.batch)).step_seconds

    def _learned(self, row: int) -> LearnedFactor | None:
        """Effect of one's own runs on this row's seconds."""
        pricer = self.pricer
        seen, waiting = pricer.calibration.own_runs, pricer.calibration.waiting
        if not seen and not waiting:
            return None
        stack = stack_name(code_of(pricer.training), pricer.cluster.gpu.name)
        unit = unit_name(stack, self.layouts[row].precision, pricer.model)
        runs = seen.get(unit, 0)
        alike = sum(count for name, count in seen.items() if name.startswith(f"{stack}, ")) - runs
        if not runs + alike and stack not in waiting:
            return None
        factor = float(self.refined.step_seconds[row] / self._as_shipped[row])
        found = [counted(runs, "run")] if runs else []
        found += [f"{counted(alike, 'run')} of other kinds"] if alike else []
        stale = pricer.calibration.stale
        said = [f"calibrated by {' and '.join(found)} of yours: x{factor:.2f}"] if found else []
        said += [] if stale is None else [f"{counted(stale.runs, 'older run')} left out as stale"]
        if stack in waiting:
            said.append(
                f"a layout that took {waiting[stack]:.2f} times its prediction waits for a second "
                "one that is as far off"
            )
        return LearnedFactor(
            runs=runs,
            runs_alike=alike,
            factor=factor,
            statement="; ".join(said),
            stale_runs=0 if stale is None else stale.runs,
            stale_since=None if stale is None else stale.since,
        )

    def _stale(self) -> str | None:
        """Runs that the calibration leaves out, and why."""
        stale = self.pricer.calibration.stale
        if stale is None:
            return None
        return (
            f"{counted(stale.runs, 'run')} of yours from before {stale.since[:10]} are left out as "
            f"stale: {stale.statement}; only runs since then count, in predictions and in intervals"
        )

    def _interval(self, row: int) -> Interval:
        names = ("step_seconds", "peak_allocated_bytes", "peak_reserved_bytes")
        ends: dict[str, Any] = {
            name: tuple(float(end[row]) for end in getattr(self.spread, name)) for name in names
        }
        return Interval(coverage=COVERAGE, **ends)

    def _memory(self, row: int) -> Memory:
        ranks = slice(int(self.batch.pp[row]))
        reserved = self.prices.rank_reserved_bytes[ranks, row].tolist()
        here = {name: column[ranks, row].tolist() for name, column in self.memory_parts.items()}
        pairs = zip(reserved, here["allocated"], strict=True)
        here["fragmentation"] = [total - allocated for total, allocated in pairs]
        stages = [
            StageMemory(
                peak_allocated_bytes=here["allocated"][rank],
                peak_reserved_bytes=reserved[rank],
                **{part.field: here[part.name][rank] for part in MEMORY_PARTS if part.field},
            )
            for rank in range(len(reserved))
        ]
        return Memory(worst_stage=reserved.index(max(reserved)), stages=stages)

    def _time(self, row: int) -> TimeBreakdown:
        parts = {name: float(self.prices.parts[name][row]) for name in PARTS}
        parts["bubble"] = float(self.refined.bubble_seconds[row])
        parts["pp"] = float(self.refined.send_seconds[row])
        return TimeBreakdown(
            compute_seconds=parts["compute"] + parts["copies"],
            launch_seconds=parts["launches"],
            host_wait_seconds=parts["waits"],
            exposed_communication_seconds={axis: parts[axis] for axis in COMMUNICATION_AXES},
            bubble_seconds=parts["bubble"],
            recompute_seconds=parts["recompute"],
            optimizer_seconds=parts["optimizer"],
            straggler_seconds=parts["straggler"],
            other_seconds=parts["other"],
        )


def model_flops_utilisation(
    model: ModelSpec, cluster: ClusterSpec, tokens_per_second_per_gpu: Rates, seq_len: int
) -> Rates | None:
    """TorchTitan's count of flops over the dense bf16 peak.

    The peak is that of bf16 in every format, as in torchtitan 0.2 (components/metrics.py), and
    attention counts in full, so products in 8 or 4 bits and attention in windows may exceed 1.
    None where the GPU has no 16-bit peak.
    """
    peak = cluster.gpu.dense_peak
    counted_flops = model.torchtitan_flops_per_token(seq_len)
    return tokens_per_second_per_gpu * counted_flops / peak if peak else None
