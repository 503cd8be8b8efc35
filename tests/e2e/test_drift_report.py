"""A sweep's history in a real database: what its report says of drift, and what is learnt then."""

from collections.abc import Sequence
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
from planner.api.jobs.leases import Claimed, Observer
from planner.api.jobs.study_probes import StudyProbes
from planner.api.jobs.sweeps import add_sweep, sweep_detail
from planner.api.render.charts import sweep_chart
from planner.api.render.sweep import report_lines
from planner.api.settings import Settings
from planner.api.wiring import Wiring, wire
from planner.cost.machine.knobs import Calibration
from planner.estimates import estimate_jobs
from planner.intake.measurements import read_measurement
from planner.specs.measurement import Measurement, question_hash
from planner.specs.sweep import SweepSpec
from tests.conftest import EACH_DATABASE, job_values
from tests.stand_ins.records import probe_record, task_record

JOB = job_values("llama3-8b", "h100-sxm-80gb", 8, 8192, 8)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_shard": 8, "ac": "full"},
    {"dp_shard": 8, "ac": "selective-op"},
)
SWEEP = {"name": "nightly", "jobs": [JOB], "measure": {"anchors": list(LAYOUTS), "top_k": 0}}
FIRST = datetime(2026, 10, 1, 2, tzinfo=UTC)
SECONDS = (2.0, 1.6)


@pytest.fixture
def nights(migrated_url: str) -> "Nights":
    return Nights(wire(Settings(database_url=migrated_url)))


class Nights:
    """Runs of one sweep, as workers would have left them."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.sweep = add_sweep(wiring, SWEEP, allow_files=False)
        self.rng = np.random.default_rng(1)
        self.reports: dict[str, dict[str, Any]] = {}

    def quiet(self, number: int) -> dict[str, Any]:
        """The report of the last of so many nights like the first."""
        return [self.run(night) for night in range(number)][-1]

    def learn(self) -> Calibration:
        """From all nights at once (each alone would take seconds): what answers the job."""
        update_from_measurements(self.wiring, self.newest)
        return learned(self.wiring, parse_job(JOB, allow_files=False))

    def is_kept_out(self, report: dict[str, Any]) -> bool:
        """Whether a host is, in this report and in the database."""
        active = self.wiring.quarantine.active()
        assert len(active) == len(report["quarantined"])
        return bool(active)

    def run(
        self, night: int, slower: float = 0.0, torch: str = "2.11.0", *,
        hosts: Sequence[str] = ("node-1", "node-1"), slow_host: float = 0.0,
        slow_driver: str = "570.86", reported: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        """One night's report; all layouts are slower than at first by this share.

        hosts: of each layout. slow_host, slow_driver: of node-2. reported: else only stored.
        """
        wiring, due = self.wiring, FIRST + timedelta(days=night)
        record = task_record(
            id=f"sweep-run-{night:03d}", kind="sweep", created_at=due, due_at=due,
            request=dict(self.sweep.spec), parent_id=self.sweep.id, asked_by=self.sweep.asked_by,
        )  # fmt: skip
        lines, measurements = [], []
        for place, (layout, host) in enumerate(zip(LAYOUTS, hosts, strict=True)):
            name, at = f"probe-{night:03d}-{place}", due + timedelta(minutes=place)
            seconds = SECONDS[place] * (1 + slower) * float(np.exp(self.rng.normal(0, 0.004)))
            seconds *= 1 + slow_host if host == "node-2" else 1.0
            driver = slow_driver if host == "node-2" else "570.86"
            software = {"torch": torch, "nccl": "2.27.3", "driver": driver}
            numbers = {"rung": "probed", "step_seconds": seconds, "software": software}
            row = {**JOB, "layout": layout, "measured": {**numbers, "hosts": [host]}}
            row["source"] = f"probe {name}"
            measurement = read_measurement(row, measurement_id=name, created_at=at.isoformat())
            measurements.append(measurement)
            wiring.measurements.add([measurement])
            key, shown = measurement.key(), measurement.job.layout
            probe = probe_record(
                id=name, created_at=at, job_hash=question_hash(measurement.job), model=key.model,
                request={"job": {**JOB, "layout": layout}, "trainer": "torchtitan"}, gpu=key.gpu,
                num_gpus=8, layout=shown.short(), plan_id=record.id, measurement_id=name,
                state="done",
            )  # fmt: skip
            wiring.probes.add([probe])
            lines.append({
                "layout": shown.short(), "why": "anchor", "predicted_step_seconds": None,
                "status": "ok", "step_seconds": seconds, "change": None, "changed": False,
                "message": None, "measurement_id": name, "software": software,
            })  # fmt: skip
        if not reported:
            return {}
        self.newest = measurements
        job = {
            "model": "llama3-8b", "gpu": "h100-sxm-80gb", "num_gpus": 8, "layouts": lines,
            "winner": None, "winner_before": None, "new_winner": False,
        }  # fmt: skip
        headline = "2 of 2 layouts measured"
        report: dict[str, Any] = {"headline": headline, "probes": 2, "gpu_seconds": 1.0}
        report |= {"quarantined": [], "jobs": [job]}
        spec = SweepSpec.model_validate(dict(self.sweep.spec))
        report = with_drift(wiring, record, spec, report)
        wiring.tasks.add([record])
        self.reports[record.id] = report
        return report

    def detail(self) -> dict[str, Any]:
        """As a reader sees it, with the reports that runs gave."""
        detail = sweep_detail(self.wiring, self.sweep, 200)
        for run in detail["runs"]:
            run["report"] = self.reports[run["id"]]
        return detail


@EACH_DATABASE
def test_two_percent_a_night_over_three_versions_is_drift(nights: Nights) -> None:
    """It was "0 changed" every night against the run before."""
    for night, torch in enumerate(["2.10.0"] * 3 + ["2.11.0"] * 2 + ["2.12.0"] * 2):
        report = nights.run(night, 0.02 * night, torch)
    change = SweepDrift.model_validate(report["drift"]).changes[-1]
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


def test_quiet_nights_are_no_drift_and_nothing_is_stale(nights: Nights) -> None:
    report = nights.quiet(12)
    assert report["drift"]["changes"] == []
    assert report["headline"] == "2 of 2 layouts measured"
    assert list(report_lines(report))[3] == "  none"
    assert nights.learn().stale is None


def test_what_was_learnt_before_a_change_is_left_out_until_measured_anew(nights: Nights) -> None:
    """No version changed, so the stack is the same one and only the sweep can tell."""
    nights.quiet(12)
    before = nights.learn()
    for night in range(12, 20):
        report = nights.run(night, 0.10)
    after = nights.learn()
    (change,) = report["drift"]["changes"]
    assert change["versions"] == {}
    assert "no version changed" in change["statement"]
    assert "node-1" in change["statement"]
    assert (after.stale.runs, after.stale.since[:10]) == (24, "2026-10-13")
    job = parse_job({**JOB, "layout": LAYOUTS[0]}, allow_files=False)
    old, new = (
        estimate_jobs([job], lambda _, found=calibration: found)[0]
        for calibration in (before, after)
    )
    assert new.step_seconds > 1.07 * old.step_seconds, "it is not averaged with what was before"
    assert new.learned.stale_runs == 24
    assert "24 older runs left out as stale" in new.learned.statement
    assert any("nightly found step times" in warning for warning in new.warnings)
    assert not any("stale" in warning for warning in old.warnings)
    shown = {line.id: line for line in calibration_page(nights.wiring, None, 100).items}
    assert shown[after.id].stale_runs == 24
    assert (shown[after.id].in_use, shown[before.id].in_use) == (True, False)
    known, said = known_to_a_study(nights.wiring)
    assert {one.created_at[:10] for one in known} == {f"2026-10-{day}" for day in range(13, 21)}
    assert len(known) == 16
    (line,) = said
    assert line.startswith("24 runs of this job from before 2026-10-13 are left out as stale: the")


def known_to_a_study(wiring: Wiring) -> tuple[list[Measurement], list[str]]:
    """(runs of the job that a study asked for now takes as measured, what it says)."""
    said: list[str] = []
    probes = StudyProbes(
        wiring=wiring,
        job=parse_job(JOB, allow_files=False),
        observer=Observer(on_message=said.append),
        claimed=Claimed(wiring.tasks, task_record(created_at=FIRST, request=JOB)),
    )
    return list(probes.measured_before()), said


def on_two_of_four(night: int) -> tuple[str, str]:
    """Hosts of a night's layouts, in turns; node-2 runs one every night."""
    other = f"node-{(1, 3, 4)[night % 3]}"
    return ("node-2", other) if night % 2 else (other, "node-2")


