"""Communication that hides under most of the compute is said, and widens the interval."""

import pytest

from planner import estimate
from planner.calibration.basis import WIDER
from planner.specs.estimate import Estimate


def at(bandwidth: str) -> Estimate:
    """70B by flat FSDP on 64 H100, one sequence a rank."""
    return estimate(
        model="llama3-70b",
        cluster={
            "gpu": "h100-sxm-80gb",
            "num_gpus": 64,
            "fabric": [{"name": "nvlink"}, {"name": "ib", "bandwidth": bandwidth}],
        },
        training={"seq_len": 8192, "global_batch_size": 64},
        layout={"dp_shard": 64, "ac": "full", "compile": True},
    )


def test_most_of_the_compute_hides_what_no_published_run_hides() -> None:
    slow, fast = at("100 Gb/s"), at("400 Gb/s")
    (said,) = [text for text in slow.warnings if "hide under compute" in text]
    assert "of communication are taken to hide" in said
    assert not any("hide under compute" in text for text in fast.warnings)
    wide, narrow = (one.time_sd for one in (slow, fast))
    assert wide == pytest.approx(WIDER * narrow, rel=0.35)
    assert wide > 1.3 * narrow


@pytest.mark.parametrize(("tp", "cards"), [(2, 4), (8, 1)])
def test_a_group_crosses_as_many_network_cards_of_a_node_as_it_has_ranks_there(
    tp: int, cards: int
) -> None:
    """405B on 512 H100, one microbatch: two gathers in 8 bits and one scatter in fp32 a step.

    With TP 2 they take 2.0 + 4.0 s at the full 4 x 50 GB/s of a group in a node (its other 4 cards
    serve the other group). One card alone, as with TP 8, would take four times as long for as much.
    Collectives reach three quarters of those rates and more.
    """
    found = estimate(
        model="llama3.1-405b",
        cluster={"gpu": "h100-sxm-80gb", "num_gpus": 512},
        training={"seq_len": 8192, "global_batch_size": 512},
        layout={
            "dp_shard": 512 // tp,
            "tp": tp,
            "micro_batch_size": tp,
            "ac": "full",
            "precision": "float8-tensorwise",
            "float8_all_gather": True,
            "compile": True,
        },
    )
    local = (405.8e9 - 2 * 128256 * 16384) / tp  # what layers hold
    crossing = local * (2 * 1.0 + 4.0) * 63 / 64
    least = crossing / (cards * 50e9)
    layers = [one for one in found.communication if one.dimension == "fsdp" and one.per_step > 2]
    assert least < sum(one.seconds for one in layers) < least / 0.75
    assert not any("hide under compute" in text for text in found.warnings) or cards == 1
