"""Megatron-LM exports: arguments of pretrain_gpt.py, and that they read back as the layout."""

import json
from typing import Any

import pytest
from export_cases import MODELS, cluster, layout, layouts, model, to_megatron, training
from hypothesis import strategies as st

from planner.catalog.megatron_arguments import argument
from planner.export import export as export_to
from planner.export.base import Export
from planner.export.commands import read_flags
from planner.export.megatron import parse_back, pipeline_layout
from planner.export.megatron_graphs import read_graphs
from planner.export.megatron_read import GATHERED, plain_names
from planner.intake.models import read_model
from planner.intake.trainer_files.megatron import StatedMegatron
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import release_of
from tests.conftest import tiers


def make(
    name: str = "llama3-70b", job: dict | None = None, num_gpus: int = 256, **values: object
) -> Export:
    chosen = layout(num_gpus, "megatron", **values)
    gpu = {"nvfp4": "b200-sxm-180gb", "mxfp4": "mi355x-288gb"}.get(chosen.precision)
    gpus = cluster(num_gpus, gpu=gpu or "h100-sxm-80gb")
    return to_megatron(chosen, model(name), gpus, training(trainer="megatron", **(job or {})))


def flags_of(exported: Export) -> dict[str, list[str]]:
    return read_flags(exported.arguments)


@tiers(80, 1000, data=st.data(), name=st.sampled_from(MODELS))
def test_any_layout_reads_back(data: st.DataObject, name: str) -> None:
    spec = model(name)
    chosen = data.draw(layouts(spec.num_hidden_layers))
    plain = {} if spec.is_moe else {"etp": 1}  # means nothing, as a gather of whole weights does
    if chosen.zero_stage == 0 or chosen.precision not in GATHERED:
        plain["float8_all_gather"] = False
    chosen = chosen.model_copy(update=plain)
    exported = to_megatron(chosen, spec, cluster(256), training())
    assert parse_back(exported) == chosen
    json.dumps(exported.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("version", "said"), [("0.17", "128255"), ("0.18", "128256")])
def test_the_vocabulary_is_that_of_the_releases_null_tokenizer(version: str, said: str) -> None:
    made = make(job={"trainer_version": version})
    assert flags_of(made)["--vocab-size"] == [said]
    words = "--tokenizer-type NullTokenizer --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    flags = read_flags(f"{words} --seq-length 64 --vocab-size {said}".split())
    stated = StatedMegatron(words=plain_names(flags), asked=version)
    assert stated.model.value["vocab_size"] == 128256


def test_python_of_the_experts_layers_means_the_models_layers() -> None:
    (code,) = flags_of(make("deepseek-v3", ep=32))["--moe-layer-freq"]
    assert eval(code) == [int(kind.moe) for kind in model("deepseek-v3").layer_kinds()]


SPLIT = {"pp": 4, "tp": 8, "pp_schedule": "Interleaved1F1B"}
DISPATCHER = "--moe-token-dispatcher-type"
BACKENDS = {"flash": "auto", "flash2": "flash", "flash3": "flash", "cudnn": "fused",
    "unfused": "unfused"}  # fmt: skip
