"""A plan with probes shows measured layouts, how each was looked at, and what failed."""

from typing import Any

import pytest

from planner.api.cli.output import as_text
from planner.api.cli.studying import _stand, failure_of
from planner.api.render.plan import plan_view
from planner.specs.plan import SOURCES, Plan, RankedLayout
from planner.units import format_seconds
from tests.conftest import ROOT

WIDTH = 240  # no line of these folds


def trial(layout: dict[str, Any], value: float | None = None, **said: Any) -> dict[str, Any]:
    state = "complete" if value else "fail"
    return {"number": 0, "state": state, "layout": layout, "value": value, **said}


def probed(plan: Plan, trials: list[dict[str, Any]], **more: Any) -> Plan:
    """The plan as if these trials had been its probes."""
    probing = {
        "probes": len(trials), "looks": 0, "gpu_seconds": 60.0, "stopped": "the budget is spent",
        "expected_regret": 0.02, "num_ruled_out": 0, "ruled_out": [], "trials": trials, **more,
    }  # fmt: skip
    return Plan.model_validate_json(plan.model_copy(update={"probing": probing}).model_dump_json())


def lines_of(plan: Plan) -> list[str]:
    text = as_text(plan_view(plan, WIDTH, letters=True), WIDTH)
    return [" ".join(line.split()) for line in text.splitlines()]


def section(plan: Plan) -> list[str]:
    """Its lines between the headings of this section and of the next."""
    lines = lines_of(plan)
    after = next(index for index, line in enumerate(lines) if line.startswith("Memory"))
    return [line for line in lines[lines.index("Measured") + 1 : after] if line]


def unranked(plan: Plan, micro_batch_size: int) -> dict[str, Any]:
    """A layout that the plan does not rank."""
    layout = plan.ranked[0].layout.model_copy(
        update={"micro_batch_size": micro_batch_size, "ac": "full", "precision": "bf16"}
    )
    assert layout not in [entry.layout for entry in plan.ranked]
    return layout.model_dump(mode="json")


def test_every_measured_layout_is_shown_fastest_first(plan: Plan) -> None:
    first, second, *_ = plan.ranked
    predicted, values = second.estimate.step_seconds or 0.0, second.layout.model_dump(mode="json")
    trials = [
        trial(values, 2.0 * predicted, rung="imitated", log_seconds_sd=0.06),
        trial(unranked(plan, 64), 0.9 * predicted, rung="probed", log_seconds_sd=0.01),
        trial(unranked(plan, 32), 3.0 * predicted, rung="emulated", log_seconds_sd=0.061),
        trial(unranked(plan, 16), 4.0 * predicted),
    ]
    other, ranked, emulated, old = section(probed(plan, trials))[2:6]
    assert other.endswith("- -")
    assert ["mbs 64" in other, " ran itself " in other] == [True, True]
    assert "±" not in other, "what ran itself is as sure as it looks"
    assert ranked.startswith(second.layout.short())
    assert [words in ranked for words in (" smaller runs ", " ± 6% ")] == [True, True]
    assert ranked.endswith(" 2.00")
    assert [words in emulated for words in (" single ranks ", " ± 6% ")] == [True, True]
    assert " - " in old.partition("mbs 16")[2], "a plan from before looks does not say how"
    assert first.layout.short() not in "".join([other, ranked, emulated, old])


def test_a_split_of_layers_is_found_among_the_ranked(plan: Plan) -> None:
    winner, *others = plan.ranked
    split = winner.layout.model_copy(update={"layers_per_stage": (16, 16)})
    ranked = [winner.model_copy(update={"layout": split}), *others]
    measured = trial(split.model_dump(mode="json"), winner.estimate.step_seconds, rung="probed")
    shown = probed(plan.model_copy(update={"ranked": ranked}), [measured])
    assert section(shown)[2].endswith(" 1.00")


