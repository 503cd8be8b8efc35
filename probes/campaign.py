"""Asks a pool how one layout runs.

The answer comes from one run, or from emulated ranks of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from planner.calibration.kernels import KernelShape
from planner.errors import Fault, ProbeError, SpecError, fault
from planner.estimates import estimate_job, model_flops_utilisation
from planner.intake.jobs import read_job
from planner.probes.emulate import combine, ranks_of_interest
from planner.probes.launch import Watch
from planner.probes.pools.protocol import Capacity, Pool, too_few
from planner.probes.protocol import MeasuredRun, OutOfMemory, ProbeResult, ProbeTask, device_of
from planner.probes.reference.recipe import extrapolated, short_steps
from planner.probes.trainers import trainer_of
from planner.rules import violations
from planner.specs.job import Job, ProbeTrainerName
from planner.specs.measurement import Measured, Measurement
from planner.specs.validation import build

MOST_KERNELS = 1000
START_SECONDS = 90.0  # from a program's start to its first step, compilation included; judgement
LEAST_STEPS = 3  # one to warm up and two that are timed
PROXY_GPUS = "imitate_gpus"  # of stored requests: the largest proxy run, which older releases made


class ProbeRequest(BaseModel):
    """A layout to measure, and how, with fields of `planner.probes.protocol.ProbeTask`.

    job: a job with its layout; kernels are timed without one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: dict[str, Any]
    trainer: ProbeTrainerName = "reference"
    emulate: bool = False
    pool: str = "local"
    warmup_steps: Annotated[int, Field(strict=True, ge=0, le=1000)] = 3
    steps: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 10
    breakdown: bool = False
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0
    time_limit_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 600.0
    kernels: Annotated[list[dict[str, Any]], Field(max_length=MOST_KERNELS)] = []

    @classmethod
    def from_user(cls, values: object, *, allow_files: bool = True) -> "tuple[ProbeRequest, Job]":
        """The request and its job, with files read into it. Raises SpecError."""
        request = build(cls, values, "")
        job = read_job(request.job, allow_files=allow_files)
        left_out = ("search", "probe", "measured")
        kept = {key: value for key, value in job.request.items() if key not in left_out}
        if request.kernels:
            _check_kernels(request)
            return request.model_copy(update={"job": kept}), job
        if job.layout is None:
            remedy = "add the layout to measure, or probe a plan"
            raise fault("layout", None, "is required to probe", remedy)
        broken = violations(job.layout, job.model, job.cluster, job.training)
        if broken:
            raise SpecError(
                [Fault(f"layout.{one.field}", one.value, one.rule, one.remedy) for one in broken]
            )
        return request.model_copy(update={"job": kept}), job

    @classmethod
    def of_record(cls, stored: Mapping[str, Any]) -> "tuple[ProbeRequest, Job]":
        """A stored request, which an older release may have stored with fields of its own."""
        values = {name: value for name, value in stored.items() if name != PROXY_GPUS}
        return cls.from_user(values, allow_files=False)

    def task(self, job: Job, task_id: str, **more: Any) -> ProbeTask:
        common = self.model_dump(include=set(ProbeTask.model_fields) - {"job"})
        return ProbeTask.model_validate(
            {"id": task_id, "job": job.request, "device": device_of(job.cluster), **common, **more}
        )


def num_microbatches(job: Job) -> int:
    """Microbatches of a step on each data-parallel rank."""
    assert job.layout is not None, "a probe's job has a layout"
    return max(1, job.layout.num_microbatches(job.training.global_batch_size))


