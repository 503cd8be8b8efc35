"""Plans that spend probes: a study is a task of the queue and ends in a stored plan.

A study whose process crashed goes on with what it has measured.
"""

from planner.api.calibration.update import calibration_for_study
from planner.api.identity import asker, hash_of_job
from planner.api.input.jobs import parse_job
from planner.api.jobs.leases import Observer, new_lease, take_abandoned
from planner.api.jobs.plans import study_of
from planner.api.jobs.probe_recovery import at_work
from planner.api.jobs.probes import pool_of, probes_of
from planner.api.jobs.study_probes import StudyProbes
from planner.api.own_entries import with_own
from planner.api.storage.job_records import OPEN, EndState, JobEnd, JobState, TaskRecord
from planner.api.storage.room import check_quota
from planner.api.storage.tasks import gpu_seconds_of
from planner.api.wiring import Wiring
from planner.errors import fault
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.probes.preflight import Need
from planner.specs.job import Job
from planner.specs.plan import Plan
from planner.study.measured_search import Probing
from planner.units import counted

PREFIX = "plan"
WARMUP_STEPS = 3  # of a request that does not say


def ask_study(wiring: Wiring, values: object, *, allow_files: bool, ours: bool) -> TaskRecord:
    """Starts a study of a job, or takes over an abandoned one of the same job.

    ours: it is claimed by us from the start; else it waits in the queue.

    Raises SpecError for a job or pool that cannot be, QuotaError.
    """
    job = parse_job(with_own(wiring, values), allow_files=allow_files)
    check_pool(wiring, job, allow_files=allow_files, wait=ours)  # before anything is stored
    job_hash = hash_of_job(job.request)
    if ours and (unfinished := _unfinished(wiring, job_hash)) is not None:
        return unfinished
    assert job.probe is not None, "its pool was checked"
    who, seconds = asker(), job.probe.gpu_seconds(job.cluster.num_gpus)
    record = TaskRecord(
        id=wiring.ids.new_id(PREFIX),
        kind="study",
        created_at=wiring.clock.now(),
        request=dict(job.request),
        job_hash=job_hash,
        asked_by=who.name,
        gpu_seconds=seconds,
        priority=job.probe.priority,
    )
    return wiring.tasks.add(
        [record],
        lease=new_lease() if ours else None,
        check=lambda session: check_quota(session, who, plans=1, gpu_seconds=seconds),
    )[0]


def check_pool(wiring: Wiring, job: Job, *, allow_files: bool, wait: bool) -> None:
    """Raises SpecError or ProbeError where the job's pool cannot run its probes."""
    if job.probe is None:
        raise fault("probe", None, "is required to spend probes", "add probe: {max_probes: 5}")
    pool = pool_of(wiring, job.probe.pool, allow_files=allow_files, field="probe.pool")
    if not pool.capacity(job.cluster).num_devices:
        remedy = "probe from a machine that has one, through slurm, or try the loop with "
        rule = f"has no {job.cluster.gpu.name}"
        raise fault("probe.pool", job.probe.pool, rule, f"{remedy}cluster.gpu: cpu")
    pool.check(Need.of(job, job.probe.trainer), wait=wait)


def _unfinished(wiring: Wiring, job_hash: str) -> TaskRecord | None:
    """Claims the newest study of the same job that is abandoned, or waits."""
    same = {"kind": "study", "job_hash": job_hash}
    ours = take_abandoned(wiring.tasks, **same)
    queued = wiring.tasks.list(limit=1, state="queued", **same).items
    if ours is not None or not queued:
        return ours
    return wiring.tasks.claim(new_lease(), job_id=queued[0].id)


def run_study(wiring: Wiring, record: TaskRecord, observer: Observer) -> Plan | None:
    """Spends a claimed study's probes and stores its plan; the best so far where it was stopped.

    None where it went back into the queue. Raises what planning raises, and StoreError, as
    `at_work` does.
    """
    with at_work(wiring, record, observer) as claimed:
        job = read_job(record.request, allow_files=False)
        plan = _plan(StudyProbes(wiring=wiring, job=job, observer=observer, claimed=claimed))
    if observer.releases() and not claimed.cancelled:
        claimed.release()
        return None
    state: EndState = "cancelled" if claimed.cancelled else "done"
    used = sum(gpu_seconds_of(one) for one in probes_of(wiring, record.id))
    stopped = (plan.probing or {}).get("stopped")
    claimed.finish(JobEnd(state=state, message=stopped, plan=(plan, job), gpu_seconds=used))
    return plan


def _plan(probes: StudyProbes) -> Plan:
    """Runs the study and returns the plan with all of its measurements."""
    wiring, job, record = probes.wiring, probes.job, probes.claimed.record
    assert job.probe is not None, "a study has probes to spend"
    resumed, asked_before, kernel_seconds = probes.done_before()
    own_ids = {one.id for one in resumed}
    known = [one for one in probes.measured_before() if one.id not in own_ids]
    pool = wiring.pool(job.probe.pool)
    pool.check(Need.of(job, job.probe.trainer))
    capacity = pool.capacity(job.cluster)
    real = capacity.measures  # else only what was recorded can be asked
    probing = Probing(
        measure=probes.measure,
        known=known,
        resumed=resumed,
        asked_before=asked_before,
        on_event=probes.on_event,
        should_stop=probes.observer.stop.is_set,
        num_devices=capacity.num_devices,
        emulates=real and capacity.device == "cuda",
        steps=job.probe.steps + WARMUP_STEPS,
        refuses=probes.refusal if real else None,
        timed=probes.timed_before(),
        kernel_seconds_before=kernel_seconds,
    )
    counted_here = {one.id for one in known}
    plan = recommend(
        job,
        now=wiring.clock.now,
        progress=probes.observer.on_message,
        calibration=calibration_for_study(
            wiring, job, counted_here, record.asked_by or "", until=record.started_at
        ),
        probing=probing,
        plan_id=record.id,
    )
    probes.update_calibration()
    return plan


def end_plan(wiring: Wiring, plan_id: str) -> tuple[JobState, list[str], str]:
    """Cancels the study of a plan and what is queued or runs of its probes.

    (state of its study, "done" of a plan on paper; ids of its cancelled probes; what was done).

    Raises NotFoundError; ForbiddenError where another key asked for any of them.
    """
    who, study = asker(), study_of(wiring, plan_id)
    owner = wiring.store.asked_by(plan_id) if study is None else study.asked_by
    was_open = study is not None and study.state in OPEN
    probes = [record for record in probes_of(wiring, plan_id) if record.state in OPEN]
    if was_open or not probes:
        who.check_owner("plan", plan_id, owner)
    for record in probes:
        who.check_owner("probe", record.id, record.asked_by)
    if study is not None:
        study = wiring.tasks.cancel(plan_id, who.name)
    ended = [wiring.probes.cancel(record.id, who.name) for record in probes]
    message = "nothing was running for it: nothing was cancelled, and what is stored stays"
    if was_open or ended:
        parts = ("its study" * was_open, counted(len(ended), "probe") if ended else "")
        message = f"cancelled: {' and '.join(filter(None, parts))}"
    return "done" if study is None else study.state, [record.id for record in ended], message
