"""Megatron-Bridge: Megatron-LM's rules and measurements, its recipes' defaults, files both ways."""

import json
import re
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from current_cases import job_of_text
from export_cases import cluster, layout, model, training

from planner import estimate
from planner.api.input.current import read_job_file
from planner.catalog.bridge_recipes import recipes
from planner.catalog.models import model_names
from planner.columns import LayoutBatch
from planner.cost.cost_inputs import units_at
from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.export import export
from planner.export.base import Export
from planner.export.megatron_bridge import arguments_of, overrides, recipe_for
from planner.export.megatron_settings import GROUPS, KEYS
from planner.intake.current import complete, own_run
from planner.intake.jobs import read_job, read_training
from planner.intake.trainer_files.canonical import canonical
from planner.rules import violations
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import TRAINERS, release_of, resolve_layout
from tests.conftest import job_values

CASES = Path(__file__).parents[1] / "cases"
BRIDGE: dict[str, Any] = {"trainer": "megatron-bridge"}


def rows(case: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / case / "rows.jsonl").read_text().splitlines()]


def under(trainer: str, row: dict[str, Any]) -> Any:
    return estimate_job(read_job({**row, "training": {**row["training"], "trainer": trainer}}))


def test_an_export_has_bridges_own_number() -> None:
    nemo = read_training({"seq_len": 4096, "global_batch_size": 8, "trainer": "nemo"})
    assert nemo.trainer == "megatron-bridge"
    for asked, own in ((None, "0.6"), ("0.4", "0.4"), ("0.5.1", "0.5")):
        _, exported = made("llama3-8b", 8, {"tp": 2}, trainer_version=asked)
        assert exported.version == own
        assert f"Megatron-Bridge {own} on megatron-core" in exported.notes[0]


def test_its_recipes_defaults() -> None:
    ours = resolve_layout({}, trainer="megatron-bridge", num_gpus=8)
    theirs = resolve_layout({}, trainer="megatron", num_gpus=8)
    assert (ours.reduce_dtype, theirs.reduce_dtype) == ("bfloat16", "float32")
    assert ours.model_copy(update={"reduce_dtype": "float32"}) == theirs
    bridge = TRAINERS["megatron-bridge"]
    assert (bridge.fused_cross_entropy, TRAINERS["megatron"].fused_cross_entropy) == (True, False)
    low = {one.name: one.native for one in bridge.recipes(None) if one.peak == "fp8"}
    assert [name for name, kept in low.items() if not kept] == ["float8-blockwise"]


def test_what_a_command_leaves_to_its_recipe_is_named() -> None:
    line = (
        "torchrun --nproc_per_node 8 run_recipe.py --recipe {} model.pipeline_model_parallel_size=8"
    )
    more = " dataset.seq_length=4096 train.global_batch_size=64 model.fp8=e4m3 model.num_layers=4"
    name = "deepseek_v4_flash_pretrain_config"  # 43 layers, over which the recipe has a layout
    wide = " mixed_precision.fp8=hybrid mixed_precision.fp8_param_gather=false"
    wide += " checkpoint.ckpt_format=fsdp_dtensor"  # which a recipe may have FSDP for
    current = {"name": "run.sh", "text": line.format(name) + more + wide}
    run = own_run({"current": current}, model("deepseek-v4-flash"), 8)
    assert run.refusals == ()
    assert f"of {name} only what the text overrides is read" in run.notes
    assert "model.num_layers=4, mixed_precision.fp8_param_gather=False" in run.notes[-1]
    text = "model: {tensor_model_parallel_size: 1}\nmixed_precision: {fp8_param_gather: false}"
    yaml = {"name": "x.yaml", "text": text, "format": "megatron-bridge"}
    run = own_run({"current": yaml}, model("llama3-8b"), 8)
    assert "of its recipe only what the text overrides is read" in run.notes
    assert not any("gather" in note for note in run.notes), "which changes nothing without fp8"
    for words in (f"{name}{more} ddp.use_megatron_fsdp=true", f"llama3_8b_fsdp_sft_config{more}"):
        with pytest.raises(SpecError, match="data_parallel_sharding_strategy is not set, and"):
            job_of_text("run.sh", line.format(words))
    with pytest.raises(SpecError, match="'llama3_8b_peft_config': trains adapters"):
        job_of_text("run.sh", line.format("llama3_8b_peft_config") + more)
    low = job_of_text("run.sh", line.format("llama3_8b_pretrain_mxfp8_config") + more)
    assert low.layout.precision == "mxfp8"
    with pytest.raises(SpecError, match="the recipe has it, which is not read"):
        job_of_text("run.sh", line.format("glm_45v_sft_config") + more)  # GLM-4.5V is not GLM-4.5


