"""Orders, rules and closed forms of the schedules; torch's own are in test_schedules_torch.py."""

import itertools
from collections import Counter

import numpy as np
import pytest

from planner.cost.pipeline.simulate import Simulation, StageCosts, compiled, replay
from planner.errors import UnknownNameError
from planner.schedules import (
    SCHEDULES,
    Order,
    OverlappedPair,
    Schedule,
    leaves,
    schedules_of,
    to_csv,
)
from planner.schedules.base import Exposed
from planner.trainers.registry import TRAINERS
from planner.trainers.transports import IDEAL, Transport
from tests.orders import compile_order
from tests.pricing import pairs_of

SIZES = list(itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4), (1, 2, 3, 4, 6, 7, 8, 12, 16, 24)))
Size = tuple[int, int, int]
ALL = pytest.mark.parametrize("entry", SCHEDULES.values(), ids=list(SCHEDULES))


def uniform(
    entry: Schedule, size: Size, seconds: np.ndarray, how: Transport = IDEAL, **given: float
) -> Simulation:
    """Equal stages: seconds (C, 3) of a microbatch over a rank's stages. given: seconds of a send,
    the share that weight gradients keep, seconds saved by a pair."""
    pp, v, m = size
    ones = np.ones((len(seconds), pp * v))
    send, share, saved = (ones * given.get(name, 0.0) for name in ("send", "share", "saved"))
    forward, input_grad, weight_grad = (ones * column[:, None] / v for column in seconds.T)
    costs = StageCosts(
        forward_seconds_CS=forward, input_grad_seconds_CS=input_grad,
        weight_grad_seconds_CS=weight_grad, send_seconds_CS=send, crowded_seconds_CS=send * 2.0,
        saved_bytes_CS=ones / v, weight_grad_bytes_CS=share / v,
        pair=pairs_of(saved, ones * 0.0, ones, ones, slowdown=0.0),
    )  # fmt: skip
    return replay(compiled(entry, pp, v, m, how), costs, num_microbatches=m)


