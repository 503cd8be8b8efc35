"""A sweep's history in a real database: what its report says of drift, and what is learnt then."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from planner.api.calibration.listing import calibration_page
from planner.api.calibration.read import learned
from planner.api.calibration.update import update_from_measurements
from planner.api.http.sweep_schemas import SweepDrift
from planner.api.input.jobs import parse_job
from planner.api.jobs.drift import with_drift
from planner.api.jobs.leases import Claimed
from planner.api.jobs.observer import Observer
from planner.api.jobs.study_probes import StudyProbes
from planner.api.jobs.sweeps import add_sweep, sweep_detail
from planner.api.render.charts import sweep_chart
from planner.api.render.sweep import report_lines
from planner.api.settings import Settings
from planner.api.storage.job_records import ProbeRecord, TaskRecord
from planner.api.storage.records import SweepRecord
from planner.api.wiring import Wiring, wire
from planner.estimates import estimate_jobs
from planner.intake.measurements import read_measurement
from planner.specs.measurement import Measurement, question_hash
from planner.specs.sweep import SweepSpec
from tests.conftest import EACH_DATABASE

JOB: dict[str, Any] = {
    "model": "llama3-8b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"seq_len": 8192, "global_batch_size": 8},
}  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_shard": 8, "ac": "full"},
    {"dp_shard": 8, "ac": "selective-op"},
)
SWEEP = {"name": "nightly", "jobs": [JOB], "measure": {"anchors": list(LAYOUTS), "top_k": 0}}
FIRST = datetime(2026, 10, 1, 2, tzinfo=UTC)
SECONDS = (2.0, 1.6)


@pytest.fixture
def wiring(migrated_url: str) -> Iterator[Wiring]:
    made = wire(Settings(database_url=migrated_url))
    yield made
    made.store.engine.dispose()


class Nights:
    """Runs of one sweep, as workers would have left them."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.sweep: SweepRecord = add_sweep(wiring, SWEEP, allow_files=False)
        self.rng = np.random.default_rng(1)

    def run(
        self,
        night: int,
        slower: float,
        torch: str = "2.11.0",
        *,
        hosts: Sequence[str] = ("node-1", "node-1"),
        slow_host: float = 0.0,
        slow_driver: str = "570.86",
        reported: bool = True,
    ) -> dict[str, Any]:
        """One night's report; all layouts are slower than at first by this share.

        hosts: of each layout. slow_host, slow_driver: of node-2. reported: else only stored.
        """
        wiring, task = self.wiring, f"sweep-run-{night:03d}"
        due = FIRST + timedelta(days=night)
        record = TaskRecord(
            id=task, kind="sweep", created_at=due, request=dict(self.sweep.spec),
            parent_id=self.sweep.id, due_at=due, asked_by=self.sweep.asked_by,
        )  # fmt: skip
        lines, measurements, probes = [], [], []
        for place, layout in enumerate(LAYOUTS):
            name = f"probe-{night:03d}-{place}"
            seconds = SECONDS[place] * (1 + slower) * float(np.exp(self.rng.normal(0, 0.004)))
            driver = "570.86"
            if hosts[place] == "node-2":
                seconds, driver = seconds * (1 + slow_host), slow_driver
            software = {"torch": torch, "nccl": "2.27.3", "driver": driver}
            numbers = {
                "rung": "probed", "step_seconds": seconds, "software": software,
                "hosts": [hosts[place]],
            }  # fmt: skip
            row = {**JOB, "layout": layout, "source": f"probe {name}", "measured": numbers}
            at = due + timedelta(minutes=place)
            measurement = read_measurement(row, measurement_id=name, created_at=at.isoformat())
            measurements.append(measurement)
            job, key = measurement.job, measurement.key()
            assert job.layout is not None
            probes.append(
                ProbeRecord(
                    id=name, created_at=at, request={"job": {**JOB, "layout": layout},
                    "trainer": "torchtitan"}, job_hash=question_hash(job), model=key.model,
                    gpu=key.gpu, num_gpus=8, layout=job.layout.short(), pool="local",
                    plan_id=task, measurement_id=name, state="done",
                )
            )  # fmt: skip
            lines.append({
                "layout": job.layout.short(), "why": "anchor", "predicted_step_seconds": None,
                "status": "ok", "step_seconds": seconds, "change": None, "changed": False,
                "message": None, "measurement_id": name, "software": software,
            })  # fmt: skip
        wiring.measurements.add(measurements)
        for probe in probes:
            wiring.probes.add([probe])
        if not reported:
            return {}
        self.newest = measurements
        report = {
            "headline": "2 of 2 layouts measured", "probes": 2, "gpu_seconds": 1.0,
            "quarantined": [],
            "jobs": [{"model": "llama3-8b", "gpu": "h100-sxm-80gb", "num_gpus": 8,
                      "layouts": lines, "winner": None, "winner_before": None,
                      "new_winner": False}],
        }  # fmt: skip
        spec = SweepSpec.model_validate(dict(self.sweep.spec))
        report = with_drift(wiring, record, spec, report)
        (stored,) = wiring.tasks.add([record])
        assert stored.id == task
        self.reports = {**getattr(self, "reports", {}), task: report}
        return report

    def learn(self) -> None:
        """Learns from all nights at once: each alone would take seconds."""
        update_from_measurements(self.wiring, self.newest)

    def detail(self) -> dict[str, Any]:
        """As a reader sees it, with the reports that runs gave."""
        detail = sweep_detail(self.wiring, self.sweep, 200)
        for run in detail["runs"]:
            run["report"] = self.reports[run["id"]]
        return detail