@pytest.mark.parametrize(("text", "core"), [
    (None, "0.19"), ("0.16", "0.16"), ("core_v0.14.0", "0.14"),
    ("0.4.2", "0.17"), ("v0.3.1", "0.16"), ("NeMo 25.09", "0.14"),  # its own releases
])  # fmt: skip
def test_rules_are_those_of_the_core_it_rests_on(text: str | None, core: str) -> None:
    assert release_of("megatron-bridge", text).number == core


def test_megatrons_rules_hold() -> None:
    job = training(**BRIDGE, overlap={"ep": True}, trainer_version="0.18")
    chosen = layout(16, "megatron-bridge", ep=8, ac="modules-moe")
    spec = model("qwen3-30b-a3b")
    (found,) = violations(chosen, spec, cluster(16), job)
    assert "Megatron-Bridge core 0.18 recomputes no whole experts" in found.rule


JOB_8B = job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 64, fused_cross_entropy=True)


def estimated(layout: dict[str, Any], **training: Any) -> Any:
    return estimate(**{**JOB_8B, "training": {**JOB_8B["training"], **training}, "layout": layout})


def test_it_is_calibrated_as_megatron_is() -> None:
    """With the same layout and loss the two are one estimate, but for what user buffers hide."""
    ours, theirs = (
        estimated({"reduce_dtype": "bfloat16"}, trainer=trainer).model_dump(exclude={"id"})
        for trainer in ("megatron", "megatron-bridge")
    )
    assert ours == theirs


def test_a_fused_loss_keeps_its_16_bit_logits_alone() -> None:
    """2 bytes a logit where Megatron's own takes 6, and no fp32 block that stays cached."""
    each = 2 * 4096 * 128256
    batch = LayoutBatch.from_layouts([layout(8, "megatron", micro_batch_size=2, ac="full")])
    logits, cached = {}, {}
    for fused in (False, True):
        job = training(trainer="megatron", seq_len=4096, fused_cross_entropy=fused)
        pricer = Pricer.build(model("llama3-8b"), cluster(8), job)
        logits[fused] = float(units_at(pricer, batch).logits_bytes[0])
        cached[fused] = float(pricer.price(batch).memory.cached[0, 0])
    assert logits == {False: 6 * each, True: 2 * each}
    assert cached[False] - cached[True] == pytest.approx(4 * each)


def test_a_trainer_without_such_a_loss_says_so() -> None:
    for trainer, version in (("fsdp", None), ("megatron", "0.11")):
        found = estimated({}, trainer=trainer, trainer_version=version)
        assert [one.field for one in found.unsupported] == ["training.fused_cross_entropy"]


# Allocated at the peak. Bridge's logger divides by 1e9 (training/utils/train_utils.py,
# report_memory); the last run's pull request says GiB, and holds pools of CUDA graphs and buffers
# of HybridEP, which are not priced.
QWEN3_30B = (61.35e9, 62.04e9, 63.14e9, 62.17 * 2**30)


@pytest.mark.parametrize(
    ("row", "measured", "off"),
    list(zip(rows("18-qwen3-30b-16-h100"), QWEN3_30B, (0.05, 0.05, 0.05, 0.1), strict=True)),
    ids=("alltoall", "overlap", "core_attn", "hybridep and graphs"),
)
def test_qwen3_30b_on_16_h100(row: dict[str, Any], measured: float, off: float) -> None:
    """41.3 s, 31.3 s with overlap, 42.9 s with core_attn, 20.15 s with HybridEP.

    Source: github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3862, 3880, 5123.
    """
    found = under("nemo", row)
    assert found.fits
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=off)


def test_overlap_and_recomputed_attention_go_the_measured_way() -> None:
    steps = [under("nemo", row).step_seconds for row in rows("18-qwen3-30b-16-h100")]
    plain, overlapped, attention, hybrid = steps
    assert plain / overlapped == pytest.approx(1.32, rel=0.06)
    assert attention / plain == pytest.approx(1.02, rel=0.02)
    assert plain / hybrid == pytest.approx(2.05, rel=0.1)


