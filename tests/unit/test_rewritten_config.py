"""Another layout in a user's YAML or JSON: what must change does, and the rest stays as it was."""

import json
from typing import Any

import yaml
from export_cases import cluster, layout, model, training
from hypothesis import given
from hypothesis import strategies as st

from planner.export import export
from planner.export.base import leaves
from planner.intake.current import complete
from planner.intake.jobs import read_job
from planner.intake.trainer_files.config_files import read_config
from planner.intake.trainer_files.edit_yaml import edit_yaml
from planner.intake.trainer_files.rewrite import EXPORTED, Rewritten, kind_of, rewrite_config
from planner.specs.job import CurrentSpec
from planner.specs.layout import Layout

ACCELERATE = """\
# ours, since March
distributed_type: FSDP   # two nodes
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true  # ZeRO-3
  fsdp_activation_checkpointing: true
  fsdp_offload_params: false
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: 'bf16'
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2

our_own_key: [1, 2]
"""
DEEPSPEED = json.dumps(
    {
        "train_batch_size": 512, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 64, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "wall_clock_breakdown": False,
    }, indent=4,
)  # fmt: skip
AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B  # published
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 64
gradient_checkpointing: true
bf16: true
datasets:
  - path: ours
    type: completion
dp_shard_size: 8
"""
BRIDGE = """\
model:
  tensor_model_parallel_size: 2  # one pair of GPUs
  seq_length: 8192
mixed_precision: bf16_mixed
train:
  global_batch_size: 512
"""


def rewritten(text: str, was: Layout, now: Layout, trainer: str = "fsdp") -> Rewritten:
    kind = kind_of(text)
    job = training(trainer=trainer)
    made = [
        export(one, model("llama3-8b"), cluster(8), job, to=kind) if kind in EXPORTED else None
        for one in (was, now)
    ]
    spec = CurrentSpec(name="theirs.yaml", text=text)
    return rewrite_config(spec, (was, now), made, job.global_batch_size)


def changed_lines(made: Rewritten) -> list[str]:
    return [line for line in made.diff.splitlines()[2:] if line[:1] in "+-"]


def plain(**values: Any) -> Layout:
    return layout(8, "fsdp", **values)


THEIRS = plain(dp_shard=4, tp=2, ac="full", sequence_parallel=False)  # of ACCELERATE


def test_accelerate_changes_in_place() -> None:
    now = plain(zero_stage=2, ac="selective-op", micro_batch_size=2)
    made = rewritten(ACCELERATE, THEIRS, now)
    assert changed_lines(made) == [
        "-  fsdp_reshard_after_forward: true  # ZeRO-3",
        "+  fsdp_reshard_after_forward: false  # ZeRO-3",
        "-  parallelism_config_dp_shard_size: 4",
        "-  parallelism_config_tp_size: 2",
        "+  parallelism_config_dp_shard_size: 8",
        "+  parallelism_config_tp_size: 1",
    ]
    assert made.notes == (
        "it has no setting for micro_batch_size 2",
        "it has no setting for ac selective-op",
    )


def test_a_new_setting_goes_behind_its_neighbours() -> None:
    made = rewritten(ACCELERATE, THEIRS, THEIRS.model_copy(update={"compile": True, "cp": 1}))
    text = made.files["theirs.yaml"]
    assert text.startswith(ACCELERATE)
    assert yaml.safe_load(text)["dynamo_config"]["dynamo_backend"] == "INDUCTOR"
    text = ACCELERATE.replace("reshard_after_forward: true", "sharding_strategy: FULL_SHARD")
    made = rewritten(text, THEIRS, THEIRS.model_copy(update={"zero_stage": 2}))
    assert "+  fsdp_sharding_strategy: SHARD_GRAD_OP  # ZeRO-3" in changed_lines(made)  # of FSDP 1


def test_deepspeed_reads_back() -> None:
    now = plain(zero_stage=3, micro_batch_size=2, compile=True)
    made = rewritten(DEEPSPEED, plain(zero_stage=2, cpu_offload=True), now)
    text = made.files["theirs.yaml"]
    assert json.loads(text)["wall_clock_breakdown"] is False
    assert len(changed_lines(made)) == 8  # four values, each before and after
    assert made.notes == ("it has no setting for compile true",)
    found = read_config("theirs.json", json.loads(text))
    job = {"model": "llama3.1-8b", "cluster": {"gpu": "h100-sxm-80gb"}, "training": {"seq_len": 8}}
    read = read_job(complete({"current": found, **job})).layout
    unsaid = {"compile": True, "sequence_parallel": now.sequence_parallel}
    assert read.model_copy(update=unsaid) == now


def test_axolotl_and_what_it_cannot_say() -> None:
    now = plain(dp_shard=4, tp=2, precision="float8-rowwise", compile=True)
    made = rewritten(AXOLOTL, plain(ac="full"), now)
    document = yaml.safe_load(made.files["theirs.yaml"])
    want = {"dp_shard_size": 4, "tensor_parallel_size": 2, "gradient_checkpointing": False}
    want |= {"gradient_accumulation_steps": 128}
    assert document | want == document
    assert document["datasets"] == [{"path": "ours", "type": "completion"}]
    assert "base_model: meta-llama/Llama-3.1-8B  # published" in made.files["theirs.yaml"]
    assert made.notes == ("it has no setting for precision float8-rowwise",)


def test_a_preset_of_bridge_is_named() -> None:
    was = layout(8, "megatron-bridge", tp=2)
    now = layout(8, "megatron-bridge", tp=4, precision="mxfp8")
    made = rewritten(BRIDGE, was, now, "megatron-bridge")
    assert "+  tensor_model_parallel_size: 4  # one pair of GPUs" in changed_lines(made)
    named = "mixed_precision is 'bf16_mixed', which names a whole"
    assert any(named in note for note in made.notes)
    assert yaml.safe_load(made.files["theirs.yaml"])["mixed_precision"] == "bf16_mixed"


KEYS = st.text("abcxyz_", min_size=1, max_size=6)
WORDS = st.sampled_from(("bf16", "no", "1e3", "a b"))
VALUES = st.one_of(st.booleans(), st.integers(-9, 99), WORDS)
PARTS = st.dictionaries(KEYS, VALUES, min_size=1)
DOCUMENTS = st.dictionaries(KEYS, VALUES | PARTS, min_size=1)


@given(
    document=DOCUMENTS,
    data=st.data(),
    as_json=st.booleans(),
    flow=st.sampled_from((True, False, None)),
)
def test_what_is_set_is_read_and_nothing_else_moves(
    document: dict[str, Any], data: st.DataObject, as_json: bool, flow: bool | None
) -> None:
    before = leaves(document)
    own = data.draw(st.sampled_from(sorted(before)))
    inside = [(key, "NEW") for key, value in document.items() if isinstance(value, dict)]
    changes = {own: data.draw(VALUES), ("NEW", "inner"): 3, **dict.fromkeys(inside, "word")}
    dumped = yaml.safe_dump(document, default_flow_style=flow)
    text = json.dumps(document, indent=2) if as_json else dumped
    assert leaves(yaml.safe_load(edit_yaml(text, changes))) == {**before, **changes}


def test_deepspeed_inside_accelerate_is_left_to_the_user() -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8\n"
    assert kind_of(text) == ""
    assert kind_of("a: [") == ""
