"""Times steps: warm-up, then timed steps in small batches, until enough or until they agree.

Of a step with many microbatches two shorter ones are timed (`ReferenceRecipe.timed_microbatches`).
"""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from planner.probes.reference.recipe import extrapolated
from planner.probes.reference.step import Trainer

# steps between two waits for the device, so that the waits do not affect every step; also the
# fewest that can agree
BATCH = 5
# Share of the time limit after which nothing more is timed; the rest is for the start before this
# program's and for its end.
TIMED_SHARE = 0.7


class NonFiniteLossError(ArithmeticError):
    """The loss became infinite or NaN."""


@dataclass(slots=True)
class StepTiming:
    """Timings and losses of a run.

    microbatches: of the two steps that were timed for each; None where whole ones were.
    seconds: of each timed step on the slowest rank.
    losses, norms: of every step, warm-up included.
    imbalance: of the experts' load after each batch of timed steps (`Trainer.expert_imbalance`).
    started: the clock's (`time.monotonic`) when the program began.
    elapsed: seconds since then on the slowest rank; all ranks see the same, and stop together.
    """

    microbatches: tuple[int, int] | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    started: float = 0.0
    elapsed: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Standard deviation over mean; infinite for fewer than two steps."""
        if len(self.seconds) < 2:
            return math.inf
        return statistics.stdev(self.seconds) / statistics.fmean(self.seconds)


def run(trainer: Trainer, ready: Callable[[], None], started: float) -> StepTiming:
    """Runs the warm-up, then timed steps, without Python's garbage collector as trainers do.

    Steps are timed until there are as many as the task says and, on a GPU, until they took as long
    as it says, for a GPU that has just begun runs faster than one at its power limit; or until the
    time limit comes near.
    ready: called between the two. started: see `StepTiming`.
    """
    task = trainer.recipe.task
    until = TIMED_SHARE * task.time_limit_seconds
    timing = StepTiming(microbatches=trainer.recipe.timed_microbatches(), started=started)
    each = 0.0  # seconds of one more step, or of the two that stand for it
    for _ in range(task.warmup_steps):
        each = sum(map(sum, _steps(trainer, 1, timing)))
        if timing.elapsed + 2 * each > until:
            break
    gc.collect()
    gc.disable()
    ready()
    try:
        spent, least = 0.0, task.least_seconds if trainer.device.type == "cuda" else 0.0
        while True:
            fits = int((until - timing.elapsed) / each) if each else 1
            wanted = task.steps - len(timing.seconds)
            count = max(1, min(BATCH, fits, wanted if wanted > 0 else BATCH))
            found = _steps(trainer, count, timing)
            timing.seconds += _whole(trainer, timing.microbatches, found)
            timing.imbalance += trainer.expert_imbalance()
            each = sum(map(sum, found)) / len(found[0])
            spent += sum(map(sum, found))
            agree = len(timing.seconds) >= BATCH and timing.spread < task.spread_below
            enough = spent >= least and (len(timing.seconds) >= task.steps or agree)
            if enough or timing.elapsed + each > until:
                return timing
    finally:
        gc.enable()


def _steps(trainer: Trainer, count: int, timing: StepTiming) -> list[list[float]]:
    """Seconds of `count` steps: of whole ones, or of so many of each of the two shorter ones."""
    sizes = timing.microbatches or (trainer.recipe.num_microbatches,)
    return [_slowest(trainer, _alike(trainer, size, count, timing), timing) for size in sizes]


def _slowest(trainer: Trainer, own: list[float], timing: StepTiming) -> list[float]:
    """The slowest rank's seconds of each step, and of its clock."""
    values = [*own, time.monotonic() - timing.started]
    if not trainer.recipe.emulated and dist.get_world_size() > 1:
        shared = torch.tensor(values, device=trainer.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        values = shared.tolist()
    timing.elapsed = values.pop()
    return values


def _whole(
    trainer: Trainer, microbatches: tuple[int, int] | None, found: list[list[float]]
) -> list[float]:
    if not microbatches:
        return found[0]
    whole = trainer.recipe.num_microbatches
    return [extrapolated(microbatches, whole, *pair) for pair in zip(*found, strict=True)]


def _alike(trainer: Trainer, size: int, count: int, timing: StepTiming) -> list[float]:
    """Seconds on this rank for each of `count` steps of so many microbatches."""
    first = len(timing.losses)
    marks, shares, norms = [_mark(trainer.device)], [], []
    for index in range(first, first + count):
        share, norm = trainer.step(index, size)
        marks.append(_mark(trainer.device))
        shares.append(share)
        norms += [] if norm is None else [norm]
    _wait(trainer.device)
    timing.losses += [float(trainer.global_loss(share)) for share in shares]
    timing.norms += [float(norm) for norm in norms]
    for step, loss in enumerate(timing.losses[first:], start=first):
        if not (trainer.recipe.emulated or math.isfinite(loss)):
            raise NonFiniteLossError(f"loss is {loss} at step {step}")
    return [_between(a, b) for a, b in pairwise(marks)]


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