def test_a_recipe_by_hand_fits_and_is_faster() -> None:
    """14.44 s on 16 H100 with 80 GB. Source: Megatron-Bridge issue 949."""
    recipe, _, by_hand = (under("nemo", row) for row in rows("19-qwen3-30b-recipe-vs-hand"))
    assert by_hand.fits
    assert by_hand.step_seconds == pytest.approx(14.44, rel=0.05)
    assert by_hand.step_seconds < recipe.step_seconds
    text = (CASES / "19-qwen3-30b-recipe-vs-hand/te_loss.sh").read_text(encoding="utf-8")
    same = job_of_text("te_loss.sh", text)
    found = estimate_job(same)
    assert (same.training.fused_cross_entropy, found.fits) == (True, True)
    assert not any("cross-entropy" in one for one in found.warnings)


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3-30b-a3b", 16, {"ep": 16, "moe_dispatcher": "hybridep"}),
    ("qwen3-30b-a3b", 16, {"ep": 8, "pp": 2, "pp_schedule": "Interleaved1F1B",
                           "virtual_stages": 12, "ac": "modules-moe_act+layernorm"}),
    ("llama3-70b", 64, {"tp": 8, "pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 5,
                        "cp": 2, "precision": "float8-tensorwise", "ac": "block-2"}),
    ("llama3-70b", 64, {"tp": 4, "pp": 4, "layers_per_stage": (19, 21, 21, 19), "ac": "uniform-2"}),
    ("llama3-8b", 8, {"reduce_dtype": "float32", "zero_stage": 0, "cpu_offload": False,
                      "ac": "full"}),
    ("llama3-8b", 8, {"cpu_offload": True, "optimizer_offload_fraction": 0.5}),
    ("llama3-8b", 8, {"activation_offload_layers": 3, "precision": "mxfp8"}),
    ("deepseek-v3", 256, {"ep": 32, "pp": 8, "ac": "modules-mla_up_proj+mlp",
                          "layers_per_stage": (7, 8, 8, 8, 8, 8, 7, 7)}),
]  # fmt: skip


def made(name: str, num_gpus: int, values: dict[str, Any], **given: Any) -> tuple[Layout, Export]:
    chosen = layout(num_gpus, "megatron-bridge", **{"cp_method": "alltoall", **values})
    job = training(**BRIDGE, seq_len=4096, global_batch_size=256, **given)
    gpu = "b200-sxm-180gb" if chosen.precision == "mxfp8" else "h100-sxm-80gb"
    machine = cluster(num_gpus, gpu=gpu)
    return chosen, export(chosen, model(name), machine, job, to="megatron-bridge")


def read_back(exported: Export, name: str, num_gpus: int, folder: Path) -> list[Job]:
    """The jobs of its two files."""
    given = {"model": name, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus}}
    found = []
    for file in ("overrides.yaml", "launch.sh"):
        (folder / file).write_text(exported.files[file], encoding="utf-8")
        current = read_job_file(str(folder / file), "--job")["current"]
        found.append(read_job(complete({"current": current, **given})))
    return found


@pytest.mark.parametrize(("name", "num_gpus", "values"), LAYOUTS)
def test_what_is_exported_reads_back(
    name: str, num_gpus: int, values: dict[str, Any], tmp_path: Path
) -> None:
    chosen, exported = made(name, num_gpus, values)
    assert exported.blockers == ()
    plain = [model(name).num_hidden_layers, "megatron-bridge"]
    for job in read_back(exported, name, num_gpus, tmp_path):
        assert canonical(job.layout, *plain) == canonical(chosen, *plain)
        training = job.training
        shape = (training.seq_len, training.global_batch_size)
        assert (training.trainer, *shape) == ("megatron-bridge", 4096, 256)


@pytest.mark.parametrize(("stage", "name"), [(0, "muon"), (1, "dist_muon")])
def test_muon_has_the_recipes_own_words(stage: int, name: str, tmp_path: Path) -> None:
    """recipes/kimi, utils/optimizer_utils.py: dist_muon, blockwise, no distributed optimizer."""
    given = {"optimizer": "muon", "trainer_version": "0.7"}
    _, exported = made("llama3-8b", 8, {"zero_stage": stage}, **given)
    words = f"optimizer.optimizer={name} optimizer.muon_tp_mode=blockwise "
    words += "ddp.use_distributed_optimizer=false ddp.overlap_param_gather=false"
    assert {*words.split()} <= {*exported.arguments}
    for job in read_back(exported, "llama3-8b", 8, tmp_path):
        training = job.training
        assert (training.optimizer, training.muon_tp_mode) == ("muon", "blockwise")
        assert job.layout.zero_stage == stage


