"""The catalogue of GPUs: complete, sourced, dense peaks, one direction."""

import math

import pytest

from planner.catalog.clusters import gpu_aliases, gpu_names
from planner.errors import UnknownNameError
from planner.intake.machines import load_gpu, read_gpu
from planner.specs.gpu import DTYPES
from planner.specs.gpu_families import SILICON
from planner.units import GIB, GIGA, TERA
from tests.unit.conftest import faults_of

CONTRACT_NAMES = [
    "v100-sxm-32gb", "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-80gb", "a800-sxm-80gb",
    "h100-sxm-80gb", "h100-sxm-96gb-hbm2e",
    "h100-pcie-80gb", "h100-nvl-94gb", "h800-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb",
    "b300-sxm-288gb", "gb200-nvl72-186gb",
    "gb300-nvl72-288gb", "l4", "l40s", "a10g", "rtx-4090", "mi250x", "mi300x-192gb", "mi325x-256gb",
    "mi350x-288gb", "mi355x-288gb",
    "h20-sxm-96gb", "rtx-5090", "rtx-pro-6000-96gb", "a6000-48gb", "l20", "tpu-v5p", "cpu",
]  # fmt: skip
FIGURES = {
    "memory", "memory_bandwidth", "peak_flops", "power_limit", "num_sms", "scale_up", "scale_out",
    "latency", "pcie_bandwidth",
    "host_memory_per_gpu", "context", "mtbf_gpu_hours", "price_per_gpu_hour",
}  # fmt: skip
# FLOPs a clock and SM (compute unit) of the dense bf16/fp16 tensor path, from the architecture
# whitepapers.
FLOPS_PER_CLOCK_AND_SM = {
    "volta": 1024, "ampere": 2048, "hopper": 4096, "blackwell": 8192, "ada": 1024, "cdna2": 1024,
    "cdna3": 2048, "cdna4": 4096,
    "rtx-blackwell": 1024,
}  # fmt: skip
CUT_RATE = {"a10g": 512, "rtx-4090": 512, "rtx-5090": 512, "l20": 512}
CUT_RATE |= {"a6000-48gb": 1024, "h20-sxm-96gb": 1024}


def test_every_name_of_the_contract_is_there():
    assert sorted(gpu_names()) == sorted(CONTRACT_NAMES)


@pytest.mark.parametrize("name", CONTRACT_NAMES)
def test_every_figure_has_its_source(name):
    gpu = load_gpu(name)
    assert gpu.name == name
    assert set(gpu.sources) >= FIGURES
    assert all(len(text) >= 9 for text in gpu.sources.values())
    assert "judgement" in gpu.sources["price_per_gpu_hour"]


