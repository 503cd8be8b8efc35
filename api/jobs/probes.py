"""Probes as both edges run them: queued in the database, claimed under a lease, measured on a pool,
ended with what came of it.
"""

import contextlib
import json
import logging
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from api.errors import fault, lines_of
from api.input.names import plan_id_of
from api.jobs.leases import Heart, lease, lease_after
from api.jobs.plans import job_of
from api.wiring import Wiring
from planner.calibration.kernels import KernelShape
from planner.errors import ConflictError, PlannerError, SpecError
from planner.ports import Lease, ProbeEnd, ProbeFilter, ProbeRecord
from planner.specs.job import Job
from planner.specs.measurement import question_hash
from planner.units import counted
from probes import guardian
from probes.campaign import Answer, Campaign, ProbeRequest
from probes.folder import BEGIN, TASK
from probes.launch import Watch
from probes.outcome import conclude
from probes.pools.protocol import Pool
from probes.preflight import Need
from probes.protocol import FailureKind, OutOfMemory, ProbeResult

PREFIX = "probe"
IDLE_SECONDS = 2.0
# a service that died under a probe runs it once more; a person's command does not
SERVICE_ATTEMPTS = 2
OOM, BACKEND = "oom", "backend"
WISHED = ("pool", "trainer", "steps")
RUNNING_LOOKED_AT = 200
PAGE = 200  # probes read at once
log = logging.getLogger("planner.probes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One layout to measure, or kernels to time; plan and rank where it comes from a plan."""

    request: ProbeRequest
    job: Job
    plan_id: str | None = None
    plan_rank: int | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs that it takes."""
        if self.request.kernels:
            return max(KernelShape.from_dict(values).num_gpus for values in self.request.kernels)
        assert self.job.layout is not None, "a request's job has a layout"
        return self.job.layout.num_gpus

    @property
    def words(self) -> str:
        """What is measured, for a line."""
        if self.request.kernels:
            return (
                f"{len(self.request.kernels)} {'kernels' if self.num_gpus == 1 else 'collectives'}"
            )
        assert self.job.layout is not None, "a request's job has a layout"
        return self.job.layout.short()


def wished_in(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a job's own `probe` says of how to measure: pool, trainer, steps."""
    wished = job.get("probe")
    return (
        {name: wished[name] for name in WISHED if name in wished}
        if isinstance(wished, Mapping)
        else {}
    )


def ask_job(values: Mapping[str, Any], *, allow_files: bool) -> list[Asked]:
    """From the fields of a ProbeRequest. Raises SpecError."""
    request, job = ProbeRequest.from_user(values, allow_files=allow_files)
    return [Asked(request=request, job=job)]


def ask_plan(wiring: Wiring, plan_id: str, top_k: int, options: Mapping[str, Any]) -> list[Asked]:
    """The best layouts of a stored plan, as its job's `probe` says where the options do not. Raises
    NotFoundError, SpecError.
    """
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id))
    if not 1 <= top_k <= len(plan.ranked):
        raise fault(
            "top_k",
            top_k,
            f"the plan ranks {counted(len(plan.ranked), 'layout')}",
            f"use 1 to {len(plan.ranked)}",
        )
    asked = []
    for entry in plan.ranked[:top_k]:
        values = {**wished_in(plan.job), **options, "job": job_of(plan, entry)}
        request, parsed = ProbeRequest.from_user(values, allow_files=False)
        asked.append(Asked(request=request, job=parsed, plan_id=plan.id, plan_rank=entry.rank))
    return asked


def pool_of(wiring: Wiring, name: str, *, allow_files: bool, field: str = "pool") -> Pool:
    """The pool of this name. Raises SpecError about this field, ProbeError.

    allow_files: whether a pool may read a file of this machine.
    """
    try:
        return wiring.pool(name, files=allow_files)
    except SpecError as error:
        raise SpecError([replace(one, field=field) for one in error.faults]) from None


def check_ready(wiring: Wiring, asked: Sequence[Asked]) -> None:
    """Says at once what would stop every one of these probes, before anything is stored. Raises
    ProbeError, SpecError.
    """
    checked = set[tuple[str, str, str]]()
    for one in asked:
        pool = wiring.pool(one.request.pool)
        tasks = Campaign.of(one.request, one.job, "probe-0", pool.capacity(one.job.cluster)).tasks
        for task in tasks[:1]:  # the others run the same program on the same devices
            if (one.request.pool, one.request.trainer, task.device) not in checked:
                pool.check(Need(job=one.job, trainer=one.request.trainer, device=task.device))
                checked.add((one.request.pool, one.request.trainer, task.device))