def test_every_setting_of_a_layout_has_an_override() -> None:
    without = {"enable_zero_bubble", "zero_bubble_max_pending_backward", "use_torch_fsdp2",
               "use_custom_fsdp", "no_gradient_accumulation_fusion", "recompute_activations",
               "num_layers_per_virtual_pipeline_stage", "fp8"}  # fmt: skip
    assert {name for names in GROUPS.values() for name in names} - KEYS.keys() - without == {
        "grad_reduce_in_bf16"  # the other value of a flag
    }


FULL_GRAPHS: dict[str, Any] = {"cuda_graphs": "full"}
# model, layout, job, overrides that are written, and starts of those that are not
WRITTEN: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    # recipes/deepseek overlaps shared experts and keeps moments in 16 bits; refused by allgather
    ("deepseek-v3", {"tp": 2, "pp": 8, "ep": 4, "moe_dispatcher": "allgather"}, {},
        "model.moe_shared_expert_overlap=false model.moe_expert_capacity_factor=null "
        "optimizer.use_precision_aware_optimizer=false optimizer.exp_avg_dtype=fp32 "
        "optimizer.main_grads_dtype=fp32 model.bias_activation_fusion=true", ""),
    ("qwen3-8b", {"tp": 2}, FULL_GRAPHS,
        "rerun_state_machine.check_for_nan_in_loss=false ddp.check_for_nan_in_grad=false "
        "rng.te_rng_tracker=true model.cuda_graph_modules=[] model.apply_rope_fusion=true "
        "model.bias_activation_fusion=true", ""),
    ("qwen3-30b-a3b", {"ep": 8, "moe_dispatcher": "hybridep"}, FULL_GRAPHS,
        "model.use_transformer_engine_op_fuser=true model.offload_modules=[]", ""),
    ("kimi-k2", {"tp": 8, "pp": 4, "ep": 2}, {"optimizer": "adamw-bf16-states"},
        "optimizer.use_distributed_optimizer=true optimizer.exp_avg_dtype=bf16", ""),
    ("llama3-8b", {}, {}, "model.recompute_granularity=null model.sequence_parallel=false "
        "model.cross_entropy_fusion_impl=te ddp.grad_reduce_in_fp32=false "
        "model.recompute_modules=null model.apply_rope_fusion=true", ""),
    # Megatron-LM refuses to fuse it with sparse attention (core 0.18 transformer_config.py)
    ("glm5.2", {"pp": 2, "ep": 8}, {}, "", "model.apply_rope_fusion=true"),
    ("llama3-70b", {"tp": 4, "pp": 4, "layers_per_stage": (19, 21, 21, 19),
        "ac": "modules-mlp+layernorm"}, {}, "model.recompute_modules=[mlp,layernorm] "
        'model.pipeline_model_parallel_layout="Et*19|t*21|t*21|t*19L"', ""),
    ("llama3-8b", {"ac": "selective-attention"}, {}, "model.recompute_modules=[core_attn]", ""),
    # most recipes set a scope, which Core refuses beside modules; some capture layers
    ("llama3-8b", {}, {"cuda_graphs": "none", "trainer_version": "0.19"},
        "model.cuda_graph_impl=none", "model.cuda_graph_scope model.cuda_graph_modules"),
    ("llama3-8b", {}, {"cuda_graphs": "partial", "trainer_version": "0.19"},
        "model.cuda_graph_impl=transformer_engine model.cuda_graph_scope=null "
        "model.cuda_graph_modules=[attn,mlp]", ""),
    ("llama3-8b", {}, {"cuda_graphs": "partial", "trainer_version": "0.17"},
        "model.cuda_graph_impl=transformer_engine model.cuda_graph_scope=[attn,mlp]",
        "model.cuda_graph_modules"),
    ("llama3-8b", {}, {**FULL_GRAPHS, "trainer_version": "core_v0.14.0"},
        "model.cuda_graph_scope=full_iteration", "model.cuda_graph_modules"),
    # a preset is written by its name
    ("llama3-8b", {"reduce_dtype": "float32"}, {}, "mixed_precision=bf16_mixed",
        "mixed_precision={"),
    ("llama3-8b", {"precision": "fp16", "reduce_dtype": "bfloat16"}, {},
        "mixed_precision=fp16_mixed", "mixed_precision={"),
    ("llama3-8b", {"precision": "float8-blockwise", "reduce_dtype": "float32"}, {},
        "mixed_precision=bf16_with_fp8_subchannel_scaling_mixed", "mixed_precision={"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "given", "wanted", "without"), WRITTEN)
