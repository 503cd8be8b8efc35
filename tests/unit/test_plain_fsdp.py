"""`trainer: fsdp`: what a search tries, what leads, what it prints; jobs that nothing can run."""

import json
from pathlib import Path

import pytest
from current_cases import job_of_text

from planner.errors import InfeasibleError, SpecError
from planner.estimates import estimate_job
from planner.export import export
from planner.intake.current import read
from planner.intake.jobs import read_job
from planner.intake.models import read_model
from planner.plan.recommend import recommend
from planner.rules import Context
from planner.search.space.domains import domains_of
from planner.search.space.enumerate import build_space
from planner.specs.current import CurrentSpec
from planner.specs.job import SearchSpec
from planner.specs.plan import Plan
from planner.trainers.registry import resolve_layout
from tests.conftest import fixed_ports, job_values

CASES = Path(__file__).parents[1] / "cases"
PARTS = ("tp", "cp", "pp", "ep")


def planned(*values: object, **more: object) -> Plan:
    return recommend(read_job(job_values(*values, **more)), ports=fixed_ports())


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
    job = read_job(job_values("llama3.1-8b", "h100-sxm-80gb", 8, 8192, 64, trainer="fsdp"))
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    free = domains_of(context, SearchSpec()).by_field
    assert all(free[name].values == (1,) for name in PARTS)
    assert free["float8_all_gather"].values == free["cpu_offload"].values == (False,)
    asked = SearchSpec(allow={"tp": [1, 2], "cp": [2], "cpu_offload": [True]})
    given = domains_of(context, asked).by_field
    assert (given["tp"].values, given["cp"].values) == ((1, 2), (2,))
    assert given["cpu_offload"].values == (True,)


def test_its_files_have_no_pipelines() -> None:
    job = job_values("llama3.1-8b", "h100-sxm-80gb", 8, 8192, 64, layout={"pp": 2}, trainer="fsdp")
    asked = read_job(job)
    assert asked.layout is not None
    made = export(asked.layout, asked.model, asked.cluster, asked.training, to="accelerate")
    assert [fault.field for fault in made.blockers] == ["pp"]


def test_what_fits_with_offload_alone_is_still_found() -> None:
    plan = planned("llama3.1-8b", "rtx-4090", 4, 2048, 16, trainer="fsdp")
    assert plan.ranked[0].layout.cpu_offload
    assert "CPUOffloadPolicy()" in plan.ranked[0].export["accelerate"]["files"]["fully_shard.py"]


def test_a_model_that_the_trainer_lacks_names_the_flag_that_works() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned("qwen2.5-7b", "h100-sxm-80gb", 8, 4096, 64)
    assert "use --trainer megatron (training.trainer in a job)" in caught.value.remedy
    assert planned("qwen2.5-7b", "h100-sxm-80gb", 8, 4096, 64, trainer="megatron").ranked


def test_seven_gpus_name_the_batch_they_cannot_split() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned("llama3.1-8b", "h100-sxm-80gb", 7, 8192, 64)
    assert "7 data-parallel ranks do not divide global_batch_size 64" in str(caught.value)
    assert "global_batch_size 63 or 70" in caught.value.remedy
    assert planned("llama3.1-8b", "h100-sxm-80gb", 7, 8192, 63).ranked


def test_one_sharding_rank_has_one_form() -> None:
    forms = {
        resolve_layout({"dp_replicate": 8, "dp_shard": 1, "zero_stage": stage}, trainer=trainer,
                       num_gpus=8)
        for stage in (0, 2, 3) for trainer in ("torchtitan", "fsdp")
    }  # fmt: skip
    assert {form.zero_stage for form in forms} == {0}
    job = read_job(job_values("llama3.2-1b", "h100-sxm-80gb", 8, 2048, 64))
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    search = SearchSpec(
        fix={"dp_replicate": 8, "ac": "full", "micro_batch_size": 1, "compile": False,
             "precision": "bf16", "optimizer_in_backward": False},
        allow={"zero_stage": [0, 2, 3]},
    )  # fmt: skip
    space = build_space(context, search)
    assert space.num_layouts == 1
    assert len(space.expand(slice(None))) == 1


def fault_of(model_type: str) -> str:
    with pytest.raises(SpecError) as caught:
        read_model({"model_type": model_type, "hidden_size": 64})
    return str(caught.value)


def test_the_nearest_type_shares_its_stem() -> None:
    assert "the nearest type we read is olmo" in fault_of("olmo4")
    assert "the nearest type we read is mamba;" in fault_of("mamba9")
    assert "nearest" not in fault_of("rwkv9")
    assert "nearest" not in fault_of("blip")


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
    assert found.valid
    assert found.fits
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
