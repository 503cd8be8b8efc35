"""A GPU that nobody timed is priced by a stand-in's curves, said aloud, with wider intervals."""

import math
from dataclasses import replace

import pytest

from planner.calibration.basis import basis
from planner.catalog.clusters import gpu_names
from planner.columns import LayoutBatch
from planner.cost.machine.knobs import LARGEST_RATES_SD, PLACE_SD, place_sd, rates_sd
from planner.cost.machine.profile import KERNELS
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.network.nccl import LIBRARIES, library_of
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.jobs import read_job, read_training
from planner.intake.machines import load_gpu, read_cluster, read_gpu
from planner.intake.models import read_model
from planner.plan.recommend import recommend
from planner.precision import PRECISIONS
from planner.rules.base import Context
from planner.rules.precisions import gpu_precisions
from planner.specs.gpu import GpuSpec
from planner.specs.gpu_families import KERNEL_ROWS, KNOWN_FAMILIES
from planner.specs.job import Job
from planner.trainers.registry import TRAINERS
from tests.conftest import fixed_now, job_values

NEW = {
    "name": "x1", "memory": "192 GB", "memory_bandwidth": "8 TB/s",
    "peak_flops": {"bf16": "2 PFLOP/s", "fp8": "4 PFLOP/s"},
    "power_limit": "1000 W", "num_sms": 148,
    "scale_up": {"bandwidth": "900 GB/s", "latency": "2 us"},
    "scale_out": {"bandwidth": "400 Gb/s", "latency": "4 us"},
}  # fmt: skip


def new_gpu(**changes: object) -> GpuSpec:
    return read_gpu({**NEW, **changes})


def job(gpu: object, **layout: object) -> Job:
    return read_job(job_values("llama3-8b", gpu, 8, 8192, 64, layout={"dp_shard": 8, **layout}))


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_of_the_catalogue_is_of_a_known_family(name):
    gpu = load_gpu(name)
    assert gpu.family in KERNEL_ROWS
    assert (gpu.family in KNOWN_FAMILIES, gpu.unknown_family) == (True, "")
    assert place_sd(gpu.family) is PLACE_SD
    dtype = "float32" if "bf16" not in gpu.peak_flops_per_second else "bfloat16"
    warnings = estimate_job(job(name, param_dtype=dtype)).warnings
    # a slow network has most of its communication hidden, and says so
    assert [one for one in warnings if "of communication" not in one] == []


def test_the_table_of_families_is_the_table_of_kernels():
    assert set(KERNEL_ROWS.values()) == KERNELS.keys()
    named = [one.kernel_rows for one in PRECISIONS.values() if one.kernel_rows is not None]
    assert frozenset().union(*named) <= KERNELS.keys()


@pytest.mark.parametrize("row", KERNELS)
def test_what_is_not_refused_on_a_family_has_a_curve_there(row):
    recipes = [recipe for trainer in TRAINERS.values() for recipe in trainer.recipes(None)]
    for recipe in recipes:
        rows = PRECISIONS[recipe.name].kernel_rows
        if rows is None or row in rows:
            assert recipe.gain_key in KERNELS[row].gemm


@pytest.mark.parametrize("family", KNOWN_FAMILIES)
def test_every_known_family_has_kernels_and_a_library(family):
    gpu = new_gpu(family=family)
    assert gpu.kernel_family in KERNELS
    cluster = read_cluster({"gpu": {**NEW, "family": family}, "num_gpus": 8})
    assert library_of(cluster) in LIBRARIES.values()


@pytest.mark.parametrize(("changes", "row"), [
    ({"peak_flops": {"bf16": 1e15}}, "ampere"),
    ({"peak_flops": {"fp16": 1e14}}, "volta"),
    ({}, "hopper"),
    ({"peak_flops": {"bf16": 1e15, "fp8": 2e15, "fp4": 4e15}}, "blackwell"),
    ({"family": "cdna5", "vendor": "amd"}, "cdna"),
    ({"family": "udna", "vendor": "amd"}, "cdna"),
    ({"family": "trillium", "vendor": "google"}, "tpu"),
    ({"family": "blackwell-ultra"}, "blackwell"),
])  # fmt: skip
def test_an_unknown_family_is_priced_with_the_nearest_and_says_so(changes, row):
    gpu = new_gpu(**changes)
    assert gpu.family not in KERNEL_ROWS
    assert gpu.kernel_family == row
    assert f"kernel curves of {row} " in gpu.unknown_family
    assert all(family in gpu.unknown_family for family in KNOWN_FAMILIES)


