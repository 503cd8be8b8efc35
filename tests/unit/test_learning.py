"""Runs and timed kernels in the database teach the calibration of their trainer and GPU."""

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest

from planner.api.calibration import inputs, update
from planner.api.calibration.inputs import learned_without
from planner.api.calibration.read import learned
from planner.api.calibration.update import (
    revert,
    update_about,
    update_from_measurements,
    update_from_probes,
)
from planner.api.input.belief import believe
from planner.api.input.measurements import Stored, store_new
from planner.api.storage.job_records import JobEnd, Lease, ProbeRecord
from planner.api.storage.records import Subject
from planner.api.storage.tables import CalibrationRecord
from planner.api.wiring import Wiring, wire
from planner.calibration.kernels import KernelShape, alone, shape_seconds
from planner.calibration.own_runs import PricedRun, priced
from planner.calibration.update import learn
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import shipped_calibration
from planner.errors import NotFoundError
from planner.intake.jobs import read_job
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement
from tests.conftest import job_values, side_by_side
from tests.pricing import pricer_of, step_seconds

GPU = "mi300x-192gb"
SUBJECT = Subject(trainer="torchtitan", gpu=GPU)
BARE = job_values("llama3-8b", GPU, 8, 8192, 64)
JOB = read_job({**BARE, "layout": {}})
OTHER = read_job({**BARE, "layout": {"ac": "full"}})
VERSIONS = {"torch": "2.11.0", "gpu_name": "AMD Instinct MI300X"}
SHAPES = [KernelShape.of("gemm", m=8192, n=n, k=4096) for n in (4096, 14336)]
SLOWER, SHIPPED = 1.3, shipped_calibration()


def seconds_of(job: Job, wiring: Wiring) -> float:
    return step_seconds(job, learned(wiring, job))


def latest(wiring: Wiring) -> CalibrationRecord:
    found = wiring.calibrations.latest(SUBJECT)
    assert found is not None
    return found


def timed(
    wiring: Wiring, number: int, factor: float = SLOWER, versions: Any = VERSIONS, **training: Any
) -> ProbeRecord:
    """A probe of kernels that ended, stored."""
    asked = {**BARE, "training": {**BARE["training"], **training}}
    job = read_job(asked)
    each = factor * shape_seconds(alone(pricer_of(job)), SHAPES)
    rows = [
        {**shape.as_dict(), "status": "ok", "seconds": float(t), "software": versions}
        for shape, t in zip(SHAPES, each, strict=True)
    ]
    rows.append({**SHAPES[0].as_dict(), "status": "oom", "software": versions})
    record = ProbeRecord(
        id=f"probe-{number}", created_at=datetime(2026, 1, number, tzinfo=UTC), job_hash="0" * 64,
        model="llama3-8b", gpu=GPU, num_gpus=1,
        request={"job": asked, "kernels": [shape.as_dict() for shape in SHAPES]},
        layout="2 kernels", pool="local",
    )  # fmt: skip
    wiring.probes.add([record])
    held = wiring.probes.claim(Lease(owner="here", seconds=60.0), job_id=record.id)
    result = {"gpu_seconds": 9.0, "outcome": {"timings": rows}}
    wiring.probes.finish(held, JobEnd(state="done", results=(result,)))
    return wiring.probes.get(record.id)


def run(name: str, factor: float, versions: dict[str, str], job: Job = JOB) -> Measurement:
    measured = Measured(rung="probed", step_seconds=factor * step_seconds(job))
    when = "2026-02-01T00:00:00+00:00"
    return Measurement(id=name, created_at=when, job=job, measured=measured, software=versions)


def update_from(wiring: Wiring, *ids: str) -> list[CalibrationRecord]:
    return update_from_measurements(wiring, [wiring.measurements.get(one) for one in ids])


def taught(wiring: Wiring, *runs: Measurement) -> CalibrationRecord:
    """What these runs, added as they are, make of the calibration."""
    wiring.measurements.add(runs)
    (record,) = update_from(wiring, *(one.id for one in runs))
    return record


def of_kernels(record: CalibrationRecord) -> int:
    """How many timings of kernels, or runs, a calibration was fitted to beside the shipped ones."""
    return len(set(record.document["fitted"]) - SHIPPED.fitted)


def test_timed_kernels_move_the_next_plan(wiring: Wiring) -> None:
    before = seconds_of(JOB, wiring)
    (record,) = update_from_probes(wiring, [timed(wiring, 1)])
    assert (record.trainer, record.gpu) == ("torchtitan", GPU)
    assert (record.num_runs, record.software) == (0, VERSIONS)
    assert update.line_about(record).endswith("from timed kernels; plans and estimates use it")
    assert 1.05 * before < seconds_of(JOB, wiring) < SLOWER * before
    (again,) = update_from_probes(wiring, [timed(wiring, 2, factor=1.0)])
    assert again.id != record.id
    # the newest timing of a kernel counts
    assert seconds_of(JOB, wiring) == pytest.approx(before, rel=1e-6)


