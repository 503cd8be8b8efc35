"""Which layout comes first: expected throughput, what can be told apart, what a mechanism adds."""

from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.basis import unmeasured
from planner.calibration.correlated import CorrelatedErrors
from planner.calibration.intervals import TimeSpread, time_spread
from planner.calibration.mechanisms import MECHANISMS, WEIGHTY, points, used_by
from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.search.choice import preference
from planner.search.choice.preference import RISK, UNPROVEN, WORTH, Weighed, spread_within_stack
from planner.specs.plan import Plan
from tests.conftest import ROOT, UNMEASURED_JOB, fixed_now, job_values
from tests.pricing import rows as batch_of

NODE = read_job(job_values("llama3.1-8b", "h100-sxm-80gb", 8, 8192, 64))
PLAIN = {"dp_shard": 8, "ac": "none"}
PIPED_ALONE = {"dp_shard": 4, "pp": 2}
PIPED = PIPED_ALONE | {"ac": "none"}
BUDGET = {"dp_shard": 8, "ac": "memory-budget-0.5", "compile": True}


def all_but(*lacking: str) -> Calibration:
    """A calibration whose runs used every mechanism except these."""
    used = (one.name for one in MECHANISMS if one.name not in lacking)
    seen = frozenset(("torchtitan", "hopper", name) for name in used)
    return replace(shipped_calibration(), seen=seen)


ALL_BUT_BUDGETS = all_but("ac memory-budget")


def pricer_of(calibration: Calibration | None = None, num_gpus: int = 8) -> Pricer:
    cluster = NODE.cluster.with_num_gpus(num_gpus)
    return Pricer.build(NODE.model, cluster, NODE.training, calibration)


def apart(batch: LayoutBatch, spread: TimeSpread, row: int = 0) -> np.ndarray:
    """How far each layout's error deviates from this one's."""
    return preference.difference_sd(CorrelatedErrors.of(batch, spread, 64), row)


def chosen(
    values: list[dict], seconds: list[float], oom: list[float] | None = None, own: float = 0.06,
    calibration: Calibration = ALL_BUT_BUDGETS,
) -> int:  # fmt: skip
    """The place of the layout that comes first."""
    batch = batch_of(*values)
    lacking, supported = unmeasured(batch, NODE, calibration).T, np.ones(len(batch), np.bool_)
    weighed = Weighed(points=points(batch, NODE), unmeasured=lacking, supported=supported)
    expected = weighed.expected(np.array(seconds), np.array(oom or [0.0] * len(seconds)))
    spread = TimeSpread(loadings=UNPROVEN * lacking, own_sd=np.full(len(batch), own))
    return preference.prefer(batch, weighed, expected, 64, spread)


# Two points less a half for narrower groups; a run that dies; what is lost and what is doubted.
BRINGS, DIES, DOUBT, HALF = WORTH * 1.5, RISK * 0.015, 2.0 * UNPROVEN, WORTH / 2.0
TIGHT, FULL = PLAIN | {"zero_stage": 2}, PLAIN | {"ac": "full"}
SHORT, LONG = PIPED | {"zero_stage": 2}, PIPED | {"dp_shard": 2, "pp": 4, "zero_stage": 2}
COMPILED, TWICE = PIPED | {"compile": True}, BUDGET | {"dp_replicate": 2, "dp_shard": 4}
RISKY_SECOND = {"oom": [0.0, 0.015]}
TWO_LACKING = {"calibration": all_but("ac memory-budget", "hsdp")}
# Two layouts, the gain of the second over the first, what else is so, and who comes first.
CHOICES: dict[str, tuple[dict, dict, float, dict, int]] = {
    "a pipeline that brings too little stands back": (PLAIN, PIPED, BRINGS - 0.001, {}, 0),
    "a pipeline that brings enough does not": (PLAIN, PIPED, BRINGS + 0.001, {}, 1),
    "what can be told apart": (PLAIN, PIPED, BRINGS - 0.001, {"own": 0.005}, 1),
    "a risk that loses less than is gained": (PLAIN, TIGHT, DIES + 0.001, RISKY_SECOND, 1),
    "a risk that loses more": (PLAIN, TIGHT, DIES - 0.001, RISKY_SECOND, 0),
    "of equals the narrowest groups": (LONG, SHORT, 0.001 - HALF, {}, 1),
    "narrow groups that are no equals": (LONG, SHORT, -0.001 - HALF, {}, 0),
    "narrow groups that can be told apart": (LONG, SHORT, 0.001 - HALF, {"own": 0.005}, 0),
    "as wide and faster": (PLAIN, FULL, 0.0001, {}, 1),
    "as wide and slower": (PLAIN, FULL, -0.0001, {}, 0),
    "unmeasured, less than its doubt": (COMPILED, BUDGET, DOUBT - 0.001, {}, 0),
    "unmeasured, more than its doubt": (COMPILED, BUDGET, DOUBT + 0.001, {}, 1),
    "two unmeasured, below root two": (COMPILED, TWICE, DOUBT + 1.3 * UNPROVEN, TWO_LACKING, 0),
    "two unmeasured, above root two": (COMPILED, TWICE, DOUBT + 1.5 * UNPROVEN, TWO_LACKING, 1),
    "errs little both ways": (COMPILED, BUDGET, DOUBT + 0.005, {"own": 0.01}, 1),
    "errs far both ways": (COMPILED, BUDGET, DOUBT + 0.005, {"own": 0.3}, 1),
    "rest on the same": (BUDGET | {"ac": "memory-budget-0.9"}, BUDGET, np.log(10 / 9), {}, 1),
}