def test_a_known_family_says_its_vendor_and_no_other():
    assert new_gpu(family="cdna3").vendor == "amd"
    named = new_gpu(family="hopper", vendor="nvidia")
    assert new_gpu(family="hopper").vendor == named.vendor == "nvidia"
    with pytest.raises(SpecError, match="family hopper, which is nvidia's, and vendor amd"):
        new_gpu(family="hopper", vendor="amd")
    assert "taken for one of nvidia's" in new_gpu(family="udna").unknown_family
    assert "taken for one of" not in new_gpu(family="udna", vendor="amd").unknown_family


def test_its_estimate_is_extrapolated_warns_and_is_unsure():
    known, unknown = (
        estimate_job(job({**NEW, "family": family})) for family in ("hopper", "rubin")
    )
    assert {kind for key, kind in unknown.basis.items() if key != "memory"} == {"extrapolated"}
    assert unknown.basis["memory"] != "datasheet"
    (warning,) = unknown.warnings
    assert "family 'rubin' of GPU x1 is unknown" in warning
    assert known.warnings == []
    assert unknown.time_sd > 1.5 * known.time_sd
    assert "no family is given for GPU x1" in estimate_job(job(NEW)).warnings[0]


def test_a_plan_warns_too():
    asked = read_job({**job(NEW).request, "layout": None})
    plan = recommend(asked, now=fixed_now)
    assert any("no family is given" in text for text in plan.warnings)


def test_what_is_unknown_besides_kernel_rates():
    assert rates_sd("rubin") == rates_sd("cdna5") == LARGEST_RATES_SD
    assert rates_sd("cdna3") == KERNELS["cdna"].rates_sd
    wider = place_sd("rubin") > PLACE_SD
    assert 0 < wider.sum() < len(PLACE_SD)


def test_measuring_at_one_place_takes_the_doubt_along_and_lets_it_shrink():
    prior = shipped_calibration()
    here = prior.at_one_place([("torchtitan", "rubin")])
    traces = (c.effective_covariance("torchtitan", "rubin").trace() for c in (prior, here))
    before, after = map(math.sqrt, traces)
    assert after == pytest.approx(before)
    assert here.place == 0.0


def test_a_measured_unknown_family_is_calibrated_where_it_was_measured():
    shipped = shipped_calibration()
    seen = shipped.seen | {("torchtitan", "rubin", "compute")}
    asked = job({**NEW, "family": "rubin"})
    batch = LayoutBatch.from_layouts([asked.layout])
    found = basis(replace(shipped, seen=seen), asked, batch)[0]
    assert (found["compute"], found["fsdp"]) == ("calibrated", "extrapolated")


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "google", "cpu"])
@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_a_precision_nobody_timed_is_refused_not_priced_as_nothing(vendor, trainer):
    peaks = {"fp32": 1e14, "bf16": 1e15, "fp8": 2e15, "fp4": 4e15}
    gpu = {**NEW, "family": "future", "vendor": vendor, "peak_flops": peaks}
    context = Context(
        model=read_model("llama3-8b"),
        cluster=read_cluster({"gpu": gpu, "num_gpus": 8}),
        training=read_training({"seq_len": 8192, "global_batch_size": 64, "trainer": trainer}),
    )
    compiled = {"dp_shard": 8, "compile": trainer == "torchtitan"}
    for precision in gpu_precisions(context):
        layout = {**compiled, "precision": precision}
        asked = job_values("llama3-8b", gpu, 8, 8192, 64, layout=layout, trainer=trainer)
        estimate = estimate_job(read_job(asked))
        assert not estimate.valid or estimate.step_seconds > 0