# model, job, layout, arguments that are said, and starts of those that are not
SAID: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("llama3-70b", {}, {"tp": 8, "pp": 4},
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--num-query-groups 8 --kv-channels 128 --normalization RMSNorm --seq-length 8192 "
        "--position-embedding-type rope --tensor-model-parallel-size 8 --micro-batch-size 1 "
        "--pipeline-model-parallel-size 4 --context-parallel-size 1 --global-batch-size 512 "
        "--num-distributed-optimizer-instances 1 --swiglu --group-query-attention --bf16 "
        "--disable-bias-linear --untie-embeddings-and-output-weights --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--accumulate-allreduce-grads-in-fp32", "--fp8 --recompute --num-experts --multi-latent"),
    ("gpt3-175b", {}, {"tp": 8, "pp": 8},
        "--normalization LayerNorm --position-embedding-type learned_absolute",
        "--swiglu --disable-bias-linear --group-query-attention"),
    ("gpt3-175b", {"seq_len": 512}, {"tp": 8, "pp": 8},
        "--max-position-embeddings 2048", ""),  # rows of its table
    ("deepseek-v3", {}, {"ep": 32},
        "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --q-lora-rank 1536 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
        "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
        "--expert-model-parallel-size 32 --multi-latent-attention --moe-grouped-gemm "
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
        "--moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-load-balancing-type none --norm-epsilon 1e-06", ""),
    ("mixtral-8x7b", {}, {"tp": 8, "ep": 4}, "--expert-tensor-parallel-size 1", ""),  # else tp
    ("mixtral-8x7b", {}, {}, "--moe-grouped-gemm --rotary-base 1000000 --moe-aux-loss-coeff 0.02 "
        "--moe-router-load-balancing-type aux_loss", "--moe-router-pre-softmax"),
    ("mixtral-8x7b", {}, {"precision": "fp16"}, "--fp16", "--moe-grouped-gemm"),
    # without the routers of recomputed experts
    ("mixtral-8x7b", {"cuda_graphs": "partial"}, {"ac": "modules-moe"},
        "--cuda-graph-modules attn", ""),
    ("mixtral-8x7b", {"cuda_graphs": "full", "trainer_version": "0.18", "moe_imbalance": 1.25},
        {"ep": 8, "moe_dispatcher": "hybridep"},
        "--moe-expert-rank-capacity-factor 1.25 --moe-paged-stash", ""),
    *(
        ("mixtral-8x7b", {"trainer_version": version, "moe_capacity_factor": 1.25, **more},
            {"ep": 8, "moe_dispatcher": "alltoall"},
            f"--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity {said}",
            "--moe-expert-rank-capacity-factor --moe-paged-stash")
        for version, more, said in (
            ("0.14", {}, ""),
            ("0.14", {"cuda_graphs": "partial"}, "--cuda-graph-scope full"),
            ("0.16", {"cuda_graphs": "partial"}, "--cuda-graph-scope attn moe"),
            ("0.16", {"cuda_graphs": "full"}, "--cuda-graph-impl local "
                "--cuda-graph-scope full_iteration --moe-pad-experts-for-cuda-graph-inference"),
            ("0.18", {"cuda_graphs": "partial"}, "--cuda-graph-modules attn moe"),
            ("0.18", {"cuda_graphs": "full"}, "--cuda-graph-impl full_iteration"),
        )
    ),
    ("qwen3-30b-a3b", {"overlap": {"ep": True}}, {"ep": 8},
        "--overlap-moe-expert-parallel-comm", ""),
    ("qwen3-30b-a3b", {}, {"ep": 8}, "", "--overlap-moe-expert-parallel-comm"),
    ("qwen3-30b-a3b", {"trainer_version": "0.14"}, {"ep": 8, "moe_dispatcher": "alltoall"},
        f"{DISPATCHER} alltoall", ""),
    ("qwen3-30b-a3b", {"trainer_version": "0.14"}, {"ep": 8, "moe_dispatcher": "allgather"},
        f"{DISPATCHER} allgather", ""),
    ("qwen3-30b-a3b", {"trainer_version": "0.14"}, {"ep": 8, "moe_dispatcher": "deepep"},
        f"{DISPATCHER} flex --moe-enable-deepep", ""),
    *(
        ("qwen3-30b-a3b", {"trainer_version": "0.16"}, {"ep": 8, "moe_dispatcher": name},
            f"{DISPATCHER} flex --moe-flex-dispatcher-backend {name}", "")
        for name in ("deepep", "hybridep")
    ),
    ("llama3-70b", {}, {"tp": 8, "zero_stage": 0}, "--overlap-grad-reduce",
        "--use-distributed-optimizer --overlap-param-gather"),
    ("llama3-70b", {}, {"tp": 8, "zero_stage": 2},
        "--data-parallel-sharding-strategy optim_grads", ""),
    ("llama3-70b", {}, {"tp": 8, "zero_stage": 3},
        "--data-parallel-sharding-strategy optim_grads_params", ""),
    ("llama3-70b", {}, {"pp": 4, "tp": 8, "layers_per_stage": (19, 21, 21, 19)},
        "--pipeline-model-parallel-layout Et*19|t*21|t*21|t*19L",
        "--num-virtual-stages-per-pipeline-rank"),
    ("llama3-70b", {}, {**SPLIT, "virtual_stages": 5},
        "--num-virtual-stages-per-pipeline-rank 5", ""),
    ("llama3-70b", {}, {**SPLIT, "virtual_stages": 3},
        "--pipeline-model-parallel-layout Et*6|" + "t*7|" * 9 + "t*6|t*5L", ""),
    ("llama3-70b", {"trainer_version": "zero-bubble"}, {"pp": 4, "tp": 8, "pp_schedule": "ZB-2p"},
        "--zero-bubble-max-pending-backward 8", ""),
    *(
        ("llama3-70b", {}, {"pp": 4, "tp": 8, "ac": ac},
            f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {n}",
            "")
        for ac, method, n in (("full", "uniform", 1), ("block-5", "block", 5),
            ("uniform-4", "uniform", 4))
    ),
    *(
        ("llama3-70b", {}, {"tp": 4, "cp": 2, "cp_method": method}, f"--cp-comm-type {word}", "")
        for method, word in (("allgather", "all_gather"), ("alltoall", "p2p"), ("ulysses", "a2a"))
    ),
    *(
        ("llama3-70b", {"trainer_version": version}, {"tp": 8, "activation_offload_layers": 12},
            "--cpu-offloading-num-layers 12", "")
        for version in ("0.15", "0.18")
    ),
    ("llama3-70b", {}, {"tp": 8, "cpu_offload": True, "optimizer_offload_fraction": 0.35},
        "--optimizer-offload-fraction 0.35 --optimizer-cpu-offload", ""),
    ("llama3-70b", {}, {"tp": 8, "cpu_offload": True}, "--optimizer-cpu-offload",
        "--optimizer-offload-fraction"),
    *(
        ("llama3-70b", {}, {"tp": 8, "precision": name}, f"--fp4-format e2m1 --fp4-recipe {name}",
            "")
        for name in ("nvfp4", "mxfp4")
    ),
    ("llama3-70b", {"checkpoint": {"interval_steps": 100, "mode": "async"}}, {},
        "--async-save --use-persistent-ckpt-worker", ""),  # without which it is switched off
    ("llama3-70b", {"optimizer": "adamw-bf16-states"}, {}, "--exp-avg-dtype bf16", ""),
    ("llama3-70b", {"max_grad_norm": None}, {}, "--clip-grad 0.0", ""),
    *(
        ("llama3-70b", {"attention_kernel": kernel}, {}, f"--attention-backend {word}", "")
        for kernel, word in BACKENDS.items()
    ),
    # what published config.json files ask for, beside the shapes
    ("llama3-8b", {}, {}, "--rotary-base 500000 --norm-epsilon 1e-05", "--use-rope-scaling"),
    ("llama3.2-1b", {}, {}, "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32", ""),
    ("qwen3-8b", {}, {}, "--rotary-base 1000000 --norm-epsilon 1e-06", "--use-rope-scaling"),
    ("deepseek-v2", {}, {},
        "--rotary-base 10000 --rope-type yarn --rotary-scaling-factor 40 --mscale 0.707 "
        "--mscale-all-dim 0.707 --moe-router-pre-softmax --moe-router-num-groups 8 "
        "--moe-router-group-topk 3 --moe-router-topk-scaling-factor 16 "
        "--moe-router-load-balancing-type seq_aux_loss", ""),
    ("kimi-k2", {}, {}, "--rotary-base 50000 --moe-router-topk-scaling-factor 2.827",
        "--moe-router-num-groups"),
    ("glm4.5-air", {}, {}, "--rotary-percent 0.5 --rotary-base 1000000", ""),
    ("nemotron4-340b", {}, {}, "--apply-layernorm-1p --rotary-percent 0.5 --squared-relu", ""),
    ("smollm3-3b", {}, {},
        "--rotary-base 5000000 --no-rope-freq [" + ",".join(["0,0,0,1"] * 9) + "]", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "job", "values", "said", "unsaid"), SAID)