def _fitting(task: ProbeTask, limit_seconds: float, step_seconds: float) -> ProbeTask:
    """The task with steps for its least seconds, or as many as fit. Raises ProbeError."""
    if limit_seconds < LEAST_STEPS * step_seconds:
        needed = START_SECONDS + LEAST_STEPS * step_seconds
        needed *= task.time_limit_seconds / limit_seconds  # which several runs share
        raise ProbeError(
            f"{LEAST_STEPS} steps of about {step_seconds:,.0f} s do not fit into "
            f"{limit_seconds:,.0f} s; give time_limit_seconds of {needed:,.0f}, or a smaller "
            "training.global_batch_size"
        )
    if not step_seconds:
        return task
    most = max(LEAST_STEPS, int((limit_seconds - START_SECONDS) / step_seconds))
    warm = min(task.warmup_steps, most - LEAST_STEPS + 1)
    timed = max(task.steps, math.ceil(task.least_seconds / step_seconds))
    return task.model_copy(update={"warmup_steps": warm, "steps": min(timed, most - warm)})


def _check_kernels(request: ProbeRequest) -> None:
    """Raises SpecError for an invalid kernel, and for a trainer that cannot time kernels."""
    for index, values in enumerate(request.kernels):
        try:
            KernelShape.from_dict(values)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            rule, remedy = f"is no kernel ({error})", "give kind, name, dtype and sizes"
            raise fault(f"kernels.{index}", values, rule, remedy) from None
    if not trainer_of(request.trainer).times_kernels:
        rule, remedy = "times no kernels alone", "use the reference program"
        raise fault("trainer", request.trainer, rule, remedy)


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The measurements of a request.

    measurements: of the requested job; empty if nothing was measured.
    failed: the run that gave no numbers. Out of memory is both a measurement and a failed run.
    """

    results: tuple[ProbeResult, ...]
    measurements: tuple[Measurement, ...]
    failed: ProbeResult | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """The tasks to run, and how their results are combined."""

    job: Job
    tasks: tuple[ProbeTask, ...]
    ranks: tuple[int, ...] = ()
    timed_microbatches: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpus_at_limit(self) -> int:
        """GPUs for which the request's time limit may be used up, one run after the other."""
        processes = [task.num_processes() for task in self.tasks]
        return sum(processes) if self.ranks else max(processes)

    @classmethod
    def of(cls, request: ProbeRequest, job: Job, probe_id: str, capacity: Capacity) -> "Campaign":
        """Plans the cheapest tasks that answer on this pool. Raises ProbeError if it cannot."""
        if request.kernels:
            task = request.task(job, probe_id)
            if task.num_processes() > capacity.num_devices:
                raise too_few(task.num_processes(), capacity)
            return cls(job=job, tasks=(task,))
        assert job.layout is not None, "a request's job has a layout"
        if request.emulate:
            fake = capacity.num_devices == 0 or capacity.device == "cpu"
            how = {"fake_tensors": True, "device": "cpu"} if fake else {}
            ranks = ranks_of_interest(job.layout, job.cluster)
            names = {rank: f"{probe_id}-rank{rank}" for rank in ranks}
            tasks = tuple(request.task(job, names[at], emulate_rank=at, **how) for at in ranks)
            notes = ("without a GPU: memory and counts only, no times",) if fake else ()
            return cls(job=job, tasks=tasks, ranks=ranks, notes=notes)
        if job.layout.num_gpus > capacity.num_devices:
            raise too_few(job.layout.num_gpus, capacity)
        if not capacity.measures or capacity.device == "cpu":  # whose steps nobody predicts
            return cls(job=job, tasks=(request.task(job, probe_id),))
        return cls._direct(request, job, probe_id)

    @classmethod
    def _direct(cls, request: ProbeRequest, job: Job, probe_id: str) -> "Campaign":
        """The layout itself, for as many steps as its time limit holds. Raises ProbeError.

        TorchTitan cannot change its batch during a run. So where whole steps are too long for the
        limit two runs of smaller global batches are made, and the whole step follows from both.
        """
        task = request.task(job, probe_id)
        limit, whole = task.time_limit_seconds, num_microbatches(job)
        each = estimate_job(job).step_seconds or 0.0
        short = short_steps(job.layout, whole) if job.layout is not None else None
        pair = each if short is None else each * sum(short) / whole
        if request.trainer == "reference":  # which stops by the clock
            _fitting(task, limit, pair)
            return cls(job=job, tasks=(task,))
        steps = task.warmup_steps + task.steps
        if short is None or START_SECONDS + steps * each <= limit:
            return cls(job=job, tasks=(_fitting(task, limit, each),))
        tasks = []
        for name, size in zip(("few", "more"), short, strict=True):
            share = START_SECONDS + (limit - 2 * START_SECONDS) * size / sum(short)
            smaller = _fitting(request.task(job, f"{probe_id}-{name}"), share, each * size / whole)
            batch = job.training.global_batch_size * size // whole
            training = {**job.request["training"], "global_batch_size": batch}
            values = {"job": {**job.request, "training": training}, "time_limit_seconds": share}
            tasks.append(smaller.model_copy(update=values))
        return cls(job=job, tasks=tuple(tasks), timed_microbatches=short)

    def run(self, pool: Pool, watch: Watch) -> ProbeAnswer:
        """Runs all tasks in order; stops at the first that gives no numbers."""
        results: list[ProbeResult] = []
        for task in self.tasks:
            result = pool.run(task, watch)
            results.append(result)
            if not isinstance(result.outcome, MeasuredRun):
                measured = isinstance(result.outcome, OutOfMemory) and not task.kernels
                known = (result.measurement(),) if measured else ()
                return ProbeAnswer(tuple(results), known, result, self.notes)
        return ProbeAnswer(tuple(results), self.read(results), None, self.notes)

    def read(self, results: list[ProbeResult]) -> tuple[Measurement, ...]:
        if self.tasks[0].kernels:
            return ()  # timings are in the result; they are not a run of a layout
        each = tuple(result.measurement() for result in results)
        if self.ranks:
            runs = {
                rank: one.outcome
                for rank, one in zip(self.ranks, results, strict=True)
                if isinstance(one.outcome, MeasuredRun)
            }
            return (self._whole(combine(self.job, runs), results),)
        return each if self.timed_microbatches is None else (self._extrapolated(*results),)

    def _extrapolated(self, few: ProbeResult, more: ProbeResult) -> Measurement:
        """The measurement of a whole step from runs of two smaller batches."""
        short, longer = few.outcome, more.outcome
        assert isinstance(short, MeasuredRun)
        assert isinstance(longer, MeasuredRun)
        assert self.timed_microbatches is not None
        whole = num_microbatches(self.job)
        pairs = zip(short.step_seconds_each, longer.step_seconds_each, strict=False)
        each = [extrapolated(self.timed_microbatches, whole, *pair) for pair in pairs]
        seconds = median(each)
        training = self.job.training
        tokens = training.global_batch_size * training.seq_len / self.job.cluster.num_gpus
        rate = tokens / seconds
        mfu = model_flops_utilisation(self.job.model, self.job.cluster, rate, training.seq_len)
        numbers = longer.model_copy(
            update={
                "step_seconds": seconds,
                "step_seconds_each": each,
                "tokens_per_second_per_gpu": rate,
                "mfu": mfu,
                "timed_microbatches": list(self.timed_microbatches),
            }
        )
        measured = more.model_copy(update={"outcome": numbers}).measurement().measured
        return self._whole(measured, [few, more])

    def _whole(self, numbers: Measured, results: Sequence[ProbeResult]) -> Measurement:
        first = results[0]
        spent = sum(result.gpu_seconds for result in results)
        extra = {"trainer": first.task.trainer, "gpu_seconds": spent}
        probe_id = first.task.id.rpartition("-")[0]
        return Measurement(
            id=probe_id,
            created_at=first.started_at,
            job=self.job,
            measured=numbers.model_copy(update=extra),
            software=first.environment.software(),
            source=f"probe {probe_id}",
        )