def test_a_narrow_table_keeps_room_for_the_layout(plan: Plan) -> None:
    winner = plan.ranked[0]
    values, seconds = winner.layout.model_dump(mode="json"), winner.estimate.step_seconds
    view = probed(plan, [trial(values, seconds, rung="probed")])
    wide, narrow = (as_text(plan_view(view, width, letters=True), width) for width in (80, 44))
    assert "predicted" in wide
    words = [line.split() for line in narrow.splitlines()]
    assert ["how", "measured", "predicted", "ratio"] in words
    assert "\n      fsdp" in narrow, "the layout stands below its row"


def test_a_long_table_ends_with_a_count(plan: Plan) -> None:
    trials = [trial(unranked(plan, 64), 1.0 + number, rung="probed") for number in range(25)]
    lines = section(probed(plan, trials))
    assert sum(" ran itself " in line for line in lines) == 20
    assert "and 5 more" in lines
    assert "and" not in [line.split()[0] for line in section(probed(plan, trials[:20]))]


def test_what_gave_no_time_names_its_layout(plan: Plan) -> None:
    winner, values = plan.ranked[0].layout, plan.ranked[0].layout.model_dump(mode="json")
    crash = trial(values, message="crash: first rank said so", rung="probed")
    full = {**trial(values, status="oom", message="out"), "state": "pruned"}
    lines = section(probed(plan, [crash, trial(values, failure="interrupted"), full]))
    assert {
        f"failed: {winner.short()}: crash: first rank said so",
        f"failed: {winner.short()}: interrupted",
        f"out of memory: {winner.short()}",
    } <= set(lines)
    lines = section(probed(plan, [crash] * 15))
    assert sum(line.startswith("failed: ") for line in lines) == 12
    assert "and 3 more" in lines


@pytest.mark.parametrize(("count", "words"), [(1, "1 layout"), (1200, "1,200 layouts")])
def test_layouts_that_no_probe_can_run_are_counted(plan: Plan, count: int, words: str) -> None:
    reason = "no pipeline schedule of that name"
    shown = probed(plan, [], refused=[{"reason": reason, "layouts": count}])
    assert f"{words} cannot be run by the probe program: {reason}" in section(shown)


def with_winner(plan: Plan, source: str = "probed", expected: float = 2.0, **measured: Any) -> Plan:
    winner, *others = plan.ranked
    found = {"step_seconds": 2.0, "rung": "probed", "runs": 1, "relative_error": 0.07, **measured}
    update = {"measurement": found, "expected_step_seconds": expected, "source": source}
    return plan.model_copy(update={"ranked": [winner.model_copy(update=update), *others]})


IMITATED = {"rung": "imitated", "expected": 2.5, "source": "emulated"}


@pytest.mark.parametrize(("found", "said"), [
    ({}, "Measured: 2 s a step, over 1 run; predicted "),
    ({"runs": 3, "mean_step_seconds": 2.25},
        "Measured: 2 s a step, the fastest of 3 runs (mean 2.25 s); predicted "),
    (IMITATED, "Not run itself: 2 s ± 7% a step by smaller runs that stood for it; "
        "2.5 s expected with all that was measured; predicted "),
])  # fmt: skip
def test_the_winner_says_how_a_step_is_known(plan: Plan, found: dict[str, Any], said: str) -> None:
    assert said in "\n".join(lines_of(with_winner(plan, **found)))


def test_the_headline_has_one_step_the_measured_one(plan: Plan) -> None:
    paper = format_seconds(plan.ranked[0].estimate.step_seconds or 0.0)
    lines = lines_of(with_winner(plan, expected=2.0))
    assert f"step 2 s predicted {paper}" in lines
    table = next(line for line in lines if line.startswith("1 "))
    assert (" 2 s " in table, table.endswith("probed")) == (True, True)
    mentions = [line for line in lines[: lines.index(table)] if paper in line]
    assert mentions
    assert all("predicted" in line for line in mentions), "it is never taken for the step"
    assert f"Time of one step: {paper} as predicted" in lines


