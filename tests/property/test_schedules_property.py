"""Any schedule at any legal size runs, wastes no less than nothing, and its closed forms hold."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.pipeline.simulate import Simulation, StageCosts, compiled, replay, simulate
from planner.schedules import SCHEDULES, Schedule, leaves
from tests.pricing import stage_costs

names = st.sampled_from(list(SCHEDULES))
Sized = tuple[Schedule, int, int, int]


@st.composite
def legal_layouts(draw: st.DrawFn) -> Sized:
    entry = SCHEDULES[draw(names)]
    pp = draw(st.integers(1, 8))
    v = 1 if entry.single_stage else 2 if entry.v_shaped else draw(st.integers(2, 4))
    m = draw(st.integers(1, 40).filter(lambda count: entry.violation(pp, v, count) is None))
    return entry, pp, v, m


@st.composite
def costs_of(draw: st.DrawFn, num_stages: int, equal: bool = False) -> StageCosts:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = 5, 3, 1 if equal else num_stages
    *work, send, saved = random.uniform(0.1, 2.0, shape) * np.ones((5, 3, num_stages))
    return stage_costs(*work, send * draw(st.sampled_from([0.0, 0.1, 1.0])), saved)


def replayed(entry: Schedule, pp: int, v: int, m: int, costs: StageCosts) -> Simulation:
    return replay(compiled(entry, pp, v, m), costs, num_microbatches=m, times=True)


@settings(max_examples=80)
@given(legal_layouts(), st.data())
def test_a_timeline_respects_work_order_and_inputs(layout: Sized, data: st.DataObject) -> None:
    entry, pp, v, m = layout
    costs = data.draw(costs_of(pp * v))
    result = replayed(entry, pp, v, m, costs)
    line = result.timeline
    singles = [(k, action) for k, item in enumerate(line.actions) for action in leaves((item,))]
    ends = {(a.stage, "I" if a.kind == "B" else a.kind, a.microbatch): k for k, a in singles}
    for k, action in singles:
        start = line.start_seconds_AC[k]
        if k and line.rank_A[k - 1] == line.rank_A[k]:
            assert np.all(start >= line.end_seconds_AC[k - 1] - 1e-9)
        other = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action.kind != "W" and 0 <= other < pp * v:
            source = ends[(other, "F" if action.kind == "F" else "I", action.microbatch)]
            moved = line.rank_A[source] != line.rank_A[k]
            hop = costs.send_seconds_CS[:, min(other, action.stage)] * moved
            assert np.all(start >= line.end_seconds_AC[source] + hop - 1e-9)
    assert np.all(result.bubble_seconds_CR(entry.synchronous_end) >= -1e-9)
    assert np.all(result.span_seconds_CR <= result.makespan_seconds_C[:, None] + 1e-9)
    lasts = np.flatnonzero(np.diff(line.rank_A, append=-1))
    assert np.allclose(line.kept_bytes_AC[lasts], 0)


@settings(max_examples=60)
@given(legal_layouts(), st.data())
def test_slower_work_or_sends_never_finish_sooner(layout: Sized, data: st.DataObject) -> None:
    entry, pp, v, m = layout
    fast = data.draw(costs_of(pp * v))
    slow = replace(
        fast,
        forward_seconds_CS=fast.forward_seconds_CS * 1.1,
        send_seconds_CS=fast.send_seconds_CS + 0.01,
    )
    ends = [replayed(entry, pp, v, m, costs).makespan_seconds_C for costs in (slow, fast)]
    assert np.all(ends[0] >= ends[1])


@settings(max_examples=25)
@given(names, st.sampled_from([2, 3, 4, 8]), st.integers(30, 60), st.data())
def test_equal_stages_go_on_exactly(name: str, pp: int, rounds: int, data: st.DataObject) -> None:
    """Sends up to 0.1 beside work of 0.1 to 2. Longer ones can close their circles of waits in odd
    numbers: 1e-3, as unequal stages.
    """
    entry = SCHEDULES[name]
    v, m = (1 if entry.single_stage else 2), pp * rounds
    costs = data.draw(costs_of(pp * v, equal=True))
    costs = replace(costs, send_seconds_CS=costs.send_seconds_CS * 0.05)
    short = simulate(entry, (pp, v, m), costs)
    whole = replay(compiled(entry, pp, v, m), costs, num_microbatches=m)
    for column in ("makespan_seconds_C", "span_seconds_CR", "peak_saved_bytes_CR"):
        found, expected = (getattr(one, column) for one in (short, whole))
        if column == "span_seconds_CR":
            found, expected = found.max(axis=1), expected.max(axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=column)
