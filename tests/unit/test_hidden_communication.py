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
