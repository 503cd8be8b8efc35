"""Times steps: warm-up, then timed steps in small batches, until enough or until they agree."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from probes.reference.step import Trainer

# steps between two waits for the device, so that the waits do not affect every step; also the
# fewest that can agree
BATCH = 5


class NonFiniteLossError(ArithmeticError):
    """The loss became infinite or NaN."""


@dataclass(slots=True)
class StepTiming:
    """Timings and losses of a run.

    seconds: of each timed step on the slowest rank.
    losses, norms: of every step, warm-up included.
    imbalance: of the experts' load after each batch of timed steps (`Trainer.expert_imbalance`).
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the timed steps."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Standard deviation over mean; infinite for fewer than two steps."""
        return (
            statistics.stdev(self.seconds) / statistics.fmean(self.seconds)
            if len(self.seconds) > 1
            else math.inf
        )


def run(trainer: Trainer, ready: Callable[[], None]) -> StepTiming:
    """Runs the warm-up, then timed steps, without Python's garbage collector as trainers do.

    ready: called between the two.
    """
    task, timing = trainer.recipe.task, StepTiming()
    done = 0
    for _ in range(task.warmup_steps):
        _steps(trainer, done, 1, timing)
        done += 1
    gc.collect()
    gc.disable()
    ready()
    try:
        _timed(trainer, done, timing)
    finally:
        gc.enable()
    return timing


def _timed(trainer: Trainer, done: int, timing: StepTiming) -> None:
    task = trainer.recipe.task
    while len(timing.seconds) < task.steps:
        count = min(BATCH, task.steps - len(timing.seconds))
        timing.seconds += _slowest(trainer, _steps(trainer, done, count, timing))
        timing.imbalance += trainer.expert_imbalance()
        done += count
        if len(timing.seconds) >= BATCH and timing.spread < task.spread_below:
            break


def _steps(trainer: Trainer, first: int, count: int, timing: StepTiming) -> list[float]:
    """Seconds on this rank for each of `count` steps."""
    marks, shares, norms = [_mark(trainer.device)], [], []
    for index in range(first, first + count):
        share, norm = trainer.step(index)
        marks.append(_mark(trainer.device))
        shares.append(share)
        norms += [] if norm is None else [norm]
    _wait(trainer.device)
    timing.losses += [float(trainer.global_loss(share)) for share in shares]
    timing.norms += [float(norm) for norm in norms]
    if not trainer.recipe.emulated:
        for step, loss in enumerate(timing.losses[first:], start=first):
            if not math.isfinite(loss):
                raise NonFiniteLossError(f"loss is {loss} at step {step}")
    return [_between(a, b) for a, b in pairwise(marks)]


def _slowest(trainer: Trainer, seconds: list[float]) -> list[float]:
    """Each step's seconds on the slowest rank.

    The list is the same on all ranks, so that all stop together.
    """
    if trainer.recipe.emulated or dist.get_world_size() == 1:
        return seconds
    shared = torch.tensor(seconds, device=trainer.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [float(s) for s in shared]


Mark = float | torch.cuda.Event


def _mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Mark, b: Mark) -> float:
    if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
        return float(a.elapsed_time(b)) / 1e3
    assert isinstance(a, float)
    assert isinstance(b, float)
    return b - a


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
