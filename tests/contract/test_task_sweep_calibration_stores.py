"""One suite for tasks, sweeps and calibrations: in memory, SQLite file, PostgreSQL."""

from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from planner.api.storage.calibrations import SqlCalibrationStore
from planner.api.storage.job_records import JobEnd, TaskRecord
from planner.api.storage.measurements import SqlMeasurementStore
from planner.api.storage.records import Subject
from planner.api.storage.sweeps import SqlSweepStore
from planner.api.storage.tables import CalibrationRecord, SweepRecord
from planner.api.storage.tasks import SqlTaskStore
from planner.errors import ConflictError, NotFoundError
from planner.specs.measurement import Measured
from tests.contract.test_measurement_and_probe_stores import SUBJECT, measurement
from tests.stand_ins.records import NOW, lease, task_record


def task(number: int, **fields: Any) -> TaskRecord:
    return task_record(number, id=f"plan-{number:03d}", **fields)


class TestTasks:
    """What tasks have beside the queue that they share with probes."""

    @pytest.fixture
    def store(self, engine: Engine) -> SqlTaskStore:
        return SqlTaskStore(engine)

    def test_a_task_goes_through_its_life(self, store: SqlTaskStore) -> None:
        store.add([task(1, request={"model": "llama3-8b"}), task(2, job_hash="a" * 64)])
        held = store.claim(lease("a"))
        assert (held.id, held.state, held.attempts) == ("plan-001", "running", 1)
        assert (held.request, held.fencing_token) == ({"model": "llama3-8b"}, 1)
        assert store.heartbeat(held, lease("a"), progress="probe 1 of 3") is False
        assert store.get(held.id).progress == "probe 1 of 3"
        result = {"winner": "fsdp 8"}
        ended = store.finish(held, JobEnd(state="done", result=result, message="stopped"))
        assert (ended.state, ended.result, ended.message) == ("done", result, "stopped")
        assert ended.finished_at is not None
        for chosen in ({"state": "queued"}, {"job_hash": "a" * 64}):
            assert [each.id for each in store.list(**chosen).items] == ["plan-002"]

    def test_events_are_numbered_and_read_on(self, store: SqlTaskStore) -> None:
        store.add([task(1), task(2)])
        first, second = store.claim(lease("a")), store.claim(lease("a"))
        assert [store.add_event(first, {"n": n}, NOW).number for n in range(3)] == [1, 2, 3]
        assert store.add_event(second, {}, NOW).number == 1
        assert [event.body for event in store.events("plan-001", after=1)] == [{"n": 1}, {"n": 2}]
        assert store.events("plan-001", after=3) == ()
        with pytest.raises(NotFoundError):
            store.add_event(task(3), {}, NOW)


def sweep() -> SweepRecord:
    jobs: dict[str, Any] = {"jobs": []}
    return SweepRecord(id="sweep-1", created_at=NOW, name="nightly", spec=jobs, next_due_at=NOW)


def night(number: int) -> TaskRecord:
    return task(number, kind="sweep", parent_id="sweep-1", due_at=NOW)


class TestSweeps:
    def test_a_moment_cannot_be_worked_on_twice(self, engine: Engine) -> None:
        SqlSweepStore(engine).add(sweep())
        tasks = SqlTaskStore(engine)
        tasks.add([night(1)])
        with pytest.raises(ConflictError):
            tasks.add([night(2)])

    def test_a_run_that_waits_for_the_one_before_it_holds_up_nobody(self, engine: Engine) -> None:
        tasks = SqlTaskStore(engine)
        SqlSweepStore(engine).add(sweep())
        tasks.add([night(1), replace(night(2), due_at=NOW + timedelta(days=1)), task(3)])
        held = tasks.claim(lease("a"))
        other = tasks.claim(lease("b"))
        assert [held.id, other and other.id] == ["plan-001", "plan-003"]
        assert tasks.claim(lease("b")) is None
        tasks.finish(held, JobEnd(state="done"))
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


def calibration(number: int, subject: Subject = SUBJECT) -> CalibrationRecord:
    learnt: dict[str, Any] = {"software": {"torch": "2.13"}, "document": {"shifts": [0.1]}}
    at = NOW + timedelta(seconds=number)
    return CalibrationRecord(
        id=f"c-{number}", created_at=at, num_runs=number, **asdict(subject), **learnt
    )


