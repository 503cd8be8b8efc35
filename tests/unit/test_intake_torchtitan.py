"""TorchTitan's TOML read as a job and a layout, and edited into another layout."""

import tomllib
from typing import Any

import pytest
from current_cases import FOLDER, exported, fixture_job, job_of_text, machine, runnable, same_run
from export_cases import layout, model
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.export.base import flatten
from planner.intake.current import complete, read
from planner.intake.trainer_files.edit_toml import edit_toml
from planner.intake.trainer_files.rewrite import unified
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.specs.job import CurrentSpec
from planner.specs.layout import Layout
from tests.conftest import tiers

EIGHT = (FOLDER / "llama3_8b.toml").read_text(encoding="utf-8")
H100 = {"gpu": "h100-sxm-80gb", "num_gpus": 8}


def edited(text: str, winner: Layout, name: str, batch: int = 512) -> str:
    stated = read(CurrentSpec(name="train.toml", text=text))
    made = exported(winner, name, "torchtitan", stated.version, batch)
    changes, _ = titan_changes(stated, winner, made)
    return edit_toml(text, {stated.spelling.get(key, key): changes[key] for key in changes})


def test_a_file_takes_torchtitans_defaults_for_what_it_leaves_out() -> None:
    machine = {"gpu": "h100-sxm-80gb", "num_gpus": 16}
    job = job_of_text("train.toml", '[model]\nflavor = "8B"\n', cluster=machine)
    assert (job.model.name, job.training.seq_len) == ("llama3.1-8b", 2048)
    assert job.training.global_batch_size == 8 * 16
    assert job.layout == layout(16, micro_batch_size=8, ac="selective-layer-2")


def test_a_whole_file() -> None:
    job = fixture_job("llama3_8b.toml", cluster={**H100, "num_gpus": 64})
    assert job.model.name == "llama3.1-8b"  # as its tokenizer's folder says
    assert job.layout == layout(64)
    assert (job.training.trainer_version, job.training.global_batch_size) == ("0.2.2", 64)


def test_names_before_0_2_mean_the_same_and_are_kept_in_the_file() -> None:
    job = fixture_job("llama3_70b_before_0.2.toml", cluster={**H100, "num_gpus": 64})
    want = {"tp": 8, "micro_batch_size": 8, "compile": True, "async_tp": True, "ac": "full"}
    want |= {"precision": "float8-tensorwise", "float8_all_gather": True}
    assert job.layout == layout(64, **want)
    text = (FOLDER / "llama3_70b_before_0.2.toml").read_text(encoding="utf-8")
    winner = layout(64, **{**want, "tp": 4, "compile": False, "async_tp": False})
    new = edited(text, winner, "llama3-70b")
    assert [line for line in unified("a", text, new).splitlines() if line[:1] in "+-"][2:] == [
        "-tensor_parallel_degree = 8", "-compile = true", "+tensor_parallel_degree = 4",
        "+compile = false", "+global_batch_size = 512",
    ]  # fmt: skip
    assert "[parallelism]" not in new


DEEPEP = """
converters = ["quantize.linear.float8"]
[quantize.linear.float8]
recipe_name = "rowwise_with_gw_hp"
[parallelism]
expert_parallel_degree = 8
expert_parallel_comm_backend = "deepep"
"""
V2_LITE, LLAMA2 = ("deepseek_v3", "16B", "deepseek-v2-lite"), ("llama2", "7B", "llama2-7b")


@pytest.mark.parametrize(("own", "text", "want"), [
    (LLAMA2, "[float8]\nenable_float8_linear = true", {"precision": "float8-tensorwise"}),
    (LLAMA2, '[training]\nfp8_linear = "dynamic"', {"precision": "float8-tensorwise"}),
    (LLAMA2, '[training]\nfp8_linear = ""\npipeline_parallel_degree = 2',
        {"precision": "bf16", "pp": 2}),
    (LLAMA2, '[float8]\nmoe_fqns_prototype = ["experts"]', {"precision": "bf16"}),
    (V2_LITE, DEEPEP, {"moe_dispatcher": "deepep", "precision": "float8-rowwise-gw-hp"}),
])  # fmt: skip
def test_settings_since_2024(own: tuple, text: str, want: dict) -> None:
    name, flavor, ours = own
    toml = f'[model]\nname = "{name}"\nflavor = "{flavor}"\n{text}\n'
    job = job_of_text("train.toml", toml, cluster=H100)
    assert job.model.name == ours
    assert {name: getattr(job.layout, name) for name in want} == want


