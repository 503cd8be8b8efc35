"""Scripts that Megatron-LM refuses are refused in its words; what is not priced is named."""

from pathlib import Path

import pytest
from current_cases import EXAMPLES, job_of_text
from export_cases import layout

from planner.api.render.estimate import verdict
from planner.catalog.megatron_arguments import alike, argument, arguments, unpriced_flags
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.trainer_files.megatron_log import measured_by, words_of
from planner.specs.estimate import Estimate

CASES = Path(__file__).parents[1] / "cases"
LINE = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --bf16 "
    "--num-attention-heads 32 --seq-length 8192 --vocab-size 32000 --micro-batch-size 1 "
    "--global-batch-size 64 --tensor-model-parallel-size 2"
)
SCRIPT = (EXAMPLES / "pretrain_llama3_70b.sh").read_text(encoding="utf-8")
# case -> (field, words of the rule or the remedy), as Megatron-LM's validate_args and
# TransformerConfig of 2026-08-22 refuse them on a CPU
REFUSED = {
    "08-70b-128-tp8pp8/pretrain": ("--distribute-saved-activations", "--sequence-parallel"),
    "15-80-layers-pp16-vpp/run16": ("--num-layers-per-virtual-pipeline-stage", "the 5 layers"),
    "15-80-layers-pp16-vpp/run30_pp4": ("--num-layers", "30 layers do not divide over 4"),
    "15-80-layers-pp16-vpp/pp1_last_stage": (
        "--decoder-last-pipeline-num-layers", "19 layers to 0 pipeline ranks"),
    "33/a_saved_activations_with_sp": (
        "--distribute-saved-activations", "excludes --sequence-parallel"),
    "33/b_saved_activations_no_recompute": (
        "--distribute-saved-activations", "needs --recompute-granularity full"),
    "33/c_ep_overlap_full_recompute": ("ep", "whole layers are recomputed"),
    "33/d_ep_overlap_pp_no_vpp": ("ep", "pp=2 and one stage a rank"),
    "33/e_ep_overlap_allgather": ("ep", "the dispatcher allgather"),
    "33/f_shared_overlap_allgather": ("--moe-shared-expert-overlap", "alltoall or flex"),
    "33/g_vpp_microbatches": (
        "--microbatch-group-size-per-virtual-pipeline-stage", "the last has 2, fewer than pp=4"),
    "33/h_gbs": ("dp_shard", "do not divide global_batch_size 102"),
    "33/i_tp_overlap_no_sp": ("async_tp", "sequence_parallel=False"),
    "33/k_vpp_without_overlap_pp2": ("virtual_stages", "over pp=2 ranks only"),
    "33/l_both_vpp_flags_uneven": (
        "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    "33/m_first_last_left_over": (
        "--decoder-first-pipeline-num-layers", "19 layers to 2 pipeline ranks"),
    "33/n_12_of_16_gpus": ("dp_shard", "16 ranks on 24 GPUs"),
    "33/o_experts_not_divisible_by_ep": ("ep", "does not divide 60 experts"),
    "33/p_overlap_param_gather_no_dist": (
        "--overlap-param-gather", "needs --use-distributed-optimizer"),
    "33/q_moe_recompute_vs_modules": ("--recompute-granularity", "--recompute-method"),
    "33/r_uniform_without_method": ("--recompute-granularity", "--recompute-method"),
    "33/s_flex_no_tp_ep": ("moe_dispatcher", "ep is 1"),
    "33/t_unknown_flag": ("--tensor-model-paralel-size", "write --tensor-model-parallel-size"),
    "20-ep-etp-pp-world/glm47_8gpu": ("ep", "does not divide 4 ranks"),
    "20-ep-etp-pp-world/tp4ep4_4gpu": ("ep", "does not divide 4 ranks"),
}  # fmt: skip
H100 = {"gpu": "h100-sxm-80gb"}


def script(name: str) -> str:
    return (CASES / f"{name}.sh").read_text(encoding="utf-8")


