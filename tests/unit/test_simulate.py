"""The timeline simulator: small cases by hand, memory, extrapolated long steps, the trace."""

import itertools
import json
import time

import numpy as np
import pytest

from planner.cost.pipeline.simulate import (
    DIRECT_ACTIONS,
    KEPT,
    Simulation,
    StageCosts,
    compiled,
    replay,
    simulate,
)
from planner.export.trace import chrome_trace
from planner.schedules import SCHEDULES
from tests.orders import compile_order, from_csv
from tests.pricing import STAGE_COLUMNS, stage_costs


def costs(forward: list[list[float]], **given: float) -> StageCosts:
    """Rows of forward seconds per stage; both gradients take as long. given: seconds of a send,
    bytes saved, and of what else is held."""
    forward_CS, ones = np.array(forward), np.ones_like(np.array(forward))
    columns = {f"{name}_CS": ones * value for name, value in given.items()}
    seconds = dict.fromkeys(STAGE_COLUMNS[:3], forward_CS)
    rest = {"send_seconds_CS": 0.0 * ones, "saved_bytes_CS": ones}
    return StageCosts(**seconds | rest | columns)


def uneven(
    num_stages: int, candidates: int, seed: int, *, spread: float = 0.1, send: float = 0.05
) -> StageCosts:
    """Stages that differ by exp(spread), a heavier last one, sends of up to `send` of a forward."""
    draw, shape = np.random.default_rng(seed), (candidates, num_stages)
    base = np.exp(draw.uniform(-spread, spread, shape))
    base[:, -1] *= draw.uniform(1, 1 + 2 * spread, candidates)
    backward = [base * draw.uniform(*ends, (candidates, 1)) for ends in ((1, 2), (0.5, 1))]
    sends = np.broadcast_to(draw.uniform(0, send, (candidates, 1)), shape)
    return stage_costs(base, *backward, sends, base)


def run(csv: str, given: StageCosts) -> Simulation:
    return replay(compile_order(from_csv(csv)), given, num_microbatches=0, times=True)


def test_two_stages_by_hand() -> None:
    """F0 0-1, F1 1-2, B0 6.5-8.5; rank 1: F0 1.5-3.5, B0 3.5-7.5, send 0.5, 1 half as fast."""
    result = run("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", costs([[1.0, 2.0]], send_seconds=0.5))
    line = result.timeline
    starts = {str(action): line.start_seconds_AC[k, 0] for k, action in enumerate(line.actions)}
    first = {"0F0": 0.0, "0F1": 1.0, "0B0": 8.0, "0B1": 14.0}
    assert starts == {**first, "1F0": 1.5, "1B0": 3.5, "1F1": 7.5, "1B1": 9.5}
    assert result.makespan_seconds_C.tolist() == [16.0]
    assert result.busy_seconds_CR.tolist() == [[6.0, 12.0]]
    assert result.bubble_seconds_CR(True).tolist() == [[10.0, 4.0]]
    assert result.span_seconds_CR.tolist() == [[16.0, 12.0]]


def test_a_weights_gradient_does_not_hold_up_the_inputs() -> None:
    orders = ("0F0,0B0\n1F0,1B0\n", "0F0,0I0,0W0\n1F0,1I0,1W0\n")
    whole, split = (run(csv, costs([[1.0, 1.0]])).makespan_seconds_C[0] for csv in orders)
    assert (whole, split) == (6.0, 5.0)


def test_memory_counts_what_is_saved_until_the_weights_gradient() -> None:
    held = {"saved_bytes": 10.0, "weight_grad_bytes": 4.0}
    result = run("0F0,0F1,0I0,0I1,0W0,0W1\n", costs([[1.0]], **held))
    kept = result.timeline.kept_bytes_AC[:, 0]
    assert kept.tolist() == [10.0, 20.0, 14.0, 8.0, 4.0, 0.0]
    assert result.peak_saved_bytes_CR.tolist() == [[20.0]]


def test_deadlock_missing_input_and_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="deadlock"):
        compile_order(from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"))
    with pytest.raises(ValueError, match="no stage computes"):
        compile_order(from_csv("0F0,0B0\n1F0\n"))
    with pytest.raises(ValueError, match="send_seconds_CS has shape"):
        StageCosts(
            **{**dict.fromkeys(STAGE_COLUMNS, np.ones((2, 4))), "send_seconds_CS": np.ones((2, 3))}
        )


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("spread", "tolerance"), [(0.0, 1e-9), (0.03, 1e-3), (0.3, 1e-3)])
def test_long_steps_go_on_as_if_replayed_whole(name: str, spread: float, tolerance: float) -> None:
    """Equal stages: 1e-9. Unequal: 1e-3. Memory exact. m up to 64 microbatches a rank."""
    entry, continued = SCHEDULES[name], 0
    for pp, v in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (4, 4)):
        m = 64 * pp
        if entry.violation(pp, v, m) or (len(compiled(entry, pp, v, m).items) <= DIRECT_ACTIONS):
            continue
        given = uneven(pp * v, 6, seed=pp * v, spread=spread)
        short = simulate(entry, (pp, v, m), given)
        whole = replay(compiled(entry, pp, v, m), given, num_microbatches=m)
        continued += short.simulated_microbatches < m
        same(short, whole, tolerance, 1e-9)
        ends = (one.step_seconds_C(False) for one in (short, whole))
        np.testing.assert_allclose(*ends, rtol=tolerance)
    assert continued or spread > 0