@pytest.mark.parametrize("name", CHOICES)
def test_which_of_two_layouts_comes_first(name: str) -> None:
    first, second, gain, more, place = CHOICES[name]
    assert chosen([first, second], [10.0, 10.0 * np.exp(-gain)], **more) == place


def test_equals_have_as_many_points_and_a_risk_of_one_in_a_hundred_is_worth_one() -> None:
    assert np.ptp(points(batch_of(SHORT, LONG), NODE)) == 0
    assert np.ptp(points(batch_of(COMPILED, BUDGET), NODE)) == 0
    assert pytest.approx(WORTH) == 0.01 * RISK


def test_nobody_gives_up_more_than_the_limit_for_simplicity() -> None:
    """Nine points would be worth 18%, and the model could not tell."""
    many = PIPED | {"tp": 2, "dp_shard": 1, "cp": 2, "pp_schedule": "Interleaved1F1B"}
    many["precision"] = "float8-rowwise"
    slower = 10.0 * (1.0 + preference.MOST_GIVEN_UP + 0.01)
    assert points(batch_of(many), NODE)[0] > 5
    assert chosen([PLAIN, many], [slower, 10.0], own=0.5) == 1


def test_a_simpler_one_that_cannot_be_told_from_the_first_comes_before_it() -> None:
    """Though it is behind the fastest, which stood back for the first."""
    three = [PIPED | {"layers_per_stage": [17, 15]}, PIPED, PLAIN]
    batch, own = batch_of(*three), 0.04
    spread = TimeSpread(loadings=np.zeros((0, 3)), own_sd=np.full(3, own))
    to_last = [apart(batch, spread, row)[2] for row in (0, 1)]
    assert to_last == pytest.approx([0.0328, 0.0325], abs=1e-3)

    def first_of(*behind: float) -> int:
        seconds = [float(10.0 * np.exp(one)) for one in behind]
        return chosen(three[: len(seconds)], seconds, own=own)

    assert first_of(0.0, 0.009) == 1
    assert first_of(0.0, 0.009, 0.035) == 2
    assert first_of(0.0, 0.009, 0.043) == 1, "behind the first too"
    assert first_of(0.0, 0.030, 0.051) == 0, "beyond what anybody gives up"


def test_a_group_is_as_wide_as_what_keeps_in_step() -> None:
    """Whoever meets once a step does not."""
    widths = (
        (8, {"dp_shard": 8}), (4, {"dp_shard": 4, "pp": 2, "zero_stage": 3}), (2, SHORT), (4, LONG),
        (1, {"dp_shard": 8, "zero_stage": 1}), (8, {"dp_shard": 2, "cp": 4}),
        (4, {"dp_shard": 2, "tp": 4}), (4, {"dp_shard": 8, "zero_stage": 1, "ep": 4}),
    )  # fmt: skip
    batch = batch_of(*(values for _, values in widths))
    assert preference.widest_group(batch).tolist() == [wide for wide, _ in widths]


def test_leaders_are_the_best_of_each_number_of_points() -> None:
    seconds, weights = np.array([5.0, 3.0, 4.0, 1.0, 2.0]), np.array([0, 0, 0, 2, 2])
    assert preference.leaders(seconds, weights, 2).tolist() == [1, 2, 3, 4]


def test_near_twins_are_told_apart_sooner_than_strangers() -> None:
    """With the shipped calibration: budgets of one layout by 1%, a pipeline by less than 5%."""
    batch = batch_of(BUDGET, BUDGET | {"ac": "memory-budget-0.52"}, BUDGET | PIPED_ALONE)
    sd = apart(batch, spread_within_stack(pricer_of(), batch))
    assert sd[0] == 0.0
    assert sd[1] < 0.01 < 0.02 < sd[2] < 0.05


