"""Sweeps on simulated nodes whose faults are drawn: what runs at once, what runs again, which hosts
are kept out, who goes first in a pool, and that every probe is accounted for, also after a kill.
"""

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated_pool import Faults, SimulatedCluster
from benchmarks.sweep_scheduler import Bench, layouts
from planner.api.jobs.leases import Claimed, Observer, new_lease
from planner.api.jobs.probes import probe_of_job, probes_of
from planner.api.jobs.side_by_side import NO_ROOM_WANTED, enqueue_in_room
from planner.api.jobs.sweep_runs import run_sweep
from planner.api.jobs.sweeps import add_sweep, run_now
from planner.api.storage.job_records import ProbeRecord, TaskRecord
from planner.api.storage.room import NoRoomError, Room
from planner.api.storage.sweeps import SqlSweepStore
from planner.api.storage.transactions import writing
from planner.api.wiring import Wiring
from planner.errors import NotFoundError
from planner.probes.pools import BACKENDS
from tests.conftest import EACH_DATABASE, side_by_side
from tests.stand_ins.records import claimed, probe_record


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated pools for these tests alone; what a run teaches is none of their matter."""
    monkeypatch.setattr("planner.probes.pools.BACKENDS", dict(BACKENDS))
    monkeypatch.setattr("planner.api.jobs.sweep_runs.update_about", lambda *_: [])


@pytest.fixture
def bench(migrated_url: str, tmp_path: Path) -> Bench:
    return Bench(folder=tmp_path, url=migrated_url, nodes=4, seed=3)


@pytest.fixture
def wiring(bench: Bench) -> Wiring:
    return bench.set_up(12, 1)


def with_faults(bench: Bench, **faults: Any) -> None:
    """Other faults, and other values of the cluster, from now on."""
    path = bench.folder / "cluster.json"
    cluster = SimulatedCluster.model_validate_json(path.read_text())
    own = {name: faults.pop(name) for name in ("probe_seconds", "nodes") if name in faults}
    changed = cluster.model_copy(update={"faults": Faults(**faults), **own})
    path.write_text(changed.model_dump_json())


def ended(wiring: Wiring) -> dict[str, Any]:
    """The report of the queued run."""
    run = run_sweep(wiring, claimed(wiring), Observer())
    assert run.result is not None, run.message
    return dict(run.result)


def another(wiring: Wiring, bench: Bench, **values: Any) -> TaskRecord:
    """A queued run of a sweep of the same jobs."""
    spec = dict(wiring.sweeps.get(bench.sweeps[0]).spec)
    return run_now(wiring, add_sweep(wiring, {**spec, **values}, allow_files=True), ours=False)


def lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for job in report["jobs"] for line in job["layouts"]]


def statuses(report: dict[str, Any]) -> set[str]:
    return {line["status"] for line in lines(report)}


def test_as_many_run_at_once_as_the_pool_has_room_for(bench: Bench, wiring: Wiring) -> None:
    with_faults(bench, probe_seconds=0.3)
    report = ended(wiring)
    assert (report["most_at_once"], statuses(report)) == (bench.nodes, {"ok"})
    assert bench.wrong(wiring) == []


def test_probes_promise_no_more_than_the_budget(bench: Bench, wiring: Wiring) -> None:
    """Of 2.5 time limits two run at once, and never more, however much room the pool has."""
    ended(wiring)
    with_faults(bench, probe_seconds=0.2)
    budget = {"max_gpu_seconds": 2.5 * 8 * 100.0, "max_probes": 100}
    another(wiring, bench, budget=budget, time_limit_seconds=100.0)
    report = ended(wiring)
    assert report["most_at_once"] == 2
    assert report["gpu_seconds"] <= budget["max_gpu_seconds"]
    skipped = {line["message"] for line in lines(report) if line["status"] == "skipped"}
    assert skipped == {"the budget is spent"}


def test_outside_its_hours_a_run_starts_nothing(
    bench: Bench, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(wiring)
    clock = datetime(2026, 7, 1, 4, 30, tzinfo=UTC)  # 06:30 in Berlin
    monkeypatch.setattr(SqlSweepStore, "now", lambda _: clock)
    night = {"hours": "22:00-06:00", "max_gpu_seconds": 1e6}
    another(wiring, bench, budget=night, time_zone="Europe/Berlin")
    report = ended(wiring)
    words = "outside the hours of the budget, 22:00-06:00 Europe/Berlin"
    assert (report["probes"], {line["message"] for line in lines(report)}) == (0, {words})
    another(wiring, bench, budget=night, time_zone="UTC")
    assert ended(wiring)["probes"] == 12


def test_out_of_memory_is_a_result_and_never_tried_again(bench: Bench, wiring: Wiring) -> None:
    with_faults(bench, oom=1.0)
    report = ended(wiring)
    assert (report["probes"], report["retried"], report["failures"]) == (12, 0, {"oom": 12})
    assert statuses(report) == {"oom"}


def test_what_was_preempted_runs_again_and_is_no_retry(bench: Bench, wiring: Wiring) -> None:
    ended(wiring)
    with_faults(bench, preempted=0.4)
    another(wiring, bench, retries=0)
    report = ended(wiring)
    assert statuses(report) == {"ok"}
    assert report["retried"] == report["probes"] - 12 > 0


def test_a_node_that_hangs_is_kept_out_and_let_in_by_command(bench: Bench, wiring: Wiring) -> None:
    ended(wiring)
    with_faults(bench, bad_nodes=("node1",), bad_share=1.0)
    spec = wiring.sweeps.get(bench.sweeps[0]).spec
    anchors = layouts()[:40]
    bench._record(list(spec["jobs"]), anchors)
    # the recordings were read before, under the same name
    (bench.folder / "recordings.jsonl").rename(bench.folder / "more.jsonl")
    path = bench.folder / "cluster.json"
    cluster = json.loads(path.read_text())
    path.write_text(json.dumps({**cluster, "recordings": str(bench.folder / "more.jsonl")}))
    run = another(wiring, bench, measure={"top_k": 0, "anchors": anchors}, retries=3)
    report = ended(wiring)
    assert [one["host"] for one in report["quarantined"]] == ["node1"]
    assert "probes failed on it" in report["quarantined"][0]["evidence"][0]
    assert "1 host in quarantine" in report["headline"]
    (out,) = wiring.quarantine.active(bench.pool)
    assert (out.host, out.found_by) == ("node1", run.id)
    another(wiring, bench)
    assert "node1" not in {host for line in lines(ended(wiring)) for host in line["hosts"]}
    assert wiring.quarantine.release("node1", None) == 1
    assert wiring.quarantine.active() == ()
    with pytest.raises(NotFoundError, match="no host"):
        wiring.quarantine.release("node1", None)


@EACH_DATABASE
def test_the_last_room_goes_to_one_of_two_workers(bench: Bench, wiring: Wiring) -> None:
    """Two transactions that ask at once are told apart; a lease that ends gives the room back."""
    run, room = claimed(wiring), Room(pool="a pool", devices=8)
    start, given = threading.Barrier(2), list[str]()

    def ask(wiring: Wiring, name: str) -> None:
        start.wait()
        try:
            wiring.probes.add(
                [probe_record(id=name, plan_id=run.id, pool="a pool", devices=8, num_gpus=8)],
                lease=new_lease(),
                check=lambda session: room.check(session, 8, task_id=run.id, priority=0),
            )
        except NoRoomError:
            return
        given.append(name)

    side_by_side(ask, (wiring, "probe-0"), (bench.wiring(), "probe-1"))
    assert len(given) == 1
    with writing(wiring.engine) as session:
        assert room.taken(session) == 8
        assert replace(room, host="elsewhere").taken(session) == 0


@EACH_DATABASE
def test_who_has_a_higher_priority_is_let_go_first(bench: Bench, wiring: Wiring) -> None:
    run = claimed(wiring)
    high = another(wiring, bench, priority=5)
    held = claimed(wiring)
    assert (held.id, held.priority) == (high.id, 5)
    room = Room(pool="a pool", devices=8)

    def ask(task: TaskRecord) -> None:
        with writing(wiring.engine) as session:
            room.check(session, 8, task_id=task.id, priority=task.priority)

    ask(run)
    wiring.tasks.heartbeat(held, new_lease(), pool="a pool", wants_gpus=8)
    with pytest.raises(NoRoomError, match=f"{high.id} of a higher priority waits"):
        ask(run)
    ask(held)
    wiring.tasks.heartbeat(held, new_lease(), **NO_ROOM_WANTED)
    ask(run)


@EACH_DATABASE
def test_a_study_waits_for_room_until_it_is_stopped(bench: Bench, wiring: Wiring) -> None:
    run, stop = claimed(wiring), threading.Event()
    stop.set()
    taken = probe_record(pool=bench.pool, devices=32, num_gpus=32)
    wiring.probes.add([taken], lease=new_lease())
    job = {**run.request["jobs"][0], "layout": run.request["measure"]["anchors"][0]}
    (asked, *_) = probe_of_job({"job": job, "pool": run.request["pool"]}, allow_files=False)
    stored = enqueue_in_room(wiring, asked, Claimed(wiring.tasks, run, stop))
    assert stored.state == "running", "it ends as soon as it starts"


def test_progress_is_told_and_stored(bench: Bench, wiring: Wiring) -> None:
    told: list[dict[str, Any]] = []
    observer = Observer(on_event=lambda body: told.append(dict(body)))
    standing = wiring.tasks.get(run_sweep(wiring, claimed(wiring), observer).id).standing
    assert (standing["layouts"], standing["num_layouts"], standing["running"]) == (12, 12, 0)
    assert standing["gpu_seconds"] == 12 * 8 * 60.0
    done = [body["layouts"] for body in told if body["event"] == "sweep"]
    assert done == sorted(done)
    assert done[-1] == 12


@EACH_DATABASE
@pytest.mark.slow
def test_workers_killed_midway_lose_and_double_nothing(migrated_url: str, tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, url=migrated_url, nodes=16, seed=5, probe_seconds=0.05)
    wiring = bench.set_up(400, 2)
    bench.run(wiring, 2, kill=True)
    assert bench.wrong(wiring) == []

    def layouts(probes: Iterable[ProbeRecord]) -> set[tuple[str, str]]:
        return {(one.job_hash, one.layout) for one in probes}

    ran = [probe for run in bench.runs(wiring) for probe in probes_of(wiring, run.id)]
    again = layouts(wiring.probes.list(failure="interrupted").items)
    done = layouts(probe for probe in ran if probe.failure != "interrupted")
    assert again <= done, "what the kill interrupted ran again"
