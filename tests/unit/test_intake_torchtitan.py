"""TorchTitan's TOML read as a job and a layout, and edited into another layout."""

import tomllib

import pytest
from current_cases import FOLDER, exported, fixture_job, job_of_text, machine, runnable, same_run
from export_cases import MODELS, OTHER, layout, model, training
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.export.base import flatten
from planner.intake.current import complete, read
from planner.intake.trainer_files.edit_toml import edit_toml
from planner.intake.trainer_files.rewrite import unified
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.intake.trainer_files.torchtitan import StatedTitan, former_name
from planner.specs.current import CurrentSpec
from planner.specs.layout import Layout
from tests.conftest import tiers

EIGHT = (FOLDER / "llama3_8b.toml").read_text(encoding="utf-8")
SHAPES = tuple(name for name in MODELS if name != "gpt3-175b")  # which TorchTitan has no class for


def edited(text: str, winner: Layout, name: str, num_gpus: int, **more: object) -> str:
    stated = read(CurrentSpec(name="train.toml", text=text))
    assert isinstance(stated, StatedTitan)
    changes, _ = titan_changes(
        stated, winner, exported(winner, name, num_gpus, "torchtitan", stated.version, **more)
    )
    return edit_toml(
        text, {former_name(key, stated.spelling): value for key, value in changes.items()}
    )


def test_a_file_takes_torchtitans_defaults_for_what_it_leaves_out() -> None:
    machine = {"gpu": "h100-sxm-80gb", "num_gpus": 16}
    job = job_of_text("train.toml", '[model]\nflavor = "8B"\n', cluster=machine)
    assert (job.model.name, job.training.seq_len) == ("llama3.1-8b", 2048)
    assert job.training.global_batch_size == 8 * 16
    assert job.layout == layout(16, micro_batch_size=8, ac="selective-layer-2")


def test_a_whole_file() -> None:
    job = fixture_job("llama3_8b.toml", cluster={"gpu": "h100-sxm-80gb", "num_gpus": 64})
    assert job.model.name == "llama3.1-8b"  # as its tokenizer's folder says
    assert job.layout == layout(64)
    assert (job.training.trainer_version, job.training.global_batch_size) == ("0.2.2", 64)


def test_names_before_0_2_mean_the_same_and_are_kept_in_the_file() -> None:
    job = fixture_job(
        "llama3_70b_before_0.2.toml", cluster={"gpu": "h100-sxm-80gb", "num_gpus": 64}
    )
    want = {
        "tp": 8, "micro_batch_size": 8, "compile": True, "async_tp": True, "ac": "full",
        "precision": "float8-tensorwise",
    }  # fmt: skip
    assert job.layout == layout(64, **want, float8_all_gather=True)
    text = (FOLDER / "llama3_70b_before_0.2.toml").read_text(encoding="utf-8")
    want |= {"tp": 4, "compile": False, "async_tp": False}
    winner = layout(64, **want, float8_all_gather=True)
    new = edited(text, winner, "llama3-70b", 64, global_batch_size=512)
    assert [line for line in unified("a", text, new).splitlines() if line[:1] in "+-"][2:] == [
        "-tensor_parallel_degree = 8",
        "-compile = true",
        "+tensor_parallel_degree = 4",
        "+compile = false",
        "+global_batch_size = 512",
    ]
    assert "[parallelism]" not in new


@pytest.mark.parametrize(("text", "want"), [
    ("[float8]\nenable_float8_linear = true", {"precision": "float8-tensorwise"}),
    ('[training]\nfp8_linear = "dynamic"', {"precision": "float8-tensorwise"}),
    ('[training]\nfp8_linear = ""\npipeline_parallel_degree = 2', {"precision": "bf16", "pp": 2}),
    ('[float8]\nmoe_fqns_prototype = ["experts"]', {"precision": "bf16"}),
])  # fmt: skip
def test_settings_of_2024(text: str, want: dict[str, object]) -> None:
    toml = f'[model]\nname = "llama2"\nflavor = "7B"\n{text}\n'
    job = job_of_text("train.toml", toml, cluster=machine(8))
    assert job.model.name == "llama2-7b"
    assert {name: getattr(job.layout, name) for name in want} == want


def test_what_neither_says_is_asked_for_by_name_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        complete({"current": {"name": "train.toml", "text": '[model]\nflavor = "debugmodel"\n'}})
    fields = [fault.field for fault in caught.value.faults]
    assert fields == ["model", "cluster.gpu", "cluster.num_gpus"]
    assert "debugmodel" in str(caught.value)
    assert "--gpu h100-sxm-80gb" in str(caught.value)


def test_a_setting_of_the_wrong_kind_is_named() -> None:
    text = EIGHT.replace("tensor_parallel_degree = 1", 'tensor_parallel_degree = "two"')
    with pytest.raises(SpecError, match=r"parallelism\.tensor_parallel_degree='two'"):
        job_of_text("train.toml", text, cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8})


def test_another_trainer_is_refused() -> None:
    with pytest.raises(SpecError, match=r"training\.trainer='megatron'"):
        fixture_job(
            "llama3_8b.toml",
            cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8},
            training={"trainer": "megatron"},
        )