def slower_by(nights: Nights, changes: Sequence[float], torch: Sequence[str]) -> dict[str, Any]:
    """The report of the last of these nights."""
    report: dict[str, Any] = {}
    for night, (change, version) in enumerate(zip(changes, torch, strict=True)):
        report = nights.run(night, change, version)
    return report


@EACH_DATABASE
def test_two_percent_a_night_over_three_versions_is_drift(wiring: Wiring) -> None:
    """It was "0 changed" every night against the run before."""
    nights = Nights(wiring)
    versions = ["2.10.0"] * 3 + ["2.11.0"] * 2 + ["2.12.0"] * 2
    report = slower_by(nights, [0.02 * night for night in range(7)], versions)
    drift = SweepDrift.model_validate(report["drift"])
    change = drift.changes[-1]
    assert report["drift"]["changes"][-1]["versions"] == {"torch": ["2.10.0", "2.11.0"]}
    assert change.low > 0.04
    assert "slower" in change.statement
    assert "first with torch 2.10.0 -> 2.11.0" in change.statement
    assert len(change.layouts) == 2
    text = "\n".join(report_lines(report))
    assert "at most one false alarm in 365 runs" in text
    assert change.statement in text
    drawn = sweep_chart(nights.detail()).spec
    assert change.statement in [mark["statement"] for mark in drawn["datasets"]["changes"]]


def test_quiet_nights_are_no_drift_and_nothing_is_stale(wiring: Wiring) -> None:
    nights = Nights(wiring)
    report = slower_by(nights, [0.0] * 12, ["2.11.0"] * 12)
    nights.learn()
    assert report["drift"]["changes"] == []
    assert report["headline"] == "2 of 2 layouts measured"
    assert list(report_lines(report))[3] == "  none"
    calibration = learned(wiring, parse_job(JOB, allow_files=False))
    assert calibration is not None
    assert calibration.stale is None