@pytest.mark.slow
def test_kernels_join_the_runs_under_their_versions_and_lose_none(wiring: Wiring) -> None:
    with_trainer = {**VERSIONS, "trainer_version": "0.2.2"}
    alone_ = taught(wiring, run("m-1", 1.2, with_trainer))
    (both,) = update_from_probes(wiring, [timed(wiring, 1)])
    assert (both.num_runs, both.software) == (1, with_trainer)
    assert both.id != alone_.id
    assert both.id.startswith(f"{SHIPPED.id}+1-")
    later = taught(wiring, run("m-2", 1.2, with_trainer))
    assert later.num_runs == 2
    assert of_kernels(later) == len(SHAPES), "kernels teach with every later run"


def test_kernels_under_other_versions_or_of_another_trainer_stay_out(wiring: Wiring) -> None:
    timed(wiring, 1, versions={**VERSIONS, "torch": "2.10.0"})
    timed(wiring, 2, trainer="megatron")
    record = taught(wiring, run("m-1", 1.2, {**VERSIONS, "trainer_version": "0.2.2"}))
    assert set(record.document["fitted"]) == SHIPPED.fitted


def test_kernels_whose_versions_contradict_every_run_displace_nothing(wiring: Wiring) -> None:
    before = taught(wiring, run("m-1", 1.3, {"torch": "2.10.0"}))
    seconds = seconds_of(JOB, wiring)
    assert update_from_probes(wiring, [timed(wiring, 1, factor=1.0)]) == []
    assert (seconds_of(JOB, wiring), latest(wiring).id) == (seconds, before.id)


def test_kernels_join_a_run_that_does_not_name_its_torch(wiring: Wiring) -> None:
    versions = {"trainer_version": "0.2.2", "gpu_name": VERSIONS["gpu_name"]}
    wiring.measurements.add([run("m-1", 1.2, versions)])
    (both,) = update_from_probes(wiring, [timed(wiring, 1)])
    assert (both.num_runs, of_kernels(both)) == (1, len(SHAPES))


def test_what_a_study_counts_itself_is_left_out_of_its_calibration(wiring: Wiring) -> None:
    """Else the study would be twice as sure of what it knows."""
    newest = taught(wiring, run("m-1", 1.3, VERSIONS), run("m-2", 1.0, VERSIONS, OTHER))
    whole, (without_first, unstored) = learned(wiring, JOB), learned_without(wiring, JOB, {"m-1"})
    assert whole.id == newest.id
    alone_ = learn(SHIPPED, [run("m-2", 1.0, VERSIONS, OTHER)])
    assert without_first.id == alone_.id
    assert without_first.shifts == pytest.approx(alone_.shifts)
    assert unstored is not None
    with pytest.raises(NotFoundError):  # a read writes nothing
        wiring.calibrations.get(alone_.id)
    assert update.calibration_for_study(wiring, JOB, {"m-1"}, "", until=None) is not None
    # a plan's calibration is found by its id
    assert wiring.calibrations.get(alone_.id).num_runs == 1
    assert latest(wiring).id == newest.id
    assert learned_without(wiring, JOB, {"m-1", "m-2"}) == (None, None)
    again, unstored = learned_without(wiring, JOB, {"m-9"})
    assert unstored is None
    assert again.id == newest.id


def test_kernels_of_a_job_that_is_none_any_more_are_passed_over(wiring: Wiring) -> None:
    lost = timed(wiring, 1)
    with wiring.engine.begin() as connection:
        command = "update probes set request = replace(request, 'llama3-8b', 'llama3-8c')"
        connection.exec_driver_sql(command)
    assert "llama3-8c" in str(wiring.probes.get(lost.id).request)
    record = taught(wiring, run("m-1", 1.2, VERSIONS))
    assert set(record.document["fitted"]) == SHIPPED.fitted
    assert update_from_probes(wiring, [wiring.probes.get(lost.id)]) == []


FAST = read_job({**BARE, "layout": {"ac": "full", "micro_batch_size": 2}})
IMPOSSIBLE = Measured(rung="probed", step_seconds=1e-6)


def stored(wiring: Wiring, *runs: Measurement, owner: str = "ann", shared: bool = True) -> Stored:
    kept = store_new(wiring, runs, asked_by=owner, shared=shared)
    update_from_measurements(wiring, kept.new)
    return kept


def test_a_row_of_before_the_check_is_refused_when_it_is_first_read(wiring: Wiring) -> None:
    impossible = run("m-1", 1.0, VERSIONS, JOB).model_copy(update={"measured": IMPOSSIBLE})
    wiring.measurements.add([impossible])
    assert update_from(wiring, "m-1") == []
    found = wiring.measurements.get("m-1")
    assert "faster than 8 mi300x-192gb can multiply its matrices" in (found.refused or "")
    assert wiring.measurements.matching(found.key().job_hash, SUBJECT) == ((), None)


