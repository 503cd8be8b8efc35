"""Kernels: never faster than the roofline, utilisation by shape, power limits, missing dtypes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog.clusters import gpu_names
from planner.cost.machine.device import (
    FP16_BYTES,
    OPERAND_BYTES,
    SINGLE,
    TILE_COLS,
    TILE_ROWS,
    Device,
    dynamic_power,
)
from planner.cost.machine.knobs import KNOBS
from planner.cost.machine.profile import KERNELS, kernel_profile, software_profile
from planner.intake.machines import load_gpu, read_cluster
from planner.precision import PRECISIONS, torchao
from planner.specs.gpu_families import SILICON
from planner.trainers.registry import TRAINERS
from tests.pricing import pricer

GPUS, H100 = sorted(gpu_names()), "h100-sxm-80gb"
Column = np.ndarray[Any, np.dtype[np.float64]]


def device(
    gpu: str | dict[str, Any] = H100, trainer: str = "torchtitan", *kernel: str, **cluster: Any
) -> Device:
    """kernel: the generation of attention, else the trainer's."""
    spec = read_cluster({"gpu": gpu, "num_gpus": 1, **cluster})
    profile = software_profile(TRAINERS[trainer])
    return Device.build(spec, kernel_profile(spec.gpu), profile, *kernel)


def gemm(
    on: Device, rows: Any, cols: Any, depth: Any, batch: Any = 1, precision: str = "bf16"
) -> Column:
    sizes = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (rows, cols, depth, batch))
    )
    return on.gemm_seconds(*sizes, np.full(sizes[0].shape, PRECISIONS.names.index(precision)))


def peak(on: Device, precision: str) -> float:
    return float(on.gpu.peak_flops_per_second[PRECISIONS[precision].torchao.peak])


def lacking_precisions(on: Device) -> set[str]:
    return {name for name, rate in zip(PRECISIONS, on.linear_rate, strict=False) if np.isnan(rate)}


def half_precision(on: Device) -> str:
    return "bf16" if "bf16" in on.gpu.peak_flops_per_second else "fp16"


SIZES = st.integers(1, 2**17)


@pytest.mark.parametrize("name", GPUS)
@settings(max_examples=25)
@given(rows=SIZES, cols=SIZES, depth=SIZES, batch=st.integers(1, 256))
def test_a_gemm_is_never_faster_than_the_roofline(
    name: str, rows: int, cols: int, depth: int, batch: int
) -> None:
    """Neither the datasheet's peak nor its bandwidth is beaten, at any shape, in any dtype."""
    on = device(name)
    for precision in set(PRECISIONS) - lacking_precisions(on):
        each = OPERAND_BYTES.get(PRECISIONS[precision].torchao.peak, FP16_BYTES)
        moved = each * (rows * depth + depth * cols) + FP16_BYTES * rows * cols
        (took,) = gemm(on, rows, cols, depth, batch, precision)
        assert took >= 2.0 * batch * rows * cols * depth / peak(on, precision)
        assert took >= batch * moved / on.gpu.memory_bandwidth_bytes_per_second


@pytest.mark.parametrize("name", GPUS)
def test_utilisation_rises_with_depth_and_stays_below_its_ceiling(name: str) -> None:
    on, depth = device(name), 2.0 ** np.arange(4, 18)
    half = half_precision(on)
    rate = 2.0 * 8192 * 8192 * depth / gemm(on, 8192, 8192, depth, precision=half)
    utilisation = rate / peak(on, half)
    assert (np.diff(utilisation) > 0).all()
    power = dynamic_power(on.gpu, on.kernels, on.gpu.power_limit_watts)
    share = on.kernels.gemm["gemm_bf16"] * on.profile.compute * on.kernels.relative_clock(power)
    assert 0.7 * share < utilisation[-1] <= share * (1 + 1e-12) < 1


