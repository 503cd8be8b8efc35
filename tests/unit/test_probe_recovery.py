"""What becomes of a probe whose owner crashed: its result, another attempt, or its end."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from planner.api.jobs import probe_recovery, probes
from planner.api.jobs.leases import LEASE_SECONDS, new_lease
from planner.api.storage.job_records import JobEnd, ProbeRecord
from planner.errors import ConflictError
from planner.probes.folder import END
from planner.probes.launch import Watch
from tests.stand_ins.ageing import age
from tests.stand_ins.runners import JOB, light_wiring

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Queue:
    """Notes what becomes of a claimed probe."""

    retried = released = False
    counts = True

    def release(self, record: ProbeRecord) -> ProbeRecord:
        self.released = True
        return replace(record, state="queued")

    def finish(self, record: ProbeRecord, end: JobEnd) -> ProbeRecord:
        names = ("state", "failure", "message", "results")
        return replace(record, finished_at=NOW, **{name: getattr(end, name) for name in names})

    def retry(self, record: ProbeRecord, end: JobEnd, *, counts: bool) -> ProbeRecord:
        self.retried, self.counts = True, counts
        left = record.attempts < record.max_attempts
        return replace(record, state="queued") if left else self.finish(record, end)


def left(run: str = "probe-1", status: str = "ok", kind: str = "crash") -> Any:
    """The result of a run that the probe left in its folder."""
    kind = SimpleNamespace(value=kind)
    outcome = SimpleNamespace(status=status, kind=kind, message="as it ended", rank=0)
    return SimpleNamespace(
        task=SimpleNamespace(id=run),
        outcome=outcome,
        measurement=lambda: SimpleNamespace(model_copy=lambda update: None),
        model_dump=lambda mode: {"run": run},
    )


Conclude = Callable[..., ProbeRecord]
ASKED = {
    "id": "probe-1", "created_at": NOW, "request": {}, "job_hash": "", "model": "llama3-8b",
    "gpu": "h100", "num_gpus": 8, "layout": "", "pool": "local", "state": "running",
    "attempts": 1, "max_attempts": 2,
}  # fmt: skip


@pytest.fixture
def concluded(monkeypatch: pytest.MonkeyPatch) -> Conclude:
    """The record of a probe in its first of two attempts, unless said otherwise.

    going_on: ids of probes that go on in the pool; it is emptied of what is ended there.
    """
    fine = SimpleNamespace(refused=None, measured=SimpleNamespace(disturbed=None))
    monkeypatch.setattr(probes, "checked", lambda one, now: fine)

    def conclude(result: Any = None, queue: Any = None, going_on: Any = (), **fields: Any) -> Any:
        record = ProbeRecord(**{**ASKED, "owner": new_lease().owner, **fields})
        monkeypatch.setattr(probe_recovery, "_result_left", lambda ours: result)
        pool = Mock(is_left=lambda one: one in going_on, end_left=lambda one: going_on.remove(one))
        wiring = Mock(probes=queue or Queue(), clock=Mock(now=lambda: NOW), pool=lambda name: pool)
        return probe_recovery._conclude(wiring, replace(record, owner="host:1:1"), record)

    return conclude


def ended(record: ProbeRecord) -> tuple[str, str | None, tuple[Any, ...]]:
    return record.state, record.failure, record.results


def test_an_attempt_that_is_left_is_made_and_counts(concluded: Conclude) -> None:
    queue = Queue()
    assert concluded(queue=queue).state == "queued"
    assert (queue.retried, queue.counts) == (True, True)


@pytest.mark.parametrize("kind", ["interrupted", "crash"])
def test_a_worker_that_was_killed_is_no_attempt_of_a_probe_that_had_not_failed(
    concluded: Conclude, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(probe_recovery, "was_killed", lambda name: name == "host:1:1")
    queue, command = Queue(), Queue()
    concluded(left(status="failed", kind=kind), queue)
    assert queue.counts is (kind != "interrupted")
    concluded(queue=command, max_attempts=1)
    assert command.counts, "a person's command is not run by somebody else"


def test_the_last_attempt_has_failed_with_its_owner(concluded: Conclude) -> None:
    found = concluded(attempts=2)
    assert ended(found) == ("failed", "lost_workers", ())
    assert "its worker was lost in 2 attempts (the last was host:1:1)" in str(found.message)


def test_the_only_attempt_of_a_command_was_interrupted(concluded: Conclude) -> None:
    found = concluded(max_attempts=1)
    assert ended(found) == ("failed", "interrupted", ())
    assert str(found.message).startswith("its runner (host:1:1) died")


def test_a_probe_that_was_cancelled_is_not_tried_again(concluded: Conclude) -> None:
    assert ended(concluded(cancel_requested=True))[:2] == ("cancelled", "interrupted")


def test_its_own_result_is_kept(concluded: Conclude) -> None:
    found = concluded(left(), cancel_requested=True)
    assert (found.state, found.results) == ("done", ({"run": "probe-1"},))


def test_the_result_of_one_of_several_is_not_the_answer(concluded: Conclude) -> None:
    one = left("probe-1-rank0")
    assert concluded(one).state == "queued"
    last = ended(concluded(one, attempts=2))
    assert last == ("failed", "lost_workers", ({"run": "probe-1-rank0"},))


def test_a_run_that_failed_says_how_in_the_end(concluded: Conclude) -> None:
    failed = left(status="failed", kind="nccl")
    assert concluded(failed).state == "queued"
    found = concluded(failed, attempts=2)
    assert (found.state, found.failure, found.message) == ("failed", "nccl", "as it ended")


def test_a_probe_that_goes_on_is_awaited_by_the_next(concluded: Conclude) -> None:
    """It is not tried again: the attempt still runs."""
    queue, jobs = Queue(), ["probe-1"]
    assert concluded(queue=queue, going_on=jobs).state == "queued"
    assert (queue.retried, queue.released, jobs) == (False, True, ["probe-1"])


@pytest.mark.parametrize("fields", [{"max_attempts": 1}, {"cancel_requested": True}])
def test_what_nobody_awaits_ends_in_its_pool(concluded: Conclude, fields: dict[str, Any]) -> None:
    jobs = ["probe-1"]
    assert (concluded(going_on=jobs, **fields).failure, jobs) == ("interrupted", [])


def test_who_loses_a_probe_before_it_began_does_not_run_it(tmp_path: Path) -> None:
    """Its owner lives, but its lease expired: a clock was put forward."""
    wiring = light_wiring(tmp_path, tmp_path / "probes", light=True)
    asked = probes.probe_of_job({"job": JOB}, allow_files=False)
    [record] = probes.enqueue(wiring, asked, max_attempts=2, ours=True)

    def taken_over(_: Path) -> None:
        age(wiring.engine, 2 * LEASE_SECONDS)
        assert [one.state for one in probe_recovery.recover(wiring)] == ["queued"]

    with pytest.raises(ConflictError):
        probes.run_probe(wiring, record, Watch(folder=taken_over))
    assert json.loads((tmp_path / "probes" / record.id / END).read_text())["reason"] == "asked"
