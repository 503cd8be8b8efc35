"""Configurations of other trainers behind --current and --job, read or named for what they are."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from export_cases import cluster, layout, model, training

from planner.api.input.current import read_current_file, read_job_file
from planner.errors import SpecError
from planner.export import export
from planner.intake.current import complete
from planner.intake.jobs import read_job
from planner.intake.trainer_files.config_files import read_config
from planner.specs.job import Job

CASE = Path(__file__).parents[1] / "cases" / "40-config-files"
GIVEN: dict[str, Any] = {
    "model": "llama3.1-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"seq_len": 4096, "global_batch_size": 256},
}


def job_of(name: str, **given: object) -> Job:
    current = read_job_file(str(CASE / name), "--job")["current"]
    return read_job(complete({"current": current, **GIVEN, **given}))


@pytest.mark.parametrize(("name", "given", "trainer", "want", "shape"), [
    ("accelerate_fsdp.yaml", {}, "fsdp",
        {"dp_shard": 8, "tp": 2, "ac": "full", "reduce_dtype": "bfloat16"}, (4096, 256)),
    ("ds_z2.json", {}, "fsdp", {"zero_stage": 2, "cpu_offload": True}, (4096, 256)),
    ("axolotl.yaml", {"model": None, "training": None,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8}}, "fsdp",
        {"dp_shard": 4, "tp": 2, "ac": "full", "micro_batch_size": 2}, (4096, 2 * 8 * 4)),
])  # fmt: skip
def test_a_configuration_is_a_job(
    name: str, given: dict[str, Any], trainer: str, want: dict[str, Any], shape: tuple[int, int]
) -> None:
    job = job_of(name, **given)
    assert job.layout == layout(job.cluster.num_gpus, trainer, **want)
    assert (job.training.trainer, job.cluster.gpus_per_node) == (trainer, 8)
    assert (job.training.seq_len, job.training.global_batch_size) == shape
    assert job.model.name == "llama3.1-8b"


DDP = {"dp_replicate": 16, "dp_shard": 1, "zero_stage": 0}


@pytest.mark.parametrize(("values", "want"), [
    ({"zero_optimization": {"stage": 0}}, DDP),
    ({"train_micro_batch_size_per_gpu": 2},
        {**DDP, "micro_batch_size": 2, "param_dtype": "float32"}),
    ({"train_batch_size": 256, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
        {"precision": "bf16", "param_dtype": "bfloat16"}),
    ({"distributed_type": "MULTI_GPU", "num_processes": 2}, DDP),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, DDP),
    ({"distributed_type": "DEEPSPEED", "deepspeed_config": {}}, {"zero_stage": 2}),
    ({"distributed_type": "FSDP", "fsdp_config": {}}, {"reduce_dtype": "float32"}),
])  # fmt: skip
def test_configurations_without_a_number_or_a_precision(values: dict, want: dict) -> None:
    current = read_config("x.yaml", values)
    job = read_job(complete({"current": current, **GIVEN}))
    assert {name: getattr(job.layout, name) for name in want} == want
    assert job.cluster.gpus_per_node == 8, "not of the file's number of processes"


def test_a_file_that_another_names_is_asked_for(tmp_path: Path) -> None:
    named = {"deepspeed_config_file": "ds.json"}
    values = {"distributed_type": "DEEPSPEED", "deepspeed_config": named}
    with pytest.raises(SpecError, match=r"'ds\.json': is not there, or is not JSON"):
        read_config("x.yaml", values)
    text = '{"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}'
    for given in (values, {**FACTORY, "fp16": True, "deepspeed": "ds.json"}):
        found = read_config("x.yaml", given, lookup={"ds.json": text}.get)
        read = found["job"]["layout"]
        assert (read["zero_stage"], read["precision"]) == (3, "fp16")
    with pytest.raises(SpecError, match="is a configuration of transformers' Trainer, which is"):
        read_config("x.yaml", {"model_name_or_path": "a/b", "per_device_train_batch_size": 4})
    (tmp_path / "x.sh").write_text("for a in b; do\n\trun: : a\ndone\n")
    (tmp_path / "x.yaml").write_text("model: {}\ngeneral: 1\ntokens: 2\noptimizer: 3\nlogging: 4")
    for name in ("x.sh", "x.yaml"):
        with pytest.raises(SpecError, match="is no trainer's configuration that can be read"):
            read_job_file(str(tmp_path / name), "--job")


@pytest.mark.parametrize(("to", "values", "field"), [
    ("deepspeed", {"dp_replicate": 2}, "dp_replicate"), ("deepspeed", {"cp": 2}, "cp"),
    ("deepspeed", {"tp": 2, "sequence_parallel": True}, "sequence_parallel"),
    ("deepspeed", {"precision": "float8-rowwise"}, "precision"),
    ("deepspeed", {"ac": "selective-op"}, "ac"), ("accelerate", {"pp": 2}, "pp"),
    ("accelerate", {"ac": "selective-attention"}, "ac"),
    ("accelerate", {"precision": "mxfp8"}, "precision"),
    ("accelerate", {"optimizer_in_backward": True}, "optimizer_in_backward"),
])  # fmt: skip
def test_what_no_file_can_say_is_refused(to: str, values: dict[str, object], field: str) -> None:
    job = training(trainer="fsdp")
    made = export(layout(8, "fsdp", **values), model("llama3-8b"), cluster(8), job, to=to)
    assert field in {fault.field for fault in made.blockers}


def test_megatron_bridge() -> None:
    job = job_of("megatron_bridge.yaml")
    want = {"tp": 4, "pp": 4, "virtual_stages": 5, "precision": "float8-tensorwise"}
    assert {name: getattr(job.layout, name) for name in want} == want
    assert (job.training.trainer, job.training.seq_len) == ("megatron-bridge", 4096)


def test_what_is_not_read_is_named_in_one_line() -> None:
    words = "is a model of Hugging Face, not what trains it; give it to --model"
    for read in (read_current_file, lambda path: read_job_file(path, "--job")):
        with pytest.raises(SpecError, match=words) as caught:
            read(str(CASE / "hf_config.json"))
        assert len(caught.value.faults) == 1


TITAN = """modules: {pre_trainer: {framework: torchtitan, model: deepseek_v3_16b.yaml, overrides: {
  training: {local_batch_size: 4, seq_len: "${LENGTH:4096}"}, primus_turbo: {use_x: true}}}}"""


def test_primus() -> None:
    """Megatron-LM's arguments under Primus's defaults, or TorchTitan's settings."""
    job = job_of("primus.yaml")
    assert (job.layout.short(), job.training.trainer) == (
        "zero1 16 · ep 8 · mbs 8 · ac block-5 · bf16",
        "megatron",
    )
    current = {"name": "x.yaml", "format": "primus", "text": TITAN.replace('"', "")}
    cluster = {"gpu": "mi300x-192gb", "num_gpus": 8}
    titan = read_job(complete({"current": current, "cluster": cluster}))
    assert (titan.layout.short(), titan.model.name) == (
        "fsdp 8 · mbs 4 · ac none · bf16 · compile",
        "deepseek-v2-lite",
    )
    assert (titan.training.seq_len, titan.training.global_batch_size) == (4096, 32)