def test_half_of_the_ceiling_is_reached_at_the_half_depth() -> None:
    """u = d / (d + half), where the tiles fill the waves exactly."""
    on = device()
    rows, cols = on.num_sms * TILE_ROWS, 64 * TILE_COLS
    half = on.kernels.gemm_half_depth["gemm_bf16"]
    rate = 2.0 * rows * cols * half / gemm(on, rows, cols, half)[0]
    assert rate == pytest.approx(on.linear_rate[PRECISIONS.names.index("bf16")] / 2, rel=1e-9)


def test_waves_and_tiles_that_are_not_full() -> None:
    """One tile more than the SMs hold starts a wave; half of its empty places are charged. One tile
    takes as long as a full wave, and a part of a tile as long as a whole one."""
    on = device()
    assert on.num_sms == 132
    cols = np.array([12, 13, 12, 1]) * TILE_COLS
    rows = np.array([11 * TILE_ROWS, 11 * TILE_ROWS, 11 * TILE_ROWS - 50, TILE_ROWS])
    full, *others = gemm(on, rows, cols, 8192)
    assert others / full == pytest.approx([0.5 * (143 / 132 + 2), 1.0, 1.0], rel=1e-9)


@pytest.mark.parametrize("axis", ["rows", "cols", "depth", "batch"])
def test_a_larger_gemm_is_never_faster(axis: str) -> None:
    on = device()
    sizes: dict[str, Any] = {"rows": 1000, "cols": 3000, "depth": 512, "batch": 3}
    sizes[axis] = np.arange(1, 20_000, 37)
    assert (np.diff(gemm(on, **sizes)) >= -1e-15).all()


def test_a_batch_fills_waves_that_one_product_cannot() -> None:
    on = device()
    one, eight = (gemm(on, 256, 1024, 2048, batch)[0] for batch in (1, 8))
    assert one <= eight < 8 * one


def test_short_gemms_are_bound_by_memory() -> None:
    on = device()
    moved = FP16_BYTES * (1 * 8192 + 8192 * 8192 + 1 * 8192)
    assert gemm(on, 1, 8192, 8192)[0] >= moved / on.memory_rate


@pytest.mark.parametrize(
    ("precision", "least", "most"), [("float8-tensorwise", 1.7, 2.0), ("float8-rowwise", 1.4, 2.0)]
)
def test_fp8_is_nearly_twice_bf16_on_hopper_where_gemms_are_long(
    precision: str, least: float, most: float
) -> None:
    on, sizes = device(), ((16384, 14336, 16384), (2048, 1024, 256))
    long, short = (gemm(on, *size)[0] / gemm(on, *size, 1, precision)[0] for size in sizes)
    assert max(least, short) < long < most


def test_a_power_limit_slows_compute_and_leaves_memory_alone() -> None:
    """FlashAttention-2 draws less than a GEMM."""
    full, capped, lower = device(), device(power_limit="500 W"), device(power_limit="300 W")
    slower = gemm(capped, 8192, 8192, 8192) / gemm(full, 8192, 8192, 8192)
    assert slower == pytest.approx(((700 - 140) / (500 - 140)) ** full.kernels.power_exponent)
    assert capped.memory_rate == full.memory_rate
    least, capped_seconds, most = (attention(on, 4096.0) for on in (lower, capped, full))
    assert least > capped_seconds == most


def attention(on: Device, context: float, backward: bool = False, **more: float) -> float:
    """Seconds of 1e15 FLOP."""
    given = (np.array([1e15]), np.array([context]))
    return float(on.attention_seconds(*given, backward=backward, **more)[0])


def test_more_power_helps_until_the_clock_is_full() -> None:
    rates = [device(power_limit=f"{watts} W").linear_rate[0] for watts in (600, 700, 800, 900)]
    assert rates[0] < rates[1] < rates[2] == rates[3]