def estimated(name: str, gpu: str = "h100-sxm-80gb", more: str = "", **given: object) -> Estimate:
    text = f"{script(name).rstrip()} {more}\n"
    return estimate_job(job_of_text(f"{name}.sh", text, cluster={"gpu": gpu}, **given))


def changed(old: str, new: str, text: str = SCRIPT, **job: object) -> Estimate:
    assert old in text
    return estimate_job(job_of_text("train.sh", text.replace(old, new, 1), **job))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_megatron_refuses(name: str) -> None:
    found = estimated(name.replace("33/", "33-megatron-asserts/"))
    field, words = REFUSED[name]
    assert (found.valid, found.step_seconds) == (False, None)
    (fault,) = found.violations
    assert fault.field == field
    assert words in f"{fault.rule}; {fault.remedy}"


def test_a_script_that_megatron_takes() -> None:
    for name in ("08-70b-128-tp8pp8/pp2_no_sp", "11-mixtral-16-h100/ep8tp2"):
        found = estimated(name)
        assert found.valid, found.violations
        assert not any("not priced" in text for text in found.warnings)
    assert estimate_job(job_of_text("train.sh", SCRIPT)).valid


def test_graphs_hold_no_routers_of_recomputed_experts() -> None:
    """As NVIDIA's recipe of Nemotron 3 Nano on H100, which captures attention and Mamba alone."""
    graphs = "--cuda-graph-impl transformer_engine --cuda-graph-scope attn"
    name = "23b-recompute-modules/moe_layernorm"
    assert estimated(name, more=graphs).valid
    (fault,) = estimated(name, more=f"{graphs} moe_router").violations
    shown = ("--cuda-graph-scope", "excludes --recompute-modules moe")
    assert (fault.field, fault.rule) == shown


def test_a_script_that_ran_fits_its_card() -> None:
    """Megatron-LM issue 756: releases since 0.13 do not save what their experts return."""
    name = "11-mixtral-16-h100/ep8tp2"
    found, before = (
        estimated(name, training=version) for version in ({}, {"trainer_version": "0.12"})
    )
    assert found.oom_probability_full_card < 0.01
    assert found.oom_probability > 0.05  # with the share that a plan keeps free
    assert not found.fits
    assert str(verdict(found)).startswith("It fits")
    rows = 2048 * 2 * 4096 * 2  # own tokens x copies x hidden x bytes
    saved = before.peak_allocated_bytes - found.peak_allocated_bytes
    assert saved == pytest.approx(32 * rows, rel=0.05)


@pytest.mark.parametrize(("name", "more", "words"), [
    ("16-13b-a800-tp4/pretrain", "", "--RMSNorm, --causal-lm, --overlapped-distributed-optimizer"),
    # it keeps the fp32 copy of the logits that Transformer Engine's has not
    ("19-qwen3-30b-recipe-vs-hand/plain", "--cross-entropy-loss-fusion",
        "--cross-entropy-loss-fusion"),
    ("23b-recompute-modules/moe_act_layernorm", "gdn_norm_out",
        "recomputing gdn_norm_out is not priced"),
])  # fmt: skip
def test_what_costs_time_or_memory_unpriced_is_named(name: str, more: str, words: str) -> None:
    found = estimated(name, more=more)
    assert found.valid
    assert sum(words in text for text in found.warnings) == 1
    job = job_of_text("x.sh", f"{script(name).rstrip()} {more}\n", cluster=H100)
    assert job.training.fused_cross_entropy is None