def test_what_was_learnt_before_a_change_is_left_out_until_it_is_measured_anew(
    wiring: Wiring,
) -> None:
    """No version changed, so the stack is the same one and only the sweep can tell."""
    nights = Nights(wiring)
    slower_by(nights, [0.0] * 12, ["2.11.0"] * 12)
    nights.learn()
    job = parse_job({**JOB, "layout": LAYOUTS[0]}, allow_files=False)
    before = learned(wiring, job)
    assert before is not None
    for night in range(12, 20):
        report = nights.run(night, 0.10)
    nights.learn()
    (change,) = report["drift"]["changes"]
    assert change["versions"] == {}
    assert "no version changed" in change["statement"]
    assert "node-1" in change["statement"]
    after = learned(wiring, job)
    assert after is not None
    assert after.stale is not None
    assert (after.stale.runs, after.stale.since[:10]) == (24, "2026-10-13")
    old, new = (
        estimate_jobs([job], lambda _, found=calibration: found)[0]
        for calibration in (before, after)
    )
    assert old.step_seconds is not None
    assert new.step_seconds is not None
    assert new.step_seconds > 1.07 * old.step_seconds, "it is not averaged with what was before"
    assert new.learned is not None
    assert new.learned.stale_runs == 24
    assert "24 older runs left out as stale" in new.learned.statement
    assert any("nightly found step times" in warning for warning in new.warnings)
    assert not any("stale" in warning for warning in old.warnings)
    shown = {line.id: line for line in calibration_page(wiring, None, 100).items}
    assert shown[after.id].stale_runs == 24
    assert shown[after.id].in_use
    assert not shown[before.id].in_use
    known, said = known_to_a_study(wiring)
    assert {one.created_at[:10] for one in known} == {f"2026-10-{day}" for day in range(13, 21)}
    assert len(known) == 16
    (line,) = said
    assert line.startswith("24 runs of this job from before 2026-10-13 are left out as stale: the")


def known_to_a_study(wiring: Wiring) -> tuple[list[Measurement], list[str]]:
    """(runs of the job that a study asked for now takes as measured, what it says)."""
    said: list[str] = []
    task = TaskRecord(id="plan-1", kind="study", created_at=FIRST, request=JOB)
    probes = StudyProbes(
        wiring=wiring,
        job=parse_job(JOB, allow_files=False),
        observer=Observer(on_message=said.append),
        claimed=Claimed(wiring.tasks, task),
    )
    return list(probes.measured_before()), said


# ---- slow hosts ----------------------------------------------------------------------------------


def on_two_of_four(night: int) -> tuple[str, str]:
    """Hosts of a night's layouts, in turns; node-2 runs one every night."""
    other = f"node-{(1, 3, 4)[night % 3]}"
    return ("node-2", other) if night % 2 else (other, "node-2")


def test_a_host_that_is_slow_for_nights_is_kept_out_with_its_evidence(wiring: Wiring) -> None:
    nights = Nights(wiring)
    for night in range(12):
        report = nights.run(night, 0.0, hosts=on_two_of_four(night), reported=night == 11)
    assert (report["quarantined"], wiring.quarantine.active()) == ([], ())
    for night in range(12, 18):
        on = on_two_of_four(night)
        report = nights.run(night, 0.0, hosts=on, slow_host=0.15, reported=night == 17)
    (bad,) = report["quarantined"]
    assert bad["host"] == "node-2"
    assert bad["evidence"][0].startswith("slower than others by 1")
    assert "since 2026-10-13" in bad["evidence"][0]
    assert report["headline"] == "2 of 2 layouts measured; 1 slow host in quarantine"
    (out,) = wiring.quarantine.active("local")
    assert (out.host, out.found_by, list(out.evidence)) == (
        "node-2",
        "sweep-run-017",
        bad["evidence"],
    )
    assert f"host node-2 is kept out for a day: {bad['evidence'][0]}" in list(report_lines(report))
    # a night without it, and one on which it is fast again, say nothing new of it
    wiring.quarantine.release("node-2", None)
    assert nights.run(18, 0.0, hosts=("node-1", "node-3"))["quarantined"] == []
    report = nights.run(19, 0.0, hosts=on_two_of_four(19))
    assert [one["until"] for one in report["drift"]["hosts"]] == [None]
    assert (report["quarantined"], wiring.quarantine.active()) == ([], ())


@pytest.mark.parametrize(
    ("slow_host", "driver"),
    [pytest.param(0.15, "580.10", id="another driver"), pytest.param(0.05, "570.86", id="little")],
)
def test_a_host_with_software_of_its_own_or_little_slower_is_not_kept_out(
    wiring: Wiring, slow_host: float, driver: str
) -> None:
    nights = Nights(wiring)
    for night in range(18):
        then = {"slow_host": slow_host, "slow_driver": driver} if night >= 12 else {}
        on = on_two_of_four(night)
        report = nights.run(night, 0.0, hosts=on, reported=night == 17, **then)  # type: ignore[arg-type]
    assert [one["host"] for one in report["drift"]["hosts"]] == ["node-2"], "it is named"
    assert (report["quarantined"], wiring.quarantine.active()) == ([], ())
