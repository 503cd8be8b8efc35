"""Reads a probe's result from its folder once all its processes have ended.

The result is what the program wrote or, without that, what its logs and error files show.
"""

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planner.probes.evidence import Evidence, read_errors, read_stacks
from planner.probes.failures import classify
from planner.probes.folder import (
    ALL_OTHERS,
    BEGIN,
    END,
    KERNEL_LOGS,
    MOST_BYTES,
    NODE_ENDS,
    RESULT,
    TASK,
    read_whole,
)
from planner.probes.guardian import LOG_BYTES, write_whole
from planner.probes.protocol import (
    Environment,
    Failed,
    FailureKind,
    MeasuredRun,
    Outcome,
    ProbeResult,
    ProbeTask,
    found_by,
)
from planner.probes.trainers import trainer_of


class Begin(BaseModel):
    """Facts known before the start.

    started: seconds since the epoch.
    token: carried by every process of the probe.
    lost_seconds: of runs of the same probe that the pool ended before this one.
    lost: a note for each of them.
    """

    model_config = ConfigDict(frozen=True)

    started: float = Field(default_factory=time.time)
    num_gpus: int
    token: str
    gpu_name: str | None = None
    lost_seconds: float = 0.0
    lost: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Begin":
        return cls.model_validate_json(read_whole(path))


class End(BaseModel):
    """How the guardian ended the probe.

    left: processes that it could not kill. stopped: ranks that a signal had stopped.
    """

    model_config = ConfigDict(frozen=True)

    reason: str
    seconds: float
    exit_code: int | None = None
    left: tuple[int, ...] = ()
    message: str = ""
    stopped: tuple[int, ...] = ()


def read_end(folder: Path, begin: Begin) -> End:
    """Reads how the guardian ended the probe.

    Without an end file the guardian itself was killed, at the latest when the folder was last
    written. If every node had a guardian, the node that failed counts; the others were stopped
    because of it.
    """
    own = end_in(folder / END)
    nodes = [end for path in sorted(folder.glob(NODE_ENDS)) if (end := end_in(path)) is not None]
    if own is not None and (own.reason != "exit" or not nodes):
        return own
    telling = (
        [end for end in nodes if end.reason == "time-limit"]
        or [end for end in nodes if end.exit_code]
        or nodes
    )
    if not telling:
        last = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
        return End(reason="guardian-gone", seconds=max(0.0, last - begin.started))
    stopped = tuple(sorted({one for end in nodes for one in end.stopped}))
    return telling[0].model_copy(update={"stopped": stopped})


def end_in(path: Path) -> End | None:
    """Reads an end file; None if it is not there, or not whole."""
    try:
        return End.model_validate_json(read_whole(path))
    except (OSError, ValueError):
        return None


def conclude(folder: Path) -> ProbeResult:
    """The result of a probe whose processes have ended, written to its folder, whoever ran it."""
    task = ProbeTask.model_validate_json(read_whole(folder / TASK))
    begin = Begin.read(folder / BEGIN)
    end = read_end(folder, begin)
    if end.reason == "not-started":
        missing = Failed(kind=FailureKind.IMPORT, message=end.message)
        return write_result(folder, task, begin, missing, end)
    evidence = Evidence(
        reason=end.reason,
        exit_code=end.exit_code,
        time_limit_seconds=task.time_limit_seconds,
        errors=read_errors(folder / RESULT),
        log="\n".join(filter(None, map(read_log, sorted(folder.glob("output*.log"))))),
        stacks=read_stacks(folder / RESULT),
        kernel="\n".join(map(read_log, sorted(folder.glob(KERNEL_LOGS)))),
        stopped=end.stopped,
        message=end.message,
    )
    trained = trainer_of(task.trainer).outcome(task, folder, evidence)
    if trained is not None:
        return write_result(folder, task, begin, trained[0], end, trained[1])
    written = _written(folder / RESULT, task)
    environment = None if written is None else written.environment
    believed = not evidence.errors and end.reason == "exit"
    if written is not None and (written.outcome.status == "ok" or believed):
        outcome, notes = written.outcome, written.notes
        return write_result(folder, task, begin, outcome, end, environment, notes=notes)
    failed = _too_large(folder / RESULT) or classify(evidence)
    return write_result(folder, task, begin, failed, end, environment)