def test_recomputed_modules_are_read_and_priced() -> None:
    """The case's 235B on 256 H800: less memory than none, a little more time, no note.

    Source: github.com/alibaba/Pai-Megatron-Patch/issues/658.
    """
    modes = {
        "none": "none", "core_attn": "selective-attention",
        "moe_act_layernorm": "modules-layernorm+moe_act", "moe_layernorm": "modules-layernorm+moe",
    }  # fmt: skip
    names = {mode: f"23b-recompute-modules/{mode}" for mode in modes}
    read = {mode: job_of_text("x.sh", script(name)).layout.ac for mode, name in names.items()}
    assert read == modes
    found = {mode: estimated(name, "h800-sxm-80gb") for mode, name in names.items()}
    assert not any("recompu" in text for one in found.values() for text in one.warnings)
    peaks = {mode: one.peak_allocated_bytes or 0.0 for mode, one in found.items()}
    steps = {mode: one.step_seconds or 0.0 for mode, one in found.items()}
    assert peaks["moe_act_layernorm"] < 0.93 * peaks["none"]
    assert peaks["moe_layernorm"] < 0.6 * peaks["none"]
    assert [found[mode].fits for mode in modes] == [False, False, True, True]
    assert 1.0 < steps["moe_act_layernorm"] / steps["none"] < 1.02
    assert 1.02 < steps["moe_layernorm"] / steps["none"] < 1.4


@pytest.mark.parametrize(("flags", "ac"), [
    ("--recompute-activations", "selective-attention"),
    ("--recompute-granularity selective", "selective-attention"),
    ("--recompute-activations --recompute-modules mlp core_attn", "modules-core_attn+mlp"),
    ("--recompute-modules mlp", "none"),  # without a granularity nothing is recomputed
    ("--moe-layer-recompute", "modules-core_attn+moe"),  # beside Megatron's own core_attn
    ("--moe-layer-recompute --recompute-modules layernorm", "modules-layernorm+moe"),
])  # fmt: skip
def test_flags_that_choose_modules(flags: str, ac: str) -> None:
    text = script("23b-recompute-modules/none").rstrip()
    assert job_of_text("train.sh", f"{text} {flags}\n").layout.ac == ac


@pytest.mark.parametrize(("words", "field", "rule"), [
    ("--sequence-parallel true", "--sequence-parallel", "takes no value, not 1"),
    ("--lr fast", "--lr", "takes a number, not 'fast'"),
    ("--train-iters 1e5", "--train-iters", "takes a whole number, not '1e5'"),
    ("--moe-router-dtype bf16", "--moe-router-dtype", "one of fp32, fp64"),
    ("--max-position-embeddings 4096", "--max-position-embeddings", "less than --seq-length"),
    ("--use_distributed_optimizer", "--use_distributed_optimizer", "is no argument"),
    ("--checkpoint-activations", "--checkpoint-activations", "use --recompute-activations"),
    ("--exp-avg-dtype bf16", "--exp-avg-dtype", "needs --use-precision-aware-optimizer"),
    ("--save out", "--save", "needs --save-interval"),
    ("--first-last-layers-bf16 --fp8-format e4m3", "--first-last-layers-bf16", "recipe delayed"),
    ("--hierarchical-context-parallel-sizes 2 2", "--hierarchical-context-parallel-sizes", "cp=1"),
    ("--recompute-modules core_atn --recompute-activations", "--recompute-modules", "core_atn"),
])  # fmt: skip
def test_each_thing_it_asserts(words: str, field: str, rule: str) -> None:
    found = estimate_job(job_of_text("train.sh", f"{LINE} {words}")).violations
    (fault,) = [one for one in found if one.field == field]
    assert rule in f"{fault.rule}; {fault.value}; {fault.remedy}"


def test_a_release_refuses_what_an_older_one_takes() -> None:
    words = "--bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te"
    for version, valid in (None, True), ("0.18", True), ("0.19", False):
        assert changed("--bf16", words, training={"trainer_version": version}).valid is valid


def test_what_means_nothing_alone() -> None:
    words = "--bf16 --fp8-recipe tensorwise --expert-tensor-parallel-size 2 --recompute-activations"
    read = job_of_text("train.sh", SCRIPT.replace("--bf16", words)).layout
    assert (read.precision, read.etp, read.ac) == ("bf16", 1, "selective-attention")


