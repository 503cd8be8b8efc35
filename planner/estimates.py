"""From a job with a layout to the contract's estimate.

Rules come first, then the price of a batch of one, then its simulated schedule.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from planner.calibration.basis import basis, memory_basis
from planner.calibration.intervals import Spread, oom_probability, spread
from planner.columns import FloatColumn, LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.stacks import stack_name, unit_name
from planner.cost.memory.peak import rows as memory_rows
from planner.cost.pipeline import stages
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.price import Pricer, Prices
from planner.cost.refine import Refined, refine
from planner.cost.step_seconds import PARTS
from planner.errors import Fault, SpecError
from planner.rules import Context, violations
from planner.rules.support import obstacles
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import (
    Basis,
    Estimate,
    Interval,
    LearnedFactor,
    Memory,
    StageMemory,
    TimeBreakdown,
    Violation,
)
from planner.specs.job import Job
from planner.specs.kernel_families import unknown_family
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.trainers.registry import training_release
from planner.units import counted
from planner.version import MODEL_VERSION
from planner.work.axes import busiest_load

COVERAGE = 0.9
FITS_BELOW = 0.05


def estimate_jobs(
    jobs: Sequence[Job], calibration_of: Callable[[Job], Calibration | None] = lambda _: None
) -> list[Estimate]:
    """One estimate per job, in order, each under its calibration (None: the shipped one).

    Raises SpecError when a job has no layout.
    """
    return [estimate_job(job, calibration_of(job)) for job in jobs]


def estimate_job(job: Job, calibration: Calibration | None = None) -> Estimate:
    """The estimate of the job's layout; an impossible layout gets an estimate with `valid` false.

    Raises SpecError when the job has no layout.
    """
    if job.layout is None:
        raise SpecError(
            Fault(
                "layout",
                None,
                "is required to estimate",
                "add the layout to price, or ask for a plan",
            )
        )
    pricer = Pricer.build(job.model, job.cluster, job.training, calibration)
    return estimate_layouts(pricer, [job.layout], job_id=job.id)[0]


def estimate_layouts(
    pricer: Pricer, layouts: Sequence[Layout], *, job_id: str | int | None = None
) -> list[Estimate]:
    """Estimates of many layouts of one job, in order; the legal ones are priced together."""
    lacking = obstacles(
        Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    )
    broken = [
        violations(layout, pricer.model, pricer.cluster, pricer.training) for layout in layouts
    ]
    legal = [index for index, faults in enumerate(broken) if not faults]
    answers = [_refused(faults, job_id, pricer) for faults in broken]
    if legal:
        batch = LayoutBatch.from_layouts([layouts[index] for index in legal])
        prices = pricer.price(batch, every_rank=True)
        refined = refine(pricer, batch, prices)
        columns = _Columns(pricer, [layouts[index] for index in legal], batch, prices, refined)
        for row, index in enumerate(legal):
            answers[index] = columns.estimate(row, job_id)
    return (
        [answer.model_copy(update={"unsupported": lacking}) for answer in answers]
        if lacking
        else answers
    )


def simulated_columns(
    pricer: Pricer, layouts: Sequence[Layout]
) -> list[tuple[float, float, float]]:
    """What the simulated steps of legal layouts give, one tuple per layout, in order.

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


def _refused(faults: Sequence[Violation], job_id: str | int | None, pricer: Pricer) -> Estimate:
    note = training_release(pricer.training).note
    return Estimate(
        id=job_id,
        valid=False,
        violations=list(faults),
        warnings=[note] if note else [],
        model_version=MODEL_VERSION,
        calibration_id=pricer.calibration.id,
    )