def test_what_is_deleted_is_forgotten(wiring: Wiring) -> None:
    before = seconds_of(JOB, wiring)
    stored(wiring, run("m-1", 1.3, VERSIONS))
    stored(wiring, run("m-2", 2.0, VERSIONS, OTHER))
    with_both = latest(wiring)
    (again,) = update_about(wiring, [wiring.measurements.delete("m-2")])
    assert again.id == learn(SHIPPED, [run("m-1", 1.3, VERSIONS)]).id
    assert wiring.calibrations.get(with_both.id).superseded_at is not None
    assert update_about(wiring, [wiring.measurements.delete("m-1")]) == []
    assert seconds_of(JOB, wiring) == before
    with pytest.raises(NotFoundError):
        wiring.measurements.get("m-1")


def test_an_owners_last_run_is_forgotten_too(wiring: Wiring) -> None:
    stored(wiring, run("m-1", 1.3, VERSIONS), shared=False)
    assert learned(wiring, JOB, "ann") is not None
    update_about(wiring, [wiring.measurements.delete("m-1")])
    assert learned(wiring, JOB, "ann") is None


def test_a_keys_runs_teach_its_own_plans_until_they_are_shared(wiring: Wiring) -> None:
    stored(wiring, run("m-1", 1.3, VERSIONS), shared=False)
    assert (learned(wiring, JOB), learned(wiring, JOB, "bob")) == (None, None)
    assert wiring.calibrations.get(learned(wiring, JOB, "ann").id).owner == "ann"
    stored(wiring, run("m-2", 1.0, VERSIONS, OTHER), owner="root")
    found = [learned(wiring, JOB, owner) for owner in ("", "ann")]
    runs = [wiring.calibrations.get(one.id).num_runs for one in found]
    assert runs == [1, 2], "shared runs count for everyone, one's own besides"
    update_from(wiring, *wiring.measurements.share(asked_by="ann"))
    assert wiring.calibrations.get(learned(wiring, JOB, "bob").id).num_runs == 2


def test_a_calibration_is_undone_with_those_after_it(wiring: Wiring) -> None:
    stored(wiring, run("m-1", 1.2, VERSIONS))
    first = latest(wiring)
    stored(wiring, run("m-2", 2.0, VERSIONS, OTHER))
    second = latest(wiring)
    stored(wiring, run("m-3", 2.0, {**VERSIONS, "torch": "2.12.0"}, FAST))
    assert set(second.document["runs"]) == {"m-1", "m-2"}
    left, made = revert(wiring, second.id, "root")
    assert (set(left), [one.id for one in made]) == ({"m-2", "m-3"}, [first.id])
    assert latest(wiring).id == first.id
    assert "who reverted" in (wiring.measurements.get("m-2").refused or "")
    update_from_measurements(wiring, [believe(wiring, "m-2", "root")])
    assert latest(wiring).id == second.id
    assert revert(wiring, first.id, "root")[1] == []
    assert learned(wiring, JOB) is None, "the first one undone leaves the shipped one"


def test_older_runs_never_replace_newer(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow teacher reads, the fast one stores a run and teaches, the slow one stores."""
    stored(wiring, run("m-1", 1.3, VERSIONS))
    slow, made = wire(wiring.settings), update._made
    fresh = [run("m-2", 1.0, VERSIONS, OTHER), run("m-3", 1.0, VERSIONS, FAST)]

    def overtaken(*given: Any) -> CalibrationRecord | None:
        record = made(*given)
        if given[0] is slow and fresh:
            stored(wiring, fresh.pop())
        return record

    monkeypatch.setattr(update, "_made", overtaken)
    update.update_calibrations(slow, [("torchtitan", GPU)], anew=True)
    assert latest(wiring).num_runs == 3
    assert latest(wiring).built_from == wiring.calibrations.inputs(SUBJECT).digest


def test_many_teachers_at_once_end_with_every_run(wiring: Wiring) -> None:
    layouts = product((1, 2, 4), ("none", "full"))
    given = [{"micro_batch_size": size, "ac": ac} for size, ac in layouts]
    jobs = [read_job({**BARE, "layout": layout}) for layout in given]
    runs = [run(f"m-{i}", 1.2, VERSIONS, job) for i, job in enumerate(jobs)]
    others = [wire(wiring.settings) for _ in runs]
    start = threading.Barrier(len(runs))

    def teach(mine: Wiring, one: Measurement) -> None:
        start.wait()
        stored(mine, one)

    assert wiring.store is not None  # makes the tables before they race
    side_by_side(teach, *zip(others, runs, strict=True))
    assert latest(wiring).num_runs == len(runs)


def test_a_run_is_priced_once_and_no_change_makes_no_calibration(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(wiring, run("m-1", 1.3, VERSIONS))
    with monkeypatch.context() as patch:
        patch.setattr(update, "learn_priced", None)
        assert update_from(wiring, "m-1") == []
    asked: list[str] = []

    def counted(calibration: Calibration, runs: Sequence[Measurement]) -> list[PricedRun]:
        asked.extend(one.id for one in runs)
        return priced(calibration, runs)

    monkeypatch.setattr(inputs, "priced", counted)
    stored(wiring, run("m-2", 1.0, VERSIONS, OTHER))
    assert asked == ["m-2"]