def test_a_host_that_is_slow_for_nights_is_kept_out_with_its_evidence(nights: Nights) -> None:
    for night in range(12):
        report = nights.run(night, hosts=on_two_of_four(night), reported=night == 11)
    assert not nights.is_kept_out(report)
    for night in range(12, 18):
        on = on_two_of_four(night)
        report = nights.run(night, hosts=on, slow_host=0.15, reported=night == 17)
    (bad,) = report["quarantined"]
    (evidence,) = bad["evidence"]
    assert bad["host"] == "node-2"
    assert evidence.startswith("slower than others by 1")
    assert "since 2026-10-13" in evidence
    assert report["headline"] == "2 of 2 layouts measured; 1 slow host in quarantine"
    (out,) = nights.wiring.quarantine.active("local")
    assert (out.host, out.found_by) == ("node-2", "sweep-run-017")
    assert list(out.evidence) == [evidence]
    assert f"host node-2 is kept out for a day: {evidence}" in list(report_lines(report))
    # a night without it, and one on which it is fast again, say nothing new of it
    nights.wiring.quarantine.release("node-2", None)
    assert nights.run(18, hosts=("node-1", "node-3"))["quarantined"] == []
    report = nights.run(19, hosts=on_two_of_four(19))
    assert [one["until"] for one in report["drift"]["hosts"]] == [None]
    assert not nights.is_kept_out(report)


@pytest.mark.parametrize(
    ("slow_host", "driver"),
    [pytest.param(0.15, "580.10", id="another driver"), pytest.param(0.05, "570.86", id="little")],
)
def test_a_host_with_software_of_its_own_or_little_slower_is_not_kept_out(
    nights: Nights, slow_host: float, driver: str
) -> None:
    for night in range(18):
        then: Any = {"slow_host": slow_host, "slow_driver": driver} if night >= 12 else {}
        report = nights.run(night, hosts=on_two_of_four(night), reported=night == 17, **then)
    assert [one["host"] for one in report["drift"]["hosts"]] == ["node-2"], "it is named"
    assert not nights.is_kept_out(report)