def same(short: Simulation, whole: Simulation, makespan: float, others: float) -> None:
    columns = {"makespan_seconds_C": makespan, "busy_seconds_CR": others}
    for name, rtol in {**columns, "peak_saved_bytes_CR": others}.items():
        np.testing.assert_allclose(*(getattr(one, name) for one in (short, whole)), rtol=rtol)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_short_steps_are_replayed_whole(name: str) -> None:
    entry = SCHEDULES[name]
    for pp, v, m in itertools.product((2, 4, 8), (1, 2, 4), (8, 16, 24, 37, 48)):
        if entry.violation(pp, v, m) or len(compiled(entry, pp, v, m).items) > DIRECT_ACTIONS:
            continue
        given = uneven(pp * v, 3, seed=m, spread=0.3)
        short = simulate(entry, (pp, v, m), given)
        assert short.simulated_microbatches == m
        same(short, replay(compiled(entry, pp, v, m), given, num_microbatches=m), 1e-12, 1e-12)


def test_two_slow_neighbours_become_the_bottleneck_late() -> None:
    """1F1B: stages 0 and 1 wait for each other and outlast the busier 15 in the end."""
    forward = np.full((4, 16), 0.7)
    forward[:, :2], forward[:, 15] = 1.0, [1.01, 1.02, 1.03, 1.032]
    continued_as_whole("1F1B", (16, 1, 1024), costs(forward.tolist(), send_seconds=0.1))


def continued_as_whole(name: str, size: tuple[int, int, int], given: StageCosts) -> None:
    short = simulate(SCHEDULES[name], size, given).makespan_seconds_C
    whole = replay(compiled(SCHEDULES[name], *size), given, num_microbatches=size[2])
    np.testing.assert_allclose(short, whole.makespan_seconds_C, rtol=1e-3)


@pytest.mark.parametrize("m", [54, 63])
def test_uneven_rounds_of_torch_are_never_broken(m: int) -> None:
    """9 microbatches a round on 8 ranks (torch's flexible rounds): only whole ones are left out."""
    continued_as_whole("Interleaved1F1B", (8, 8, m), uneven(64, 3, seed=3))


def test_trace_has_a_row_per_rank_an_event_per_action_and_a_memory_track() -> None:
    result = simulate(SCHEDULES["ZB-1p"], (4, 1, 6), uneven(4, 2, seed=4), times=True)
    trace = json.loads(json.dumps(chrome_trace(result, candidate=1)))
    events = trace["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    assert len(shown) == 4 * 6 * 3
    assert {event["tid"] for event in shown} == {0, 1, 2, 3}
    end = max(event["ts"] + event["dur"] for event in shown)
    assert end == pytest.approx(result.makespan_seconds_C[1] * 1e6)
    assert {event["name"] for event in shown} >= {"0F0", "3I5", "3W5"}
    for rank in range(4):
        row = sorted((event["ts"], event["dur"]) for event in shown if event["tid"] == rank)
        pairs = itertools.pairwise(row)
        assert all(start + length <= later + 1e-6 for (start, length), (later, _) in pairs)
        counters = [event for event in events if (event["ph"], event["tid"]) == ("C", rank)]
        track = [event["args"]["bytes"] for event in counters]
        assert max(track) == pytest.approx(result.peak_saved_bytes_CR[1, rank])
        assert track[-1] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="times=True"):
        chrome_trace(simulate(SCHEDULES["1F1B"], (2, 1, 4), uneven(2, 1, seed=0)))


def test_two_hundred_candidates_in_forty_groups_take_no_more_than_a_second_cold() -> None:
    """Budget 0.3 s of processor time, allowed three times that; nothing is compiled before."""
    KEPT.clear()
    names = ("1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
    began, groups = time.process_time(), 0
    for name in names:
        entry = SCHEDULES[name]
        for pp in (2, 4, 8, 16):
            for rounds in (4, 32):
                v = 1 if entry.single_stage else 2
                simulate(entry, (pp, v, pp * rounds), uneven(pp * v, 5, seed=pp, spread=0.02))
                groups += 1
    assert groups == 40
    assert time.process_time() - began < 0.9
