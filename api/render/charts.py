"""Charts of what the database holds."""

from collections.abc import Iterator, Mapping
from typing import Any

from api.render.sweep import versions_changed
from planner.charts.chart import Chart
from planner.charts.sweep import SweepPoint, over_time


def sweep_points(detail: Mapping[str, Any]) -> Iterator[SweepPoint]:
    """Every measured layout of the runs of a sweep (`api.jobs.sweeps.sweep_detail`)."""
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
    """How the measured layouts of a sweep changed from run to run."""
    return Chart(over_time(list(sweep_points(detail)), title=f"Sweep {detail['name']}"))
