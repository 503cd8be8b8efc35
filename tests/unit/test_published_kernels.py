"""Kernel curves against published timings (micro.csv, cudnn.csv), by family and generation."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fit_kernels import (
    Gemms,
    attention_by_generation,
    gemms_by_family,
    mean_error,
    quantising,
)
from planner.cost.machine.knobs import KNOBS, PLACE, kernels_at
from planner.cost.machine.profile import KERNELS
from planner.intake.machines import load_gpu

# Blackwell's two sources of bf16 differ by 1.4 times (`docs/STATUS.md`).
GEMM_LIMITS = {
    ("ampere", "bf16"): 0.08,
    ("hopper", "bf16"): 0.08,
    ("hopper", "float8-tensorwise"): 0.09,
    ("hopper", "float8-blockwise"): 0.07,
    ("blackwell", "bf16"): 0.23,
    ("blackwell", "float8-tensorwise"): 0.12,
    ("blackwell", "float8-blockwise"): 0.11, ("blackwell", "nvfp4"): 0.12,
}  # fmt: skip
ATTENTION_LIMITS = {
    ("ampere", "flash2"): 0.16, ("ampere", "cudnn"): 0.22, ("hopper", "flash2"): 0.05,
    ("hopper", "flash3"): 0.13, ("hopper", "cudnn"): 0.03, ("blackwell", "cudnn"): 0.17,
    ("hopper", "cudnn-9.17"): 0.03, ("blackwell", "cudnn-9.17"): 0.05,
}  # fmt: skip


@pytest.mark.parametrize("case", GEMM_LIMITS, ids="-".join)
def test_products_follow_published_timings(case: tuple[str, str]) -> None:
    for left in quantising(gemms_by_family()[case], KERNELS[case[0]]):
        assert mean_error(left) < GEMM_LIMITS[case]


@pytest.mark.parametrize("case", ATTENTION_LIMITS, ids="-".join)
def test_attention_follows_published_timings(case: tuple[str, str]) -> None:
    for one in attention_by_generation()[case]:
        assert mean_error(one.residuals(KERNELS[case[0]])) < ATTENTION_LIMITS[case]


def test_every_published_family_and_format_has_a_limit() -> None:
    assert set(gemms_by_family()) == set(GEMM_LIMITS)
    assert set(attention_by_generation()) == set(ATTENTION_LIMITS)


def test_fp4_follows_published_timings_worse_with_the_depth_it_had() -> None:
    """Its half depth was 3,300, the quantised input taken for a part of the product."""
    groups = gemms_by_family()["blackwell", "nvfp4"]
    base = KERNELS["blackwell"]
    before = replace(base, gemm_half_depth={**base.gemm_half_depth, "gemm_fp4": 3300.0})
    for old, new in zip(quantising(groups, before), quantising(groups, base), strict=True):
        assert mean_error(old) > 1.3 * mean_error(new)


def test_an_engines_input_and_host_are_taken_off_the_product() -> None:
    """t = max(product + bytes m k / rate, host), closed form."""
    kernels, gpu = KERNELS["hopper"], load_gpu("h100-sxm-80gb")
    m, n, k, b = (np.array([size]) for size in (8192.0, 4096.0, 4096.0, 1.0))
    given = {"precision": "float8-tensorwise", "sizes": (m, n, k, b)}
    timed = Gemms(gpu=gpu.name, source="", seconds=np.ones(1), **given)
    product = timed.predicted(kernels)
    rate = gpu.memory_bandwidth_bytes_per_second * kernels.memory
    whole = np.exp(timed.residuals(kernels, 5.0, 0.0))
    assert whole == pytest.approx(product + 5.0 * m * k / rate)
    assert np.exp(timed.residuals(kernels, 5.0, 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize(("knob", "moves"), [
    ("gemm_half_depth", True), ("low_precision_half_depth", False)
])  # fmt: skip
def test_each_format_has_a_depth_curve_of_its_own(knob: str, moves: bool) -> None:
    """One knob moves the 16-bit half depth, another that of fp8 and fp4."""
    gpu, shifts = load_gpu("b200-sxm-180gb"), np.zeros(len(KNOBS))
    base = kernels_at(gpu, shifts).gemm_half_depth
    shifts[PLACE[knob]] = 0.5
    moved = kernels_at(gpu, shifts).gemm_half_depth
    assert {key for key in base if moved[key] != base[key]} == {
        key for key in base if (key == "gemm_bf16") == moves
    }