def _unpriced(model: ModelSpec) -> Iterator[str]:
    """What the model's config has and the estimate leaves out."""
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
    """Priced and simulated columns, read row by row into estimates."""

    def __init__(
        self,
        pricer: Pricer,
        layouts: Sequence[Layout],
        batch: LayoutBatch,
        prices: Prices,
        refined: Refined,
    ) -> None:
        self.pricer, self.layouts, self.batch, self.prices, self.refined = (
            pricer,
            layouts,
            batch,
            prices,
            refined,
        )
        self.spread: Spread = spread(pricer, batch, prices, refined.step_seconds)
        self.m = num_microbatches(batch, pricer.training)

    def estimate(self, row: int, job_id: str | int | None) -> Estimate:
        """The estimate of one row."""
        pricer, prices = self.pricer, self.prices
        step = float(self.refined.step_seconds[row])
        tokens = (
            pricer.training.global_batch_size
            * pricer.training.seq_len
            / pricer.cluster.num_gpus
            / step
        )
        mfu = model_flops_utilisation(pricer.model, pricer.cluster, tokens, pricer.training.seq_len)
        probability = float(self.spread.oom_probability[row])
        return Estimate(
            id=job_id,
            valid=True,
            violations=[],
            fits=probability <= FITS_BELOW,
            oom_probability=probability,
            oom_probability_full_card=float(self.spread.oom_probability_full_card[row]),
            step_seconds=step,
            tokens_per_second_per_gpu=tokens,
            mfu=mfu,
            hfu=None if mfu is None else mfu * (1.0 + self._redone_share(row)),
            peak_allocated_bytes=float(prices.peak_allocated_bytes[row]),
            peak_reserved_bytes=float(prices.peak_reserved_bytes[row]),
            device_bytes=float(prices.device_bytes[row]),
            usable_bytes=float(pricer.cluster.usable_memory_bytes),
            interval=self._interval(row),
            memory=self._memory(row),
            time=self._time(row),
            basis=self._basis(row),
            moe_imbalance=self._moe_imbalance(row),
            learned=self._learned(row),
            warnings=[
                text
                for text in (
                    training_release(pricer.training).note,
                    unknown_family(pricer.cluster.gpu),
                    *_unpriced(pricer.model),
                    self._predicted_load(row),
                )
                if text
            ],
            model_version=MODEL_VERSION,
            calibration_id=pricer.calibration.id,
        )

    def _moe_imbalance(self, row: int) -> float | None:
        layout = self.layouts[row]
        if layout.ep == 1 or not self.pricer.model.is_moe:
            return None
        one = LayoutBatch.from_layouts([layout])
        return float(busiest_load(one, self.pricer.model, self.pricer.training)[0])

    def _predicted_load(self, row: int) -> str:
        """What the numbers take for the busiest expert rank, where the job does not say."""
        load = self._moe_imbalance(row)
        if load is None or self.pricer.training.moe_imbalance is not None:
            return ""
        return (
            f"the busiest expert rank takes {load:.2f} times the mean load, as random routing "
            "gives; training.moe_imbalance states another"
        )

    @cached_property
    def _as_shipped(self) -> FloatColumn:
        """Step seconds under the calibration that ships, (N,)."""
        pricer = Pricer.build(self.pricer.model, self.pricer.cluster, self.pricer.training)
        prices = pricer.price(self.batch)
        return refine(pricer, self.batch, prices).step_seconds

    def _learned(self, row: int) -> LearnedFactor | None:
        """What one's own runs did to this row's seconds."""
        pricer = self.pricer
        stack = stack_name(pricer.training.trainer, pricer.cluster.gpu.name)
        unit = unit_name(stack, self.layouts[row].precision, pricer.model)
        seen = pricer.calibration.own_runs
        runs = seen.get(unit, 0)
        alike = sum(count for name, count in seen.items() if name.startswith(f"{stack}, ")) - runs
        if not runs + alike:
            return None
        factor = float(self.refined.step_seconds[row] / self._as_shipped[row])
        found = [counted(runs, "run")] if runs else []
        found += [f"{counted(alike, 'run')} of other kinds"] if alike else []
        return LearnedFactor(
            runs=runs,
            runs_alike=alike,
            factor=factor,
            statement=f"calibrated by {' and '.join(found)} of yours: x{factor:.2f}",
        )

    def _redone_share(self, row: int) -> float:
        """Recomputed over required flops.

        A step requires three forwards: one for the forward, two for the backward.
        """
        flops, redone = (
            self.prices.stage_seconds.forward_flops[:, row],
            self.prices.stage_seconds.recompute_flops[:, row],
        )
        counts = stages.rank_units(self.batch, row, self.pricer.model, self.pricer.rules).sum(
            axis=0
        )
        return float(counts @ redone / (3.0 * (counts @ flops)))

    def _interval(self, row: int) -> Interval:
        def pair(low: FloatColumn, high: FloatColumn) -> tuple[float, float]:
            return float(low[row]), float(high[row])

        s = self.spread
        return Interval(
            coverage=COVERAGE,
            step_seconds=pair(*s.step_seconds),
            peak_allocated_bytes=pair(*s.peak_allocated_bytes),
            peak_reserved_bytes=pair(*s.peak_reserved_bytes),
        )

    def _memory(self, row: int) -> Memory:
        parts = memory_rows(self.prices.memory)
        reserved = self.prices.rank_reserved_bytes[:, row]
        stages = []
        for rank in range(int(self.batch.pp[row])):
            here = {name: float(column[rank, row]) for name, column in parts.items()}
            stages.append(
                StageMemory(
                    peak_allocated_bytes=here["allocated"],
                    peak_reserved_bytes=float(reserved[rank]),
                    parameters_bytes=here["parameters"],
                    gradients_bytes=here["gradients"],
                    optimizer_bytes=here["optimizer"],
                    activations_bytes=here["activations"],
                    logits_bytes=here["logits"],
                    communication_buffers_bytes=here["buffers"],
                    workspace_bytes=here["workspace"],
                    fragmentation_bytes=float(reserved[rank]) - here["allocated"],
                )
            )
        return Memory(
            worst_stage=int(np.argmax([stage.peak_reserved_bytes for stage in stages])),
            stages=stages,
        )

    def _time(self, row: int) -> TimeBreakdown:
        parts = {name: float(self.prices.parts[name][row]) for name in PARTS}
        parts["bubble"], parts["pp"] = (
            float(self.refined.bubble_seconds[row]),
            float(self.refined.send_seconds[row]),
        )
        return TimeBreakdown(
            compute_seconds=parts["compute"] + parts["copies"],
            launch_seconds=parts["launches"],
            host_wait_seconds=parts["waits"],
            exposed_communication_seconds={
                axis: parts[axis] for axis in ("tp", "cp", "ep", "pp", "fsdp", "dp")
            },
            bubble_seconds=parts["bubble"],
            recompute_seconds=parts["recompute"],
            optimizer_seconds=parts["optimizer"],
            straggler_seconds=parts["straggler"],
            other_seconds=parts["other"],
        )

    def _basis(self, row: int) -> dict[str, Basis]:
        """The basis of every mechanism, and of memory.

        Memory rests on how torch allocates and is checked against published peaks.
        """
        pricer = self.pricer
        of = basis(pricer.calibration, pricer, self.layouts[row])
        return {**of, "memory": memory_basis(pricer.calibration, pricer.training.trainer)}


def model_flops_utilisation(
    model: ModelSpec, cluster: ClusterSpec, tokens_per_second_per_gpu: float, seq_len: int
) -> float | None:
    """TorchTitan's count of flops over the dense bf16 peak.

    The peak is that of bf16 in every format, as in torchtitan 0.2 (components/metrics.py), so steps
    whose products are in 8 or 4 bits may exceed 1. A GPU without bf16 counts by its fp16 peak;
    None where it has neither.
    """
    peak = cluster.gpu.peak_flops_per_second.get("bf16") or cluster.gpu.peak_flops_per_second.get(
        "fp16"
    )
    return (
        tokens_per_second_per_gpu * model.torchtitan_flops_per_token(seq_len) / peak
        if peak
        else None
    )
