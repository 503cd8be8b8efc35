"""Turns TorchTitan's log and event files into the outcome of a probe.

Exit 0 proves little: a run counts only if every step is there, its loss is finite and its gradients
have a plausible norm.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from planner.estimates import model_flops_utilisation
from planner.probes.evidence import Evidence
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, Outcome, ProbeTask, RankMemory
from planner.probes.trainers.tensorboard_events import read_scalars
from planner.probes.trainers.titan_log import StepLine, TitanLog, failure, read_log
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.units import GIB

SECONDS = "time_metrics/end_to_end(s)"
ACTIVE, RESERVED = "memory/max_active(GiB)", "memory/max_reserved(GiB)"
RETRIES = "memory/num_alloc_retries"  # since the start
# A freshly initialised model's first gradients have a norm of 0.1 to 100; beyond this limit they
# were summed wrongly. Judgement. With a pipeline, 0.2 differentiates the loss summed over tokens
# and divides only what it logs (train.py, forward_backward_step).
LARGEST_NORM = 1e4
Scalars = dict[int | None, dict[str, dict[int, float]]]  # by rank, tag and step
# Tokens per second are logged as integers: below this rate the time stamps of the log lines, exact
# to a millisecond, are better.
COARSE_TOKENS_PER_SECOND = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanProbe:
    """The run that was planned."""

    task: ProbeTask
    job: Job
    layout: Layout

    @classmethod
    def of(cls, task: ProbeTask) -> "TitanProbe":
        job = task.parsed()
        assert job.layout is not None, "a probe's job has a layout"
        return cls(task=task, job=job, layout=job.layout)

    @property
    def steps(self) -> range:
        return range(1, self.task.warmup_steps + self.task.steps + 1)

    @property
    def timed(self) -> range:
        return range(self.task.warmup_steps + 1, self.steps.stop)

    @property
    def tokens_per_step_per_gpu(self) -> float:
        """Tokens of a step per GPU of the layout: TorchTitan's tps is this number over seconds."""
        training = self.job.training
        return training.global_batch_size * training.seq_len / self.layout.num_gpus

    @property
    def largest_norm(self) -> float:
        """The largest plausible gradient norm."""
        training = self.job.training
        tokens = training.global_batch_size * training.seq_len
        return LARGEST_NORM * (tokens if self.layout.pp > 1 else 1)


def read_outcome(task: ProbeTask, evidence: Evidence, outputs: Path | None = None) -> Outcome:
    """The outcome of one run. outputs: TorchTitan's dump folder; None if there is only the log."""
    asked, log = TitanProbe.of(task), read_log(evidence.log)
    losses = log.losses()
    if any(step not in losses for step in asked.steps):
        return failure(log, evidence)
    if asked.task.emulate_rank is None:
        broken = _implausible(asked, log)
        if broken is not None:
            return broken
    return _measured(asked, log, _scalars(outputs))


def _implausible(asked: TitanProbe, log: TitanLog) -> Failed | None:
    losses, norms = log.losses(), log.gradient_norms()
    for step in asked.steps:
        norm = norms.get(step)
        for name, value in (("loss", losses[step]), ("gradient norm", norm)):
            if value is not None and not math.isfinite(value):
                message = f"the {name} of step {step} is {value}"
                return Failed(kind=FailureKind.NON_FINITE_LOSS, message=message)
        if norm is None or not 0.0 < norm <= asked.largest_norm:
            rule = f"between 0 and {asked.largest_norm:g} was expected, so it did not train"
            message = f"the gradient norm of step {step} is {norm}: {rule}"
            return Failed(kind=FailureKind.CRASH, message=message)
    return None


def _scalars(outputs: Path | None) -> Scalars:
    """Scalars of `tb/<time>/rank_<n>/events...`; of rank None if there is one folder for all."""
    found: Scalars = {}
    for path in sorted(outputs.glob("tb/**/events.out.tfevents.*")) if outputs is not None else []:
        name = path.parent.name
        rank = int(name.removeprefix("rank_")) if name.startswith("rank_") else None
        tags = found.setdefault(rank, {})
        for tag, values in read_scalars(path).items():
            tags.setdefault(tag, {}).update(values)
    return found


def _measured(asked: TitanProbe, log: TitanLog, scalars: Scalars) -> MeasuredRun:
    each = [max(seconds) for seconds in zip(*_seconds_by_rank(asked, log, scalars), strict=True)]
    middle = median(each)
    rate, job = asked.tokens_per_step_per_gpu / middle, asked.job
    losses, norms = log.losses(), log.gradient_norms()
    return MeasuredRun(
        step_seconds=middle,
        step_seconds_each=each,
        tokens_per_second_per_gpu=rate,
        mfu=model_flops_utilisation(job.model, job.cluster, rate, job.training.seq_len),
        losses=[losses[step] for step in asked.steps],
        gradient_norms=[norms[step] for step in asked.steps if step in norms],
        memory=_memory(log, scalars),
    )


def _seconds_by_rank(asked: TitanProbe, log: TitanLog, scalars: Scalars) -> list[list[float]]:
    """Seconds of the timed steps of every rank: of its event file if that is whole, or its log."""
    timed = set(asked.timed)
    exact = [tags.get(SECONDS, {}) for tags in scalars.values()]
    whole = [[one[step] for step in asked.timed] for one in exact if timed <= one.keys()]
    if whole:
        return whole
    return [
        [_seconds(asked, steps, step) for step in asked.timed]
        for steps in log.by_rank().values()
        if timed <= steps.keys()
    ]


def _seconds(asked: TitanProbe, steps: dict[int, StepLine], step: int) -> float:
    """Seconds of one step of one rank, by its rate or by the times of its line and the last."""
    here, before = steps[step], steps.get(step - 1)
    coarse = here.tokens_per_second < COARSE_TOKENS_PER_SECOND
    if coarse and here.logged_at and before and before.logged_at:
        return (here.logged_at - before.logged_at).total_seconds()
    return asked.tokens_per_step_per_gpu / max(here.tokens_per_second, 1e-9)


def _memory(log: TitanLog, scalars: Scalars) -> list[RankMemory]:
    """Peaks of every rank over all steps. TorchTitan counts active blocks, not allocated ones."""
    lines = log.by_rank()
    ranks = [rank for rank in scalars if RESERVED in scalars[rank]]
    ranks = ranks or sorted(lines, key=lambda rank: rank or 0)
    found = []
    for rank in ranks:
        tags = scalars.get(rank, {})
        peaks = [value * GIB for value in tags.get(RESERVED, {}).values()]
        peak = max(peaks or [line.reserved_bytes for line in lines.get(rank, {}).values()])
        known = {}
        if peak > 0:  # -1 means a device without statistics
            retries = tags.get(RETRIES)
            flushed = round(max(retries.values())) if retries else None
            known = {"peak_reserved_bytes": round(peak), "allocator_retries": flushed}
        found.append(RankMemory(rank=rank or 0, **known))
    return found
