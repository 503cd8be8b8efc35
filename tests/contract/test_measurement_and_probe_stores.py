"""One suite for measurements and probes: in memory, SQLite file, PostgreSQL."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from planner.api.storage.engine import is_memory
from planner.api.storage.job_records import JobEnd, ProbeRecord
from planner.api.storage.measurements import SqlMeasurementStore
from planner.api.storage.records import Subject
from planner.api.storage.sweeps import SqlDriftStore, SqlSweepStore
from planner.api.storage.tables import DriftFinding, SweepRecord
from planner.api.storage.tasks import SqlProbeStore
from planner.errors import ConflictError, NotFoundError
from planner.intake.jobs import read_job
from planner.specs.measurement import Measured, Measurement, question_hash
from tests.conftest import JOB, LAYOUT, side_by_side
from tests.stand_ins.ageing import age
from tests.stand_ins.records import NOW, lease, pages_of, probe_record

SOFTWARE = {"torch": "2.11.0", "gpu_name": "NVIDIA H100 80GB HBM3"}
SUBJECT = Subject(trainer="torchtitan", gpu="h100-sxm-80gb")
UNKNOWN = ("probe-nope", "", "\0", "ü", "x" * 10_000, "' OR 1=1 --")


def measurement(
    number: int = 1, *, layout: Any = None, model: str = "llama3-8b", **numbers: Any
) -> Measurement:
    values = {"rung": "probed", "step_seconds": 2.5, "steps": 10, "peak_reserved_bytes": 2**36}
    return Measurement(
        id=f"measurement-{number:03d}",
        created_at=(NOW + timedelta(seconds=number // 2)).isoformat(),
        job=read_job({**JOB, "model": model, "layout": layout or LAYOUT}),
        measured=Measured.model_validate({**values, "extra": {"kept": [1, "ü"]}, **numbers}),
        software=SOFTWARE,
        source="probe probe-1",
    )


class TestMeasurements:
    @pytest.fixture
    def store(self, engine: Engine) -> SqlMeasurementStore:
        return SqlMeasurementStore(engine)

    def test_a_measurement_comes_back_as_it_was_stored(self, store: SqlMeasurementStore) -> None:
        store.add([measurement()])
        assert store.get("measurement-001") == measurement()

    def test_an_unknown_id_is_not_found(self, store: SqlMeasurementStore) -> None:
        for unknown in UNKNOWN:
            with pytest.raises(NotFoundError):
                store.get(unknown)

    def test_all_or_none(self, store: SqlMeasurementStore) -> None:
        store.add([measurement(1)])
        with pytest.raises(ConflictError):
            store.add([measurement(2), measurement(1)])
        with pytest.raises(NotFoundError):
            store.get("measurement-002")
        store.add([])

    @pytest.mark.parametrize("limit", [1, 3, 7])
    def test_pages_hold_all_once_newest_first(self, store: SqlMeasurementStore, limit: int) -> None:
        store.add([measurement(number) for number in range(7)])  # pairs share a moment
        seen: list[str] = []
        for page in pages_of(lambda cursor: store.list(cursor, limit)):
            seen += page
            store.add([measurement(100 + len(seen))])  # newcomers do not disturb
        assert seen == [f"measurement-{number:03d}" for number in reversed(range(7))]

    def test_filters_narrow_and_combine(self, store: SqlMeasurementStore) -> None:
        others = measurement(2, model="llama3-70b"), measurement(3, status="oom")
        store.add([measurement(1), *others, measurement(4, rung="emulated")])

        def ids(**wanted: Any) -> str:
            page = store.list(**wanted)
            return "".join(item.id[-1] for item in page.items)

        assert (ids(), ids(job_hash=measurement().key().job_hash)) == ("4321", "431")
        assert ids(model="llama3-70b") == "2"
        assert ids(gpu="h100-sxm-80gb", status="ok") == "421"
        assert ids(rung="emulated", model="llama3-8b") == "4"
        assert ids(gpu="\0") == ""

    def test_a_question_finds_measurements_oldest_first(self, store: SqlMeasurementStore) -> None:
        other = measurement(3, layout={"dp_shard": 4, "tp": 2})
        store.add([other, measurement(1), measurement(2, model="llama3-70b")])
        same = {**JOB, "model": "meta-llama/Meta-Llama-3-8B", "search": {"top_k": 3}}
        found, stale = store.matching(question_hash(read_job(same)), SUBJECT)
        assert ([item.id[-1] for item in found], stale) == (["1", "3"], None)
        assert store.matching("0" * 64, SUBJECT) == ((), None)

    def test_what_a_sweep_found_changed_since_is_no_measurement_of_now(
        self, engine: Engine, store: SqlMeasurementStore
    ) -> None:
        """Layouts have changed alone, or all together; out of memory is what it was."""
        other = {"dp_shard": 4, "tp": 2}
        full = {"status": "oom", "step_seconds": None}
        store.add([measurement(0), measurement(2, layout=other), measurement(4, **full)])
        store.add([measurement(6), measurement(8, layout=other)])
        key, at = measurement().key(), NOW + timedelta(seconds=3)
        changed = DriftFinding(
            sweep_id="sweep-1",
            trainer="torchtitan", gpu="h100-sxm-80gb", owner="", software_hash="another",
            job_hash=key.job_hash, layout_hash=key.layout_hash, since=at, statement="7% slower",
        )  # fmt: skip
        SqlSweepStore(engine).add(
            SweepRecord(id="sweep-1", created_at=NOW, name="nightly", spec={}, next_due_at=None)
        )
        drift = SqlDriftStore(engine)

        def found(*findings: DriftFinding, subject: Subject = SUBJECT) -> tuple[str, int]:
            drift.replace("sweep-1", findings)
            left, stale = store.matching(key.job_hash, subject)
            assert stale is None or (stale.since, stale.statement) == (at.isoformat(), "7% slower")
            return "".join(item.id[-1] for item in left), 0 if stale is None else stale.runs

        assert found() == ("02468", 0)
        assert found(changed) == ("2468", 1)
        later = NOW + timedelta(days=1)
        elsewhere = replace(changed, job_hash="b" * 64, since=later, statement="another job")
        assert found(changed, elsewhere) == ("2468", 1)
        everything = replace(changed, job_hash=None, layout_hash=None)
        assert found(everything) == ("468", 2)
        assert found(replace(everything, gpu="a100-sxm-80gb")) == ("02468", 0)
        ann = replace(everything, owner="ann")
        assert found(ann) == ("02468", 0)
        assert found(ann, subject=replace(SUBJECT, owner="ann")) == ("468", 2)


class TestProbes:
    @pytest.fixture
    def store(self, engine: Engine) -> SqlProbeStore:
        return SqlProbeStore(engine)

    def claimed(self, store: SqlProbeStore, number: int = 1, **values: Any) -> ProbeRecord:
        store.add([probe_record(number, **values)])
        return store.claim(lease())

    def test_a_probe_comes_back_as_it_was_stored(self, store: SqlProbeStore) -> None:
        whole = {"plan_id": "plan-1", "plan_rank": 2, "results": [{"a": 1}]}
        record = probe_record(request={"job": {**JOB, "layout": LAYOUT}, "notes": "ü"}, **whole)
        store.add([record])
        assert store.get("probe-001") == record

    def test_an_unknown_id_is_not_found(self, store: SqlProbeStore) -> None:
        for unknown in UNKNOWN:
            for call in (store.get, store.cancel):
                with pytest.raises(NotFoundError):
                    call(unknown)

    def test_the_oldest_is_claimed_first_and_once(self, store: SqlProbeStore) -> None:
        store.add([probe_record(number) for number in (4, 1, 2)])
        claims = [store.claim(lease(f"host:{number}")) for number in range(4)]
        assert [claim and claim.id[-1] for claim in claims] == ["1", "2", "4", None]
        first = claims[0]
        assert (first.state, first.owner) == ("running", "host:0")
        assert (first.fencing_token, first.attempts) == (1, 1)
        length = (first.lease_until - first.started_at).total_seconds()
        assert length == pytest.approx(30.0, abs=0.1)

    def test_claimers_share_without_doubles(self, store: SqlProbeStore, engine: Engine) -> None:
        claimers = 1 if is_memory(engine.url) else 4  # a database in memory is one connection
        store.add([probe_record(number) for number in range(12)])
        seen: list[str] = []

        def claim_all(owner: str) -> None:
            while (held := store.claim(lease(owner))) is not None:
                seen.append(held.id)

        side_by_side(claim_all, *((f"host:{number}",) for number in range(claimers)))
        assert sorted(seen) == [f"probe-{number:03d}" for number in range(12)]

    def test_a_heartbeat_prolongs_and_tells_of_a_wish_to_cancel(self, store: SqlProbeStore) -> None:
        held = self.claimed(store)
        age(store.engine, 20)
        assert store.heartbeat(held, lease(), progress="step 3 of 10", folder="/x") is False
        here = store.get(held.id)
        assert (here.progress, here.folder) == ("step 3 of 10", "/x")
        age(store.engine, 20)
        assert store.expired() == ()
        assert store.cancel(held.id).state == "running"
        assert store.heartbeat(held, lease()) is True

    def test_a_lost_lease_writes_nothing(self, store: SqlProbeStore) -> None:
        dead = self.claimed(store)
        assert store.take_over(dead, lease("host:2"), crashed=False) is None
        age(store.engine, 31)
        done = JobEnd(state="done", measurements=(measurement(),))
        with pytest.raises(ConflictError, match="was lost"):  # by a sleeper, to nobody yet
            store.finish(dead, done)
        assert [probe.id for probe in store.expired()] == [dead.id]
        heir = store.take_over(dead, lease("host:2"), crashed=False)
        assert (heir.fencing_token, heir.attempts, heir.owner) == (2, 1, "host:2")
        assert store.take_over(dead, lease("host:3"), crashed=False) is None
        for call in (
            lambda: store.heartbeat(dead, lease()),
            lambda: store.finish(dead, done),
            lambda: store.retry(dead, JobEnd(state="failed")),
            lambda: store.release(dead),
        ):
            with pytest.raises(ConflictError, match="lease of host:1 was lost"):
                call()
        assert store.get(dead.id) == heir
        assert SqlMeasurementStore(store.engine).list().items == []

    def test_a_lease_from_before_the_clock_was_put_back_is_cut(self, store: SqlProbeStore) -> None:
        store.add([probe_record()])
        ours = store.claim(lease(seconds=630.0))
        assert store.expired() == ()
        left = store.get(ours.id).lease_until or NOW
        assert (ours.lease_until or NOW) - left > timedelta(seconds=560)

    def test_an_end_is_stored_with_its_measurement_or_not_at_all(
        self, store: SqlProbeStore, engine: Engine
    ) -> None:
        held, runs = self.claimed(store), SqlMeasurementStore(engine)
        runs.add([measurement(7)])
        with pytest.raises(ConflictError):
            store.finish(held, JobEnd(state="done", measurements=(measurement(7),)))
        assert store.get(held.id).state == "running"
        measured = (measurement(1), measurement(2))
        end = JobEnd(state="done", results=({"x": "ü"},), measurements=measured)
        done = store.finish(held, end)
        assert (done.state, done.measurement_id) == ("done", "measurement-001")
        assert (done.results, done.lease_until) == ([{"x": "ü"}], None)
        assert done.finished_at is not None
        assert tuple(runs.get(one.id) for one in measured) == measured
        with pytest.raises(ConflictError, match="is done"):
            store.finish(held, JobEnd(state="failed"))
        assert store.get(held.id).state == "done"

    def test_a_failure_keeps_its_class_and_words(self, store: SqlProbeStore) -> None:
        end = JobEnd(state="failed", failure="killed", message="rank 3 \0 died")
        failed = store.finish(self.claimed(store), end)
        assert (failed.state, failed.failure) == ("failed", "killed")
        assert (failed.message, failed.measurement_id) == ("rank 3  died", None)

    def test_a_released_probe_is_claimed_again(self, store: SqlProbeStore) -> None:
        released = store.release(self.claimed(store))
        assert (released.state, released.owner, released.attempts) == ("queued", None, 0)
        assert released.lease_until is None
        again = store.claim(lease("host:2"))
        assert (again.fencing_token, again.attempts) == (2, 1)

    def test_a_lost_workers_probe_ends_with_its_attempts(self, store: SqlProbeStore) -> None:
        lost = JobEnd(state="failed", failure="lost_workers", message="twice")
        waiting = store.retry(self.claimed(store, max_attempts=2), lost)
        assert (waiting.state, waiting.attempts, waiting.message) == ("queued", 1, "twice")
        assert store.claim(lease()) is None
        age(store.engine, 10)
        again = store.claim(lease())
        assert (again.attempts, again.not_before) == (2, None)
        ended = store.retry(again, lost)
        assert (ended.state, ended.failure, ended.attempts) == ("failed", "lost_workers", 2)
        assert store.requeue(ended.id, None).attempts == 0

    def test_cancel_of_queued_and_of_ended(self, store: SqlProbeStore) -> None:
        store.add([probe_record(1)])
        assert store.cancel("probe-001").state == "cancelled"
        assert store.claim(lease()) is None
        held = self.claimed(store, number=2)
        store.finish(held, JobEnd(state="done"))
        assert store.cancel(held.id).state == "done"

    def test_pages_and_filters(self, store: SqlProbeStore) -> None:
        of_plan = {number: "plan-1" if number % 2 else None for number in range(5)}
        store.add([probe_record(number, plan_id=plan) for number, plan in of_plan.items()])
        store.claim(lease())
        first = store.list(limit=3)
        second = store.list(first.next_cursor, 3)
        assert [item.id[-1] for item in first.items + second.items] == ["4", "3", "2", "1", "0"]
        assert second.next_cursor is None
        for chosen, ids in (
            ({"plan_id": "plan-1"}, ["3", "1"]),
            ({"state": "running"}, ["0"]),
            ({"state": "queued", "plan_id": "plan-1", "gpu": "h100"}, []),
        ):
            assert [item.id[-1] for item in store.list(**chosen).items] == ids