def test_what_was_measured_is_in_the_table_beyond_its_usual_end(plan: Plan) -> None:
    sources = {rank: "probed" if rank == 14 else "simulated" for rank in range(1, 15)}
    many = [
        plan.ranked[0].model_copy(update={"rank": rank, "source": source})
        for rank, source in sources.items()
    ]
    lines = lines_of(plan.model_copy(update={"ranked": many}))
    ranks = [line.split()[0] for line in lines if line.endswith((" probed", " simulated"))]
    assert ranks == [*map(str, range(1, 11)), "14"]


@pytest.mark.parametrize(("expected", "named"), [(1.8, True), (2.2, False)])
def test_what_may_be_faster_still_is_named_as_the_next_to_probe(
    plan: Plan, expected: float, named: bool
) -> None:
    shown = with_winner(plan, expected=2.0)
    winner, second, *others = shown.ranked
    rival = second.model_copy(update={"expected_step_seconds": expected})
    lines = section(probed(shown.model_copy(update={"ranked": [winner, rival, *others]}), []))
    faster = "expected 1.11 times as fast as number 1 and not measured"
    assert (faster in "\n".join(lines), "times as fast" in "\n".join(lines)) == (named, named)


@pytest.mark.parametrize(
    ("rung", "words"),
    [("probed", "best 35.3 ms a step"), ("imitated", "35.3 ms a step expected of the leader")],
)
def test_a_line_of_progress_says_whether_the_best_was_measured(rung: str, words: str) -> None:
    body = {
        "event": "told", "layout": "fsdp 2", "message": "40 ms a step", "best_step_seconds": 0.0353,
        "best_rung": rung, "expected_regret": None, "gpu_seconds_left": 10.0, "probes": 1,
        "probes_left": 1,
    }  # fmt: skip
    assert words in _stand(body).line


def test_where_probes_decide_the_models_own_doubt_is_left_out(plan: Plan) -> None:
    paper = lines_of(plan)
    assert "How sure" in paper
    assert "Number 2 against number 1" in paper
    decided = lines_of(probed(plan, []))
    assert "How sure" not in decided
    assert "Number 2 against number 1, on paper" in decided
    assert "expected regret of number 1: 2.0%" in "".join(decided)


def test_probing_failed_only_where_no_layout_at_all_was_measured(plan: Plan) -> None:
    broken = trial(unranked(plan, 64), message="crash")
    measured = trial(unranked(plan, 32), 2.0)
    assert failure_of(probed(plan, [broken])) == "the budget is spent"
    assert failure_of(probed(plan, [broken, measured])) is None, "though not among the best"
    assert failure_of(probed(plan, [{**broken, "state": "pruned"}])) is None
    assert failure_of(plan) is None


@pytest.mark.parametrize(("risk", "faster", "named"), [
    (0.03, 0.9, True), (0.009, 0.9, False), (0.03, 1.1, False),
])  # fmt: skip
def test_what_is_faster_and_not_first_for_its_risk_is_named(
    plan: Plan, risk: float, faster: float, named: bool
) -> None:
    first, second, *_ = plan.ranked
    changed = {"oom_probability": risk, "step_seconds": first.shown.step_seconds * faster}
    risky = second.model_copy(update={"estimate": second.estimate.model_copy(update=changed)})
    lines = lines_of(plan.model_copy(update={"ranked": [first, risky]}))
    words = "faster, but out of memory in over 1% of runs, so not first: 2 (3.0%)"
    assert (words in lines) == named


def test_sources_that_are_shown_are_explained_and_no_others(plan: Plan) -> None:
    shown = {entry.source for entry in plan.ranked}
    names = tuple(f"{name}: " for name in SOURCES)
    (line,) = [line for line in lines_of(plan) if line.startswith(names)]
    assert {name for name in SOURCES if f"{name}: {SOURCES[name]}" in line} == shown
    described = str(RankedLayout.model_fields["source"].description)
    page = (ROOT / "api" / "web" / "plan.js").read_text(encoding="utf-8")
    for name, means in SOURCES.items():
        assert f"{name}: {means}" in described
        assert f'{name}: "{means}"' in page