def test_layouts_of_a_stack_differ_by_what_its_runs_scatter_by() -> None:
    """Each alone is off by more, and by more yet where nobody measured."""
    shipped, batch = shipped_calibration(), batch_of(PLAIN, PIPED, BUDGET)
    pricer = pricer_of(shipped)
    among = spread_within_stack(pricer, batch)
    alone = time_spread(pricer, batch, pricer.price(batch))
    rest = shipped.directions("torchtitan", "hopper")[1]
    assert among.own_sd == pytest.approx(np.sqrt(rest + shipped.own_run_sd**2))
    assert shipped.own_run_sd < shipped.run_sd
    assert np.all(among.own_sd < alone.own_sd)


def test_what_all_layouts_of_a_job_share_keeps_none_of_them_apart() -> None:
    """A cluster larger than any measured one widens each estimate, not their difference."""
    batch, sizes = batch_of(PLAIN, PLAIN | {"zero_stage": 2}), (8, 16_384)
    here, large = (spread_within_stack(pricer_of(num_gpus=count), batch) for count in sizes)
    assert here.own_sd == pytest.approx(large.own_sd)
    assert len(here.loadings) == len(large.loadings)  # so that plans over sizes can join them


def test_what_only_one_of_two_rests_on_unmeasured_keeps_them_from_being_told_apart() -> None:
    full = PLAIN | {"ac": "full", "compile": True}
    batch, pricer = batch_of(full, BUDGET, BUDGET | {"zero_stage": 2}), pricer_of(ALL_BUT_BUDGETS)
    count, spread = len(Weighed.of(batch, pricer).unmeasured), spread_within_stack(pricer, batch)
    unproven = spread.loadings[-count:]
    assert np.linalg.norm(unproven, axis=0) == pytest.approx([0.0, UNPROVEN, UNPROVEN])
    assert np.linalg.norm(unproven[:, 1] - unproven[:, 2]) == 0.0
    assert apart(batch, spread)[1] > UNPROVEN


RISKY = preference.MOST_RISK


@pytest.mark.parametrize(("seconds", "supported", "oom", "rows"), [
    ([10.0, 10.49, 10.51], None, None, [0, 1]),  # nobody gives up more than 5% on paper
    ([8.0, 10.0, 10.4], [False, True, True], None, [1, 2]),  # a speed that no run supports
    ([8.0, 8.0 * preference.FAR_BEHIND + 0.1], [False, True], None, [0]),
    ([8.0, 8.1], [False, False], None, [0, 1]),
    ([9.0, 10.0, 10.4], None, [RISKY + 0.001, RISKY, 0.0], [1, 2]),  # wants a probe first
    ([9.0, 9.1], None, [0.03, 0.04], [0, 1]),
])  # fmt: skip
def test_rows_that_may_come_first(
    seconds: list[float], supported: list[bool] | None, oom: list[float] | None, rows: list[int]
) -> None:
    count = len(seconds)
    weighed = Weighed(
        points=np.zeros(count, dtype=np.int64),
        unmeasured=np.zeros((0, count), dtype=np.bool_),
        supported=np.array(supported or [True] * count),
    )
    found = preference.eligible(weighed, *[np.array(seconds)] * 2, np.array(oom or [0.0] * count))
    assert np.flatnonzero(np.isfinite(found)).tolist() == rows


def test_an_exchange_leads_where_runs_of_the_trainer_on_the_family_made_it() -> None:
    """And a program's mechanism wherever it is; HSDP is practice on many GPUs."""
    cut = PLAIN | {"dp_shard": 4, "cp": 2}
    batch = batch_of(PLAIN, cut, cut | {"cp_method": "alltoall"}, PIPED, BUDGET)
    lacking = all_but("cp allgather", "pp", "ac memory-budget")
    elsewhere = {("torchtitan", "ampere", "cp allgather"), ("megatron", "hopper", "cp allgather")}
    for seen in (lacking.seen, lacking.seen | elsewhere):
        weighed = Weighed.of(batch, pricer_of(replace(lacking, seen=seen)))
        assert weighed.supported.tolist() == [True, False, True, True, False]


def test_hsdp_on_many_gpus_is_practice() -> None:
    hsdp = batch_of(PLAIN | {"dp_replicate": 2, "dp_shard": 4}, PLAIN)
    for count, lacking, weight in ((256, 1, 1), (512, 0, 0)):
        weighed = Weighed.of(hsdp, pricer_of(all_but("hsdp"), count))
        assert weighed.unmeasured[:, 0].sum() == lacking
        assert weighed.points[0] - weighed.points[1] == weight