def test_what_a_job_means_is_said_in_megatrons_arguments(
    name: str, job: dict[str, Any], values: dict[str, Any], said: str, unsaid: str
) -> None:
    made = make(name, job, **values)
    flags, wanted = flags_of(made), read_flags(said.split())
    assert {flag: flags.get(flag) for flag in wanted} == wanted
    assert not [flag for flag in flags if flag.startswith(tuple(unsaid.split()))]
    assert made.blockers == ()
    assert parse_back(made) == layout(256, "megatron", **values)
    assert not {gap.fault.field for gap in made.gaps} & values.keys()
    noted = any("flash-attn" in note for note in made.notes)
    assert noted == (BACKENDS.get(job.get("attention_kernel", "")) == "flash")


def test_stages_of_layers_are_a_string_and_what_a_fork_has_is_noted() -> None:
    assert pipeline_layout((2, 3, 0, 1)) == "Et*2|t*3||t*1L"
    offloaded = make(job={"optimizer": "adamw-bf16-states"}, cpu_offload=True)
    assert offloaded.arguments.count("--use-precision-aware-optimizer") == 1
    assert any("fork" in note for note in make(pp=4, tp=8, pp_schedule="ZB-2p").notes)


def test_windows_of_some_layers() -> None:
    exported = make("llama4-scout")
    assert "--window-size" not in flags_of(exported)
    fields = [gap.fault.field for gap in exported.gaps]
    assert fields == ["model.rope_scaling", "model.sliding_window"]
    assert "high_freq" not in str(exported.gaps[0])
    assert flags_of(exported)["--no-rope-freq"] == ["[" + ",".join(["0,0,0,1"] * 12) + "]"]
    assert flags_of(make("mistral-7b"))["--window-size"] == ["4096,0"]
    older = make("mistral-7b", {"trainer_version": "0.14"})  # whose parser has no such flag
    assert "--window-size" not in flags_of(older)
    assert "model.sliding_window" in [gap.fault.field for gap in older.gaps]