def test_rounds_of_the_interleaved_schedule() -> None:
    """36 microbatches over 4 ranks of 4 stages: whole rounds, or a last one of pp and more."""
    flag = "    --microbatch-group-size-per-virtual-pipeline-stage"
    batch = "GBS=72"  # 2 data-parallel ranks
    assert changed("GBS=256", batch).valid
    for size, valid in ((4, True), (8, True), (5, False), (3, False), (40, False)):
        text = SCRIPT.replace("GBS=256", batch)
        found = changed("    --sequence-parallel", f"{flag} {size}\n    --sequence-parallel", text)
        assert found.valid is valid, size
        assert any("priced as rounds of 4" in text for text in found.warnings) is (size != 4)


GONE = next(flag for flag, rows in arguments().items() if rows[-1].until == "0.14")


def test_the_release_is_the_newest_that_has_every_flag() -> None:
    def version(words: str) -> str | None:
        text = SCRIPT.replace("--sequence-parallel", f"--sequence-parallel {words}")
        return job_of_text("train.sh", text).training.trainer_version

    assert version("") is None
    assert version("--cuda-graph-modules attn") is None
    assert version("--mtp-hsm") == "0.20"
    assert argument(GONE, "0.18") is None
    assert version(GONE) == "0.15"


def test_a_flag_of_another_release_is_refused_where_a_release_is_named() -> None:
    words = "    --cuda-graph-modules attn\n    --sequence-parallel"
    named = {"training": {"trainer_version": "0.14"}}
    found = changed("    --sequence-parallel", words, **named)
    assert [one.field for one in found.violations] == ["--cuda-graph-modules"]
    assert "core 0.18 or later has it" in found.violations[0].rule
    assert changed("    --sequence-parallel", words).valid
    both = changed("    --sequence-parallel", f"    {GONE} --mtp-hsm")
    assert any("by the rules of 0.19" in text and "core 0.20" in text for text in both.warnings)


def test_an_older_release_or_a_fork_has_flags_of_its_own() -> None:
    words = "    --my-own-flag 3\n    --sequence-parallel"
    assert not changed("    --sequence-parallel", words).valid
    older = changed("    --sequence-parallel", words, training={"trainer_version": "0.9"})
    assert (older.valid, "--my-own-flag" in str(older.warnings)) == (True, True)


def test_the_table_of_arguments() -> None:
    assert len(arguments()) == 929
    assert argument("--tensor-model-parallel-size", "0.18").kind == "int"
    assert argument("--cuda-graph-modules", "0.16") is None
    assert argument("--cuda-graph-modules", "0.17") is not None  # between two that were read
    assert alike("--tensor-model-paralel-size") == "--tensor-model-parallel-size"
    own = {f"--{name.replace('_', '-')}" for name in unpriced_flags()} - arguments().keys()
    assert ("--enable-zbh1-pipeline" in own, len(own)) == (True, 18), "of Megatron-DeepSpeed"


def test_a_command_of_nemo_is_named_for_what_it_is() -> None:
    with pytest.raises(SpecError, match="is a command of NeMo with Hydra overrides"):
        job_of_text("launch.sh", script("27-nemo-hydra-13b-8-a100/launch"))


def test_a_log_is_read_with_what_it_measured() -> None:
    text = (CASES / "30-megatron-log/train.log").read_text(encoding="utf-8")
    job = job_of_text("train.log", text)
    assert (job.model.name, job.cluster.num_gpus) == ("mixtral-8x7b", 16)
    ran = layout(16, "megatron", tp=2, ep=8, etp=2, micro_batch_size=1)
    assert job.layout.short() == ran.short()
    assert job.training.global_batch_size == 128
    assert job.training.overlap.pp  # off only where stages are interleaved
    assert measured_by(text)["step_seconds"] == pytest.approx(5.53)
    assert measured_by(text)["tokens_per_second_per_gpu"] == pytest.approx(128 * 4096 / 16 / 5.53)
    assert estimate_job(job).valid
    assert words_of({"fp4": "e2m1", "fp8": "None"}) == {"fp4_format": ["e2m1"]}
