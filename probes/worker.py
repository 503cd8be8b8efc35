"""The program that torchrun starts: `python -m planner.probes.worker TASK.json RESULT.json`.

Rank 0 writes RESULT.json atomically: measured, out of memory, or failed. Every rank that fails
first writes RESULT.json.rankN.error.json: {rank, type, message, traceback, time, kind}. From these
files `planner.probes.failures` finds the first cause, here as in the runner.
Exit status: 0 measured, 1 anything else.
"""

import os
import platform
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.probes.evidence import Evidence, RankError, read_errors
from planner.probes.failures import classify
from planner.probes.guardian import write_whole
from planner.probes.packages import allocator_settings
from planner.probes.protocol import Environment, MeasuredRun, Outcome, ProbeResult, ProbeTask
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
        found = RankError.of(error, rank)
        sys.stderr.write(found.traceback)
        found.write(result_path)
        outcome = classify(Evidence(exit_code=1, errors=read_errors(result_path)))
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
    if not isinstance(outcome, MeasuredRun):
        return 1
    run.close()
    return 0


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


def _set_allocator(expandable: bool | None, trainer: str) -> None:
    """Sets the allocator's environment, which torch reads at its first allocation."""
    wanted = TRAINERS[trainer].expandable_segments if expandable is None else expandable
    os.environ.update(allocator_settings(wanted, os.environ))


def end(status: int) -> None:
    """Leaves at once: torch takes a second to tear down, and broken groups may wait for ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(main())