def test_what_neither_says_is_asked_for_by_name_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        complete({"current": {"name": "train.toml", "text": '[model]\nflavor = "debugmodel"\n'}})
    fields = [fault.field for fault in caught.value.faults]
    assert fields == ["model", "cluster.gpu", "cluster.num_gpus"]
    assert "debugmodel" in str(caught.value)


def test_a_setting_of_the_wrong_kind_and_another_trainer_are_refused() -> None:
    text = EIGHT.replace("tensor_parallel_degree = 1", 'tensor_parallel_degree = "two"')
    with pytest.raises(SpecError, match=r"parallelism\.tensor_parallel_degree='two'"):
        job_of_text("train.toml", text, cluster=H100)
    with pytest.raises(SpecError, match=r"training\.trainer='megatron'"):
        fixture_job("llama3_8b.toml", cluster=H100, training={"trainer": "megatron"})


def test_what_the_trainer_stops_at_and_what_is_not_priced_is_said() -> None:
    def run_of(batch: int, text: str = EIGHT) -> Any:
        both = f"local_batch_size = 4\nglobal_batch_size = {batch}\n"
        text = text.replace("local_batch_size = 1\n", both)
        return read(CurrentSpec(name="train.toml", text=text)).run(model("llama3-8b"), 8)

    assert [fault.field for fault in run_of(40).refusals] == ["training.global_batch_size"]
    piped = EIGHT.replace("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 2")
    assert "4 times a step" in run_of(64, piped).notes[0]


def test_weights_of_the_ends_of_a_pipeline_become_a_split() -> None:
    four = "pipeline_parallel_degree = 4\npipeline_parallel_first_stage_less_layers = 3"
    text = EIGHT.replace("pipeline_parallel_degree = 1", four)
    assert job_of_text("train.toml", text, cluster=H100).layout.layers_per_stage == (6, 9, 9, 8)


UNKNOWN = st.dictionaries(
    st.sampled_from(["metrics.log_freq", "comm.trace_buf_size", "training.dataset",
        "fault_tolerance.group_size", "quantize.linear.mx.filter_fqns", "optimizer.lr"]),
    st.one_of(st.integers(0, 9), st.text("ab #\"'", max_size=5), st.booleans(),
        st.lists(st.integers(0, 3), max_size=3)), max_size=4,
)  # fmt: skip


@tiers(12, 120, data=st.data())
def test_editing_keeps_what_it_does_not_know_and_gives_the_new_layout(data: st.DataObject) -> None:
    first, winner = (data.draw(runnable("llama3-8b", "torchtitan", "0.2.2")) for _ in range(2))
    unknown = data.draw(UNKNOWN)
    micro = winner.micro_batch_size * first.micro_batch_size
    batch = 4 * micro * winner.dp_degree * first.dp_degree
    before, after = (
        exported(one, "llama3-8b", "torchtitan", "0.2.2", batch).files for one in (first, winner)
    )
    text = edit_toml(before["train.toml"], unknown)
    text = text.replace("\n[parallelism]", "  # kept\n\n# about it\n[parallelism]")
    new = edited(text, winner, "llama3-8b", batch)
    job = job_of_text("train.toml", new, after, cluster=machine(winner.num_gpus))
    assert same_run(job.layout, winner, 32, "torchtitan")
    assert job.training.global_batch_size == batch
    flat = flatten(tomllib.loads(new))
    assert {key: flat[key] for key in unknown} == unknown
    old, kept = ([line for line in x.splitlines() if line[:1] == "#"] for x in (text, new))
    assert kept == old
    assert edited(new, winner, "llama3-8b", batch) == new


def test_a_file_that_runs_the_layout_already_is_not_touched() -> None:
    assert edited(EIGHT, layout(64), "llama3-8b", 64) == EIGHT