def step_and_bubble(
    entry: Schedule, size: Size, seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    step = uniform(entry, size, seconds).step_seconds_C(entry.synchronous_end)
    return step, step - size[2] * seconds.sum(axis=1)


def legal_sizes(entry: Schedule) -> list[Size]:
    return [size for size in SIZES if entry.violation(*size) is None]


def test_registry_holds_the_contracts_names_in_order() -> None:
    contract = (
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
        "DualPipeV", "ZB-1p", "ZB-2p",
    )  # fmt: skip
    assert tuple(SCHEDULES) == contract
    assert SCHEDULES.find("1F1B") == SCHEDULES.of_code(1)
    with pytest.raises(UnknownNameError, match="Interleaved1F1B"):
        SCHEDULES.find("Interleaved1F1")
    with pytest.raises(ValueError, match="already"):
        SCHEDULES.add(SCHEDULES["GPipe"])


def test_a_runtime_has_its_own_schedules_in_the_order_in_which_a_search_tries_them() -> None:
    assert schedules_of("torch") == (
        "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV",
        "LoopedBFS", "GPipe",
    )  # fmt: skip
    assert schedules_of("megatron") == ("1F1B", "Interleaved1F1B", "ZB-1p", "ZB-2p")


def test_orders_one_can_check_by_eye() -> None:
    """Those of torch are its own: test_schedules_torch.py."""
    order = "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"
    assert to_csv(SCHEDULES["ZB-1p"].actions(2, 1, 3)) == order


def test_interleaved_order_of_the_paper() -> None:
    """Narayanan et al. 2021, figure 4: 4 ranks, 2 stages each: rank 0 forwards 1-4, 1-4, 5-8 ..."""
    first = SCHEDULES["Interleaved1F1B"].actions(4, 2, 8)[0]
    assert [str(action) for action in first[:12]] == [
        "0F0", "0F1", "0F2", "0F3", "4F0", "4F1", "4F2", "4F3", "0F4", "0F5", "0F6", "4B0",
    ]  # fmt: skip


def each_once_in_order(orders: Order, num_stages: int, m: int) -> None:
    """Each stage has one F and one B, or F, I and W, of each microbatch, one after the other."""
    ranks = [leaves(order) for order in orders]
    assert max(Counter(itertools.chain(*ranks)).values()) == 1
    kinds = {(stage, microbatch): "" for stage in range(num_stages) for microbatch in range(m)}
    for action in itertools.chain(*ranks):
        kinds[action.stage, action.microbatch] += action.kind
    assert set(kinds.values()) <= {"FB", "FIW"}


@ALL
def test_every_order_is_legal_on_the_ranks_it_claims(entry: Schedule) -> None:
    for pp, v, m in legal_sizes(entry):
        orders = entry.actions(pp, v, m)
        compile_order(orders)  # which refuses one whose ranks wait for each other in a circle
        each_once_in_order(orders, pp * v, m)
        for rank, order in enumerate(orders):
            found = list(leaves(order))
            assert {int(entry.stage_rank(action.stage, pp, v)) for action in found} == {rank}
            assert entry.splits_backward or {"I", "W"}.isdisjoint(one.kind for one in found)
            pairs = sum(isinstance(item, OverlappedPair) for item in order)
            assert pairs == entry.overlapped_pairs(rank, pp, v, m)
        apart = sum(action.kind == "W" for order in orders for action in leaves(order))
        assert entry.split_share(pp, v, m) == pytest.approx(apart / (pp * v * m))


def test_megatron_has_its_own_rules() -> None:
    assert SCHEDULES["1F1B"].violation(4, 1, 3, "megatron") is None
    violation = SCHEDULES["Interleaved1F1B"].violation
    assert [m for m in (3, 4, 10, 11, 12) if violation(4, 2, m, "megatron")] == [3, 11]


@ALL
def test_legal_column_is_the_scalar_rule(entry: Schedule) -> None:
    pp, v, m = (np.array(column) for column in zip(*SIZES, strict=True))
    assert entry.legal(pp, v, m).tolist() == [entry.violation(*size) is None for size in SIZES]


@ALL
def test_bubble_closed_form_is_the_simulation_where_backwards_are_longer(entry: Schedule) -> None:
    """w <= f <= i: equal to rounding; ZBV below 2p - 1 microbatches up to 1 % short."""
    draw = np.random.default_rng(0)
    longer = np.stack([np.ones(60), draw.uniform(1, 4, 60), draw.uniform(0.2, 1, 60)], axis=1)
    seconds = np.concatenate([np.ones((1, 3)), longer])
    for size in legal_sizes(entry):
        step, simulated = step_and_bubble(entry, size, seconds)
        error = (entry.bubble_seconds(*size, *seconds.T) - simulated) / step
        assert error.max() <= 1e-9, size
        assert error.min() >= (-0.01 if few(entry, size) else -1e-9), size


def few(entry: Schedule, size: Size) -> bool:
    return entry.name == "ZBVZeroBubble" and size[2] < 2 * size[0] - 1


@ALL
def test_bubble_closed_form_stays_close_everywhere_else(entry: Schedule) -> None:
    """Any f, i, w within a factor of two: 4 % of the step (ZBV below 2p - 1: 10 %)."""
    seconds = np.random.default_rng(1).uniform(0.7, 1.4, (80, 3))
    for size in legal_sizes(entry):
        step, simulated = step_and_bubble(entry, size, seconds)
        error = np.abs(entry.bubble_seconds(*size, *seconds.T) - simulated) / step
        assert error.max() <= (0.1 if few(entry, size) else 0.04), (size, error.max())


@ALL
@pytest.mark.parametrize("share", [0.0, 0.4, 0.5, 1.0, 1.6, 3.0, 20.0])
def test_what_is_held_is_the_simulated_peak(entry: Schedule, share: float) -> None:
    """I to W may hold more than forward saved: then one of several moments is the peak. Exact; ZBV
    between p and 2p - 1 up to 1."""
    for size in legal_sizes(entry):
        pp, ranks = size[0], np.arange(size[0])
        peak = uniform(entry, size, np.ones((1, 3)), share=share).peak_saved_bytes_CR[0]
        if share <= 1:
            held = entry.weight_grad_held(ranks, *size)
            closed = entry.in_flight(ranks, *size) + share * held
            np.testing.assert_allclose(closed, peak, rtol=1e-12, err_msg=str(size))
        if pp > 1 and not (few(entry, size) and size[2] > pp and share > 1):
            moments = entry.peak_candidates(ranks, *size)
            fullest = np.max([whole + share * half for whole, half in moments], axis=0)
            np.testing.assert_allclose(fullest, peak, rtol=1e-12, err_msg=str(size))


def test_memory_of_the_zero_bubble_paper() -> None:
    """Qi et al. 2023, table 1: ZB-H1 holds p, ZB-H2 at most 2p - 1 microbatches until W."""
    ranks = np.arange(8)
    for name, limit in (("ZB-1p", 8), ("ZB-2p", 15)):
        entry = SCHEDULES[name]
        held = entry.in_flight(ranks, 8, 1, 32) + entry.weight_grad_held(ranks, 8, 1, 32)
        assert held.tolist() == [limit] * 8


def test_bubbles_order_as_in_the_papers() -> None:
    one = np.array([[1.0, 1.1, 0.9]])
    bubble = {
        name: float(step_and_bubble(entry, (4, 1 if entry.single_stage else 2, 16), one)[1][0])
        for name, entry in SCHEDULES.items()
    }
    assert bubble["1F1B"] == pytest.approx(bubble["GPipe"])
    assert bubble["1F1B"] > bubble["ZB-1p"] > bubble["ZB-2p"] >= 0
    assert bubble["1F1B"] > bubble["Interleaved1F1B"] > bubble["InterleavedZeroBubble"] > 0
    assert bubble["ZBVZeroBubble"] < bubble["ZB-1p"]
    assert bubble["ZB-2p"] == pytest.approx(3 * (1.0 + 1.1 - 1.8))


EXPOSED = {
    TRAINERS[trainer].framework.transport(name, None, overlap=overlap).exposed
    for trainer, name, overlap in (
        ("torchtitan", "DualPipeV", False), ("torchtitan", "DualPipeV", True),
        ("megatron", "Interleaved1F1B", False),
    )
}  # fmt: skip


@ALL
def test_sends_on_critical_path_is_the_slope_of_the_step(entry: Schedule) -> None:
    """Like recomputation (f 1, i 2.2, w 0.9), steady, short sends: 2 hops off (pairs: 8)."""
    within = 8 if entry.name == "DualPipeV" else 2.01
    for pp, v, rounds in itertools.product((1, 2, 4, 8), (1, 2, 4), (2, 3, 6)):
        size = pp, v, pp * rounds
        if entry.violation(*size) is None:
            slope = send_slope(entry, size, IDEAL)
            assert entry.sends_on_critical_path(*size) == pytest.approx(slope, abs=within), size


def send_slope(entry: Schedule, size: Size, how: Transport) -> float:
    seconds, send = np.array([[1.0, 2.2, 0.9]]), 1e-6
    runs = (uniform(entry, size, seconds, how, send=s) for s in (0.0, send))
    without, with_sends = (one.step_seconds_C(entry.synchronous_end)[0] for one in runs)
    return float((with_sends - without) / send)


@pytest.mark.parametrize(("name", "trainer", "overlap", "within"), [
    ("GPipe", "torchtitan", True, 0.01), ("1F1B", "torchtitan", True, 0.01),
    ("1F1B", "megatron", True, 0.01), ("LoopedBFS", "torchtitan", True, 0.01),
    ("Interleaved1F1B", "megatron", True, 2.01), ("Interleaved1F1B", "megatron", False, 0.01),
    ("Interleaved1F1B", "torchtitan", False, 0.01), ("ZB-1p", "megatron", True, 0.01),
    ("ZB-2p", "megatron", True, 0.01), ("ZB-1p", "megatron", False, 0.01),
    ("Interleaved1F1B", "torchtitan", True, 2.01),
])  # fmt: skip
def test_exposed_sends_are_the_slope(name: str, trainer: str, overlap: bool, within: float) -> None:
    """Under the trainer's own transport, from two ranks and two rounds on."""
    entry, how = SCHEDULES[name], TRAINERS[trainer].framework.transport(name, None, overlap=overlap)
    for pp, v, rounds in itertools.product((2, 3, 4, 8), (1, 2, 3), (2, 3, 6)):
        size = pp, v, pp * rounds
        if entry.violation(*size) is None:
            hops = entry.sends_on_critical_path(*size, how.exposed)
            assert hops == pytest.approx(send_slope(entry, size, how), abs=within), size


@ALL
@pytest.mark.parametrize("exposed", sorted(EXPOSED))
def test_no_transport_hides_more_than_the_ideal_one(entry: Schedule, exposed: Exposed) -> None:
    for size in legal_sizes(entry):
        fewer = entry.sends_on_critical_path(*size)
        assert entry.sends_on_critical_path(*size, exposed) >= fewer


@pytest.mark.parametrize("saved", [0.05, 0.2, 0.45])
def test_pairs_on_critical_path_are_the_slope_of_the_step(saved: float) -> None:
    """DualPipeV, w <= f <= i: each of 2 m - p - 2 pairs saves its part (stages forward in 0.5)."""
    entry = SCHEDULES["DualPipeV"]
    seconds = np.array([[1.0, 1.3, 0.8], [1.0, 1.0, 1.0], [1.0, 2.2, 0.5]])
    for size in (size for size in legal_sizes(entry) if size[0] > 1):
        both = (uniform(entry, size, seconds, saved=x) for x in (0.0, saved))
        slow, quick = (one.step_seconds_C(True) for one in both)
        pairs = entry.pairs_on_critical_path(*size)
        np.testing.assert_allclose((slow - quick) / saved, pairs, rtol=1e-9, err_msg=str(size))


@ALL
def test_closed_forms_take_columns(entry: Schedule) -> None:
    sizes = legal_sizes(entry)
    pp, v, m = (np.array(column) for column in zip(*sizes, strict=True))
    seconds = np.random.default_rng(2).uniform(0.5, 2.0, (3, len(sizes)))
    bubbles, hops = entry.bubble_seconds(pp, v, m, *seconds), entry.sends_on_critical_path(pp, v, m)
    flights = entry.in_flight(np.zeros_like(pp), pp, v, m)
    for row, size in enumerate(sizes):
        assert bubbles[row] == entry.bubble_seconds(*size, *seconds[:, row])
        assert hops[row] == entry.sends_on_critical_path(*size)
        assert flights[row] == entry.in_flight(0, *size)
