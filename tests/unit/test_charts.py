"""Charts hold the plan's numbers, and every one can be drawn."""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from planner.api.render.charts import study_chart, sweep_chart, sweep_points
from planner.calibration.comparison import shipped_comparison
from planner.calibration.report import chart_of, runs_of
from planner.charts.accuracy import BAND, RunPoint, accuracy, within_band
from planner.charts.chart import Chart
from planner.charts.pareto import FARTHEST, Point, front, pareto, shown
from planner.charts.sweep import over_time
from planner.charts.terminal import scatter
from planner.charts.timeline import MOST_DRAWN, Span
from planner.charts.timeline import timeline as drawn_timeline
from planner.errors import MissingPackageError, SpecError
from planner.intake.jobs import read_job
from planner.plan.timeline import timeline
from planner.specs.estimate_parts import MEMORY_PARTS, TIME_PARTS
from planner.specs.plan import Plan
from planner.units import GIB
from tests.conftest import JOB, needed

PIPELINE = {**JOB, "layout": {"pp": 4, "dp_shard": 2, "pp_schedule": "1F1B"}}


def data(chart: Chart, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = chart.spec["datasets"][name]
    return rows


def drawn(chart: Chart) -> str:
    """As Vega draws it, which refuses what it does not understand."""
    needed("vl_convert")
    svg = chart.svg()
    assert svg.startswith("<svg")
    return svg


def test_the_pareto_chart_holds_the_numbers_of_the_plan(plan: Plan) -> None:
    rows = {row["rank"]: row for row in data(plan.plot(), "points") if row["rank"] is not None}
    assert sorted(rows) == [one.rank for one in plan.ranked]
    for one in plan.ranked:
        estimate, row = one.estimate, rows[one.rank]
        assert row["layout"] == one.layout.short() == one.label
        for name in ("tokens_per_second_per_gpu", "device_bytes"):
            assert row[name] == getattr(estimate, name)
        assert row["gib"] * GIB == pytest.approx(estimate.device_bytes)
        fast, slow = estimate.interval.step_seconds
        work = (estimate.tokens_per_second_per_gpu or 0) * (estimate.step_seconds or 0)
        assert (row["low"], row["high"]) == pytest.approx((work / slow, work / fast))
        assert row["low_gib"] <= row["gib"] <= row["high_gib"]


def test_what_was_considered_is_on_it_once(plan: Plan) -> None:
    others = [one for one in plan.considered if one.rank is None and one.refused is None]
    points = plan.points()[len(plan.ranked) :]
    tokens = JOB["training"]["seq_len"] * JOB["training"]["global_batch_size"]
    assert {point.rank for point in points} == {None}
    assert [point.tokens_per_second_per_gpu for point in points] == pytest.approx(
        [tokens / (one.step_seconds or 0.0) / one.num_gpus for one in others]
    )


def point(rate: float, gib: float, **more: Any) -> Point:
    values: dict[str, Any] = {"layout": "x", "rank": None, "num_gpus": 8, "fits": True, **more}
    return Point(
        tokens_per_second_per_gpu=rate,
        interval=None,
        device_bytes=gib * GIB,
        memory_interval=None,
        **values,
    )


def test_the_front_is_what_no_other_beats() -> None:
    best, frugal, beaten = (point(9, 40), point(5, 20), point(4, 30))
    unfit = point(20, 99, fits=False)
    assert front([best, beaten, unfit, frugal]) == [frugal, best]


def test_what_is_far_from_fitting_is_left_out_and_counted() -> None:
    near, far = point(9, FARTHEST * 80), point(9, FARTHEST * 80 + 1)
    assert shown([near, far], 80 * GIB) == ([near], 1)
    assert "1 layout beyond" in pareto([near, far], 80 * GIB, title="t")["description"]


def test_a_measured_layout_is_a_mark_of_its_own(plan: Plan) -> None:
    first = plan.ranked[0]
    step = 2.0 * (first.estimate.step_seconds or 0.0)
    probed = first.model_copy(update={"measurement": {"step_seconds": step}, "source": "probed"})
    chart = plan.model_copy(update={"ranked": [probed, *plan.ranked[1:]]}).plot()
    (row,) = data(chart, "measured")
    assert row["rank"] == 1
    half = (first.estimate.tokens_per_second_per_gpu or 0.0) / 2.0
    assert row["measured_tokens_per_second_per_gpu"] == pytest.approx(half)
    assert "measured" in drawn(chart)
    assert data(plan.plot(), "measured") == []
    emulated = probed.model_copy(update={"source": "emulated"})
    stood_for = plan.model_copy(update={"ranked": [emulated]})
    assert data(stood_for.plot(), "measured") == [], "single ranks are not the layout"
    assert stood_for.columns()["measured_step_seconds"] == [None]


@pytest.mark.parametrize(("kind", "whole"), [("memory", "device_bytes"), ("time", "step_seconds")])
def test_bars_add_up_to_the_estimate(plan: Plan, kind: Any, whole: str) -> None:
    chart = plan.plot(kind)
    for one in plan.ranked:
        parts = [row for row in data(chart, "parts") if row["rank"] == one.rank]
        total = getattr(one.estimate, whole)
        assert sum(row["size"] for row in parts) == pytest.approx(total, rel=0.005)
        assert sum(row["share"] for row in parts) == pytest.approx(1.0)
    assert "#1" in drawn(chart)


def test_every_part_has_a_colour_and_a_letter_of_its_own() -> None:
    for parts in (MEMORY_PARTS, TIME_PARTS):
        for own in ("name", "letter", "colour"):
            assert len({getattr(part, own) for part in parts}) == len(parts)


def test_the_timeline_shows_every_action() -> None:
    played = timeline(read_job(PIPELINE))
    rows = data(played.plot(), "spans")
    assert len(rows) == 2 * 4 * 32, "a forward and a backward a microbatch and rank"
    assert {row["rank"] for row in rows} == {0, 1, 2, 3}
    assert max(row["end_seconds"] for row in rows) == pytest.approx(played.makespan_seconds)
    assert all(row["end_seconds"] > row["start_seconds"] for row in rows)
    assert "pipeline rank" in drawn(played.plot())


def test_of_a_long_step_the_beginning_is_drawn_and_said() -> None:
    one = Span(
        rank=0, action="0F0", kind="forward", stage=0, microbatch=0, start_seconds=0.0,
        end_seconds=1.0,
    )  # fmt: skip
    spans = [
        replace(one, microbatch=i, start_seconds=float(i), end_seconds=i + 1.0)
        for i in reversed(range(MOST_DRAWN + 5))
    ]
    spec = drawn_timeline(spans, title="t")
    assert len(spec["datasets"]["spans"]) == MOST_DRAWN
    assert spec["datasets"]["spans"][0]["microbatch"] == 0
    assert spec["title"]["subtitle"].startswith("the first ")


def run(measured: float, predicted: float) -> RunPoint:
    return RunPoint(
        id="x", layout="fsdp 8", model="m", trainer="t", gpu="g",
        measured_seconds=measured, predicted_seconds=predicted,
    )  # fmt: skip


def test_the_band_is_what_it_says() -> None:
    runs = [run(1.0, 1.0 + BAND - 0.001), run(1.0, 1.0 + BAND + 0.001), run(2.0, 1.9)]
    runs.append(run(1.0, 1.0 - BAND - 0.001))
    assert within_band(runs) == 2
    spec = accuracy(runs, title="t")
    assert spec["title"]["subtitle"].startswith("2 of 4 runs within 10%")
    for end in spec["datasets"]["band"]:
        assert end["below"] / end["at"] == pytest.approx(0.9)
        assert end["above"] / end["at"] == pytest.approx(1.1)


def test_the_accuracy_chart_has_every_compared_run() -> None:
    rows = shipped_comparison().left_out["group"]
    chart = chart_of(rows, "t")
    compared = [row for row in rows if row.measured_seconds and row.predicted_seconds]
    predicted = [row["predicted_seconds"] for row in data(chart, "runs")]
    assert predicted == [row.predicted_seconds for row in compared]
    assert len(runs_of(rows)) == len(compared) > 100
    drawn(chart)


def sweep_detail() -> Mapping[str, Any]:
    def line(step: float | None, **more: Any) -> dict[str, Any]:
        status = "ok" if step else "failed"
        return {
            "layout": "fsdp 8", "predicted_step_seconds": 1.0, "status": status,
            "step_seconds": step, "change": None, **more,
        }  # fmt: skip

    def ran(number: int, *lines: dict[str, Any]) -> dict[str, Any]:
        job = {"model": "llama3-8b", "gpu": "l4", "num_gpus": 8, "layouts": list(lines)}
        due = f"2026-01-0{number}T02:00:00+00:00"
        return {"id": f"run-{number}", "due_at": due, "report": {"jobs": [job]}}

    changed = {"change": 0.5, "versions_changed": {"torch": ["2.9", "2.10"]}}
    newest_first = [ran(2, line(3.0, **changed), line(None)), ran(1, line(2.0))]
    return {"name": "nightly", "runs": [*newest_first, {**ran(3), "report": None}]}


def test_a_sweep_is_drawn_against_its_first_run() -> None:
    chart = sweep_chart(sweep_detail())
    rows = data(chart, "points")
    assert [row["relative"] for row in rows] == [1.0, 1.5]
    points = list(sweep_points(sweep_detail()))
    assert chart.spec == over_time(points, title="Sweep nightly")
    assert [row["versions"] for row in rows] == ["", "torch 2.9 -> 2.10"]
    assert "nightly" in drawn(chart)


def test_a_study_is_drawn_result_by_result() -> None:
    events = [
        ("asked", None, None, 0.0), ("told", None, None, 5.0), ("told", 2.0, "imitated", 10.0),
        ("asked", 2.0, "imitated", 10.0), ("told", 1.5, "probed", 30.0),
    ]  # fmt: skip
    names = ("event", "best_step_seconds", "best_rung", "gpu_seconds")
    same = {"layout": "fsdp 8", "message": "m", "probes": 1, "expected_regret": 0.1}
    chart = study_chart([{**dict(zip(names, one, strict=True)), **same} for one in events])
    rows = data(chart, "points")
    assert [(row["gpu_seconds"], row["best_step_seconds"]) for row in rows] == [(10, 2), (30, 1.5)]
    assert [row["best"] for row in rows] == ["expected from smaller runs", "ran itself"]
    assert "after 2 results" in drawn(chart)


def test_charts_become_files(plan: Plan) -> None:
    needed("vl_convert")
    chart = plan.plot()
    assert chart.drawn(".PNG").startswith(b"\x89PNG")
    assert chart.drawn(".svg").startswith(b"<svg")
    page = chart.drawn(".html").decode()
    assert re.findall(r"<script[^>]*src|<link", page) == [], "nothing is loaded from elsewhere"
    with pytest.raises(SpecError, match="is no format of a chart"):
        chart.drawn(".gif")


def test_a_notebook_is_shown_the_drawing_or_at_least_the_specification(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed("vl_convert")
    chart = plan.plot()
    assert "image/svg+xml" in chart._repr_mimebundle_()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert chart.spec in chart._repr_mimebundle_().values()
    assert "image/svg+xml" not in chart._repr_mimebundle_()
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[plot\]'"):
        chart.svg()


def test_text_marks_the_ranks_where_they_are(plan: Plan) -> None:
    best, frugal = point(200, 80, rank=1), point(100, 20, rank=2)
    lines = scatter([best, frugal, point(150, 50)], None, 60)
    places = {mark: (row, text.index(mark, 11)) for row, text in enumerate(lines[1:15])
              for mark in "12·" if mark in text[11:]}  # fmt: skip
    assert places["1"][0] < places["·"][0] < places["2"][0], "faster is higher"
    assert places["1"][1] > places["·"][1] > places["2"][1], "more memory is to the right"
    assert max(map(len, scatter(plan.points(), None, 80))) <= 80


def test_a_plan_is_a_table_for_people(plan: Plan) -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan)
    text, page = console.export_text(), plan._repr_html_()
    for one in plan.ranked:
        rate = f"{one.estimate.tokens_per_second_per_gpu:,.0f}"
        for shown_as in (text, page):
            assert one.label in shown_as
            assert rate in shown_as


def test_a_plan_is_columns_or_a_pandas_frame(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = plan.columns()
    assert columns["label"] == [one.label for one in plan.ranked]
    assert columns["step_seconds"] == [one.estimate.step_seconds for one in plan.ranked]
    assert columns["tp"] == [one.layout.tp for one in plan.ranked]
    needed("pandas")
    frame = plan.to_frame()
    assert list(frame.columns) == list(columns)
    for name in ("label", "step_seconds", "tp"):
        assert frame[name].tolist() == columns[name]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        plan.to_frame()


def test_labels_travel_with_every_layout_of_a_plan(plan: Plan) -> None:
    body = plan.model_dump(mode="json")
    for name, layouts in (("ranked", plan.ranked), ("pareto", plan.pareto)):
        assert [one["label"] for one in body[name]] == [one.layout.short() for one in layouts]
