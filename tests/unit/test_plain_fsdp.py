"""`trainer: fsdp`: what a search tries, what leads, what it prints; jobs that nothing can run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from current_cases import job_of_text

from planner.errors import InfeasibleError, SpecError
from planner.estimates import estimate_job
from planner.intake.current import read
from planner.intake.jobs import read_job
from planner.intake.models import read_model
from planner.plan.recommend import recommend
from planner.rules import Context
from planner.search.space.domains import domains_of
from planner.search.space.enumerate import build_space
from planner.specs.job import CurrentSpec, SearchSpec
from planner.specs.plan import Plan
from planner.trainers.registry import resolve_layout
from tests.conftest import fixed_now, job_values

CASES = Path(__file__).parents[1] / "cases"
PARTS = ("tp", "cp", "pp", "ep")


def planned(*values: object, **more: object) -> Plan:
    return recommend(read_job(job_values(*values, **more)), now=fixed_now)


def context(*values: object, **more: object) -> Context:
    job = read_job(job_values(*values, **more))
    return Context(model=job.model, cluster=job.cluster, training=job.training)


@pytest.mark.parametrize(("model", "gpu", "gpus", "batch"), [
    ("llama3.2-3b", "rtx-4090", 8, 64),
    pytest.param("llama3.1-8b", "l40s", 16, 128, marks=pytest.mark.slow),
])  # fmt: skip
def test_plain_fsdp_leads(model: str, gpu: str, gpus: int, batch: int) -> None:
    plan = planned(model, gpu, gpus, 4096, batch, trainer="fsdp")
    for row in plan.ranked:
        layout = row.layout
        assert all(getattr(layout, name) == 1 for name in PARTS), row.label
        assert (layout.cpu_offload, layout.float8_all_gather) == (False, False)
        assert layout.optimizer_in_backward is False
        assert layout.ac in ("none", "selective-op", "full")
    assert plan.ranked[0].layout.dp_shard == gpus
    exported = plan.ranked[0].export["accelerate"]
    assert exported["blockers"] == []
    assert {"accelerate.yaml", "fully_shard.py", "launch.sh"} <= exported["files"].keys()


def test_other_axes_come_by_allow() -> None:
    asked = context("llama3.1-8b", "h100-sxm-80gb", 8, 8192, 64, trainer="fsdp")
    free = domains_of(asked, SearchSpec()).by_field
    assert all(free[name].values == (1,) for name in PARTS)
    assert free["float8_all_gather"].values == free["cpu_offload"].values == (False,)
    allowed = {"tp": [1, 2], "cp": [2], "cpu_offload": [True]}
    given = domains_of(asked, SearchSpec(allow=allowed)).by_field
    assert {name: [*given[name].values] for name in allowed} == allowed


def test_what_fits_with_offload_alone_is_still_found() -> None:
    plan = planned("llama3.1-8b", "rtx-4090", 4, 2048, 16, trainer="fsdp")
    assert plan.ranked[0].layout.cpu_offload
    assert "CPUOffloadPolicy()" in plan.ranked[0].export["accelerate"]["files"]["fully_shard.py"]


LLAMA, QWEN = ("llama3.1-8b", "h100-sxm-80gb", 7, 8192), ("qwen2.5-7b", "h100-sxm-80gb", 8, 4096)


@pytest.mark.parametrize(("asked", "says", "remedy", "works", "more"), [
    ((*QWEN, 64), "", "use --trainer megatron (training.trainer in a job)", (*QWEN, 64),
        {"trainer": "megatron"}),
    ((*LLAMA, 64), "7 data-parallel ranks do not divide global_batch_size 64",
        "global_batch_size 63 or 70", (*LLAMA, 63), {}),
])  # fmt: skip
def test_a_job_that_nothing_can_run_names_what_works(
    asked: tuple[Any, ...], says: str, remedy: str, works: tuple[Any, ...], more: dict[str, Any]
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned(*asked)
    assert says in str(caught.value)
    assert remedy in caught.value.remedy
    assert planned(*works, **more).ranked


def test_one_sharding_rank_has_one_form() -> None:
    forms = {
        resolve_layout({"dp_replicate": 8, "dp_shard": 1, "zero_stage": stage}, trainer=trainer,
                       num_gpus=8)
        for stage in (0, 2, 3) for trainer in ("torchtitan", "fsdp")
    }  # fmt: skip
    assert {form.zero_stage for form in forms} == {0}
    search = SearchSpec(
        fix={"dp_replicate": 8, "ac": "full", "micro_batch_size": 1, "compile": False,
             "precision": "bf16", "optimizer_in_backward": False},
        allow={"zero_stage": [0, 2, 3]},
    )  # fmt: skip
    space = build_space(context("llama3.2-1b", "h100-sxm-80gb", 8, 2048, 64), search)
    assert space.num_layouts == 1
    assert len(space.expand(slice(None))) == 1


@pytest.mark.parametrize(("model_type", "nearest"), [
    ("olmo4", "olmo"), ("mamba9", "mamba"), ("rwkv9", None), ("blip", None),
])  # fmt: skip
def test_the_nearest_type_shares_its_stem(model_type: str, nearest: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        read_model({"model_type": model_type, "hidden_size": 64})
    found = re.findall(r"the nearest type we read is (\w+)", str(caught.value))
    assert found == ([nearest] if nearest else [])


def test_infinity_in_a_published_config_is_read(tmp_path: Path) -> None:
    config = json.loads((CASES / "40-config-files" / "hf_config.json").read_text("utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}), "utf-8")
    assert "Infinity" in path.read_text("utf-8")
    assert read_model(str(path)).total_parameters() == 8030261248
    path.write_text(json.dumps({**config, "rope_theta": float("inf")}), "utf-8")
    with pytest.raises(SpecError, match=r"model\.rope_theta"):
        read_model(str(path))


PIPELINES = CASES / "02-pp-fewer-microbatches-than-stages"


@pytest.mark.parametrize("name", ["train", "eight", "interleaved", "gpipe"])
def test_a_pipeline_alone_is_priced_in_fp32(name: str) -> None:
    text = (PIPELINES / f"{name}.toml").read_text("utf-8")
    machine = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    job = job_of_text(f"{name}.toml", text, cluster=machine)
    assert job.layout.param_dtype == "float32"
    notes = read(CurrentSpec(name=f"{name}.toml", text=text)).run(job.model, 8).notes
    assert "mixed precision is off" in notes[0]
    found = estimate_job(job)
    if name == "train":
        assert [one.field for one in found.violations] == ["micro_batch_size"]
        return
    assert (found.valid, found.fits) == (True, True)
    shards = job_of_text(f"{name}.toml", text, cluster={**machine, "num_gpus": 16}).layout
    assert shards.param_dtype == "float32", "the file says dp_shard 1"
    sharded = text.replace("shard_degree = 1", "shard_degree = 2")
    assert job_of_text("x.toml", sharded, cluster=machine).layout.param_dtype == "bfloat16"


def test_32b_under_fsdp_is_judged_in_the_order_in_which_it_ran() -> None:
    """16 H100 trained on 20,000 tokens; 8 did not, and 16 did not on 32,000."""
    lines = (CASES / "36-qwen32b-fsdp-8-vs-16" / "rows.jsonl").read_text("utf-8").splitlines()
    eight, sixteen, longer = [estimate_job(read_job(json.loads(line))) for line in lines]
    assert (eight.fits, longer.fits) == (False, False)
    assert min(eight.oom_probability, longer.oom_probability) > 0.99
    assert sixteen.oom_probability < 0.5, "more likely to run than not"


def test_float8_gathers_need_shards_and_no_recipe() -> None:
    """TorchTitan drops the gather where dp_shard is 1, and stops at it beside a recipe."""
    text = (PIPELINES / "eight.toml").read_text("utf-8")
    text = text.replace('"8B"', '"8B"\nconverters = ["float8"]')
    text += "\n[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
    machine = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    assert not job_of_text("x.toml", text, cluster=machine).layout.float8_all_gather
    sharded = text.replace("shard_degree = 1", "shard_degree = 8")
    sharded = sharded.replace("pipeline_parallel_degree = 8", "pipeline_parallel_degree = 1")
    for more, valid in ("", True), ('recipe_name = "rowwise"\n', False):
        found = estimate_job(job_of_text("x.toml", sharded + more, cluster=machine))
        assert found.valid is valid, found.violations