@pytest.mark.parametrize("name", CONTRACT_NAMES)
def test_figures_are_plausible(name):
    gpu = load_gpu(name)
    assert set(gpu.peak_flops_per_second) <= set(DTYPES)
    assert GIB < gpu.memory_bytes < 400 * GIB
    assert 0.05 < gpu.nominal_power_watts / gpu.power_limit_watts < 3
    assert gpu.context_bytes < gpu.memory_bytes / 10
    up, out = gpu.scale_up, gpu.scale_out
    assert out.bandwidth_bytes_per_second < up.bandwidth_bytes_per_second <= 900 * GIGA
    assert up.latency_seconds <= out.latency_seconds
    assert gpu.memory_bandwidth_bytes_per_second > up.bandwidth_bytes_per_second
    peaks = gpu.peak_flops_per_second
    rates = [peaks[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8", "fp4") if dtype in peaks]
    assert rates == sorted(rates), "wider dtypes are never faster"


@pytest.mark.parametrize("name", [n for n in CONTRACT_NAMES if n not in ("cpu", "tpu-v5p")])
def test_peaks_are_dense_and_follow_from_clock_and_units(name):
    """A sparse figure would be twice what the tensor cores do at the datasheet clock."""
    gpu = load_gpu(name)
    per_clock = CUT_RATE.get(name, FLOPS_PER_CLOCK_AND_SM[gpu.family])
    assert gpu.boost_clock_hz is not None
    peak = gpu.num_sms * gpu.boost_clock_hz * per_clock
    assert gpu.peak_flops_per_second["fp16"] == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize(("name", "dtype", "peak"), [
    ("v100-sxm-32gb", "fp16", 125), ("a100-sxm-80gb", "bf16", 312),
    ("h100-sxm-80gb", "bf16", 989.4), ("h100-sxm-80gb", "fp8", 1978.9),
    ("b200-sxm-180gb", "bf16", 2250), ("b200-sxm-180gb", "fp8", 4500),
    ("b200-sxm-180gb", "fp4", 9000), ("gb200-nvl72-186gb", "bf16", 2500),
    ("gb300-nvl72-288gb", "fp4", 15000), ("mi300x-192gb", "bf16", 1307.4),
    ("mi355x-288gb", "fp8", 5033.2), ("tpu-v5p", "bf16", 459), ("h20", "bf16", 148),
    ("h20", "fp8", 296), ("rtx-5090", "bf16", 209.5), ("rtx-5090", "fp8", 419),
    ("l20", "bf16", 119.5), ("a6000", "bf16", 154.8), ("mi350x", "bf16", 2306.9),
    ("v100", "bf16", None), ("a100", "fp8", None), ("h200", "fp4", None),
])  # fmt: skip
def test_published_dense_peaks(name, dtype, peak):
    """None: the silicon does not have the format."""
    found = load_gpu(name).peak_flops_per_second.get(dtype)
    assert found == (pytest.approx(peak * TERA) if peak else None)


@pytest.mark.parametrize(("name", "one_way"), [
    ("v100-sxm-32gb", 150), ("a100-sxm-80gb", 300), ("a800-sxm-80gb", 200), ("h100-sxm-80gb", 450),
    ("h800-sxm-80gb", 200), ("b200-sxm-180gb", 900), ("h20-sxm-96gb", 450),
    ("gb200-nvl72-186gb", 900), ("mi300x-192gb", 448), ("tpu-v5p", 600),
])  # fmt: skip
def test_scale_up_bandwidth_is_one_direction(name, one_way):
    assert load_gpu(name).scale_up.bandwidth_bytes_per_second == pytest.approx(one_way * GIGA)


def test_nominal_power_follows_units_and_clock():
    """P = units x (static + dynamic x clock^(1 / x)), over the silicon's reference product."""
    gpu, silicon = load_gpu("mi350x-288gb"), SILICON["cdna4"]
    clock = gpu.boost_clock_hz / silicon.clock_hz
    units = gpu.peak_flops_per_second["bf16"] / silicon.peak_flops_per_second / clock
    assert units == pytest.approx(1.0, rel=1e-3), "the same 256 compute units"
    dynamic = silicon.full_power_watts - 0.2 * silicon.timed_power_watts
    assert gpu.nominal_power_watts == pytest.approx(
        units * (280.0 + dynamic * clock ** (1 / silicon.power_exponent)), rel=1e-3
    )


def test_the_500_watt_h100_knows_the_power_of_its_peaks():
    gpu, whole = load_gpu("h100-sxm-96gb-hbm2e"), load_gpu("h100-sxm-80gb")
    assert (gpu.power_limit_watts, whole.power_limit_watts) == (500.0, 700.0)
    assert gpu.nominal_power_watts == whole.nominal_power_watts == 800.0
    assert gpu.memory_bandwidth_bytes_per_second == pytest.approx(2.4 * TERA)
    assert gpu.memory_bytes / GIB == pytest.approx(95.0, abs=0.1)


def test_only_switched_nvlink_of_hopper_and_later_reduces_in_the_switch():
    assert {name for name in gpu_names() if load_gpu(name).nvls} == {
        "h100-sxm-80gb", "h100-sxm-96gb-hbm2e", "h800-sxm-80gb", "h200-sxm-141gb", "h20-sxm-96gb",
        "b200-sxm-180gb", "b300-sxm-288gb", "gb200-nvl72-186gb", "gb300-nvl72-288gb",
    }  # fmt: skip


def test_aliases_are_unique_and_lower_case():
    names = [alias.lower() for name in gpu_names() for alias in (name, *load_gpu(name).aliases)]
    assert len(names) == len(set(names)), "two GPUs share an alias"
    assert all(alias == alias.lower() for alias in gpu_aliases())


@pytest.mark.parametrize(
    "typed", ["h100", "H100", "H100-SXM-80GB", " h100_sxm ", "NVIDIA H100 80GB HBM3"]
)
def test_aliases_and_case(typed):
    assert load_gpu(typed) is load_gpu("h100-sxm-80gb")


def test_unknown_name_names_the_closest():
    with pytest.raises(UnknownNameError, match="h100-sxm-80gb"):
        load_gpu("h100-sxm-80g")


def test_inline_gpu_over_a_base_changes_only_what_it_names():
    h100 = load_gpu("h100")
    changes = {"scale_up": {"bandwidth": "200 GB/s"}, "peak_flops": {"bf16": "800 TFLOP/s"}}
    gpu = read_gpu({"base": "h100", "memory": "64 GiB", **changes})
    assert gpu.name == "h100-sxm-80gb-custom"
    assert gpu.memory_bytes == 64 * GIB != h100.memory_bytes
    assert gpu.scale_up.bandwidth_bytes_per_second == 200 * GIGA
    assert gpu.scale_up.latency_seconds == h100.scale_up.latency_seconds
    expected = {**h100.peak_flops_per_second, "bf16": 800 * TERA}
    assert dict(gpu.peak_flops_per_second) == expected


def test_inline_gpu_without_base_and_its_dump_are_the_same():
    inline = {
        "name": "x1", "memory": "48 GB", "memory_bandwidth": "1 TB/s", "peak_flops": {"bf16": 1e14},
        "power_limit": 300, "num_sms": 64, "scale_up": {"bandwidth": "64 GB/s", "latency": "2 us"},
        "scale_out": {"bandwidth": "100 Gb/s", "latency": 5e-6},
    }  # fmt: skip
    gpu = read_gpu(inline)
    assert gpu.memory_bytes == 48 * GIGA
    assert gpu.scale_out.bandwidth_bytes_per_second == pytest.approx(12.5 * GIGA)
    assert gpu.nominal_power_watts == gpu.power_limit_watts == 300
    assert read_gpu(gpu.model_dump()) == gpu
    assert hash(read_gpu(gpu.model_dump())) == hash(gpu)


@pytest.mark.parametrize(("change", "field"), [
    ({"memory": "80 Gb/s"}, "cluster.gpu.memory"),
    ({"memory": 80}, "cluster.gpu.memory"),
    ({"memory": -1}, "cluster.gpu.memory"),
    ({"memory": math.nan}, "cluster.gpu.memory"),
    ({"memory": True}, "cluster.gpu.memory"),
    ({"peak_flops": {"bf17": "1 TFLOP/s"}}, "cluster.gpu"),
    ({"peak_flops": {"bf16": 0}}, "cluster.gpu.peak_flops.bf16"),
    ({"memry": 1}, "cluster.gpu.memry"),
    ({"num_sms": 1.5}, "cluster.gpu.num_sms"),
    ({"vendor": "acme"}, "cluster.gpu.vendor"),
])  # fmt: skip
def test_bad_inline_figures_are_named(change, field):
    assert field in [fault.field for fault in faults_of(read_gpu, {"base": "h100", **change})]


def test_values_are_immutable():
    with pytest.raises(ValueError, match="frozen"):
        load_gpu("h100").memory_bytes = 1.0