def test_what_was_priced_is_written_over_what_a_recipe_sets(
    name: str, values: dict[str, Any], given: dict[str, Any], wanted: str, without: str
) -> None:
    """Seen by Megatron-Bridge 0.6's own recipes and validation (benchmarks/parsed_bridge.py)."""
    _, exported = made(name, 64, values, **given)
    assert {*wanted.split()} <= {*exported.arguments}
    assert not [one for one in exported.arguments if one.startswith(tuple(without.split()))]
    assert not without.startswith("mixed") or "mixed_precision is" not in str(exported.notes)
    settings = dict(one.split("=", 1) for one in exported.arguments)  # of two, the second counts
    file = yaml.safe_load(exported.files["overrides.yaml"])
    for path, value in settings.items():
        assert reduce(getitem, path.split("."), file) == yaml.safe_load(value)


def test_overrides_are_lists_where_bridge_has_lists() -> None:
    by_name = overrides({"cuda_graph_modules": ["attn"], "cp_comm_type": ["p2p"]})
    assert by_name["model.cuda_graph_modules"] == ["attn"]
    assert by_name["model.cp_comm_type"] == "p2p"  # a list of it has one for each layer
    assert arguments_of(overrides({"micro_batch_size": ["2"]}))["micro_batch_size"] == ["2"]


def test_an_export_has_the_loss_that_was_priced() -> None:
    """Whatever its format: the job's trainer says which loss it is, unless the job does."""
    chosen, spec = layout(8, "megatron-bridge"), model("llama3-8b")
    for given, te in ((BRIDGE, True), ({"trainer": "megatron"}, False),
                      ({**BRIDGE, "fused_cross_entropy": False}, False)):  # fmt: skip
        ours, theirs = (
            export(chosen, spec, cluster(8), training(**given), to=to).arguments
            for to in ("megatron-bridge", "megatron")
        )
        assert f"model.cross_entropy_fusion_impl={'te' if te else 'native'}" in ours
        assert ("--cross-entropy-fusion-impl" in theirs) is te


@pytest.mark.parametrize(("name", "predicts"), [
    ("deepseek-v3", None), ("deepseek-v3-mtp", 1), ("glm5.2", None), ("qwen3-next-80b-a3b", None),
    ("nemotron-3-super-120b-a12b", None),
])  # fmt: skip
def test_an_export_predicts_no_more_tokens_than_were_priced(name: str, predicts: object) -> None:
    """Recipes of these set mtp_num_layers; Core counts it against the layout's letters."""
    hybrid = name.startswith("nemotron")
    _, exported = made(name, 32, {"ep": 8, "pp": 1 if hybrid else 4, "tp": 1})
    values = yaml.safe_load(exported.files["overrides.yaml"])["model"]
    stages = values["pipeline_model_parallel_layout"]
    assert stages is None or ("m" in stages) is (predicts is not None)
    assert f"model.mtp_num_layers={json.dumps(predicts)}" in exported.arguments
    # the repeated layer of a hybrid model is in its pattern
    assert ("mtp_hybrid_override_pattern" in values) is hybrid


def test_overlaps_are_written_where_bridge_reads_them_last() -> None:
    """comm_overlap.setup() overwrites fields of model and ddp, by false where it has none."""
    _, exported = made("qwen3-30b-a3b", 16, {"ep": 8}, overlap={"ep": True, "dp": False})
    values = yaml.safe_load(exported.files["overrides.yaml"])
    overlaps = {"tp_comm_overlap": False, "overlap_moe_expert_parallel_comm": True,
                "overlap_grad_reduce": False, "overlap_param_gather": False}  # fmt: skip
    assert values["comm_overlap"] | overlaps == values["comm_overlap"]
    assert values["model"]["moe_shared_expert_overlap"] is False
    first, second = (one for one in exported.arguments if one.startswith("comm_overlap"))
    assert first == "comm_overlap=null"
    assert yaml.safe_load(second.partition("=")[2]) == values["comm_overlap"]