@pytest.mark.parametrize(("faster", "slower", "most"), [
    ("gb300-nvl72-288gb", "gb200-nvl72-186gb", 1.15),
    ("gb200-nvl72-186gb", "b200-sxm-180gb", 1.15),
    ("b300-sxm-288gb", "b200-sxm-180gb", 1.10),
    ("mi355x-288gb", "mi350x-288gb", 1.25),
    ("mi325x-256gb", "mi300x-192gb", 1.20),
    ("a100-sxm-80gb", "a100-pcie-80gb", 1.25),
    ("h100-sxm-80gb", "h100-nvl-94gb", 1.6),
])  # fmt: skip
def test_a_product_with_a_higher_limit_of_the_same_silicon_is_faster(
    faster: str, slower: str, most: float
) -> None:
    """Where both throttle, rates differ by units x (power a unit over its static part)^x alone."""
    both = one, other = device(faster), device(slower)
    gain = one.linear_rate[one.half] / other.linear_rate[other.half]
    assert 1.0 < gain < most
    silicon = SILICON[one.gpu.family]
    if all(d.gpu.power_limit_watts < d.gpu.nominal_power_watts for d in both):
        clocks = [d.gpu.boost_clock_hz or silicon.clock_hz for d in both]
        peaks = [d.gpu.peak_flops_per_second["bf16"] for d in both]
        units = [peak / clock for peak, clock in zip(peaks, clocks, strict=True)]
        shares = [unit / silicon.peak_flops_per_second * silicon.clock_hz for unit in units]
        limits = [d.gpu.power_limit_watts for d in both]
        static = 0.2 * silicon.timed_power_watts
        each = [limit / share - static for limit, share in zip(limits, shares, strict=True)]
        by_power = (each[0] / each[1]) ** one.kernels.power_exponent
        assert gain == pytest.approx(units[0] / units[1] * by_power)


def test_equal_specifications_take_equal_time_under_any_name() -> None:
    for name in ("h100-sxm-80gb", "mi355x-288gb", "gb200-nvl72-186gb"):
        gpu = load_gpu(name).model_dump(exclude={"nominal_power_watts", "aliases", "sources"})
        twin = device({**gpu, "name": "twin"})
        np.testing.assert_allclose(twin.linear_rate, device(name).linear_rate)
        assert twin.attention_backward_rate == device(name).attention_backward_rate


@pytest.mark.parametrize(("name", "measured"), [
    ("mi300x-192gb", 668.4e12),
    ("mi325x-256gb", 784.9e12),
    ("mi355x-288gb", 1565e12),
    ("a100-pcie-80gb", 252.9e12),
    ("h100-sxm-80gb", 794.5e12),
])  # fmt: skip
def test_a_large_gemm_stays_just_below_the_best_published_shape(name: str, measured: float) -> None:
    """micro.csv, GEMM bf16 max achievable (best shape): another source than the curves'."""
    rate = device(name).linear_rate[0] / device(name).profile.compute
    assert 0.88 < rate / measured < 1.08


def test_a_family_that_nobody_measured_clocks_as_the_one_that_prices_it() -> None:
    """Its own limit is the power of its peaks, and no more is known of its clock."""
    known = load_gpu("b200-sxm-180gb")
    gpu = known.model_dump(exclude={"nominal_power_watts", "aliases", "sources"})
    new = device({**gpu, "name": "new", "family": "blackwell-next"})
    assert new.linear_rate[0] == pytest.approx(device("b200-sxm-180gb").linear_rate[0])


def test_the_500_watt_h100_is_slower_than_the_700_watt_one() -> None:
    """FINDINGS: 0.79 of nominal clocks fitted its rows."""
    share = device("h100-sxm-96gb-hbm2e").linear_rate[0] / device("h100-sxm-80gb").linear_rate[0]
    assert share == pytest.approx(0.79, abs=0.02)


