"""The program that torchrun starts: `python -m planner.probes.worker TASK.json RESULT.json`.

Rank 0 writes RESULT.json atomically: measured, out of memory, or failed. Every rank that fails
first writes RESULT.json.rankN.error.json: {rank, type, message, traceback, time, kind,
attempted_bytes, allocated_bytes}. From these files the runner finds the first cause.
Exit status: 0 measured, 1 anything else.
"""

import os
import platform
import sys
import time
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.errors import SpecError
from planner.probes.causes import OOM, TRIED, size_in
from planner.probes.evidence import RankError, read_errors
from planner.probes.guardian import write_whole
from planner.probes.programs import allocator_settings
from planner.probes.protocol import (
    Environment,
    Failed,
    FailureKind,
    MeasuredRun,
    Outcome,
    OutOfMemory,
    ProbeResult,
    ProbeTask,
)
from planner.trainers.registry import TRAINERS


def main(arguments: list[str] | None = None) -> int:
    """Runs the task file's probe on this rank; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m planner.probes.worker TASK.json RESULT.json\n")
        return 1
    result_path = Path(arguments[1])
    rank = int(os.environ.get("RANK", "0"))
    started, clock = datetime.now(UTC), time.monotonic()
    task = ProbeTask.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    run: Any = None
    try:
        run = _program(task)
        outcome: Outcome = run.measure()
    except BaseException as error:
        found = rank_error(error, rank)
        sys.stderr.write(found.traceback)
        found.write(result_path)
        # a broken connection comes after the error of the rank that broke it
        outcome = outcome_of(min((found, *read_errors(result_path)), key=lambda one: one.time))
    if rank == 0:
        seconds = time.monotonic() - clock
        result = ProbeResult(
            task=task,
            outcome=outcome,
            environment=run.environment() if run else Environment(python=platform.python_version()),
            started_at=started.isoformat(),
            wall_seconds=seconds,
            gpu_seconds=seconds * task.num_processes(),
            complete=isinstance(outcome, MeasuredRun),
            notes=run.notes() if run else [],
        )
        write_whole(result_path, result.model_dump_json())
    if isinstance(outcome, MeasuredRun):
        run.close()
        return 0
    return 1


def _program(task: ProbeTask) -> Any:
    """The run of this task, not begun: `measure`, `environment`, `notes`, `close`."""
    if task.kernels:
        from planner.probes.micro import KernelProgram

        return KernelProgram(task)
    from planner.probes.reference.recipe import ReferenceRecipe

    recipe = ReferenceRecipe.of(task)
    _set_allocator(recipe.training.expandable_segments, recipe.training.trainer)
    # FSDP2 warns of views that blocks return; no code here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    from planner.probes.reference.run import ReferenceRun

    return ReferenceRun(recipe)


def rank_error(error: BaseException, rank: int) -> RankError:
    """An exception as a record, with the sizes of a failed allocation.

    Its kind is a FailureKind or "oom"; None if only the message can tell.
    """
    message = str(error) or type(error).__name__
    kind = _kind(error, message)
    return replace(
        RankError.of(error, rank),
        message=message,
        kind=kind,
        attempted_bytes=size_in(TRIED, message) if kind == OOM else None,
        allocated_bytes=_allocated() if kind == OOM else None,
    )


def outcome_of(first: RankError) -> Outcome:
    """The probe's outcome with this first cause."""
    if first.kind == OOM:
        return OutOfMemory(
            rank=first.rank or 0,
            attempted_bytes=first.attempted_bytes,
            allocated_bytes=first.allocated_bytes,
            message=first.message,
        )
    return Failed(
        kind=FailureKind(first.kind or FailureKind.CRASH),
        rank=first.rank,
        message=first.message,
        traceback=first.traceback,
    )


def _kind(error: BaseException, message: str) -> str | None:
    if type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in message
    ):
        return "oom"
    if type(error).__name__ == "NonFiniteLossError":
        return FailureKind.NON_FINITE_LOSS.value
    for types, kind in (
        (SpecError, FailureKind.INVALID_LAYOUT),
        (ImportError, FailureKind.IMPORT),
        (KeyboardInterrupt, FailureKind.INTERRUPTED),
    ):
        if isinstance(error, types):
            return kind.value
    return None


def _allocated() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_allocated())


def _set_allocator(expandable: bool | None, trainer: str) -> None:
    """Sets the allocator's environment, which torch reads at its first allocation."""
    wanted = TRAINERS[trainer].expandable_segments if expandable is None else expandable
    os.environ.update(allocator_settings(wanted, os.environ))


def end(status: int) -> None:
    """Leaves the process.

    After a failure it leaves at once, because destroying broken process groups may wait for ranks
    that have ended.
    """
    if status == 0:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(main())
