"""Recovery of probes whose process crashed: reads their results, or runs them again."""

import contextlib
import json
import logging
import platform
from collections.abc import Iterator
from pathlib import Path

from planner.api.errors import lines_of
from planner.api.jobs.leases import Claimed, Observer, abandoned, lost_workers, take_over
from planner.api.jobs.owners import was_killed
from planner.api.jobs.probes import OOM, end_of
from planner.api.storage.job_records import OPEN, JobEnd, ProbeRecord, TaskRecord
from planner.api.storage.queue import LOST_WORKERS
from planner.api.wiring import Wiring
from planner.errors import ConflictError, NotFoundError, PlannerError, StoreError
from planner.probes import guardian
from planner.probes.campaign import ProbeAnswer
from planner.probes.folder import BEGIN, TASK
from planner.probes.outcome import conclude
from planner.probes.pools.protocol import Pool
from planner.probes.protocol import FailureKind, ProbeResult

log = logging.getLogger("planner.probes")


def recover(wiring: Wiring, *, check_processes: bool = False) -> list[ProbeRecord]:
    """Ends the probes that nobody works on any more (see `abandoned`); returns them.

    A result in the probe's folder is kept. A probe that goes on without its runner, as on Slurm,
    goes back to the queue for the next worker to await, if it may be attempted again or a sweep's
    run wants it. Else it is ended, and goes back to the queue or has failed.
    """
    concluded = []
    for crashed in abandoned(wiring.probes, check_processes=check_processes):
        ours = take_over(wiring.probes, crashed)
        if ours is not None:
            with contextlib.suppress(ConflictError):
                concluded.append(_conclude(wiring, crashed, ours))
    return concluded


@contextlib.contextmanager
def at_work(
    wiring: Wiring, record: TaskRecord, observer: Observer
) -> Iterator[Claimed[TaskRecord]]:
    """Context of a claimed task; first ends the probes that crashed owners left running.

    A PlannerError inside is stored as the failure that ends the task, and raised; a StoreError
    leaves the task as it is: another process owns it, or it goes on once the database answers.
    """
    recover(wiring, check_processes=True)
    with Claimed(wiring.tasks, record, observer.stop) as claimed:
        try:
            yield claimed
            claimed.renew()  # tells of a cancellation that came after the last heartbeat
        except StoreError:
            raise
        except PlannerError as error:
            message = "; ".join(lines_of(error))
            claimed.finish(JobEnd(state="failed", failure=error.kind, message=message))
            raise


def _conclude(wiring: Wiring, crashed: ProbeRecord, ours: ProbeRecord) -> ProbeRecord:
    claimed = Claimed(wiring.probes, ours)
    pool = _pool_with(wiring, ours)
    if pool is not None and not ours.cancel_requested and _is_awaited(wiring, ours):
        return claimed.release()
    if pool is not None:
        pool.end_left(ours.id)
    result = _result_left(ours)
    # one of several runs is not the answer
    whole = result is not None and result.task.id == ours.id
    if result is not None and whole and result.outcome.status in ("ok", OOM):
        failed = None if result.outcome.status == "ok" else result
        answer = ProbeAnswer(results=(result,), measurements=(result.measurement(),), failed=failed)
        end = end_of(answer, wiring.clock.now(), stopped=False, asked_by=ours.asked_by)
        return claimed.finish(end)
    interrupted = FailureKind.INTERRUPTED.value
    if ours.cancel_requested:
        message = "cancelled after its owner had crashed"
        return claimed.finish(JobEnd(state="cancelled", failure=interrupted, message=message))
    results = () if result is None else (result.model_dump(mode="json"),)
    kind = interrupted
    message = f"its runner ({crashed.owner}) died; everything that it had started was ended"
    outcome = None if result is None else result.outcome
    if outcome is not None and outcome.status == "failed" and outcome.kind.value != interrupted:
        kind, message = outcome.kind.value, outcome.message
    elif ours.max_attempts > 1:
        kind, message = LOST_WORKERS, lost_workers(ours.attempts, crashed.owner)
    end = JobEnd(state="failed", results=results, failure=kind, message=message)
    counts = kind != LOST_WORKERS or not was_killed(crashed.owner)
    return wiring.probes.retry(ours, end, counts=counts)


def _is_awaited(wiring: Wiring, record: ProbeRecord) -> bool:
    """Whether somebody runs the probe again: any worker, or the next owner of a sweep's run."""
    if record.max_attempts > 1 or record.plan_id is None:
        return record.max_attempts > 1
    try:
        parent = wiring.tasks.get(record.plan_id)
    except NotFoundError:  # a plan
        return False
    return parent.kind == "sweep" and parent.state in OPEN


def _pool_with(wiring: Wiring, record: ProbeRecord) -> Pool | None:
    """Pool in which a probe still runs after its runner crashed; None if it does not."""
    try:
        pool = wiring.pool(record.pool)
        return pool if pool.is_left(record.id) else None
    except PlannerError:  # it cannot be opened here, so it says nothing
        return None


def _result_left(record: ProbeRecord) -> ProbeResult | None:
    """Reads the result in the folder of the last run, on the host that has it.

    Every process of the probe is ended first.
    """
    host, _, path = (record.folder or "").partition(":")
    folder = Path(path)
    if host != platform.node():
        return None
    with contextlib.suppress(OSError):  # an owner that lives may be about to start it
        (folder / guardian.STOP).touch()
    if not (folder / TASK).is_file() or not (folder / BEGIN).is_file():
        return None
    try:
        guardian.kill_all(str(json.loads((folder / BEGIN).read_text(encoding="utf-8"))["token"]))
        return conclude(folder)
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: its folder %s cannot be read: %s", record.id, folder, error)
        return None