def plan_of(*, calibration: Calibration = ALL_BUT_BUDGETS, **search: object) -> Plan:
    """8B that hardly fits without recomputation; fixed to what decides about budgets."""
    given = search.pop("fix", {})
    fix = {**UNMEASURED_JOB["search"]["fix"], **given}
    job = read_job({**UNMEASURED_JOB, "search": {**search, "fix": fix}})
    return recommend(job, now=fixed_now, calibration=calibration)


@pytest.mark.slow
def test_the_first_does_not_depend_on_how_many_are_asked_for() -> None:
    one, three, ten = (plan_of(top_k=count) for count in (1, 3, 10))
    assert one.ranked[0].layout == three.ranked[0].layout == ten.ranked[0].layout
    assert [len(plan.ranked) for plan in (one, three, ten)] == [1, 3, 10]


def test_the_fastest_on_paper_is_the_second_line_with_what_it_would_gain() -> None:
    plan = plan_of(top_k=3)
    (first, second, _), other = plan.ranked, plan.fastest_on_paper
    assert first.unmeasured == []
    assert plan.rests_on is plan.best_measured is None
    assert "memory-budget recomputation" in second.unmeasured
    assert (other.rank, other.layout) == (2, second.layout)
    times = first.estimate.step_seconds / second.estimate.step_seconds
    assert other.times_as_fast == pytest.approx(times, rel=1e-3)
    of_first, of_second = (used_by(one.layout, NODE) for one in (first, second))
    more = [one.words for one in of_second if one.points and one not in of_first]
    assert set(other.adds) >= set(more)
    assert other.unmeasured == [word for word in other.adds if word in second.unmeasured]
    assert f"{other.oom_probability:.1%}" in other.statement
    assert all(other.statement.count(words) == 1 for words in other.adds)


@pytest.mark.parametrize(("shared", "best"), [
    ([], "fully measured"), (["optimizer adamw"], "that rests on optimizer adamw alone"),
])  # fmt: skip
def test_number_1_on_nothing_measured_has_the_best_beside_it(shared: list[str], best: str) -> None:
    lacking = all_but("ac memory-budget", *shared)
    plan = plan_of(top_k=1, prefer="fastest", calibration=lacking)
    assert (len(plan.ranked), plan.fastest_on_paper) == (2, None)
    first, beside = plan.ranked
    assert "memory-budget recomputation" in first.unmeasured
    assert beside.unmeasured == shared
    assert (plan.best_measured.rank, plan.best_measured.layout) == (2, beside.layout)
    slower = beside.estimate.step_seconds / first.estimate.step_seconds
    assert plan.best_measured.times_as_long == pytest.approx(slower, rel=1e-3)
    assert "memory-budget recomputation" in plan.rests_on
    assert f"best {best}: rank 2, {1.0 - 1.0 / slower:.1%} slower" in plan.rests_on
    # dense models on Hopper were off no further with what other sources had not (`classes`)
    assert shared or first.estimate.time_sd > beside.estimate.time_sd


def test_nothing_measured_to_stand_beside() -> None:
    plan = plan_of(top_k=1, fix={"ac": "memory-budget-0.05"})
    assert plan.rests_on.startswith("uses memory-budget recomputation, which none of the runs")
    assert "nothing that fits and comes near it does without" in plan.rests_on
    assert plan.best_measured is None


def test_the_numbers_of_the_rule_are_those_of_the_decision() -> None:
    page = ROOT / "docs/decisions/0006-simplest-of-what-cannot-be-told-apart.md"
    shares = [f"{share:.0%}" for share in (preference.MOST_GIVEN_UP, WORTH, UNPROVEN)]
    families = ("precision ", "schedule ", "dispatcher ")  # one row of the decision for many
    alone = [one for one in WEIGHTY if not one.name.startswith(families)]
    rows = [f"| {one.words} | {one.points} |" for one in alone]
    said = [f"{preference.SURE:g} standard deviation", f"(1 - P)^{RISK:g}", *shares, *rows]
    text = page.read_text(encoding="utf-8")
    assert [words for words in said if words not in text] == []


@pytest.mark.parametrize(("search", "named"), [({}, False), ({"allow": {"tp": [1, 2]}}, True)])
def test_reasons_name_changes_that_are_searched(search: dict[str, object], named: bool) -> None:
    job = job_values("llama3.2-1b", "h100-sxm-80gb", 8, 2048, 64, trainer="fsdp", search=search)
    plan = recommend(read_job(job), now=fixed_now)
    assert any(line.startswith("tp 2 instead of 1") for line in plan.ranked[0].reasons) == named
