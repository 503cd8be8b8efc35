"""TorchTitan exports: what files say and cannot say, and that they read back as the layout."""

import ast
import json
import re
import shlex
import tomllib
from functools import reduce
from typing import Any

import pytest
from current_cases import job_of_text
from export_cases import MODELS, cluster, layout, layouts, model, to_titan, training
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.models import model_names
from planner.errors import SpecError, UnknownNameError
from planner.export import export as export_to
from planner.export.base import Draft, Export, flatten, write_toml
from planner.export.torchtitan import parse_back, write
from planner.intake.models import read_model
from planner.specs.layout import parse_ac
from planner.trainers.registry import TRAINERS
from planner.trainers.titan_models import (
    FLAVORS,
    even_split,
    find_flavor,
    shape_of,
    uniform_layers_per_stage,
)
from tests.conftest import tiers

VERSIONS = ("0.2.2", "0.3.0")
# has gone in 0.3
LOST_IN_03: dict[str, Any] = {"cp": 2, "cp_method": "alltoall", "precision": "float8-tensorwise"}
LOST_IN_03 |= {"ac": "selective-layer-2", "optimizer_in_backward": True}


def toml_of(exported: Export) -> dict:
    return tomllib.loads(exported.files["train.toml"])


def make(
    version: str = "0.2.2", name: str = "llama3.1-70b", job: dict | None = None,
    num_gpus: int = 256, **values: object,
) -> Export:  # fmt: skip
    made = training(**(job or {}))
    return to_titan(layout(num_gpus, **values), model(name), cluster(num_gpus), made, version)


@tiers(80, 800, data=st.data(), name=st.sampled_from(MODELS), version=st.sampled_from(VERSIONS))
def test_any_layout_reads_back(data: st.DataObject, name: str, version: str) -> None:
    """And imports nothing of the planner, which the trainer's machines have not."""
    spec = model(name)
    chosen = data.draw(layouts(spec.num_hidden_layers))
    exported = to_titan(chosen, spec, cluster(256), training(), version)
    assert parse_back(exported) == chosen
    json.dumps(exported.as_dict(), allow_nan=False)
    for text in (text for file, text in exported.files.items() if file.endswith(".py")):
        for node in ast.walk(ast.parse(text)):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert "planner" not in {name.partition(".")[0] for name in names}


@tiers(60, 600, data=st.data())
def test_a_layout_of_the_trainers_own_words_has_no_blocker(data: st.DataObject) -> None:
    """What the trainer's row of `TRAINERS` allows, 0.2.2 says in its file."""
    rules, spec = TRAINERS["torchtitan"], model("llama3-70b")
    drawn = data.draw(layouts(spec.num_hidden_layers))
    update: dict[str, Any] = {
        "float8_all_gather": drawn.precision == "float8-tensorwise" and drawn.float8_all_gather,
        "zero_stage": max(2, drawn.zero_stage) if drawn.dp_shard * drawn.cp > 1 else 0,
        "sequence_parallel": drawn.tp > 1,
        "optimizer_offload_fraction": 1.0,
        "activation_offload_layers": 0,
    }
    for field, words, plain in (
        ("precision", rules.precisions - {"mxfp8"}, "bf16"),
        ("cp_method", rules.cp_methods, "allgather"),
        ("pp_schedule", rules.schedules, "1F1B"),
    ):
        update[field] = getattr(drawn, field) if getattr(drawn, field) in words else plain
    update["ac"] = drawn.ac if parse_ac(drawn.ac)[0] in rules.ac_kinds else "none"
    if drawn.layers_per_stage == (1, 2, 3):
        update["layers_per_stage"] = None
    chosen = drawn.model_copy(update=update)
    batch = chosen.dp_degree * chosen.micro_batch_size * 8
    exported = write(Draft(chosen, spec, cluster(256), training(global_batch_size=batch), "0.2.2"))
    assert exported.blockers == ()
    unsaid = {gap.fault.field for gap in exported.gaps}
    assert unsaid <= {"layers_per_stage", "virtual_stages", "moe_dispatcher"}, unsaid