def _too_large(path: Path) -> Failed | None:
    """A result file that nobody reads."""
    size = path.stat().st_size if path.is_file() else 0
    if size <= MOST_BYTES:
        return None
    message = f"its result file {path} has {size:,} bytes, more than {MOST_BYTES:,}: it is not read"
    return Failed(kind=FailureKind.CRASH, rank=0, message=message)


def write_result(
    folder: Path,
    task: ProbeTask,
    begin: Begin,
    outcome: Outcome,
    end: End | None = None,
    environment: Environment | None = None,
    *,
    notes: Sequence[str] = (),
) -> ProbeResult:
    """Returns the whole result, and writes it to the folder unless the disk is full.

    Times are the guardian's, from before the start until the program's end, and of lost runs.
    """
    seconds = end.seconds if end is not None else max(0.0, time.time() - begin.started)
    seconds += begin.lost_seconds
    here = environment or found_by(folder, begin.gpu_name)
    others = "; ".join(map(read_log, sorted(folder.glob(ALL_OTHERS))))
    result = ProbeResult(
        task=task,
        outcome=outcome,
        environment=here.model_copy(update={"shared": True}) if others else here,
        started_at=datetime.fromtimestamp(begin.started, UTC).isoformat(),
        wall_seconds=seconds,
        gpu_seconds=seconds * begin.num_gpus,
        complete=outcome.status == "ok",
        notes=[*notes, *([others] if others else []), *begin.lost, *_notes(folder, outcome, end)],
    )
    with suppress(OSError):  # what the program wrote stays
        write_whole(folder / RESULT, result.model_dump_json(indent=1))
    return result


def _notes(folder: Path, outcome: Outcome, end: End | None) -> list[str]:
    notes = []
    if end is not None and end.left:
        notes.append(f"processes {', '.join(map(str, end.left))} could not be killed")
    if end is not None and outcome.status == "ok" and (end.reason != "exit" or end.exit_code):
        code = f"exit code {end.exit_code}" if end.reason == "exit" else end.reason
        notes.append(f"the program ended with {code} after it had written its result")
    if outcome.status != "ok":
        notes.append(f"its files are in {folder}")
    return notes


def _written(path: Path, task: ProbeTask) -> ProbeResult | None:
    """Reads what rank 0 wrote for this task; an impossible claim of success becomes a failure."""
    try:
        result = ProbeResult.model_validate_json(read_whole(path))
    except (OSError, ValidationError):
        return None
    if result.task.id != task.id:
        return None
    doubt = _doubt(result) if isinstance(result.outcome, MeasuredRun) else None
    return result if doubt is None else result.model_copy(update={"outcome": doubt})


def _doubt(result: ProbeResult) -> Failed | None:
    """Why a run that ended with exit 0 still does not count; None if it counts.

    It needs timed steps and a finite loss, unless its inputs are not real data (emulated, fake).
    """
    outcome, task = result.outcome, result.task
    assert isinstance(outcome, MeasuredRun)
    if task.fake_tensors:
        return None
    if task.kernels:
        rows = outcome.timings or []
        said = next((str(row["message"]) for row in rows if row.get("message")), "it wrote no line")
        timed = any(row["status"] == "ok" for row in rows)
        message = f"no kernel could be timed: {said}"
        return None if timed else Failed(kind=FailureKind.CRASH, rank=0, message=message)
    if not (outcome.step_seconds_each and (outcome.step_seconds or 0.0) > 0.0):
        message = "the program ended without a timed step"
        return Failed(kind=FailureKind.CRASH, rank=0, message=message)
    bad = [number for number, loss in enumerate(outcome.losses) if not math.isfinite(loss)]
    if bad and task.emulate_rank is None:
        message = f"the loss of step {bad[0]} is {outcome.losses[bad[0]]}"
        return Failed(kind=FailureKind.NON_FINITE_LOSS, rank=0, message=message)
    return None


def read_log(path: Path) -> str:
    """Reads a log; of a very long one its beginning and its end."""
    with suppress(OSError), path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        if size <= 2 * LOG_BYTES:
            return stream.read().decode("utf-8", "replace")
        head = stream.read(LOG_BYTES)
        stream.seek(-LOG_BYTES, os.SEEK_END)
        return (head + b"\n[...]\n" + stream.read()).decode("utf-8", "replace")
    return ""