def probes_of(wiring: Wiring, parent_id: str) -> list[ProbeRecord]:
    """All probes of a plan, a study or a run of a sweep, oldest first."""
    found: list[ProbeRecord] = []
    cursor = None
    while True:
        page = wiring.probes.list(ProbeFilter(plan_id=parent_id), cursor, PAGE)
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found[::-1]


def enqueue(
    wiring: Wiring, asked: Sequence[Asked], *, max_attempts: int, ours: bool = False
) -> list[ProbeRecord]:
    """Stores them, all or none: queued, or `ours` from the start, so that what a dead command left
    is never run by somebody else.
    """
    records = []
    now = lease(wiring)
    held: Mapping[str, Any] = {
        "state": "running",
        "attempts": 1,
        "owner": now.owner,
        "fencing_token": 1,
        "heartbeat_at": now.now,
        "started_at": now.now,
        "lease_until": now.now + timedelta(seconds=now.seconds),
    }
    for one in asked:
        records.append(
            ProbeRecord(
                id=wiring.ids.new_id(PREFIX),
                created_at=wiring.clock.now(),
                request=one.request.model_dump(mode="json"),
                job_hash=question_hash(one.job),
                model=one.job.model.name,
                gpu=one.job.cluster.gpu.name,
                num_gpus=one.num_gpus,
                layout=one.words,
                pool=one.request.pool,
                plan_id=one.plan_id,
                plan_rank=one.plan_rank,
                max_attempts=max_attempts,
            )
        )
    stored = [replace(record, **held) if ours else record for record in records]
    wiring.probes.add(stored)
    return stored


@dataclass
class ProbeHeart(Heart[ProbeRecord]):
    """A heart that also carries what the probe says and where its files are, to the store and to
    who watches.
    """

    watch: Watch = field(kw_only=True)
    _folder: str | None = field(default=None, kw_only=True)

    def say(self, words: str) -> None:
        """What the probe says, for the next beat and for who watches."""
        self.words = words
        self.watch.progress(words)

    def stay(self, folder: Path) -> None:
        """Where its files are: at once, so that a successor finds them."""
        self._folder = f"{platform.node()}:{folder}"
        self._beat()
        self.watch.folder(folder)

    def _prolong(self, now: Lease) -> bool:
        return self.wiring.probes.heartbeat(
            self.held, now, progress=self.words, folder=self._folder
        )


def run_probe(
    wiring: Wiring, held: ProbeRecord, watch: Watch, *, release_when_stopped: bool = False
) -> ProbeRecord:
    """Measures a claimed probe and stores its end; ConflictError where the lease was lost
    meanwhile.

    release_when_stopped: a probe that was stopped by us, not cancelled by somebody, goes back into
        the queue.
    """
    with ProbeHeart(wiring, held, watch.stop, watch=watch) as heart:
        inner = Watch(stop=watch.stop, progress=heart.say, folder=heart.stay)
        try:
            answer = _measure(wiring, held, inner)
            end = end_of(answer, stopped=watch.stop.is_set())
        except PlannerError as error:
            message = "; ".join(lines_of(error))
            end = ProbeEnd(
                state="cancelled" if watch.stop.is_set() else "failed",
                failure=BACKEND,
                message=message,
            )
    if release_when_stopped and end.state == "cancelled" and not heart.cancelled and not heart.lost:
        return wiring.probes.release(held, counts=False)
    return wiring.probes.finish(held, end, wiring.clock.now())


def _measure(wiring: Wiring, held: ProbeRecord, watch: Watch) -> Answer:
    request, job = ProbeRequest.from_user(held.request, allow_files=False)
    pool = wiring.pool(request.pool)
    return Campaign.of(request, job, held.id, pool.capacity(job.cluster)).run(pool, watch)


def end_of(answer: Answer, *, stopped: bool) -> ProbeEnd:
    """The end that an answer makes. Out of memory is an answer: done, with its class."""
    results = tuple(result.model_dump(mode="json") for result in answer.results)
    failed = answer.failed
    if failed is None:
        return ProbeEnd(
            state="done",
            results=results,
            measurements=answer.measurements,
            message="; ".join(answer.notes) or None,
        )
    outcome = failed.outcome
    if isinstance(outcome, OutOfMemory):
        message = f"out of memory on rank {outcome.rank}: {outcome.message}"
        ended: Literal["done", "failed"] = "done" if answer.measurements else "failed"
        return ProbeEnd(
            state=ended,
            results=results,
            measurements=answer.measurements,
            failure=OOM,
            message=message,
        )
    assert outcome.status == "failed", "what is measured has not failed"
    interrupted = outcome.kind == FailureKind.INTERRUPTED and stopped
    message = outcome.message if outcome.rank is None else f"rank {outcome.rank}: {outcome.message}"
    return ProbeEnd(
        state="cancelled" if interrupted else "failed",
        results=results,
        failure=outcome.kind.value,
        message=message,
    )