PIPED = {"pp": 4, "pp_schedule": "Interleaved1F1B"}
STAGES = "parallelism.pipeline_parallel_layers_per_stage"
PARTS = "parallelism.module_fqns_per_model_part"
BACKEND = "parallelism.expert_parallel_comm_backend"
MICRO = "parallelism.pipeline_parallel_microbatch_size"
FLOAT8 = "quantize.linear.float8"
SMALL = ["auto_filter_small_kn", "output"]
# model, layout, and what train.toml says: a value or a whole table, None what it has not
SAID: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama3.1-70b", {"tp": 8, "micro_batch_size": 16, "ac": "full", "compile": True, "precision":
        "float8-rowwise", "async_tp": True}, {"model.name": "llama3", "model.flavor": "70B",
        "model.converters": [FLOAT8], FLOAT8: {"filter_fqns": SMALL, "recipe_name": "rowwise"},
        "parallelism.data_parallel_shard_degree": 32, "parallelism.tensor_parallel_degree": 8,
        "parallelism.enable_async_tensor_parallel": True, "training.local_batch_size": 16,
        "parallelism.fsdp_reshard_after_forward": "default", "training.global_batch_size": 512,
        "activation_checkpoint": {"mode": "full"}, MICRO: None}),
    # without a pipeline the local batch is the microbatch, and the global one accumulates
    ("llama3.1-70b", {"dp_shard": 64, "tp": 4, "micro_batch_size": 2},
        {"training.local_batch_size": 2, "training.global_batch_size": 512}),
    ("llama3.1-70b", {"dp_shard": 8, "tp": 8, "pp": 4, "micro_batch_size": 2},
        {"training.local_batch_size": 64, MICRO: 2}),  # it holds all microbatches
    *(
        ("llama3.1-70b", {"pp": pp, "zero_stage": stage},
            {"parallelism.fsdp_reshard_after_forward": policy})
        for pp, stage, policy in ((1, 2, "never"), (4, 3, "always"), (4, 2, "never"))
    ),
    *(
        ("llama3.1-70b", {"ac": ac}, {"activation_checkpoint": said})
        for ac, said in (
            ("none", {"mode": "none"}),
            ("selective-op", {"mode": "selective", "selective_ac_option": "op"}),
            ("selective-layer-3", {"mode": "selective", "selective_ac_option": "3"}),
        )
    ),
    ("llama3.1-70b", {"ac": "memory-budget-0.4", "compile": True},
        {"activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.4}}),
    ("llama3.1-70b", {"precision": "float8-tensorwise", "float8_all_gather": True,
        "compile": True}, {FLOAT8: {"filter_fqns": SMALL, "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True}}),
    ("qwen3-30b-a3b", {"precision": "float8-rowwise", "ep": 8}, {"model.converters": [FLOAT8,
        "quantize.grouped_mm.float8"], f"{FLOAT8}.filter_fqns": [*SMALL, "router.gate"]}),
    ("qwen3-30b-a3b", {"precision": "float8-rowwise", "ep": 8, "cp": 2},
        {"model.converters": [FLOAT8]}),  # experts stay in bf16
    ("deepseek-v3", {"ep": 8, "moe_dispatcher": "deepep"}, {BACKEND: "deepep"}),
    # the trainer's own number of stages is left to it
    ("llama3.1-70b", {"pp": 4}, {STAGES: None, PARTS: None}),
    ("llama3.1-70b", {**PIPED, "virtual_stages": 2}, {STAGES: None, PARTS: None}),
    ("llama3.1-70b", {**PIPED, "ac": "none", "pp_schedule": "ZBVZeroBubble", "virtual_stages": 2},
        {STAGES: None, PARTS: None}),
    ("llama3.1-405b", {**PIPED, "pp": 8, "virtual_stages": 4},
        {STAGES: 4}),  # ceil((126 + 2) / 4) = 32 stages
    ("llama3.1-70b", {"reduce_dtype": "bfloat16"}, {"job.custom_config_module": "planner_config"}),
    *(
        (name, {}, {"experimental.custom_import": "planner_model", "model.name": "planner_model"})
        for name in ("mixtral-8x7b", "llama2-7b", "kimi-k2")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "said"), SAID)
def test_what_a_layout_means_is_said_in_the_toml_of_0_2(
    name: str, values: dict[str, Any], said: dict[str, Any]
) -> None:
    made = make("0.2.2", name, **values)

    def found(path: str) -> object:
        return reduce(lambda table, key: table.get(key) or {}, path.split("."), toml_of(made))

    assert {path: found(path) or None for path in said} == said
    assert made.blockers == ()
    own = [text for key, text in said.items() if key.startswith(("job.", "experimental."))]
    assert {f"{module}.py" for module in own} <= made.files.keys()


# release, model, job, layout: what the module of 0.2 or the job of 0.3 says and does not say
WRITTEN: list[tuple[str, str, dict[str, Any], dict[str, Any], str, str]] = [
    ("0.2.2", "llama3-8b", {}, {"precision": "float8-rowwise-gw-hp", "compile": True},
        '"rowwise_with_gw_hp"', SMALL[0]),  # torchao refuses the filter with this recipe
    ("0.3.0", "llama3-8b", {}, {"precision": "float8-rowwise-gw-hp", "compile": True},
        '"rowwise_with_gw_hp"', SMALL[0]),
    ("0.3.0", "qwen3-30b-a3b", {}, {"ep": 8, "moe_dispatcher": "hybridep"},
        "moe_comm_backend='hybridep'", "deepep"),
    ("0.3.0", "llama3.1-8b", {"chunked_loss": False}, {}, "loss=CrossEntropyLoss.Config(",
        "Chunked"),
    ("0.3.0", "llama3-8b", {"attention_kernel": "flash3"}, {}, "attn_backend='varlen'", "cudnn"),
    ("0.3.0", "llama3.1-70b", {},
        {"precision": "nvfp4", "compile": True, "reduce_dtype": "bfloat16"},
        "NVFP4LinearConverter.Config(fqns=nvfp4_bf16_tail_fqns(80, 0.15), "
        "model_compile_enabled=True)", SMALL[0]),  # the last layers stay in 16 bits
    ("0.3.0", "llama3.1-70b", {},
        {"precision": "nvfp4", "compile": True, "reduce_dtype": "bfloat16"},
        "from torchtitan.components.quantization.nvfp4 import nvfp4_bf16_tail_fqns\n", SMALL[0]),
    ("0.3.0", "llama3.1-70b", {}, {"precision": "mxfp8", "compile": True}, "MXFP8",
        "nvfp4_bf16_tail_fqns"),
    ("0.3.0", "llama3.1-70b", {}, {"tp": 8, "precision": "float8-rowwise", "compile": True},
        'Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)',
        SMALL[0]),  # a filter that would decline every layer
    ("0.2.2", "deepseek-v3", {}, {"cp": 2}, "attn_type='sdpa'", "use_flex_attn"),
    ("0.2.0", "deepseek-v3", {}, {"cp": 2}, "use_flex_attn=False", "sdpa"),
    ("0.2.2", "deepseek-v3", {}, {}, "deepseek_v3", "sdpa"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "name", "job", "values", "says", "lacks"), WRITTEN)
def test_what_no_setting_says_is_written_in_python(
    version: str, name: str, job: dict[str, Any], values: dict[str, Any], says: str, lacks: str
) -> None:
    made = make(version, name, job, **values)
    text = "".join(text for file, text in made.files.items() if file.endswith((".py", ".toml")))
    assert says in text
    assert lacks not in text
    assert parse_back(made) == layout(256, **values)


@pytest.mark.parametrize(("version", "name", "job", "values", "fields"), [
    ("0.2.0", "deepseek-v3", {}, {"ep": 8, "moe_dispatcher": "deepep"}, "moe_dispatcher"),
    ("0.2.2", "qwen3-30b-a3b", {}, {"ep": 8, "moe_dispatcher": "deepep"}, "moe_dispatcher"),
    ("0.2.2", "llama3.1-8b", {"chunked_loss": True}, {}, "training.chunked_loss"),
    ("0.2.2", "llama3-8b", {"cuda_graphs": "full"}, {}, "training.cuda_graphs"),
    ("0.3.0", "llama3-8b", {"cuda_graphs": "partial"}, {}, "training.cuda_graphs"),
    ("0.3.0", "llama3-8b", {"cuda_graphs": "full"}, {"pp": 2}, "pp training.cuda_graphs"),
    ("0.2.2", "llama3-8b", {"attention_kernel": "flash3"}, {}, "training.attention_kernel"),
    ("0.3.0", "llama3-8b", {"attention_kernel": "cudnn"}, {}, "training.attention_kernel"),
    ("0.3.0", "llama3-8b", {"attention_kernel": "flash3"}, {"cp": 2}, "training.attention_kernel"),
    *(
        ("0.2.2", "llama3.1-70b", {"optimizer": optimizer}, {}, "training.optimizer")
        for optimizer in ("muon", "adafactor", "sgd", "adamw-bf16-states")
    ),
    ("0.2.2", "qwen3-32b", {}, {"pp": 2}, "pp"),
    ("0.3.0", "qwen3-32b", {}, {"pp": 2}, ""),
    ("0.3.0", "qwen3-30b-a3b", {}, {"ep": 8, "moe_dispatcher": "hybridep"}, ""),
    ("0.3.0", "llama3.1-70b", {}, LOST_IN_03, " ".join(sorted(LOST_IN_03.keys() - {"cp"}))),
    ("0.2.2", "llama3.1-70b", {"max_grad_norm": None}, {**LOST_IN_03, "micro_batch_size": 4}, ""),
])  # fmt: skip
def test_what_a_release_lacks_is_a_blocker(
    version: str, name: str, job: dict[str, Any], values: dict[str, Any], fields: str
) -> None:
    made = make(version, name, job, **values)
    assert {fault.field for fault in made.blockers} == {*fields.split()}


def test_what_an_export_leaves_to_the_release_or_notes() -> None:
    assert "planner_job.py" not in make("0.3.0", name="llama3.1-8b").files  # a loss in chunks
    older = make("0.2.0", "deepseek-v3", ep=8, moe_dispatcher="deepep").files["train.toml"]
    assert "expert_parallel_comm_backend" not in older
    with_cp = make(name="qwen3-30b-a3b", precision="float8-rowwise", ep=8, cp=2)
    assert any("experts stay in bf16" in note for note in with_cp.notes)
    assert uniform_layers_per_stage(80, 16) is None  # ceil(82 / 6) = 14 and ceil(82 / 5) = 17
    parts = toml_of(make(**PIPED, virtual_stages=4))["parallelism"]["module_fqns_per_model_part"]
    # the head stands for one layer but is two modules
    assert [len(part) for part in parts] == [6, 6, *[5] * 13, 6]


@pytest.mark.parametrize(("text", "number", "noted"), [
    ("torchtitan 2026-02-25", "0.2.2", True),
    ("torchtitan 2026-05-27", "0.3.0", True),  # configured in Python by then
    ("torchtitan 2026-10-01", "0.3.0", True), ("9.9", "0.3.0", True),
    ("2025-06-14", "0.2.0", True), ("2025-11-04", "0.2.0", True), ("0.2.3", "0.2.2", True),
    ("0.1.0", "0.2.0", True), ("v0.3.0", "0.3.0", False), ("0.3", "0.3.0", False),
])  # fmt: skip
def test_a_release_or_day_is_written_in_its_settings(text: str, number: str, noted: bool) -> None:
    made = make(text, name="llama3.1-8b")
    assert made.version == number
    notes = [note for note in made.notes if "Written for TorchTitan" in note]
    assert [text in note for note in notes] == [True] * noted


@pytest.mark.parametrize(("name", "job", "values", "on"), [
    ("llama3-8b", {}, {}, True),
    ("llama3-8b", {"cuda_graphs": "none"}, {}, False),
    ("llama3-8b", {}, {"pp": 2}, False),
    ("llama3-8b", {"attention_kernel": "flash3"}, {}, False),
    ("qwen3-30b-a3b", {}, {"ep": 1}, True),
    ("qwen3-30b-a3b", {}, {"ep": 8}, False),
    # buffers for the worst case only where the job asks for graphs
    ("deepseek-v3", {}, {"ep": 8, "moe_dispatcher": "hybridep"}, False),
    ("deepseek-v3", {"cuda_graphs": "full"}, {"ep": 8, "moe_dispatcher": "hybridep"}, True),
])  # fmt: skip
def test_cuda_graphs_where_0_3_captures_them(name: str, job: dict, values: dict, on: bool) -> None:
    made = make("0.3.0", name=name, job=job, **values)
    assert made.blockers == ()
    assert ("--training.no_disable_cuda_graphs" in made.arguments) == on
    sized = "non_blocking_capacity_factor=1.0" in made.files.get("planner_job.py", "")
    assert sized == (on and "moe_dispatcher" in values)


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_splits_are_torchtitans(layers: int, stages: int) -> None:
    split, uniform = even_split(layers, stages), uniform_layers_per_stage(layers, stages)
    assert (split is None) == (stages > layers + 2)
    if split is not None:
        assert (sum(split), len(split)) == (layers, stages)
        weighted = [n + (at == 0) + (at == stages - 1) for at, n in enumerate(split)]
        assert max(weighted) - min(weighted) <= 1
    assert uniform is None or -(-(layers + 2) // uniform) == stages


def test_layers_per_stage_become_module_names() -> None:
    values: dict[str, Any] = {"pp": 4, "layers_per_stage": (18, 21, 21, 20)}
    first, second, _, last = toml_of(make(**values))["parallelism"]["module_fqns_per_model_part"]
    assert (first[:2], second[0]) == (["tok_embeddings", "layers.0"], "layers.18")
    assert last[-3:] == ["layers.79", "norm", "output"]
    new = make("0.3.0", **values)
    assert any(word.endswith("layers.79,norm,lm_head") for word in new.arguments)


@pytest.mark.parametrize(("name", "module", "flavor"), [
    ("llama3-8b", "llama3", "8B"), ("llama3.1-70b", "llama3", "70B"),
    ("llama3.1-405b", "llama3", "405B"), ("qwen3-0.6b", "qwen3", "0.6B"),
    ("qwen3-1.7b", "qwen3", "1.7B"), ("qwen3-4b", "qwen3", "4B"), ("qwen3-8b", "qwen3", "8B"),
    ("qwen3-14b", "qwen3", "14B"), ("qwen3-32b", "qwen3", "32B"),
    ("qwen3-30b-a3b", "qwen3", "30B-A3B"), ("qwen3-235b-a22b", "qwen3", "235B-A22B"),
    ("deepseek-v2-lite", "deepseek_v3", "16B"), ("deepseek-v2", "deepseek_v3", "236B"),
    ("deepseek-v3", "deepseek_v3", "671B"), ("llama4-scout", "llama4", "17bx16e"),
    ("llama4-maverick", "llama4", "17bx128e"), ("gpt-oss-20b", "gpt_oss", "20b"),
    ("gpt-oss-120b", "gpt_oss", "120b"),
])  # fmt: skip
def test_catalogue_models_are_torchtitans(name: str, module: str, flavor: str) -> None:
    found = find_flavor(model(name), "0.2")
    assert (found.module, found.flavor) == (module, flavor)
    assert {shape_of(model(name)) for name in model_names()} >= set(FLAVORS)


CUT = [("llama4-scout", ("llama4", "17bx16e")), ("gpt-oss-20b", ("gpt_oss", "20b"))]


@pytest.mark.parametrize(("base", "flavor"), CUT)
def test_a_shipped_model_cut_in_depth_is_its_flavor(base: str, flavor: tuple[str, str]) -> None:
    cut = read_model({"base": base, "name": "cut", "num_hidden_layers": 2})
    found = find_flavor(cut, "0.2")
    assert (found.module, found.flavor, found.num_layers) == (*flavor, 2)
    exported = to_titan(layout(8), cut, cluster(8), training(), "0.2.2")
    assert exported.blockers == ()
    assert "n_layers=2," in exported.files["planner_model.py"]
    wider = read_model({"base": base, "name": "wider", "hidden_size": 2 * cut.hidden_size})
    assert find_flavor(wider, "0.2") is None


@pytest.mark.parametrize(("version", "name", "values", "reasons"), [
    ("0.2.2", "gpt3-175b", {}, {"model": "gelu MLP"}),
    ("0.3.0", "gpt3-175b", {"precision": "float8-rowwise", "compile": True},
        {"model": "gelu MLP", "precision": "this model has none"}),
    ("0.3.0", "llama4-scout", {},
        {"model": "layers without RoPE, query-key norm without weights, attention temperature, "
            "router scores on the experts' input"}),
])  # fmt: skip
def test_a_model_without_a_class_is_a_blocker_with_a_reason(
    version: str, name: str, values: dict[str, Any], reasons: dict[str, str]
) -> None:
    exported = make(version, name, **values)
    found = {fault.field: fault.rule for fault in exported.blockers}
    assert found.keys() == reasons.keys()
    assert all(reasons[field] in found[field] for field in reasons)
    with pytest.raises(SpecError, match=reasons["model"]):
        exported.require_runnable()


def test_03_takes_its_own_config_where_flags_can_say_the_rest() -> None:
    plain = make("0.3.0", tp=8, ac="full")
    assert plain.arguments[:4] == ("--module", "llama3", "--config", "llama3_70b")
    assert plain.arguments[-1] == "activation-checkpoint:full"
    assert "planner_job.py" not in plain.files
    low = make("0.3.0", tp=8, precision="float8-rowwise", compile=True)
    assert low.arguments[:4] == ("--module", "planner_job", "--config", "planner_job")
    # its own config has float8 built in
    assert "planner_job.py" in make("0.3.0", name="llama3.1-405b").files


def test_launch_on_one_node_and_on_many() -> None:
    one = make(num_gpus=8, name="llama3.1-8b")
    allocator = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert one.command[:4] == ("env", allocator, "torchrun", "--standalone")
    assert "--nproc_per_node=8" in one.command
    assert one.command[-2:] == ("--job.config_file", "train.toml")
    assert "slurm.sbatch" not in one.files
    assert "--nproc_per_node=4" in make(num_gpus=4, name="llama3-8b").command
    many = make(num_gpus=256)
    assert many.command == ("sbatch", "slurm.sbatch")
    assert "#SBATCH --nodes=32" in many.files["slurm.sbatch"]
    assert all(word in many.files["launch.sh"] for word in ("--nnodes=32", "--rdzv_endpoint"))


def test_training_lands_in_the_file() -> None:
    job: dict[str, Any] = {"max_grad_norm": None, "total_tokens": 8192 * 512 * 7.5}
    job |= {"checkpoint": {"interval_steps": 50, "mode": "async-pinned"}, "overlap": {"dp": False}}
    job |= {"vocab_parallel_loss": False, "expandable_segments": False}
    exported = make(job=job, tp=8)
    said = toml_of(exported)
    assert (said["training"]["max_norm"], said["training"]["steps"]) == (float("inf"), 8)
    mode = "async_with_pinned_mem"
    assert said["checkpoint"] == {"enable": True, "interval": 50, "async_mode": mode}
    assert said["parallelism"]["disable_loss_parallel"] is True
    assert "PYTORCH_CUDA_ALLOC_CONF" not in exported.files["launch.sh"]
    assert [gap.fault.field for gap in exported.gaps] == ["training.overlap"]


@pytest.mark.parametrize(("model", "loss", "parts"), [
    (False, True, ["loss"]),  # as TorchTitan's own files of DeepSeek do
    (True, False, ["model"]),
    (True, None, ["model", "loss"]),
    (False, None, None),
])  # fmt: skip
def test_a_loss_is_compiled_with_the_model_or_by_itself(
    model: bool, loss: bool | None, parts: list[str] | None
) -> None:
    exported = make(job={"fused_cross_entropy": loss}, num_gpus=8, tp=8, compile=model)
    compiled = toml_of(exported)["compile"]
    assert compiled["enable"] is (parts is not None)
    assert parts in (None, compiled["components"])
    job = job_of_text("train.toml", exported.files["train.toml"], cluster={"gpu": "h100-sxm-80gb",
        "num_gpus": 8})  # fmt: skip
    assert (job.layout.compile, job.training.fused_cross_entropy) == (model, loss)


def test_a_name_cannot_break_out_of_the_files() -> None:
    evil = '"""; rm -rf /\n[model]\n$(touch x) `x` \x7f'
    spec = model("llama2-7b").model_copy(update={"name": evil})
    for version in VERSIONS:
        exported = to_titan(layout(256, tp=8), spec, cluster(256), training(), version)
        assert not re.search(r"rm -rf /|\$\(touch", "".join(exported.files.values()))
        for name in exported.files:
            assert not name.endswith(".py") or ast.parse(exported.files[name])
        assert all(shlex.quote(word) == word for word in exported.command)


def test_the_release_and_the_format_are_the_jobs_unless_they_are_named() -> None:
    for asked, written in (("0.2.1", "0.2.1"), (None, "0.2.2")):
        job = training(trainer_version=asked)
        assert to_titan(layout(256), model(), cluster(256), job).version == written
    with pytest.raises(UnknownNameError, match="export format"):
        export_to(layout(256), model(), cluster(256), training(), to="nemo")
    assert export_to(layout(256), model(), cluster(256), training()).trainer == "torchtitan"


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
anything = st.one_of(st.booleans(), st.integers(-9, 9), st.floats(), text, st.lists(text))


@given(values=st.dictionaries(st.sampled_from(["a.b", "a.c", "d.e.f"]), anything))
def test_toml_reads_back(values: dict) -> None:
    read = flatten(tomllib.loads(write_toml(values)))
    assert repr(read) == repr({key: read[key] for key in read})
    shown, given = ({key: repr(value) for key, value in one.items()} for one in (read, values))
    assert shown == given