def test_adapters_are_refused() -> None:
    axolotl = yaml.safe_load((CASE / "axolotl.yaml").read_text("utf-8"))
    with pytest.raises(SpecError, match="adapter='lora': is not priced"):
        read_config("x.yaml", {**axolotl, "adapter": "lora"})
    with pytest.raises(SpecError, match="finetuning_type='lora'"):
        read_config("x.yaml", {**FACTORY, "finetuning_type": "lora"})
    with pytest.raises(SpecError, match="pipeline_model_parallel_size=2: is not priced"):
        read_config("x.yaml", {**FACTORY, "pipeline_model_parallel_size": 2})


FACTORY = {"model_name_or_path": "llama3-8b", "stage": "sft", "finetuning_type": "full"}
PLAIN = {"micro_batch_size": 1, "ac": "full", "compile": False}


@pytest.mark.parametrize(("values", "layout", "note"), [
    ({"bf16": True}, {**PLAIN, "precision": "bf16", "zero_stage": 0}, "it is DDP, unless"),
    ({"pure_bf16": True, "fsdp": "full_shard", "optim": "adamw_8bit"},
        {**PLAIN, "precision": "bf16", "master_dtype": "bfloat16"}, "adamw_8bit is priced as"),
    ({"fp8": True, "enable_liger_kernel": True, "use_muon": True, "fsdp": "full_shard"},
        {**PLAIN, "precision": "float8-tensorwise"}, "optimizer muon is priced as AdamW"),
])  # fmt: skip
def test_llama_factory(values: dict[str, Any], layout: dict[str, Any], note: str) -> None:
    found = read_config("x.yaml", {**FACTORY, **values})
    assert found["job"]["layout"] == layout
    assert found["job"]["training"].get("chunked_loss", False) == ("enable_liger_kernel" in values)
    assert note in "; ".join(found["notes"])


def test_a_layout_or_a_job_is_none_of_these() -> None:
    found = read_config("x.yaml", {"train": {"global_batch_size": 8}})
    assert found["format"] == "megatron-bridge"
    assert read_config("x.yaml", {"dp_shard": 8, "tp": 2}) is None
    assert read_config("x.yaml", {"train_batch_size": 8, "train_files": "a"}) is None  # verl's
    assert read_config("x.yaml", {**GIVEN, "layout": {"tp": 2}}) is None


@pytest.mark.parametrize(("to", "values"), [
    ("accelerate", {"ac": "full", "reduce_dtype": "bfloat16"}),
    ("accelerate", {"dp_replicate": 2, "zero_stage": 2, "reduce_dtype": "bfloat16",
        "compile": True}),
    ("accelerate", {"dp_replicate": 8, "dp_shard": 1}),
    ("accelerate", {"cpu_offload": True, "reduce_dtype": "bfloat16"}),
    ("deepspeed", {"zero_stage": 2, "micro_batch_size": 2}),
    ("deepspeed", {"dp_replicate": 8, "dp_shard": 1}),
    ("deepspeed", {"tp": 2, "sequence_parallel": False, "cpu_offload": True}),
    ("deepspeed", {"param_dtype": "bfloat16", "master_dtype": "bfloat16",
        "reduce_dtype": "bfloat16"}),
])  # fmt: skip
def test_what_is_exported_reads_back(to: str, values: dict[str, object]) -> None:
    chosen = layout(8, "fsdp", **values)
    job = training(trainer="fsdp")
    made = export(chosen, model("llama3-8b"), cluster(8), job, to=to)
    assert made.blockers == ()
    name = {"accelerate": "accelerate.yaml", "deepspeed": "ds_config.json"}[to]
    found = read_config(name, yaml.safe_load(made.files[name]))
    given = {**GIVEN, "cluster": {"gpu": "h100-sxm-80gb"}}
    assert read_job(complete({"current": found, **given})).layout == chosen