def test_only_megatrons_fsdp_starts_without_one_connection_a_device() -> None:
    for stage, one in ((1, True), (2, False), (3, False)):
        launched = make(tp=8, zero_stage=stage).files["launch.sh"]
        assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in launched) is one
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in launched) is one


@pytest.mark.parametrize(("job", "values", "field"), [
    ({}, {"precision": "float8-rowwise"}, "precision"),
    ({}, {"ac": "selective-op"}, "ac"),
    ({}, {"compile": True}, "compile"),
    ({}, {"optimizer_in_backward": True}, "optimizer_in_backward"),
    ({}, {"master_dtype": "bfloat16"}, "master_dtype"),
    ({}, {"pp_schedule": "DualPipeV", "virtual_stages": 2}, "pp_schedule"),
    ({"trainer_version": "0.14"}, {"precision": "nvfp4"}, "precision"),
    ({"trainer_version": "0.14"}, {"precision": "mxfp4"}, "precision"),
    ({"trainer_version": "0.14"}, {"pp": 1, "activation_offload_layers": 12},
        "activation_offload_layers"),
    ({"trainer_version": "0.14"}, {"pp": 1, "tp": 1, "ep": 8, "moe_dispatcher": "hybridep"},
        "moe_dispatcher"),
    ({"optimizer": "adafactor"}, {}, "training.optimizer"),
    ({"optimizer": "muon", "trainer_version": "0.15"}, {}, "training.optimizer"),
])  # fmt: skip
def test_what_megatron_lacks_is_a_blocker(job: dict, values: dict, field: str) -> None:
    whole = {"tp": 8, "pp": 4, **values}
    made = make("qwen3-30b-a3b" if "ep" in values else "llama3-70b", job, **whole)
    assert {fault.field for fault in made.blockers} == {field}
    assert {name: getattr(parse_back(made), name) for name in whole} == whole


@pytest.mark.parametrize(("release", "stage", "name", "sharded", "mode"), [
    ("0.16", 1, "dist_muon", False, "blockwise"),
    ("0.17", 0, "muon", False, "blockwise"),
    ("0.19", 1, "muon", True, "blockwise"),
    ("0.20", 1, "muon", True, "duplicated"),
])  # fmt: skip
def test_muon_is_sharded_as_the_release_has_it(
    release: str, stage: int, name: str, sharded: bool, mode: str
) -> None:
    job = {"optimizer": "muon", "trainer_version": release}
    flags = flags_of(made := make(job=job, zero_stage=stage))
    assert not made.blockers
    assert (flags["--optimizer"], flags["--muon-tp-mode"]) == ([name], [mode])
    assert ("--use-distributed-optimizer" in flags) == sharded
    hidden = release not in ("0.16", "0.17")  # or under dist_muon of 0.17
    assert ("--overlap-grad-reduce" in flags) == hidden
    assert parse_back(made).zero_stage == stage
    asked = make(job={**job, "muon_tp_mode": "distributed"})
    assert flags_of(asked)["--muon-tp-mode"] == ["distributed"]
    if release != "0.17":  # whose table we have not
        rows = {flag: argument(flag, release) for flag in flags}
        assert not [flag for flag, row in rows.items() if row is None or row.refusal(flags[flag])]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss(name: str) -> None:
    made = make(name, num_gpus=8, ep=8)
    given = flags_of(made)
    words = "--softmax-type learnable --quick-geglu --glu-linear-offset 1.0 "
    words += "--activation-func-clamp-value 7 --position-embedding-type yarn "
    words += "--rotary-scaling-factor 32 --no-yarn-correction-range-round-to-int"
    wanted = read_flags(words.split())
    assert {flag: given.get(flag) for flag in wanted} == wanted
    assert (made.blockers, "--disable-bias-linear" in given) == ((), False)
    rows = {flag: argument(flag, made.version) for flag in given}
    assert not [flag for flag, row in rows.items() if row is None or row.refusal(given[flag])]
    assert StatedMegatron(words=plain_names(given)).model.value == name
    yarn = "yarn scaling of RoPE"
    older = ["attention sinks", "clamped SwiGLU", "biased router or experts", yarn]
    lacks = {"0.14": older, "0.18": [yarn], "0.19": [], "NeMo 25.11": []}
    found = {one: lacking(model(name), release_of("megatron", one)) for one in lacks}
    assert found == lacks


