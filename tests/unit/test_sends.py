"""Sends between pipeline ranks: which level of the fabric a hop crosses, and what comes on top."""

from typing import Any

import numpy as np
import pytest

from planner.cost.network.collectives import send_seconds
from planner.cost.network.sends import Sends, transport_of
from planner.cost.price import Pricer
from tests import pricing
from tests.pricing import batch_of, collective_of

PAYLOAD = 64e6


def pricer(trainer: str = "torchtitan", **training: Any) -> Pricer:
    return pricing.pricer("llama3-8b", 32, trainer=trainer, **training)


def sends(p: Pricer, **layout: Any) -> Sends:
    return Sends(job=p, batch=batch_of(p, **layout), payload_bytes=np.array([PAYLOAD]))


def hop(p: Pricer, stride: float, payload: float = PAYLOAD) -> float:
    return float(send_seconds(np.array([payload]), np.array([stride]), p.fabric)[0])


def test_no_pipeline_sends_nothing() -> None:
    assert sends(pricer(), tp=8).mean_seconds()[0] == 0.0


def test_ranks_of_one_node_send_inside_it_and_others_across() -> None:
    """Pipelines outermost: ranks of pp 4 over 32 GPUs lie 8 apart, each in a node of its own."""
    p = pricer()
    own = p.profile.collective_seconds
    seconds, crowded = sends(p, pp=4).hop_seconds(4)
    assert seconds[0] == pytest.approx([hop(p, 8.0) + own] * 4)
    assert crowded[0] == pytest.approx([2 * hop(p, 8.0) + own] * 4)
    assert hop(p, 8.0) > 2 * hop(p, 1.0)


def test_transfers_by_different_ports_do_not_share_one() -> None:
    """Ranks 4 apart, two to a node: one neighbour inside, one outside, each at its own port."""
    p = pricer()
    own = p.profile.collective_seconds
    seconds, crowded = sends(p, pp=8).hop_seconds(8)
    assert seconds[0] == pytest.approx([hop(p, 4.0) + own, hop(p, 8.0) + own] * 4)
    assert crowded[0] == pytest.approx(seconds[0])
    mean = (4 * hop(p, 4.0) + 3 * hop(p, 8.0)) / 7 + own
    assert sends(p, pp=8).mean_seconds()[0] == pytest.approx(mean)


def test_torch_neither_splits_sends_nor_waits_on_the_host() -> None:
    p = pricer()
    how = transport_of(p.training, "1F1B")
    assert (how.splits, how.synchronises) == (False, False)


def test_megatrons_blocking_sends_launch_anew() -> None:
    p = pricer("megatron")
    assert transport_of(p.training, "1F1B").synchronises
    found = sends(p, pp=4).hop_seconds(4)[0][0]
    fixed = p.profile.collective_seconds + p.profile.fused_launch_seconds
    assert found == pytest.approx([hop(p, 8.0) + fixed] * 4)


def test_split_sends_carry_a_share_and_are_gathered_behind() -> None:
    """Megatron of 2022 splits over TP ranks unless sequence parallelism did: then all is sent."""
    p = pricer("megatron", trainer_version="2022-06")
    fixed = p.profile.collective_seconds + p.profile.fused_launch_seconds
    gathered = collective_of(p, "all-gather", PAYLOAD, 4)[0]
    split = sends(p, pp=4, tp=4, sequence_parallel=False).hop_seconds(4)[0][0]
    assert split == pytest.approx([hop(p, 8.0, PAYLOAD / 4) + fixed + gathered] * 4)
    whole = sends(p, pp=4, tp=4, sequence_parallel=True).hop_seconds(4)[0][0]
    assert whole == pytest.approx([hop(p, 8.0) + fixed] * 4)


def test_a_choice_of_rows_is_the_same_rows() -> None:
    p = pricer()
    one = sends(p, pp=8)
    assert one.take(np.array([0])).mean_seconds()[0] == one.mean_seconds()[0]