# ---- after a death -------------------------------------------------------------------------------


def recover(wiring: Wiring, gone: Callable[[str | None], bool] | None = None) -> list[ProbeRecord]:
    """Concludes the probes whose owner has died: what their folder holds is kept, the rest goes
    back to the queue or failed.

    Dead is whose lease has ended, and at once whom `gone` knows to be.
    """
    concluded = []
    expired = list(wiring.probes.expired(wiring.clock.now()))
    if gone is not None:
        running = wiring.probes.list(ProbeFilter(state="running"), None, RUNNING_LOOKED_AT).items
        expired += [
            record
            for record in running
            if gone(record.owner) and record.id not in {each.id for each in expired}
        ]
    for dead in expired:
        heir = wiring.probes.take_over(dead.id, lease_after(wiring, dead.lease_until))
        if heir is not None:
            with contextlib.suppress(ConflictError):
                concluded.append(_conclude(wiring, dead, heir))
    return concluded


def _conclude(wiring: Wiring, dead: ProbeRecord, heir: ProbeRecord) -> ProbeRecord:
    result = _left_behind(heir)
    # one of several runs is not the answer
    whole = result is not None and result.task.id == heir.id
    if result is not None and whole and result.outcome.status in ("ok", OOM):
        failed = None if result.outcome.status == "ok" else result
        answer = Answer(results=(result,), measurements=(result.measurement(),), failed=failed)
        return wiring.probes.finish(heir, end_of(answer, stopped=False), wiring.clock.now())
    if heir.cancel_requested:
        end = ProbeEnd(
            state="cancelled",
            failure=FailureKind.INTERRUPTED.value,
            message="cancelled while its owner was dead",
        )
        return wiring.probes.finish(heir, end, wiring.clock.now())
    if heir.attempts < heir.max_attempts:
        return wiring.probes.release(heir, counts=True)
    results = () if result is None else (result.model_dump(mode="json"),)
    message = f"its runner ({dead.owner}) died; everything that it had started was ended"
    kind = FailureKind.INTERRUPTED.value
    if (
        result is not None
        and result.outcome.status == "failed"
        and result.outcome.kind != FailureKind.INTERRUPTED
    ):
        kind, message = result.outcome.kind.value, result.outcome.message
    return wiring.probes.finish(
        heir,
        ProbeEnd(state="failed", results=results, failure=kind, message=message),
        wiring.clock.now(),
    )


def _left_behind(heir: ProbeRecord) -> ProbeResult | None:
    """What the folder of the last run says, on the host where it lies, after nobody of the probe is
    left.
    """
    host, _, path = (heir.folder or "").partition(":")
    folder = Path(path)
    if host != platform.node() or not (folder / TASK).is_file() or not (folder / BEGIN).is_file():
        return None
    try:
        guardian.kill_all(str(json.loads((folder / BEGIN).read_text(encoding="utf-8"))["token"]))
        return conclude(folder)
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: its folder %s cannot be read: %s", heir.id, folder, error)
        return None


# ---- many at once --------------------------------------------------------------------------------


def run_all(
    wiring: Wiring, held: Sequence[ProbeRecord], watches: Mapping[str, Watch]
) -> list[ProbeRecord]:
    """Runs these probes at once, as far as the pool has devices, and waits for all. An interruption
    ends them first, then goes on.
    """
    ended: dict[str, ProbeRecord] = {}
    bugs: list[BaseException] = []
    # a join that Ctrl-C interrupts takes the thread for dead (CPython 3.11, bpo-45274)
    done = [threading.Event() for _ in held]

    def work(record: ProbeRecord, mine: threading.Event) -> None:
        try:
            ended[record.id] = run_probe(wiring, record, watches[record.id])
        except BaseException as error:
            bugs.append(error)
        finally:
            mine.set()

    for record, mine in zip(held, done, strict=True):
        threading.Thread(target=work, args=(record, mine), daemon=True).start()
    try:
        for mine in done:
            mine.wait()
    except KeyboardInterrupt:
        for watch in watches.values():
            watch.stop.set()
        for mine in done:
            mine.wait()
        raise
    if bugs:
        raise bugs[0]
    return [ended[record.id] for record in held]