def test_scripts_and_versions() -> None:
    many, one = make(num_gpus=256, tp=8), make("llama3-8b", num_gpus=8)
    assert "pretrain_gpt.py" in many.files["launch.sh"]
    # pretrain_gpt.py is not in the export's folder
    assert (many.command, one.command) == (("sbatch", "slurm.sbatch"), ("bash", "launch.sh"))
    exported = export_to(layout(256, "megatron"), model(), cluster(256), training(), to="megatron")
    assert exported.version == "0.19"
    job = training(trainer="megatron-deepspeed")  # which has no format of its own
    other = export_to(layout(256, "megatron"), model(), cluster(256), job, to="megatron")
    assert [*other.notes[1:]] == [*exported.notes]
    assert other.notes[0].startswith("Priced under Megatron-DeepSpeed")
    older = to_megatron(layout(256), model(), cluster(256), training(), "0.1")
    assert any("Written for Megatron-LM core 0.14" in note for note in older.notes)
    assert not any("Written for" in note for note in one.notes)


def test_an_operation_it_lacks_blocks_and_a_number_it_cannot_be_told_is_named() -> None:
    (blocker,) = make("gemma2-9b").blockers
    assert "soft cap on attention scores" in blocker.rule
    kimi = make("kimi-k2")
    assert kimi.blockers == ()
    gaps = {gap.fault.field: str(gap) for gap in kimi.gaps}
    assert "(32.0, 1.0, 4096)" in gaps["model.rope_scaling"]


def test_unknown_numbers_are_said() -> None:
    widths = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024}
    own = read_model({**widths, "num_hidden_layers": 4, "num_attention_heads": 8})
    exported = to_megatron(layout(8, "megatron"), own, cluster(8), training(), "0.14")
    assert {gap.fault.field for gap in exported.gaps} >= {"model.rope_theta", "model.norm_eps"}
    assert flags_of(exported)["--rotary-base"] == ["10000"]


STEP = ["--no-check-for-nan-in-loss-and-grad", "--te-rng-tracker"]
TE, LOCAL = "--cuda-graph-impl transformer_engine", "--cuda-graph-impl local"


@pytest.mark.parametrize(("version", "name", "graphs", "expected"), [
    ("0.14", "llama3-70b", "partial", "--external-cuda-graph --cuda-graph-scope full"),
    ("0.14", "mixtral-8x7b", "partial", "--external-cuda-graph --cuda-graph-scope attn"),
    ("0.15", "mixtral-8x7b", "partial", f"{TE} --cuda-graph-scope attn"),
    ("0.16", "deepseek-v3", "partial",
        f"{TE} --cuda-graph-scope attn mlp moe_router moe_preprocess"),
    ("0.18", "llama3-70b", "partial", f"{TE} --cuda-graph-modules attn mlp"),
    ("0.14", "llama3-70b", "full", "--enable-cuda-graph --cuda-graph-scope full_iteration"),
    ("0.16", "llama3-70b", "full", f"{LOCAL} --cuda-graph-scope full_iteration"),
    ("0.18", "llama3-70b", "full", "--cuda-graph-impl full_iteration"),
])  # fmt: skip
def test_graphs_by_release(version: str, name: str, graphs: str, expected: str) -> None:
    exported = make(name, {"cuda_graphs": graphs, "trainer_version": version})
    wanted = expected.split() + (STEP if graphs == "full" else ["--te-rng-tracker"])
    assert [*exported.arguments[-len(wanted) :]] == wanted
    assert read_graphs(plain_names(read_flags(exported.arguments))) == graphs


def test_without_graphs_no_argument_names_them() -> None:
    for job in ({}, {"cuda_graphs": "none"}):
        words = plain_names(read_flags(make(job=job).arguments))
        assert not [name for name in words if "graph" in name]
        assert read_graphs(words) is None


def test_graphs_and_expandable_segments() -> None:
    job = {"cuda_graphs": "partial", "expandable_segments": True}
    old, new = (make(job={**job, "trainer_version": number}) for number in ("0.15", "0.16"))
    assert [gap.fault.field for gap in old.gaps if gap.blocking] == ["training.cuda_graphs"]
    assert not [gap for gap in new.gaps if gap.blocking]
    assert "NCCL_GRAPH_REGISTER=0" in new.files["launch.sh"]
    assert "NCCL_GRAPH_REGISTER" not in make(job={"cuda_graphs": "partial"}).files["launch.sh"]
