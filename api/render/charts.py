"""Charts of stored sweeps and studies."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from planner.api.render.probing import REALLY
from planner.api.render.sweep import versions_changed
from planner.charts.chart import Chart
from planner.charts.study import SHOWN, progress
from planner.charts.sweep import over_time

Row = dict[str, Any]


def sweep_points(detail: Mapping[str, Any]) -> Iterator[Row]:
    """Every measured layout of the runs of a sweep (`planner.api.jobs.sweeps.sweep_detail`)."""
    for run in detail["runs"]:
        for job in (run["report"] or {}).get("jobs", ()):
            for line in job["layouts"]:
                if line["status"] == "ok" and line["step_seconds"]:
                    yield {
                        "at": run["due_at"],
                        "run": run["id"],
                        "job": f"{job['model']} on {job['num_gpus']} {job['gpu']}",
                        **{name: line[name] for name in ("layout", "step_seconds", "change")},
                        "predicted_seconds": line["predicted_step_seconds"],
                        "versions": ", ".join(versions_changed(line)),
                    }


def sweep_chart(detail: Mapping[str, Any]) -> Chart:
    points = list(sweep_points(detail))
    changes = list(change_points(detail, {point["run"]: point["at"] for point in points}))
    return Chart(over_time(points, title=f"Sweep {detail['name']}", changes=changes))


def change_points(detail: Mapping[str, Any], due: Mapping[str, str]) -> Iterator[Row]:
    """Points at which the newest report finds drift, within the runs that are shown.

    due: when each run was due.
    """
    reports = (run["report"] or {} for run in detail["runs"])
    drift = next((report["drift"] for report in reports if report.get("drift")), None)
    for change in drift["changes"] if drift else ():
        if change["run"] in due:
            yield {"at": due[change["run"]], "statement": change["statement"]}


def study_points(events: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Every result of a study's events (`study_probes.event_body`) with a best so far."""
    for number, body in enumerate(events, start=1):
        if body["event"] == "told" and body["best_step_seconds"] is not None:
            shown = {name: body[name] for name in SHOWN}
            own = {"number": number, "layout": body["layout"] or ""}
            yield {**shown, **own, "ran": body["best_rung"] in REALLY}


def study_chart(events: Iterable[Mapping[str, Any]]) -> Chart:
    return Chart(progress(list(study_points(events)), title="Best so far"))
