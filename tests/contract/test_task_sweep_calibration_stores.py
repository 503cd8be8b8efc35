"""One suite for tasks, sweeps and calibrations: in memory,
SQLite file, PostgreSQL.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from planner.api.storage.calibrations import SqlCalibrationStore
from planner.api.storage.job_records import Lease, TaskEnd, TaskFilter, TaskRecord
from planner.api.storage.learning import SqlLearningStore
from planner.api.storage.measurements import SqlMeasurementStore
from planner.api.storage.records import CalibrationRecord, Subject, SweepRecord
from planner.api.storage.sweeps import SqlSweepStore
from planner.api.storage.tasks import SqlTaskStore
from planner.errors import ConflictError, NotFoundError, SpecError
from planner.intake.jobs import read_job
from planner.specs.measurement import Measured, Measurement
from tests.conftest import JOB, LAYOUT
from tests.stand_ins.ageing import age

NOW = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)


def task(number: int, **fields: object) -> TaskRecord:
    record = TaskRecord(
        id=f"plan-{number:03d}",
        kind="study",
        created_at=NOW + timedelta(seconds=number),
        request={"model": "llama3-8b"},
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def lease(owner: str, seconds: float = 30.0) -> Lease:
    return Lease(owner=owner, seconds=seconds)


class TestTasks:
    def test_a_task_goes_through_its_life(self, engine: Engine) -> None:
        store = SqlTaskStore(engine)
        store.add([task(1), task(2)])
        held = store.claim(lease("a"))
        assert held is not None
        assert (held.id, held.state, held.attempts, held.fencing_token) == (
            "plan-001",
            "running",
            1,
            1,
        )
        assert store.heartbeat(held, lease("a"), progress="probe 1 of 3") is False
        assert store.get(held.id).progress == "probe 1 of 3"
        ended = store.finish(
            held, TaskEnd(state="done", result={"winner": "fsdp 8"}, message="stopped")
        )
        assert (ended.state, ended.result) == ("done", {"winner": "fsdp 8"})
        assert ended.finished_at is not None
        assert [each.id for each in store.list(TaskFilter(state="queued")).items] == ["plan-002"]

    def test_nobody_gets_the_same_task_twice(self, engine: Engine) -> None:
        store = SqlTaskStore(engine)
        store.add([task(number) for number in range(6)])
        if engine.url.database is None:
            claimed = [store.claim(lease(str(number))) for number in range(8)]
        else:
            with ThreadPoolExecutor(8) as pool:
                claimed = list(pool.map(lambda number: store.claim(lease(str(number))), range(8)))
        ids = [each.id for each in claimed if each is not None]
        assert len(ids) == len(set(ids)) == 6

    def test_who_lost_the_lease_changes_nothing(self, engine: Engine) -> None:
        store = SqlTaskStore(engine)
        store.add([task(1)])
        first = store.claim(lease("a"))
        assert first is not None
        age(engine, 31)
        assert [each.id for each in store.expired()] == ["plan-001"]
        second = store.take_over(first, lease("b"), crashed=False)
        assert second is not None
        assert (second.fencing_token, second.attempts) == (2, 1)
        with pytest.raises(ConflictError, match="lease of a was lost"):
            store.finish(first, TaskEnd(state="failed"))
        with pytest.raises(ConflictError, match="owned by b: the lease of a was lost"):
            store.add_event(first, {"message": "late"}, NOW)
        assert store.events("plan-001") == ()
        assert store.add_event(second, {}, NOW).number == 1
        assert store.release(second).state == "queued"

    def test_cancelling(self, engine: Engine) -> None:
        store = SqlTaskStore(engine)
        store.add([task(1), task(2)])
        held = store.claim(lease("a"))
        assert held is not None
        assert store.cancel(held.id).state == "running"
        assert store.heartbeat(held, lease("a")) is True
        assert store.cancel("plan-002").state == "cancelled"
        with pytest.raises(NotFoundError):
            store.cancel("plan-nope")

    def test_events_are_numbered_and_read_on(self, engine: Engine) -> None:
        store = SqlTaskStore(engine)
        store.add([task(1), task(2)])
        first, second = store.claim(lease("a")), store.claim(lease("a"))
        assert first is not None
        assert second is not None
        assert [store.add_event(first, {"n": n}, NOW).number for n in range(3)] == [1, 2, 3]
        assert store.add_event(second, {}, NOW).number == 1
        assert [event.body for event in store.events("plan-001", after=1)] == [{"n": 1}, {"n": 2}]
        assert store.events("plan-001", after=3) == ()
        with pytest.raises(NotFoundError):
            store.add_event(task(3), {}, NOW)

    def test_pages_and_filters(self, engine: Engine) -> None:
        store = SqlTaskStore(engine)
        store.add([task(number, job_hash="a" * 64 if number % 2 else None) for number in range(5)])
        page = store.list(limit=3)
        assert [each.id for each in page.items] == ["plan-004", "plan-003", "plan-002"]
        assert [each.id for each in store.list(cursor=page.next_cursor).items] == [
            "plan-001",
            "plan-000",
        ]
        assert [each.id for each in store.list(TaskFilter(job_hash="a" * 64)).items] == [
            "plan-003",
            "plan-001",
        ]
        with pytest.raises(SpecError, match="cursor"):
            store.list(cursor="nonsense")


def sweep(**fields: object) -> SweepRecord:
    record = SweepRecord(
        id="sweep-1", created_at=NOW, name="nightly", spec={"jobs": []}, next_due_at=NOW
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def night(number: int) -> TaskRecord:
    return task(number, kind="sweep", parent_id="sweep-1", due_at=NOW)


class TestSweeps:
    def test_a_moment_becomes_one_task_however_many_look(self, engine: Engine) -> None:
        sweeps, tasks = SqlSweepStore(engine), SqlTaskStore(engine)
        sweeps.add(sweep())
        (due,) = sweeps.due(NOW)
        tomorrow = NOW + timedelta(days=1)
        assert sweeps.due(NOW - timedelta(seconds=1)) == ()
        assert [sweeps.advance(due, tomorrow, night(number)) for number in (1, 2)] == [True, False]
        assert [each.id for each in tasks.list(TaskFilter(parent_id="sweep-1")).items] == [
            "plan-001"
        ]
        assert sweeps.get("sweep-1").next_due_at == tomorrow

    def test_a_moment_cannot_be_worked_on_twice(self, engine: Engine) -> None:
        SqlSweepStore(engine).add(sweep())
        tasks = SqlTaskStore(engine)
        tasks.add([night(1)])
        with pytest.raises(ConflictError):
            tasks.add([night(2)])

    def test_a_run_that_waits_for_the_one_before_it_holds_up_nobody(self, engine: Engine) -> None:
        tasks = SqlTaskStore(engine)
        SqlSweepStore(engine).add(sweep())
        following = replace(night(2), due_at=NOW + timedelta(days=1))
        tasks.add([night(1), following, task(3)])
        held = tasks.claim(lease("a"))
        assert held is not None
        other = tasks.claim(lease("b"))
        assert [held.id, other and other.id] == ["plan-001", "plan-003"]
        assert tasks.claim(lease("b")) is None
        tasks.finish(held, TaskEnd(state="done"))
        last = tasks.claim(lease("b"))
        assert (last and last.id) == "plan-002"

    def test_pause_resume_cancel(self, engine: Engine) -> None:
        sweeps = SqlSweepStore(engine)
        sweeps.add(sweep())
        assert sweeps.change("sweep-1", "paused", None).state == "paused"
        assert sweeps.due(NOW) == ()
        assert sweeps.change("sweep-1", "active", NOW).next_due_at == NOW
        sweeps.change("sweep-1", "cancelled", None)
        with pytest.raises(ConflictError, match="was cancelled"):
            sweeps.change("sweep-1", "active", NOW)
        with pytest.raises(NotFoundError):
            sweeps.get("sweep-2")
        with pytest.raises(ConflictError):
            sweeps.add(sweep())
        assert [each.id for each in sweeps.list().items] == ["sweep-1"]


H100 = Subject(trainer="torchtitan", gpu="h100-sxm-80gb")


def measurement(number: int) -> Measurement:
    return Measurement(
        id=f"measurement-{number:03d}",
        created_at=(NOW + timedelta(seconds=number)).isoformat(),
        job=read_job({**JOB, "layout": LAYOUT}),
        measured=Measured(rung="probed", step_seconds=2.5),
        software={"torch": "2.13"},
    )


def calibration(number: int, subject: Subject = H100) -> CalibrationRecord:
    return CalibrationRecord(
        id=f"c-{number}",
        created_at=NOW + timedelta(seconds=number),
        trainer=subject.trainer,
        gpu=subject.gpu,
        owner=subject.owner,
        software={"torch": "2.13"},
        num_runs=number,
        document={"shifts": [0.1]},
    )


class TestCalibrations:
    @pytest.fixture
    def store(self, engine: Engine) -> SqlCalibrationStore:
        return SqlCalibrationStore(engine, "basis")

    @pytest.fixture
    def learning(self, engine: Engine) -> SqlLearningStore:
        return SqlLearningStore(engine, "basis")

    def test_the_one_in_use_of_a_subject(
        self, store: SqlCalibrationStore, learning: SqlLearningStore
    ) -> None:
        for number, subject in enumerate((H100, H100, replace(H100, gpu="cpu"))):
            put = calibration(number, subject)
            assert store.put_in_use(subject, put, learning.inputs(subject), put.created_at)
        latest = store.latest(H100)
        assert latest is not None
        assert (latest.id, latest.document, latest.software) == (
            "c-1",
            {"shifts": [0.1]},
            {"torch": "2.13"},
        )
        assert store.get("c-0").superseded_at == NOW + timedelta(seconds=1)
        assert store.latest(Subject(trainer="megatron", gpu="cpu")) is None
        assert store.latest(replace(H100, owner="ann")) is None
        then = store.latest(H100, until=NOW + timedelta(seconds=0.5))
        assert then is not None
        assert then.id == "c-0"
        assert store.latest(H100, until=NOW - timedelta(days=1)) is None
        assert [each.id for each in store.list(limit=2).items] == ["c-2", "c-1"]
        store.save(replace(latest, num_runs=99))
        assert store.get("c-1").num_runs == 1
        with pytest.raises(NotFoundError):
            store.get("c-9")

    def test_one_before_may_be_in_use_again_or_none(
        self, store: SqlCalibrationStore, learning: SqlLearningStore
    ) -> None:
        inputs = learning.inputs(H100)
        for at, number in enumerate((0, 1, 0)):
            assert store.put_in_use(H100, calibration(number), inputs, NOW + timedelta(seconds=at))
        latest = store.latest(H100)
        assert latest is not None
        assert (latest.id, latest.superseded_at) == ("c-0", None)
        assert store.put_in_use(H100, None, inputs, NOW + timedelta(seconds=9))
        assert store.latest(H100) is None

    def test_one_of_older_runs_is_refused(
        self, engine: Engine, store: SqlCalibrationStore, learning: SqlLearningStore
    ) -> None:
        older = learning.inputs(H100)
        runs = SqlMeasurementStore(engine)
        runs.add([measurement(1)])
        assert not store.put_in_use(H100, calibration(1), older, NOW)
        assert store.latest(H100) is None
        newer = learning.inputs(H100)
        assert [run.id for run in newer.runs] == ["measurement-001"]
        assert store.put_in_use(H100, calibration(2), newer, NOW)
        runs.delete("measurement-001")
        assert not store.put_in_use(H100, calibration(3), newer, NOW)

    def test_runs_that_do_not_count_are_no_inputs(
        self, engine: Engine, learning: SqlLearningStore
    ) -> None:
        runs = SqlMeasurementStore(engine)
        told = [
            {"refused": "impossible"},
            {"asked_by": "ann", "shared": False},
            {"measured": Measured(status="oom", rung="probed")},
            {"measured": Measured(rung="emulated", step_seconds=2.0)},
            {"measured": Measured(rung="probed", step_seconds=2.0, throttled=True)},
            {"measured": Measured(rung="probed", step_seconds=2.0, allocator_retries=1)},
            {"measured": Measured(rung="probed", step_seconds=2.0, allocator_retries=0)},
            {},
        ]
        runs.add([measurement(n).model_copy(update=each) for n, each in enumerate(told)])
        counting = ["measurement-007", "measurement-006"]
        assert [run.id for run in learning.inputs(H100).runs] == counting
        anns = learning.inputs(replace(H100, owner="ann")).runs
        assert [run.id for run in anns] == [*counting, "measurement-001"]
        assert learning.owners("torchtitan", "h100-sxm-80gb") == ["ann"]
        assert runs.share(asked_by="bob") == []
        assert runs.share(asked_by="ann") == ["measurement-001"]
        assert len(learning.inputs(H100).runs) == 3
        runs.refuse("measurement-007", "impossible")
        left = [run.id for run in learning.inputs(H100).runs]
        assert left == ["measurement-006", "measurement-001"]
        assert runs.get("measurement-007").refused == "impossible"

    def test_runs_of_both_programs_under_the_same_versions_count_together(
        self, engine: Engine, learning: SqlLearningStore
    ) -> None:
        runs = SqlMeasurementStore(engine)
        versions: list[dict[str, str]] = [
            {"torch": "2.10", "trainer_version": "reference 1"},
            {"torch": "2.11", "trainer_version": "0.2.1"},
            {"torch": "2.11+cu130", "trainer_version": "reference 1", "driver": "580"},
            {"torch": "2.11", "trainer_version": "0.2.2"},
        ]
        runs.add(
            [measurement(n).model_copy(update={"software": one}) for n, one in enumerate(versions)]
        )
        both = [run.id for run in learning.inputs(H100).runs]
        assert both == ["measurement-003", "measurement-002"]
        named = learning.inputs(H100, versions[2]).runs
        assert [run.id for run in named] == both
        assert [run.id for run in learning.inputs(H100, versions[0]).runs] == ["measurement-000"]

    def test_what_pricing_found_is_kept_until_its_basis_changes_or_its_run_goes(
        self, engine: Engine, learning: SqlLearningStore
    ) -> None:
        runs = SqlMeasurementStore(engine)
        runs.add([measurement(1)])
        for found in ({"a": 1}, {"a": 2}):
            learning.keep({"measurement-001": found, "measurement-009": found})
        (run,) = learning.inputs(H100).runs
        assert run.priced == {"a": 2}
        (other,) = SqlLearningStore(engine, "newer").inputs(H100).runs
        assert other.priced is None
        runs.delete("measurement-001")
        assert learning.inputs(H100).runs == ()
