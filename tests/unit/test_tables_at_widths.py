"""What commands print at 80, 100 and 120 columns: no line is too long and no word is broken."""

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import RenderableType

from planner.api.catalog import catalog_list
from planner.api.cli.output import as_text
from planner.api.collectives import ask_collective
from planner.api.render.accuracy import accuracy_view, rows_view
from planner.api.render.estimate import bullets, key_figures
from planner.api.render.lists import catalog_table
from planner.api.render.plan import ranked_table, run_section, sizes_table
from planner.api.render.probe import beside, measurements_table
from planner.api.render.simulations import collective_view, timeline_view
from planner.calibration.comparison import shipped_comparison
from planner.calibration.report import report
from planner.intake.jobs import read_job
from planner.intake.measurements import read_measurement
from planner.plan.timeline import timeline
from planner.specs.plan import Plan
from planner.specs.plan_comparisons import SizeOption
from tests.conftest import job_values
from tests.golden.rows import published

WIDTHS = (80, 100, 120)
WIDE = 1000
KINDS = ("models", "gpus", "clusters", "schedules", "defaults")
LONG = {
    "pp": 8, "dp_shard": 4, "tp": 2, "virtual_stages": 2, "pp_schedule": "Interleaved1F1B",
    "ac": "memory-budget-0.73", "compile": True, "precision": "float8-tensorwise",
}  # fmt: skip
View = Callable[[int], RenderableType]


def check(view: View) -> None:
    whole = {word for line in as_text(view(WIDE), WIDE).splitlines() for word in line.split()}
    for width in WIDTHS:
        lines = as_text(view(width), width).splitlines()
        assert max(map(len, lines)) <= width
        words = {word for line in lines for word in line.split() if word.strip("─")}
        assert words - whole == set(), f"at {width} columns"
        assert "…" not in "".join(lines)


def test_a_plan(plan: Plan) -> None:
    long = plan.ranked[0].layout.model_copy(update=LONG)
    entries = [entry.model_copy(update={"layout": long}) for entry in plan.ranked]
    wordy = plan.model_copy(update={"ranked": entries})
    check(lambda width: ranked_table(wordy, width))
    check(lambda width: key_figures(entries[0].estimate, width))
    check(lambda width: bullets([*plan.ranked[0].reasons, *plan.headline]))
    run = plan.ranked[0].run
    check(lambda width: run_section(run, 8)[1])
    each = {"tokens_per_second": 1.5e6, "time_to_train_seconds": 1e6, "cost": 1e6}
    each |= {"energy_joules": 1e12, "co2_grams": 1e8}
    options = []
    for size in (8, 16384):
        whole = {name: amount * size for name, amount in each.items()}
        one = SizeOption(num_gpus=size, layout=long, step_seconds=1.25, on_front=True, **whole)
        options.append(one)
    check(lambda width: sizes_table(plan.model_copy(update={"sizes": options}), width))


def test_measurements() -> None:
    rows = [*published().values()][:200:40]
    given: Any = {"created_at": "2026-11-22T00:00:00+00:00", "allow_files": False}
    names = [f"measurement-{row['id']:>024}" for row in rows]
    pairs = zip(rows, names, strict=True)
    found = [read_measurement(row, measurement_id=name, **given) for row, name in pairs]
    said = beside(found)
    check(lambda width: measurements_table(found, said, width))


def test_accuracy() -> None:
    result = report(shipped_comparison())
    check(lambda width: accuracy_view(result, width))
    check(lambda width: rows_view(result.rows, width))


@pytest.mark.parametrize("kind", KINDS)
def test_the_catalogue(kind: str) -> None:
    lines = catalog_list(kind)
    check(lambda width: catalog_table(kind, lines, width))


def test_collectives_and_pipelines() -> None:
    asked = {"op": "all-reduce", "size": "1 GiB", "cluster": "h100-256"}
    answer = ask_collective(asked, allow_files=False)
    check(lambda width: collective_view(answer, width))
    job = job_values("llama3-8b", "h100-sxm-80gb", 8, 2048, 16, layout={"pp": 4})
    played = timeline(read_job(job))
    check(lambda width: timeline_view(played))