@pytest.mark.parametrize(("precision", "preset", "fields"), [
    ("bf16", "bf16_mixed", {"fp8": None}), ("fp16", "fp16_mixed", {"fp16": True, "bf16": False}),
    ("float8-delayed", "bf16_with_fp8_delayed_scaling_mixed",
     {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024}),
    ("float8-tensorwise", "bf16_with_fp8_current_scaling_mixed",
     {"fp8_recipe": "tensorwise", "first_last_layers_bf16": False}),
    ("mxfp8", "bf16_with_mxfp8_mixed", {"fp8": "e4m3", "reuse_grad_buf_for_mxfp8_param_ag": True}),
    ("nvfp4", "bf16_with_nvfp4_mixed", {"fp8": None, "fp4": "e2m1", "fp4_param_gather": False}),
])  # fmt: skip
def test_a_changed_preset_is_a_configuration(
    precision: str, preset: str, fields: dict[str, object], tmp_path: Path
) -> None:
    """An override of one of its fields stops at a recipe's name, such as "bf16_mixed"."""
    reduced = "float32" if precision == "fp16" else "bfloat16"
    chosen, exported = made("llama3-8b", 8, {"precision": precision, "reduce_dtype": reduced})
    written = yaml.safe_load(exported.files["overrides.yaml"])["mixed_precision"]
    assert written["_target_"].endswith("mixed_precision.MixedPrecisionConfig")
    dtype = f"torch.{'float16' if precision == 'fp16' else 'bfloat16'}"
    fields |= {"grad_reduce_in_fp32": precision == "fp16"}
    fields |= {"params_dtype": {"_target_": dtype, "_call_": False}}
    assert written | fields == written
    first, second = (one for one in exported.arguments if one.startswith("mixed_precision"))
    assert first == f"mixed_precision={preset}"
    assert yaml.safe_load(second.partition("=")[2]) == written
    assert any(one.startswith(f"mixed_precision is {preset} with") for one in exported.notes)
    for job in read_back(exported, "llama3-8b", 8, tmp_path):
        assert (job.layout.precision, job.layout.reduce_dtype) == (precision, reduced)
        assert job.layout.param_dtype == chosen.param_dtype


@pytest.mark.parametrize(("values", "kept"), [
    ({"precision": "float8-tensorwise"}, True),
    ({"precision": "float8-tensorwise", "zero_stage": 0}, False),
    ({"precision": "float8-tensorwise", "cpu_offload": True}, False),
    ({"precision": "float8-delayed", "cpu_offload": True}, True),
])  # fmt: skip
def test_parameters_are_launched_in_fp8_where_they_are_priced_so(values: dict, kept: bool) -> None:
    """On Hopper two fp8 copies are as large as one bf16 parameter, or lie beside it."""
    _, exported = made("llama3-8b", 8, values)
    written = yaml.safe_load(exported.files["overrides.yaml"])["mixed_precision"]
    assert written["fp8_param_gather"] is kept
    stages = []
    for given in (values, {**values, "precision": "bf16"}):
        job = job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 64, layout=given, **BRIDGE)
        stages.append(estimate(**job).memory.stages[0].parameters_bytes)
    assert (stages[0] < 1.1 * stages[1]) is kept


def test_an_export_names_a_recipe_that_exists_or_none() -> None:
    release = release_of("megatron-bridge", None)
    trained = [name for name in model_names() if not lacking(model(name), release)]
    missing = set()
    for name in trained:
        _, exported = made(name, 8, {})
        (written,) = re.findall(r"--recipe (\w+)", exported.files["launch.sh"])
        if written not in recipes():
            assert written == "YOUR_RECIPE_pretrain_config"
            assert f"has no recipe that pretrains {name}" in " ".join(exported.notes)
            missing.add(name)
        assert name in missing or recipes()[written].since <= release.number
    assert {"gemma4-26b-a4b", "glm5", "mixtral-8x7b"} <= missing
    assert len(trained) - len(missing) >= 45