class TestCalibrations:
    @pytest.fixture
    def store(self, engine: Engine) -> SqlCalibrationStore:
        return SqlCalibrationStore(engine, "basis")

    def test_the_one_in_use_of_a_subject(self, store: SqlCalibrationStore) -> None:
        for number, subject in enumerate((SUBJECT, SUBJECT, replace(SUBJECT, gpu="cpu"))):
            put = calibration(number, subject)
            assert store.put_in_use(subject, put, store.inputs(subject), put.created_at)

        def latest(subject: Subject = SUBJECT, **until: datetime) -> str | None:
            found = store.latest(subject, **until)
            return found and found.id

        assert latest() == "c-1"
        assert store.get("c-0").superseded_at == NOW + timedelta(seconds=1)
        assert store.get("c-1") == calibration(1)
        assert latest(Subject(trainer="megatron", gpu="cpu")) is None
        assert latest(replace(SUBJECT, owner="ann")) is None
        assert latest(until=NOW + timedelta(seconds=0.5)) == "c-0"
        assert latest(until=NOW - timedelta(days=1)) is None
        assert [each.id for each in store.list(limit=2).items] == ["c-2", "c-1"]
        store.save(replace(calibration(1), num_runs=99))
        assert store.get("c-1").num_runs == 1
        with pytest.raises(NotFoundError):
            store.get("c-9")

    def test_one_before_may_be_in_use_again_or_none(self, store: SqlCalibrationStore) -> None:
        inputs = store.inputs(SUBJECT)
        for at, number in enumerate((0, 1, 0)):
            assert store.put_in_use(
                SUBJECT, calibration(number), inputs, NOW + timedelta(seconds=at)
            )
        latest = store.latest(SUBJECT)
        assert (latest.id, latest.superseded_at) == ("c-0", None)
        assert store.put_in_use(SUBJECT, None, inputs, NOW + timedelta(seconds=9))
        assert store.latest(SUBJECT) is None

    def test_one_of_older_runs_is_refused(self, engine: Engine, store: SqlCalibrationStore) -> None:
        older = store.inputs(SUBJECT)
        runs = SqlMeasurementStore(engine)
        runs.add([measurement(1)])
        assert not store.put_in_use(SUBJECT, calibration(1), older, NOW)
        assert store.latest(SUBJECT) is None
        newer = store.inputs(SUBJECT)
        assert [run.id for run in newer.runs] == ["measurement-001"]
        assert store.put_in_use(SUBJECT, calibration(2), newer, NOW)
        runs.delete("measurement-001")
        assert not store.put_in_use(SUBJECT, calibration(3), newer, NOW)

    def test_uncounted_runs_are_no_inputs(self, engine: Engine, store: SqlCalibrationStore) -> None:
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
        assert [run.id for run in store.inputs(SUBJECT).runs] == counting
        anns = store.inputs(replace(SUBJECT, owner="ann")).runs
        assert [run.id for run in anns] == [*counting, "measurement-001"]
        assert store.owners("torchtitan", "h100-sxm-80gb") == ["ann"]
        assert runs.share(asked_by="bob") == []
        assert runs.share(asked_by="ann") == ["measurement-001"]
        assert len(store.inputs(SUBJECT).runs) == 3
        runs.refuse("measurement-007", "impossible")
        left = [run.id for run in store.inputs(SUBJECT).runs]
        assert left == ["measurement-006", "measurement-001"]
        assert runs.get("measurement-007").refused == "impossible"

    def test_runs_of_both_programs_under_the_same_versions_count_together(
        self, engine: Engine, store: SqlCalibrationStore
    ) -> None:
        versions: list[dict[str, str]] = [
            {"torch": "2.10", "trainer_version": "reference 1"},
            {"torch": "2.11", "trainer_version": "0.2.1"},
            {"torch": "2.11+cu130", "trainer_version": "reference 1", "driver": "580"},
            {"torch": "2.11", "trainer_version": "0.2.2"},
        ]
        told = [measurement(n).model_copy(update={"software": v}) for n, v in enumerate(versions)]
        SqlMeasurementStore(engine).add(told)

        def counting(*stack: dict[str, str]) -> list[str]:
            return [run.id for run in store.inputs(SUBJECT, *stack).runs]

        assert counting() == counting(versions[2]) == ["measurement-003", "measurement-002"]
        assert counting(versions[0]) == ["measurement-000"]

    def test_what_pricing_found_is_kept_until_its_basis_changes_or_its_run_goes(
        self, engine: Engine, store: SqlCalibrationStore
    ) -> None:
        runs = SqlMeasurementStore(engine)
        runs.add([measurement(1)])
        for found in ({"a": 1}, {"a": 2}):
            store.keep({"measurement-001": found, "measurement-009": found})
        (run,) = store.inputs(SUBJECT).runs
        assert run.priced == {"a": 2}
        (other,) = SqlCalibrationStore(engine, "newer").inputs(SUBJECT).runs
        assert other.priced is None
        runs.delete("measurement-001")
        assert store.inputs(SUBJECT).runs == ()