def test_what_the_trainer_stops_at_and_what_is_not_priced_is_said() -> None:
    text = EIGHT.replace("local_batch_size = 1\n", "local_batch_size = 4\nglobal_batch_size = 40\n")
    stated = read(CurrentSpec(name="train.toml", text=text))
    refusals = stated.run(model("llama3-8b"), 8).refusals
    assert [fault.field for fault in refusals] == ["training.global_batch_size"]
    piped = EIGHT.replace("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 2")
    piped = piped.replace(
        "local_batch_size = 1\n", "local_batch_size = 4\nglobal_batch_size = 64\n"
    )
    stated = read(CurrentSpec(name="train.toml", text=piped))
    assert "4 times a step" in stated.run(model("llama3-8b"), 8).notes[0]


def test_weights_of_the_ends_of_a_pipeline_become_a_split() -> None:
    text = EIGHT.replace(
        "pipeline_parallel_degree = 1",
        "pipeline_parallel_degree = 4\npipeline_parallel_first_stage_less_layers = 3",
    )
    job = job_of_text("train.toml", text, cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8})
    assert job.layout.layers_per_stage == (6, 9, 9, 8)


@tiers(12, 120, data=st.data())
def test_every_export_reads_back_as_the_same_job(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SHAPES))
    shapes = model(name)
    chosen = data.draw(runnable(name, "torchtitan", "0.2.2"))
    micro = chosen.micro_batch_size * chosen.dp_degree
    made = exported(
        chosen, name, chosen.num_gpus, "torchtitan", "0.2.2", global_batch_size=micro * 4
    )
    files, gpus = made.files, machine(chosen.num_gpus)
    job = job_of_text("train.toml", files["train.toml"], files, cluster=gpus)
    assert job.layout is not None
    assert same_run(job.layout, chosen, shapes.num_hidden_layers, "torchtitan")
    want = training(global_batch_size=micro * 4, trainer_version="0.2.2")
    assert job.training == want
    assert {**job.model.model_dump(), "name": ""} == {**shapes.model_dump(), "name": ""}


@pytest.mark.parametrize("field", sorted(OTHER))
def test_every_field_is_changed_in_the_users_file(field: str) -> None:
    base = {
        "dp_shard": 4, "tp": 4, "cp": 2, "pp": 8, "pp_schedule": "Interleaved1F1B",
        "virtual_stages": 2, "compile": True,
    }  # fmt: skip
    base |= {"precision": "float8-tensorwise"} if field == "float8_all_gather" else {}
    values = {**base, field: OTHER[field]}
    if field == "layers_per_stage":
        values |= {
            "virtual_stages": 1,
            "pp_schedule": "1F1B",
            "layers_per_stage": (9, 10, 10, 10, 10, 10, 11, 10),
        }
    values.pop("dp_shard") if field == "dp_replicate" else None
    size = 256 if field != "dp_replicate" else 512
    winner = layout(
        size,
        **({"dp_shard": size // 64} | values)
        if field not in ("dp_shard", "pp", "tp", "cp")
        else values,
    )
    made = exported(winner, "llama3-70b", winner.num_gpus, "torchtitan", "0.2.2")
    new = edited(EIGHT.replace('"8B"', '"70B"'), winner, "llama3-70b", winner.num_gpus)
    gpus = {"gpu": "h100-sxm-80gb", "num_gpus": winner.num_gpus}
    job = job_of_text("train.toml", new, made.files, cluster=gpus)
    stated = {gap.fault.field for gap in made.gaps if gap.blocking}
    assert job.layout is not None
    if field not in stated and not stated:
        assert same_run(job.layout, winner, 80, "torchtitan")


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
        exported(one, "llama3-8b", one.num_gpus, "torchtitan", "0.2.2", global_batch_size=batch)
        for one in (first, winner)
    )
    text = edit_toml(before.files["train.toml"], unknown).replace(
        "\n[parallelism]", "  # kept\n\n# about it\n[parallelism]"
    )
    new = edited(text, winner, "llama3-8b", winner.num_gpus, global_batch_size=batch)
    job = job_of_text("train.toml", new, after.files, cluster=machine(winner.num_gpus))
    assert job.layout is not None
    assert same_run(job.layout, winner, 32, "torchtitan")
    assert job.training.global_batch_size == batch
    flat = flatten(tomllib.loads(new))
    assert {key: flat[key] for key in unknown} == unknown
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in new.splitlines() if line.startswith("#")
    ]
    assert edited(new, winner, "llama3-8b", winner.num_gpus, global_batch_size=batch) == new


def test_a_file_that_runs_the_layout_already_is_not_touched() -> None:
    assert edited(EIGHT, layout(64), "llama3-8b", 64, global_batch_size=64) == EIGHT


def test_deepep_and_rowwise_with_16_bit_weight_gradients_are_read() -> None:
    text = """
[model]
name = "deepseek_v3"
flavor = "16B"
converters = ["quantize.linear.float8"]
[quantize.linear.float8]
recipe_name = "rowwise_with_gw_hp"
[parallelism]
expert_parallel_degree = 8
expert_parallel_comm_backend = "deepep"
"""
    job = job_of_text("train.toml", text, cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8})
    assert job.layout.moe_dispatcher == "deepep"
    assert job.layout.precision == "float8-rowwise-gw-hp"
