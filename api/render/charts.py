"""Charts of what the database holds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from planner.api.render.probing import REALLY
from planner.api.render.sweep import versions_changed
from planner.charts.chart import Chart
from planner.charts.study import StudyPoint, progress
from planner.charts.sweep import ChangePoint, SweepPoint, over_time


def sweep_points(detail: Mapping[str, Any]) -> Iterator[SweepPoint]:
    """Every measured layout of the runs of a sweep (`planner.api.jobs.sweeps.sweep_detail`)."""
    for run in detail["runs"]:
        for job in (run["report"] or {}).get("jobs", ()):
            for line in job["layouts"]:
                if line["status"] == "ok" and line["step_seconds"]:
                    yield SweepPoint(
                        at=run["due_at"],
                        run=run["id"],
                        job=f"{job['model']} on {job['num_gpus']} {job['gpu']}",
                        layout=line["layout"],
                        step_seconds=line["step_seconds"],
                        predicted_seconds=line["predicted_step_seconds"],
                        change=line["change"],
                        versions=", ".join(versions_changed(line)),
                    )


def sweep_chart(detail: Mapping[str, Any]) -> Chart:
    points = list(sweep_points(detail))
    return Chart(
        over_time(
            points,
            title=f"Sweep {detail['name']}",
            changes=list(change_points(detail, {point.run: point.at for point in points})),
        )
    )


def change_points(detail: Mapping[str, Any], due: Mapping[str, str]) -> Iterator[ChangePoint]:
    """Points at which the newest report finds drift, within the runs that are shown.

    due: when each run was due.
    """
    drift = next((run["report"]["drift"] for run in detail["runs"] if _has_drift(run)), None)
    for change in drift["changes"] if drift else ():
        if change["run"] in due:
            yield ChangePoint(at=due[change["run"]], statement=change["statement"])


def _has_drift(run: Mapping[str, Any]) -> bool:
    return bool((run["report"] or {}).get("drift"))


def study_points(events: Iterable[Mapping[str, Any]]) -> Iterator[StudyPoint]:
    """Every result of a study's events (`study_probes.event_body`) with a best so far."""
    for number, body in enumerate(events, start=1):
        if body["event"] == "told" and body["best_step_seconds"] is not None:
            yield StudyPoint(
                number=number,
                layout=body["layout"] or "",
                message=body["message"],
                probes=body["probes"],
                gpu_seconds=body["gpu_seconds"],
                best_step_seconds=body["best_step_seconds"],
                expected_regret=body["expected_regret"],
                ran=body["best_rung"] in REALLY,
            )


def study_chart(events: Iterable[Mapping[str, Any]]) -> Chart:
    return Chart(progress(list(study_points(events)), title="Best so far"))