@pytest.mark.parametrize(("name", "recipe"), [
    ("step-3.5-flash", "step35_196b_a11b_pretrain_config"),
    ("glm5.2", "glm52_pretrain_416gpu_h100_bf16_config"),
    ("deepseek-v3-mtp", "deepseek_v3_pretrain_config"), ("gemma4-26b-a4b", None),
    ("qwen3.5-35b-a3b", "qwen35_text_35b_a3b_pretrain_config"), ("k-exaone-2", None),
])  # fmt: skip
def test_the_recipe_of_a_model_in_a_release(name: str, recipe: str | None) -> None:
    found = recipe_for(name, release_of("megatron-bridge", "0.6"))
    assert (found and found.name) == recipe
    assert recipe_for(name, release_of("megatron-bridge", "0.3")) is None or "v3" in name
    if recipe and name != "deepseek-v3-mtp":
        own = COMMAND.replace("qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config", recipe)
        assert job_of_text("run.sh", own).model.name == name


COMMAND = (
    "torchrun --nproc_per_node=8 --nnodes=2 scripts/training/run_recipe.py "
    "--recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config -ep 8 -mb 2 "
    "model.recompute_granularity=selective model.recompute_modules=[moe_act,layernorm] "
    "train.global_batch_size=512 dataset.seq_length=4096 "
    "comm_overlap.overlap_moe_expert_parallel_comm=true"
)


def test_a_command_of_run_recipe() -> None:
    job = job_of_text("run.sh", COMMAND)
    assert (job.model.name, job.cluster.num_gpus) == ("qwen3-30b-a3b", 16)
    want = {"ep": 8, "micro_batch_size": 2, "ac": "modules-layernorm+moe_act"}
    assert job.layout == layout(16, "megatron-bridge", **want, cp_method="alltoall")
    assert (job.training.overlap.ep, job.training.global_batch_size) == (True, 512)
    rack = {"cluster": {"gpu": "gb200-nvl72", "num_gpus": 16}}  # whose recipes overlap in mxfp8
    for words, overlaps in (("", None), (COMMAND.split()[-1].replace("true", "false"), False)):
        job = job_of_text("run.sh", f"{' '.join(COMMAND.split()[:-1])} {words}", **rack)
        assert job.training.overlap.ep is overlaps


@pytest.mark.parametrize(("words", "hides"), [
    ("", True), ("comm_overlap.tp_comm_overlap=false", False), ("model.tp_comm_overlap=true", True),
])  # fmt: skip
def test_user_buffers_hide_tp_unless_they_are_switched_off(words: str, hides: bool) -> None:
    both = "model.tensor_model_parallel_size=2 model.sequence_parallel=true"
    job = job_of_text("run.sh", f"{COMMAND} {both} {words}")
    assert (job.training.overlap.tp, job.layout.async_tp) == (hides, False)


@pytest.mark.parametrize(("preset", "precision", "reduce_dtype"), [
    ("bf16_mixed", "bf16", "float32"), ("fp16_mixed", "fp16", "bfloat16"),
    ("bf16_with_fp8_subchannel_scaling_mixed", "float8-blockwise", "float32"),
    ("bf16-with-mxfp8-mixed", "mxfp8", "float32"), ("bf16_with_nvfp4_mixed", "nvfp4", "float32"),
])  # fmt: skip
def test_presets_of_mixed_precision(preset: str, precision: str, reduce_dtype: str) -> None:
    job = job_of_text("run.sh", f"{COMMAND} mixed_precision={preset}")
    assert (job.layout.precision, job.layout.reduce_dtype) == (precision, reduce_dtype)


@pytest.mark.parametrize(("line", "fields"), [
    (f"{COMMAND} mixed_precision=int8_mixed", {"mixed_precision"}),
    (f"{COMMAND} model.tensor_model_parallel_size=two", {"--tensor-model-parallel-size"}),
    ("python run_recipe.py --recipe llama3_8b_pretrain_config model.context_parallel_size=2",
     {"training.seq_len", "training.global_batch_size"}),  # which no override has
])  # fmt: skip
def test_bad_and_missing_overrides_are_named(line: str, fields: set[str]) -> None:
    with pytest.raises(SpecError) as error:
        job_of_text("run.sh", line, cluster={"gpu": "h100-sxm-80gb", "num_gpus": 16})
    assert {one.field for one in error.value.faults} == fields
