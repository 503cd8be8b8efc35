"""MFU follows TorchTitan's count; HFU what the hardware does."""

from typing import Any

import pytest

from planner import estimate
from planner.specs.estimate import Estimate
from tests.conftest import job_values

H100 = "h100-sxm-80gb"
KINDS = ("none", "full")


def of(model: str, seq_len: int, layout: dict[str, Any], **training: Any) -> Estimate:
    job = job_values(model, H100, 8, seq_len, 64, layout={"ac": "none", **layout}, **training)
    return estimate(**job)


def hardware_flops(found: Estimate) -> float:
    """Flops of a step, over the peak of all its GPUs."""
    return (found.hfu or 0.0) * (found.step_seconds or 0.0)


def test_windows_and_causality_count_for_hfu_alone() -> None:
    """phi3-mini attends to 2,047 of up to 131,072 tokens, which TorchTitan's count leaves out."""
    model = {"hidden_size": 3072, "layers": 32, "window": 2047, "seq": 131072}
    found = of("phi3-mini", model["seq"], {"cp": 8})
    attended = model["window"] * (1 - model["window"] / (2 * model["seq"]))
    parameters = 3_821_079_552 - 32_064 * model["hidden_size"]
    attention = 2 * model["layers"] * model["hidden_size"]
    counts = {
        "mfu": 6 * parameters + 6 * attention * model["seq"],
        "hfu": 6 * parameters + 6 * attention * attended,
    }
    rate = (found.tokens_per_second_per_gpu or 0.0) / 989.4e12
    assert found.mfu == pytest.approx(counts["mfu"] * rate, rel=1e-3)
    assert found.hfu == pytest.approx(counts["hfu"] * rate, rel=1e-3)
    assert (found.mfu or 0.0) > 1 > (found.hfu or 1.0)


@pytest.mark.parametrize("change", [
    {"model": "llama3-8b", "tp": 2, "pp": 2},
    {"ep": 8, "moe_imbalance": 3.0},
    {"ep": 4, "micro_batch_size": 2, "pp": 2, "pp_schedule": "Interleaved1F1B",
     "virtual_stages": 2},
])  # fmt: skip
def test_no_layout_changes_the_work(change: dict[str, Any]) -> None:
    """An overloaded rank takes longer; all of them together do as much."""
    layout = {"model": "deepseek-v2-lite", **change}
    model = layout.pop("model")
    training = {key: layout.pop(key) for key in ("moe_imbalance",) if key in layout}
    found, plain = of(model, 4096, layout, **training), of(model, 4096, {})
    assert hardware_flops(found) == pytest.approx(hardware_flops(plain), rel=1e-9)


def test_recomputation_counts_as_often_as_it_runs() -> None:
    """Once in 1F1B, and again for each group of weight gradients that a schedule puts off."""
    none, full = (hardware_flops(of("llama3-8b", 4096, {"pp": 4, "ac": ac})) for ac in KINDS)
    assert 1.25 < full / none < 4 / 3, "all but the head"
    split = {"pp": 4, "ac": "full", "pp_schedule": "ZBVZeroBubble", "virtual_stages": 2}
    assert hardware_flops(of("llama3-8b", 4096, split)) > 3 * none
