"""The program that torchrun starts: `python -m planner.probes.worker TASK.json RESULT.json`.

Rank 0 writes RESULT.json atomically: measured, out of memory, or failed. Every rank that fails
first writes RESULT.json.rankN.error.json: {rank, type, message, traceback, time, kind,
attempted_bytes, allocated_bytes}. From these files the runner finds the first cause.
Exit status: 0 measured, 1 anything else.
"""

import json
import os
import platform
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.errors import SpecError
from planner.probes.causes import OOM, TRIED, size_in
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The error that ended one rank.

    time: seconds since the epoch.
    kind: a FailureKind or "oom"; None if only the message can tell.
    """

    rank: int
    type: str
    message: str
    traceback: str
    time: float
    kind: str | None
    attempted_bytes: int | None = None
    allocated_bytes: int | None = None

    def outcome(self) -> Outcome:
        """The probe's outcome if this was its first cause."""
        if self.kind == "oom":
            return OutOfMemory(
                rank=self.rank,
                attempted_bytes=self.attempted_bytes,
                allocated_bytes=self.allocated_bytes,
                message=self.message,
            )
        return Failed(
            kind=FailureKind(self.kind or FailureKind.CRASH),
            rank=self.rank,
            message=self.message,
            traceback=self.traceback,
        )


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
    attempt = _Attempt(task)
    try:
        outcome: Outcome = attempt.run()
    except BaseException as error:
        found = rank_error(error, rank)
        sys.stderr.write(found.traceback)
        write_atomically(error_path(result_path, rank), json.dumps(_plain(found)))
        outcome = _first_cause(result_path, found).outcome()
    if rank == 0:
        seconds = time.monotonic() - clock
        result = ProbeResult(
            task=task,
            outcome=outcome,
            environment=attempt.environment(),
            started_at=started.isoformat(),
            wall_seconds=seconds,
            gpu_seconds=seconds * task.num_processes(),
            complete=isinstance(outcome, MeasuredRun),
            notes=attempt.notes(),
        )
        write_atomically(result_path, result.model_dump_json())
    if isinstance(outcome, MeasuredRun):
        attempt.close()
        return 0
    return 1


class _Attempt:
    """One run, with everything to report even when it fails on the way."""

    def __init__(self, task: ProbeTask) -> None:
        self._task = task
        self._run: Any = None

    def run(self) -> MeasuredRun:
        """Runs and measures. Raises whatever goes wrong."""
        if self._task.kernels:
            from planner.probes.micro import KernelProgram

            self._run = KernelProgram(self._task)
            timed: MeasuredRun = self._run.measure()
            return timed
        from planner.probes.reference.recipe import ReferenceRecipe

        recipe = ReferenceRecipe.of(self._task)
        _set_allocator(recipe.training.expandable_segments, recipe.training.trainer)
        # FSDP2 warns of views that blocks return; no code here changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        from planner.probes.reference.run import ReferenceRun

        self._run = ReferenceRun(recipe)
        measured: MeasuredRun = self._run.measure()
        return measured

    def environment(self) -> Environment:
        if self._run is not None:
            found: Environment = self._run.environment()
            return found
        return Environment(python=platform.python_version())

    def notes(self) -> list[str]:
        return list(self._run.notes()) if self._run is not None else []

    def close(self) -> None:
        if self._run is not None:
            self._run.close()


def error_path(result: Path, rank: int) -> Path:
    return result.with_name(f"{result.name}.rank{rank}.error.json")


def rank_error(error: BaseException, rank: int) -> RankFailure:
    """An exception as a record, with the sizes of a failed allocation."""
    message = str(error) or type(error).__name__
    kind = _kind(error, message)
    tried = size_in(TRIED, message) if kind == OOM else None
    return RankFailure(
        rank=rank,
        type=_type_name(error),
        message=message,
        time=time.time(),
        kind=kind,
        attempted_bytes=tried,
        traceback="".join(traceback.format_exception(error)),
        allocated_bytes=_allocated() if kind == "oom" else None,
    )


def write_atomically(path: Path, text: str) -> None:
    """Writes a whole file or nothing."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
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


def _first_cause(result: Path, own: RankFailure) -> RankFailure:
    """Returns the earliest error that any rank left beside the result.

    A broken connection ranks after the error that broke it.
    """
    found = [own]
    for path in result.parent.glob(f"{result.name}.rank*.error.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.append(RankFailure(**record))
    return min(found, key=lambda error: error.time)


def _plain(error: RankFailure) -> dict[str, Any]:
    return {name: getattr(error, name) for name in RankFailure.__slots__}


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