@pytest.mark.parametrize(("kernel", "share"), [("flash2", 1.0), ("cudnn", 0.87)])
def test_attention_holds_more_of_its_clock_than_products_do(kernel: str, share: float) -> None:
    """A kernel of 0.36 / 0.84 of a GEMM's products a second draws as much less: (0.55 / 0.43) > 1;
    cuDNN's 0.60 / 0.84 leaves (0.55 / 0.71)^0.53."""
    gpus = ("h100-sxm-96gb-hbm2e", H100)
    slow, fast = (device(gpu, "torchtitan", kernel).attention_forward_rate for gpu in gpus)
    assert slow / fast == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_rates_exist_exactly_where_the_gpu_has_the_peak(name: str) -> None:
    on = device(name)
    lacking = lacking_precisions(on)
    for recipe in torchao():
        has_peak = recipe.peak in on.gpu.peak_flops_per_second
        has_kernel = recipe.gain_key in on.kernels.gemm
        assert (recipe.name in lacking) == (not (has_peak and has_kernel)), recipe.name
    assert set(PRECISIONS) - lacking, "something can be computed"


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "v100-sxm-32gb"])
@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_fp32_runs_on_tf32_cores_where_the_trainer_asks_for_them(trainer: str, gpu: str) -> None:
    """torch leaves TF32 off, Transformer Engine takes it; Volta has none."""
    on = pricer("gpt2", 1, gpu, seq_len=1024, trainer=trainer).device
    peaks, half = on.gpu.peak_flops_per_second, half_precision(on)
    dtype = "tf32" if trainer == "megatron" and "tf32" in peaks else "fp32"
    rate = on.linear_rate[PRECISIONS.names.index(half)]
    assert rate / on.linear_rate[SINGLE] == pytest.approx(peaks[half] / peaks[dtype])
    attention = peaks["tf32"] / 3 if "tf32" in peaks and dtype == "fp32" else peaks[dtype]
    assert on.single_attention == pytest.approx(peaks[half] / attention)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("backward", [False, True])
def test_attention_stays_below_the_peak_and_gains_with_context(name: str, backward: bool) -> None:
    on = device(name)
    rate = np.array([1e15 / attention(on, 2.0**power, backward) for power in range(6, 20)])
    assert (np.diff(rate) > 0).all()
    ceiling = on.attention_backward_rate if backward else on.attention_forward_rate
    assert rate[-1] <= ceiling < 0.8 * peak(on, half_precision(on))
    at_half = 1e15 / attention(on, on.kernels.attention["flash2"].half_context, backward)
    assert at_half == pytest.approx(ceiling / 2, rel=1e-9)


@pytest.mark.parametrize("backward", [False, True])
def test_generations_of_attention_differ_as_authors_measured_on_hopper(backward: bool) -> None:
    """micro.csv: FlashAttention-3 and cuDNN run 1.5 to 2 times as fast as -2, -1 slower."""
    names = ("flash1", "flash2", "flash3", "cudnn")
    machines = (device(H100, "torchtitan", name) for name in names)
    flash1, flash2, flash3, cudnn = (attention(on, 4096.0, backward) for on in machines)
    assert 1.4 < flash1 / flash2 < 2.0
    assert 1.3 < flash2 / flash3 < 2.0
    assert 1.4 < flash2 / cudnn < 2.0


def test_small_heads_slow_attention_as_micro_csv_says() -> None:
    on = device(H100, "torchtitan", "flash3")
    small, wide, wider = (attention(on, 8192.0, head_size=size) for size in (64.0, 128.0, 256.0))
    assert small / wide == pytest.approx(2**on.attention.small_heads)
    assert wider == wide


def test_streaming_reaches_its_share_of_the_bandwidth() -> None:
    on = device()
    bandwidth = on.gpu.memory_bandwidth_bytes_per_second
    assert on.moved_seconds(np.array([bandwidth]))[0] == pytest.approx(1 / on.kernels.memory)


@pytest.mark.parametrize("family", KERNELS)
def test_kernel_profiles_are_shares_with_sources(family: str) -> None:
    kernels = KERNELS[family]
    curves = kernels.attention.values()
    shares = [*kernels.gemm.values(), kernels.memory]
    shares += [share for c in curves for share in (c.forward, c.backward)]
    assert all(0 < share < 1 for share in shares)
    assert kernels.gemm.keys() == kernels.gemm_half_depth.keys()
    assert kernels.source
    assert "flash2" in kernels.attention
    assert 0 < kernels.timed_power <= 1


def test_defaults_of_a_profile_are_the_priors_of_the_knobs() -> None:
    priors = {knob.name: knob.prior for knob in KNOBS if knob.scope == "trainer"}
    profile = software_profile(TRAINERS["torchtitan"])
    assert {name: getattr(profile, name) for name in priors} == priors
