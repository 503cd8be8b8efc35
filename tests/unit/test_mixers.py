"""Mixers besides plain attention: FLOP and bytes against the real classes, patterns, rules."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from export_cases import to_megatron
from real_torchtitan import FOLDER

from planner.catalog.megatron_arguments import argument
from planner.cost.pipeline.stages import stage_units
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.export.base import Export
from planner.export.commands import read_flags
from planner.export.megatron import parse_back
from planner.export.megatron_mixers import pattern
from planner.export.megatron_read import plain_names
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.intake.models import read_model
from planner.intake.trainer_files.megatron import StatedMegatron
from planner.intake.trainer_files.megatron_unpriced import unpriced
from planner.rules import Context
from planner.rules.support import obstacles
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.mixers import MIXER_KINDS, Mixer, MixerKind
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import TRAINERS, release_of
from planner.trainers.torchtitan import TORCHTITAN
from planner.work import blocks
from planner.work.axes import weight_sizes
from planner.work.gated_norm import branch_norm
from planner.work.hyper_connections import STREAMS, entering, leaving
from planner.work.liveness import saved_tensors
from planner.work.mixers import MIXERS, MixerWork
from planner.work.ops import Attention, Elementwise, Gemm, Op, Ops, Tensor
from planner.work.pieces import HIDDEN, HIDDEN_SP, PLAIN, Code, output_projection, projection
from planner.work.recompute_modules import layer_input, recomputed
from tests.conftest import job_values, judged
from tests.pricing import H100, batch_of, check_rows_and_bounds, named_ops, pricer

NEXT, HYBRID, KIMI = "qwen3-next-80b-a3b", "nemotron-h-56b", "kimi-linear-48b-a3b"
SPARSE = "deepseek-v3.2"
SUPER, MOE = "nemotron-3-super-120b-a12b", LayerKind(moe=True, window=0, mixer="none")
TOKENS = 2 * 4096  # of tests/torch_memory/real_mixers.py
ROUTED = ("expert_", "gather", "dispatch", "scatter", "combine")  # names of operations
WIDTHS = {"byte": 1.0, "fp32": 4.0, "compute": 2.0, "linear": 2.0, "index": 8.0}
Real = dict[str, dict[str, Any]]


def sizes(model: ModelSpec) -> dict[str, float]:
    one = np.ones(1)
    found = {name: float(size[0]) for name, size in weight_sizes(model, one, one).items()}
    context = {"context": 4096, "attended": 2048, "chosen": model.index_topk}
    tokens = dict.fromkeys(("tokens", "tokens_sp", "tokens_saved", "tokens_moe"), TOKENS)
    tokens["tokens_routed"] = TOKENS * model.num_computing_per_tok
    tokens["tokens_per_expert"] = tokens["tokens_routed"] / max(model.num_experts, 1)
    tokens |= {"tokens_ring": 0, "tokens_batched": 0}
    tokens |= {"experts": model.num_choices, "experts_local": model.num_experts}
    return {**found, **tokens, **context}


def flops(ops: tuple[Op, ...], model: ModelSpec) -> float:
    of, products = sizes(model), []
    for op in ops:
        products += [(*op.rows, *op.cols, *op.depth, *op.batch)] if isinstance(op, Gemm) else []
        products += op.products if isinstance(op, Elementwise) else ()
    return 2.0 * sum(math.prod(of[name] for name in dims) for dims in products)


def saved(ops: tuple[Op, ...], model: ModelSpec, **own: float) -> float:
    of = {**sizes(model), **own}
    held = [one for one in saved_tensors(ops).values() if not one.fused_only]
    return sum(WIDTHS[one.width] * math.prod(of[name] for name in one.dims) for one in held)


def attention_flops(model: ModelSpec) -> float:
    layer = blocks.layer_ops(model, LayerKind(moe=model.is_moe, window=0), True)
    return flops(tuple(op for op in layer if op.name in ("wq", "wk", "wv", "wg", "wo")), model)


def counted(ops: tuple[Op, ...], model: ModelSpec, found: dict[str, Any], more: float = 0) -> None:
    """FLOP, with these that only one side counts, and bytes are those of the real code."""
    assert flops(ops, model) + more == pytest.approx(found["flops"], rel=5e-3)
    assert saved(ops, model) == pytest.approx(found["saved"], rel=0.03)


def without_experts(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(op for op in ops if not op.name.startswith(ROUTED))


def model_of(found: dict[str, Any], model_type: str) -> ModelSpec:
    config = {"num_hidden_layers": 4, **found["config"]}
    return read_model({"model_type": model_type, "architectures": [], **config})


def against_the_real_one(test: Any) -> Any:
    return pytest.mark.torch(pytest.mark.slow(test))


@pytest.fixture(scope="module")
def real() -> Real:
    *_, last = judged("transformers", FOLDER, "tests/torch_memory/real_mixers.py")
    found: Real = json.loads(last)
    return found


@against_the_real_one
@pytest.mark.parametrize(("of", "model_type", "mixer", "solved"), [
    ("delta", "qwen3_next", "gated-delta", 4 * 64 * (32 + 64)),
    ("kimi", "kimi_linear", "kimi-delta", 4 * 64 * (32 + 32)),
    ("ling", "bailing_hybrid", "kimi-delta", 4 * 64 * (32 + 32)),
    ("mamba", "nemotron_h", "mamba2", None),
    ("falcon", "falcon_h1", "attention-mamba2", None),
    ("jamba", "jamba", "mamba", 128 * 4),  # its convolution is a stand-in
    ("mamba1", "mamba", "mamba", None),
    ("lfm", "lfm3", "short-conv", 0),
    ("minimax", "minimax", "lightning", 0),
    # scores and attends to the whole square, of which a mask hides the most
    ("dsa", "deepseek_v32", "dsa", -4096 * 4 * (48 + 32)),
    ("axk2", "axk2", "dsa", -4096 * 4 * (48 + 32)),
    ("hy4", "hy_v4", "dsa", -4096 * 4 * (48 + 32)),
    ("hy4-shared", "hy_v4", "dsa-shared", -4096 * 4 * (48 + 32)),
    # its indexer scores the whole square; torch's counter sees no fused attention
    ("m3", "minimax_m3_vl_text", "msa", 0),
])  # fmt: skip
def test_a_mixer_is_the_real_one(
    of: str, model_type: str, mixer: Mixer, solved: int | None, real: Real
) -> None:
    """solved: products of a token, as of triangular solves, which torch's counter leaves out; None:
    no counter.
    """
    model = model_of(real[of], model_type)
    ops = MIXERS[mixer].operations(model, Code(composite_norm=mixer.startswith("dsa")))
    found = {"flops": flops(ops, model) - 2.0 * TOKENS * (solved or 0), **real[of]}
    counted(ops, model, found, -2.0 * TOKENS * (solved or 0))
    assert (solved is None) == ("flops" not in real[of])
    if "attention_flops" in real[of]:
        assert attention_flops(model) == pytest.approx(real[of]["attention_flops"], rel=5e-3)
    if "norm" in real[of]:
        gated, _ = branch_norm(model, "mlp_norm", Tensor("x", HIDDEN_SP), PLAIN)
        counted(gated, model, real[of]["norm"])


@against_the_real_one
@pytest.mark.parametrize("kind", ["full", "windowed"])
@pytest.mark.parametrize(("of", "model_type"), [
    ("step", "step3p5"), ("mimo", "mimo_v2_flash"), ("gemma4", "gemma4_text"),
    ("dots3", "dots3_note_text"),
])  # fmt: skip
def test_attention_of_each_kind_of_layer_is_the_real_one(
    of: str, model_type: str, kind: str, real: Real
) -> None:
    model, found = model_of(real[of], model_type), real[of][kind]
    windowed = kind == "windowed"
    layer = next(one for one, _ in model.distinct_layers() if bool(one.window) == windowed)
    ops = blocks.layer_ops(model, layer, True)
    names = [op.name for op in ops]
    counted(ops[names.index("attention_in") + 1 : names.index("wo") + 1], model, found)
    if "layer" in found:
        assert flops(ops, model) == pytest.approx(found["layer"], rel=5e-3)
        assert saved(without_experts(ops), model) == pytest.approx(found["rest"], rel=0.03)


@against_the_real_one
def test_per_layer_embeddings_and_shared_keys_are_the_real_ones(real: Real) -> None:
    """Recomputed layers' keys and values stay as well, which no hook sees."""
    found = real["gemma4-small"]
    model = model_of(found, "gemma4_text")
    ends = [blocks.embedding_ops(model), blocks.head_ops(model)[:1]]
    whole = {measure: sum(measure(ops, model) for ops in ends) for measure in (flops, saved)}
    checkpointed = whole[saved] + 24 * TOKENS * 64 * 2
    for kind, count in model.distinct_layers():
        ops = blocks.layer_ops(model, kind, True)
        name = ("windowed" if kind.window else "full") + "-shared" * kind.shares_keys
        counted(ops, model, found[name])
        for measure in whole:
            whole[measure] += count * measure(ops, model)
    assert whole[flops] == pytest.approx(found["whole"]["flops"], rel=5e-3)
    assert whole[saved] == pytest.approx(found["whole"]["saved"], rel=0.03)
    lent = 2 * (16 + 32) * TOKENS * 2
    assert checkpointed == pytest.approx(found["whole"]["full"] + lent, rel=0.03)


@against_the_real_one
def test_two_layers_are_one_of_longcat(real: Real) -> None:
    found = real["longcat"]
    model = model_of(found, "longcat_flash")
    halves = [blocks.layer_ops(model, kind, True) for kind, _ in model.distinct_layers()]
    assert sum(flops(ops, model) for ops in halves) == pytest.approx(found["flops"], rel=5e-3)
    rest = sum(saved(without_experts(ops), model) for ops in halves)
    assert rest == pytest.approx(found["rest"], rel=0.03)


@against_the_real_one
@pytest.mark.parametrize("mixer", ["shared-kv", "csa", "hca"])
def test_compressed_attention_is_the_real_one(mixer: Mixer, real: Real) -> None:
    """With its eager core and with one kernel, a whole layer, and what full recomputation saves."""
    code, model = Code(composite_norm=True), model_of(real["v4"], "deepseek_v4")
    found = {name: 2 * number for name, number in real["v4"][mixer].items()}  # of two sequences
    ops = MIXERS[mixer].operations(model, code)
    rate, _ = model.entries(mixer)
    square = 2 * 2.0 * TOKENS * (4096 + (4096 / rate if rate else 0)) * 4 * 32
    counted(ops, model, {**found, "saved": found["core"]}, square)
    both = saved(ops, model, tokens_batched=TOKENS)
    assert 2 * both == pytest.approx(found["two"], rel=0.03)
    kernel = MIXERS[mixer].operations(model, Code(own_mixers=True))
    core = next(op for op in kernel if isinstance(op, Attention))
    held = [one for one in core.saves if one.name[0] in "qk" or one.name == "log_sum_exp"]

    def alone(one: Tensor) -> float:
        return saved((replace(core, saves=(one,)),), model)

    rest = tuple(op for op in ops if not isinstance(op, Attention))
    around = saved(rest, model) + sum(map(alone, held))
    assert around == pytest.approx(found["saved"], rel=0.03)
    layer = blocks.layer_ops(model, LayerKind(moe=True, window=128, mixer=mixer), True, code)
    assert flops(layer, model) + square == pytest.approx(found["layer"], rel=5e-3)
    assert alone(layer_input(layer)) == pytest.approx(found["full"], rel=0.03)


@against_the_real_one
@pytest.mark.parametrize(("of", "model_type"), [("v4", "deepseek_v4"), ("hy4", "hy_v4")])
def test_residual_streams_are_the_real_ones(of: str, model_type: str, real: Real) -> None:
    model = model_of(real[of], model_type)
    before, after = (Tensor(name, STREAMS) for name in "xh")
    branch = Tensor("attention_sum", HIDDEN_SP)
    mixed = entering(model, "attention", before)
    left = leaving("attention_residual", (before,), (branch,), after, across=of == "v4")
    for name, ops in (("streams", (*mixed, left)), ("head", entering(model, "head", before))):
        counted(ops, model, {key: 2 * number for key, number in real[of][name].items()})


@against_the_real_one
def test_experts_on_a_latent_multiply_what_the_real_ones_do(real: Real) -> None:
    model = model_of(real["latent"], "nemotron_h")
    found = flops(blocks.layer_ops(model, MOE, True), model)
    assert found == pytest.approx(real["latent"]["flops"], rel=5e-3)


def test_experts_on_a_latent_exchange_its_width() -> None:
    dense = LayerKind(moe=False, window=0, mixer="none")
    wide, narrow = (named_ops(read_model(SUPER), kind) for kind in (dense, MOE))
    assert wide.keys().isdisjoint({"latent_in", "latent_out"})
    assert narrow["dispatch"].tensor.dims == ("tokens_sent", "expert_hidden")
    assert {tensor.name for tensor in narrow["latent_out"].saves} == {"latent_sum"}
    models = (SUPER, {"base": SUPER, "moe_latent_size": 4096})
    times = [estimated(model, 64, ep=8).time for model in models]
    one, two = (time.exposed_communication_seconds["ep"] for time in times)
    assert one * 2 < two


def test_bytes_of_a_token_are_those_that_kernels_save() -> None:
    """fla ops/gated_delta_rule/chunk.py, modules/norm/fused_norm_gate.py; ssd_combined.py."""
    keys, values, heads = 2048, 4096, 32
    halves = 2048 + (2 * keys + 2 * values + 2 * heads) + heads  # input, projection, rate
    halves += 2 * keys + values + heads * 64 + 2 * values  # q and k, v, inverse, core and normed
    singles = 2 * heads + 2 * 16 + heads + heads  # step and decay, rstd, sums, rows of the norm
    model = read_model(NEXT)
    found = saved(MIXERS["gated-delta"].operations(model, PLAIN), model)
    assert found / TOKENS == 2 * halves + 4 * singles
    model, width = read_model(HYBRID), 256 * 64
    found = saved(MIXERS["mamba2"].operations(model, PLAIN), model)
    assert found / TOKENS == 2 * (8192 + (2 * width + 2 * 8 * 256 + 256) + width) + 4 * 8


@pytest.mark.parametrize(("name", "mixer", "own"), [
    (NEXT, "gated-delta", {"q_repeated", "k_repeated", "gate"}),
    (HYBRID, "mamba2", {"gated", "normed"}),
])  # fmt: skip
def test_megatron_saves_copies_its_kernels_read(name: str, mixer: Mixer, own: set[str]) -> None:
    """gated_delta_net.py repeats queries and keys and copies the gate; mamba_mixer.py norms apart
    from the scan, and its projection keeps its input."""
    model = read_model(name)
    both = (MIXERS[mixer].operations(model, code) for code in (PLAIN, Code(own_mixers=True)))
    plain, copied = map(saved_tensors, both)
    assert {name.partition("_")[2] for name in copied.keys() - plain.keys()} == own


def test_a_pattern_of_letters_is_layers_of_one_branch() -> None:
    model = read_model(HYBRID)
    mamba = LayerKind(moe=False, window=0, mixer="mamba2", feeds=False)
    alone = LayerKind(moe=False, window=0, mixer="none")
    attention = LayerKind(moe=False, window=0, feeds=False)
    assert dict(model.distinct_layers()) == {mamba: 54, alone: 54, attention: 10}
    layers = [blocks.layer_ops(model, kind, True) for kind in (mamba, alone, attention)]
    norms = [sum(op.name.endswith("_norm") for op in ops) for ops in layers]
    assert norms == [2, 1, 1]  # the mixer's own is the second
    assert model.parameters.layer(alone) == 2 * 8192 * 32768 + 8192


def test_fewer_layers_of_a_base_keep_its_pattern() -> None:
    short = read_model({"base": NEXT, "num_hidden_layers": 6})
    assert short.mixers == (*["gated-delta"] * 3, "attention", *["gated-delta"] * 2)
    longer = read_model({"base": HYBRID, "num_hidden_layers": 120})
    assert longer.layer_kinds()[118:] == longer.layer_kinds()[:2]
    moe = read_model({"base": "nemotron-3-nano-30b-a3b", "num_hidden_layers": 4})
    assert [kind.moe for kind in moe.layer_kinds()] == [False, True, False, True]


def test_modules_of_a_layer_without_feed_forward_are_those_of_its_mixer() -> None:
    model, repeated = read_model(HYBRID), {}
    for kind, _ in model.distinct_layers():
        ops = Ops(blocks.layer_ops(model, kind, True))
        again = recomputed(ops, 3).repeats  # core attention and MLP
        repeated[kind.mixer] = {op.name for op, one in zip(ops, again, strict=True) if one}
    assert repeated["mamba2"] == set()
    assert "attention" in repeated["attention"]
    assert "mlp_w1" in repeated["none"]


def job(
    model: object, num_gpus: int, trainer: str = "megatron", gpu: str = H100, **layout: object
) -> Job:
    return read_job(job_values(model, gpu, num_gpus, 4096, 256, layout=layout, trainer=trainer))


def estimated(*run: Any, **layout: object) -> Estimate:
    return estimate_job(job(*run, **layout))


@pytest.mark.parametrize(("name", "most"), [(NEXT, 16), (HYBRID, 8)])
def test_tp_and_cp_cut_heads_of_a_recurrence_together(name: str, most: int) -> None:
    """transformer_config.py: linear_num_key_heads must be a multiple of tp x cp."""
    cut = (estimated(name, 64, tp=2, cp=cp, sequence_parallel=True) for cp in (most // 2, most))
    every = (*cut, estimated(name, 64, "fsdp", cp=2))
    fits, beyond, alone = ("; ".join(one.rule for one in found.violations) for found in every)
    assert ("groups of heads" in fits, "groups of heads" in beyond) == (False, True)
    assert "runs recurrent layers whole" in alone


def test_context_parallelism_exchanges_tokens_for_heads() -> None:
    """Forward and backward move the projection and the values once per layer: tensor_a2a_cp2hp."""
    ops = MIXERS["gated-delta"].operations(read_model(NEXT), PLAIN)
    sites = [op.name for op in ops if getattr(op, "site", "") == "cp_heads"]
    assert sites == ["delta_in_heads", "delta_out_heads"]
    times = [estimated(NEXT, 8, cp=cp, ep=8).time for cp in (1, 2)]
    one, two = (time.exposed_communication_seconds["cp"] for time in times)
    assert one == 0 < two


def read_back(asked: Job, *version: str) -> tuple[Export, StatedMegatron]:
    """An export, all of which is understood and found again, and what its arguments say."""
    done = to_megatron(asked.layout, asked.model, asked.cluster, asked.training, *version)
    assert not [gap for gap in done.gaps if gap.blocking]
    assert parse_back(done) == asked.layout
    given = read_flags(done.arguments)
    words = plain_names(given)
    assert not [*unpriced(words)]
    for one in version:
        rows = {flag: argument(flag, one) for flag in given}
        assert not [flag for flag, row in rows.items() if row is None or row.refusal(given[flag])]
    return done, StatedMegatron(words=words)


@pytest.mark.parametrize("version", ["0.18", "0.20"])  # which renames the variant of attention
@pytest.mark.parametrize(("name", "layout"), [
    (NEXT, {"dp_shard": 32, "ep": 8, "pp": 2, "virtual_stages": 12,
        "pp_schedule": "Interleaved1F1B", "zero_stage": 1}),
    (HYBRID, {"tp": 8, "dp_shard": 8, "zero_stage": 1}),
    (SUPER, {"tp": 2, "dp_shard": 32, "ep": 8, "zero_stage": 1}),
    (HYBRID, {"tp": 4, "pp": 2, "dp_shard": 8, "zero_stage": 1, "layers_per_stage": [60, 58]}),
    (HYBRID, {"tp": 4, "pp": 4, "virtual_stages": 2, "pp_schedule": "Interleaved1F1B",
        "dp_shard": 4, "layers_per_stage": [15, 15, 15, 15, 15, 15, 14, 14]}),
])  # fmt: skip
def test_arguments_of_hybrids_read_back(name: str, layout: dict[str, Any], version: str) -> None:
    done, stated = read_back(job(name, 64, **layout), version)
    assert stated.model.value == name
    assert ("gated_delta_net" in done.arguments) == (name == NEXT and version == "0.18")
    assert ("--hybrid-layer-pattern" in done.arguments) == (name != NEXT)
    assert ("pretrain_hybrid.py" in done.files["launch.sh"]) == (name != NEXT)


@pytest.mark.parametrize("freq", [1, 4])
def test_sparse_attention_is_written_and_read_back(freq: int) -> None:
    """dsa.py: layer 1, 2, 3 and every fourth from there compute; others take their tokens."""
    sharing = ["dsa-shared" if max(i - 2, 0) % freq else "dsa" for i in range(61)]
    model = {**inline_keys(read_model(SPARSE)), "name": SPARSE, "mixers": sharing}
    splits = {} if freq == 1 else {"layers_per_stage": [30, 31]}
    asked = job(model, 64, pp=2, ep=16, zero_stage=1, **splits)
    for version in ("0.19", "0.20"):
        _, stated = read_back(asked, version)
        assert read_model(stated.model.value).mixers == asked.model.mixers
    odd = ("dsa", "dsa-shared", "dsa-shared", *("dsa",) * 58)
    none = asked.model.model_copy(update={"mixers": odd})
    gaps = to_megatron(asked.layout, none, asked.cluster, asked.training, "0.19").gaps
    assert "model.mixers" in {gap.fault.field for gap in gaps}


def test_sparse_attention_pads_heads_and_shares_no_keys_between_ranks() -> None:
    """TP 8 leaves 16 heads of 128, which FlashMLA pads to 64: the core is four times as dear."""
    model, own = read_model(SPARSE), Code(own_mixers=True)
    heads = MIXERS["dsa"].sizes(model, np.array([1.0, 2.0, 8.0]))["sparse_heads"]
    assert heads.tolist() == [128, 64, 64]
    fused, masked = (MIXERS["dsa"].operations(model, code) for code in (own, PLAIN))
    core = next(op for op in fused if isinstance(op, Attention))
    assert (core.window, core.widths) == (2048, ("kv_lora_rope", "kv_lora"))
    of = sizes(model)
    assert math.prod(of[name] for name in saved_tensors(fused)["q"].dims[1:]) == 128 * 576
    sinks = MIXERS["dsa"].operations(read_model({"base": SPARSE, "attention_sinks": True}), PLAIN)
    for ops, found in ((masked, "index_mask"), (sinks, "softmax_out")):
        assert {"index_mask", "softmax_out"} & saved_tensors(ops).keys() == {found}
    shared = MIXERS["dsa-shared"].operations(model, own)
    indexers = [[op for op in ops if op.name == "indexer"] for ops in (fused, shared)]
    assert [len(found) for found in indexers] == [1, 0]


@pytest.mark.parametrize(("name", "change", "words"), [
    *(
        ("llama3-8b", {field: True if field == "use_double_wide_mlp" else 4},
            rf"model\.{field}=\w+: (is of|stands beside) ")  # layers that it has not
        for field in ("o_groups", "compress_rate_csa", "compress_rate_hca", "use_double_wide_mlp",
            "num_hash_layers", "zero_expert_num")
    ),
    (SPARSE, {"q_lora_rank": 0}, "reads the latent of queries"),
    (SPARSE, {"fused_query_gate": True}, "from the latent of queries"),
    (SPARSE, {"sliding_qk_nope_head_dim": 64}, "sum of both its parts"),
    ("llama3-8b", {"k_rope_norm": True}, "is of MLA alone"),
    ("llama3-8b", {"gated_norm_rank": 16, "parallel_residual": True}, "run side by side"),
    (SPARSE, {"index_topk": 0}, "is needed by dsa layers"),
    (HYBRID, {"mixers": ["mamba2"] * 3}, "one value for each of 118 layers"),
    (HYBRID, {"ssm_state_size": 0}, "is needed by mamba2 layers"),
    (HYBRID, {"mamba_n_groups": 7}, "does not divide 256 heads"),
    (HYBRID, {"mixer_only_layers": [200]}, "beyond the 118"),
    (HYBRID, {"mixer_only_layers": [1]}, "leaves a layer with nothing"),
])  # fmt: skip
def test_sizes_and_patterns_that_are_no_model_are_refused(
    name: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        read_model({**inline_keys(read_model(name)), **change})


def test_sparse_attention_came_with_its_kernels() -> None:
    old = job(SPARSE, 64, gpu="a100-sxm-80gb")
    context = Context(model=old.model, cluster=old.cluster, training=old.training)
    words = "; ".join(one.rule for one in obstacles(context))
    assert "kernels of sparse attention for Hopper and newer" in words


def test_a_layer_of_two_branches_is_two_letters() -> None:
    model = read_model({"base": NEXT, "num_hidden_layers": 8})
    assert pattern(model, (5, 3)) == "GEGEGE*EGE|GEGE*E"


@pytest.mark.parametrize(("name", "release", "before", "words"), [
    (SPARSE, "0.19", "0.18", "sparse attention with an indexer (DSA)"),
    (NEXT, "0.18", "0.15", "gated DeltaNet (linear attention)"),
    (HYBRID, "0.18", "0.17", "Mamba-2 (state space) layers"),
])  # fmt: skip
def test_releases_older_than_a_block(name: str, release: str, before: str, words: str) -> None:
    model = read_model(name)
    assert lacking(model, release_of("megatron", release)) == []
    assert words in lacking(model, release_of("megatron", before))


@pytest.mark.parametrize(
    "change", [{"mamba_d_conv": 3}, {"mamba_conv_bias": False}, {"mamba_proj_bias": True}]
)
def test_other_taps_and_biases_of_mamba_are_named(change: dict[str, object]) -> None:
    other = read_model({**inline_keys(read_model(HYBRID)), **change})
    assert lacking(other, release_of("megatron", "0.18")) == ["other taps or biases of Mamba-2"]


@pytest.mark.parametrize(("name", "words"), [
    (KIMI, "Kimi Delta Attention (linear attention)"),
    ("lfm2-1.2b", "gated short convolutions"),
    ("falcon-h1-7b", "Mamba-2 (state space) heads beside those of attention"),
    ("minimax-text-01", "lightning (linear) attention"),
    ("jamba-v0.1", "Mamba (state space) layers"),
    ("gemma4-e4b", "per-layer embeddings"),
    ("gemma4-e4b", "layers that share keys and values"),
    ("longcat-flash", "experts that compute nothing"),
    ("longcat-flash", "experts on a shortcut over the next layer"),
    ({"base": SPARSE, "gated_norm_rank": 16}, "gated norms"),
    ({"base": SPARSE, "k_rope_norm": True}, "norms of rotated keys"),
])  # fmt: skip
def test_trainers_without_a_mixer_name_it(name: object, words: str) -> None:
    model = read_model(name)
    assert words in lacking(model, release_of("megatron", "0.18"))
    for trainer in ("torchtitan", "megatron-bridge", "megatron-deepspeed", "internevo"):
        assert words in TRAINERS[trainer].lacks(model, release_of(trainer, None))


def test_a_new_mixer_is_its_operations_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOP and memory follow from them."""

    def operations(_: ModelSpec, code: Code) -> tuple[Op, ...]:
        source = Tensor("attention_in", HIDDEN)
        into = projection("toy_in", ("toy",), ("hidden",), source)
        return into, output_projection("toy_out", ("toy",), into.output)

    def priced(width: int, **layout: Any) -> tuple[float, float]:
        """(FLOP of a step on all GPUs, bytes of parameters on one) with so wide a mixer."""
        row = MixerWork(operations=operations, sizes=lambda _, tp: {"toy": width / tp},
                        cut=frozenset({"toy"}))  # fmt: skip
        monkeypatch.setitem(MIXERS, "short-conv", row)  # under a name that models may have
        toy = MixerKind("toys", parameters=lambda _, hidden: 2 * hidden * width)
        monkeypatch.setitem(MIXER_KINDS, "short-conv", toy)
        shapes = {
            "name": f"toy-{width}", "hidden_size": 1024, "intermediate_size": 4096,
            "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 4096,
            "linear_conv_kernel_dim": 3, "mixers": ["short-conv", "attention"] * 2,
        }  # fmt: skip
        asked = job(shapes, 8, trainer="fsdp", ac="none", **layout)
        found = estimate_job(asked)
        assert found.valid, found.violations
        peak = asked.cluster.gpu.peak_flops_per_second["bf16"]
        return found.hfu * found.step_seconds * peak * 8, found.memory.stages[0].parameters_bytes

    (flop, held), (more_flop, more_held) = (priced(width, dp_shard=8) for width in (4096, 8192))
    more = 2 * 2 * 1024 * 4096  # weights of two layers
    assert more_flop - flop == pytest.approx(6 * more * 256 * 4096)
    assert more_held - held == pytest.approx(more * 4 / 8)


# ---- multi-token prediction ----------------------------------------------------------------------

MTP = "deepseek-v3-mtp"


def test_a_layer_that_predicts_more_is_counted() -> None:
    """DeepSeek-V3 README_WEIGHTS.md: 11.5B of its own; a projection of two hidden sizes besides."""
    one, none = read_model(MTP), read_model("deepseek-v3")
    layer = none.parameters.layer(none.layer_kinds()[-1])
    assert layer == pytest.approx(11.5e9, rel=0.01)
    assert one.total_parameters() - none.total_parameters() == layer + 2 * 7168**2 + 3 * 7168
    kind, count = one.distinct_layers()[-1]
    assert (kind.mtp, count) == (True, 1)
    assert len(one.layer_kinds()) == 61  # a split of layers does not see it


def test_the_last_stage_has_it() -> None:
    model = read_model(MTP)
    units = stage_units((16, 15, 15, 15), model)
    assert units[:, 2].tolist() == [0, 0, 0, 1]  # dense, of experts, this one
    layout = {"tp": 2, "pp": 4, "ep": 32, "zero_stage": 1, "ac": "full"}
    two = [estimated(name, 256, **layout) for name in ("deepseek-v3", MTP)]
    plain, more = ([one.parameters_bytes for one in each.memory.stages] for each in two)
    assert more[:-1] == plain[:-1]
    kind, _ = model.distinct_layers()[-1]
    routed = model.num_experts * model.parameters.expert()
    table = model.vocab_size * model.hidden_size
    own = (model.parameters.layer(kind) - routed + table) / 2 + routed / 32
    assert more[-1] - plain[-1] == pytest.approx(2 * own, rel=0.01)  # 16 bits
    assert 1.0 < two[1].step_seconds / two[0].step_seconds < 1.0 + 3 / 61


def test_it_multiplies_a_layer_a_projection_and_a_head() -> None:
    model = read_model(MTP)
    kind, _ = model.distinct_layers()[-1]
    plain, more = (named_ops(model, one) for one in (LayerKind(moe=True, window=0), kind))
    gemms = {name for name in more.keys() - plain.keys() if isinstance(more[name], Gemm)}
    assert gemms == {"mtp_proj", "head"}
    kept = saved_tensors(tuple(more.values())).keys() - saved_tensors(tuple(plain.values())).keys()
    assert kept >= {"mtp_softmax", "mtp_pair", "mtp_state", "mtp_embedded", "head_in"}


@pytest.mark.parametrize("split", [None, [16, 15, 15, 15]])
def test_its_argument_is_read_back(split: list[int] | None) -> None:
    asked = job(MTP, 256, pp=4, dp_shard=64, ep=32, zero_stage=1, layers_per_stage=split)
    _, stated = read_back(asked)
    assert stated.words["mtp_num_layers"] == ["1"]
    assert stated.words["pipeline_model_parallel_layout"][0].endswith("mL")
    assert stated.model.value == MTP
    assert "multi-token prediction" in TORCHTITAN.lacks(asked.model, release_of("torchtitan", None))


MEGATRON = (
    {"ac": "none"},
    {"tp": 2, "pp": 4, "ac": "full"},
    {"pp": 4, "micro_batch_size": 2, "ac": "selective-attention"},
    {"pp": 2, "virtual_stages": 2, "pp_schedule": "Interleaved1F1B", "ac": "block-2"},
    {"cp": 2, "pp": 2, "ac": "modules-layernorm+mlp"},
)
FEW = {"num_hidden_layers": 8, "num_experts": 64}
FSDP = ({"ac": "none"}, {"ac": "full", "compile": True}, {"ac": "memory-budget-0.5"})


@pytest.mark.parametrize(("trainer", "model"), [
    ("megatron", {"base": NEXT, "num_hidden_layers": 16, "num_experts": 64}),
    ("megatron", {"base": HYBRID, "num_hidden_layers": 24, "hidden_size": 4096}),
    ("megatron", {"base": "deepseek-v2-lite", "mtp_num_layers": 1}),
    ("megatron", {"base": KIMI, "num_experts": 64}),
    ("megatron", {"base": KIMI, "num_experts": 64, "linear_full_gates": True,
        "attention_head_gate": True}),
    ("megatron", "lfm2-1.2b"),
    ("megatron", {"base": SUPER, "num_hidden_layers": 16, "num_experts": 64}),
    ("megatron", {"base": "falcon-h1-7b", "num_hidden_layers": 16}),
    ("megatron", {"base": "minimax-text-01", "num_hidden_layers": 16}),
    ("megatron", {"base": "deepseek-v2-lite", "moe_output_norm": True}),
    ("megatron", {"base": "deepseek-v4-flash", "num_hidden_layers": 8, "num_experts": 64,
        "mtp_num_layers": 1}),
    ("megatron", {"base": "llama3-8b", "hc_mult": 4}),
    ("fsdp", {"base": SPARSE, **FEW, "gated_norm_rank": 16, "attention_output_gate": True,
        "fused_query_gate": True}),
    ("fsdp", {"base": SPARSE, **FEW, "mixers": ["dsa", "attention"] * 4, "sliding_window": 512,
        "layer_types": ["full_attention", "sliding_attention"] * 4, "k_rope_norm": True,
        "sliding_kv_lora_rank": 256}),
    ("fsdp", {"base": "glm5.2", **FEW, "hc_mult": 4, "hc_sinkhorn_iters": 0,
        "attention_sinks": True, "attention_output_gate": True}),
    ("fsdp", "gemma4-e4b"),
    ("fsdp", "gemma4-e2b"),
    ("fsdp", "longcat-flash"),
    ("fsdp", "jamba-v0.1"),
])  # fmt: skip
def test_bounds_stay_below_prices_and_batches_are_their_rows(trainer: str, model: object) -> None:
    num_gpus, layouts = (64, MEGATRON) if trainer == "megatron" else (8, FSDP)
    p = pricer(model, num_gpus, trainer=trainer, global_batch_size=256)
    experts = {"ep": 8} if p.model.is_moe else {}
    check_rows_and_bounds(p, batch_of(p, *({**one, **experts} for one in layouts)))


NANO = ("nemotron-3-nano-30b-a3b", {})
FLASH = ({"base": "deepseek-v4-flash", "mtp_num_layers": 1},
    {"optimizer": "adamw-bf16-states", "cuda_graphs": "full"})  # fmt: skip
WIDE = {"ep": 64, "precision": "mxfp8", "ac": "modules-mla_up_proj"}


@pytest.mark.parametrize(("own", "run", "layout", "published", "high"), [
    (NANO, ("h100-sxm-80gb", 16, 8192, 1024), {"micro_batch_size": 1, "precision":
        "float8-tensorwise", "ac": "modules-moe+layernorm"}, 14719, 0.136),
    (NANO, ("gb200-nvl72-186gb", 8, 8192, 512), {"micro_batch_size": 2, "precision": "mxfp8"},
        34816, 0.245),
    (NANO, ("gb300-nvl72-288gb", 8, 8192, 512), {"micro_batch_size": 4, "precision": "mxfp8"},
        39936, 0.143),
    (FLASH, ("gb300-nvl72-288gb", 128, 4096, 2048), WIDE, 8224, 0.082),
    (FLASH, ("gb200-nvl72-186gb", 128, 4096, 2048), WIDE, 7776, 0.087),
])  # fmt: skip
def test_it_is_near_what_its_publisher_measured(
    own: tuple[Any, Any], run: tuple[Any, ...], layout: Any, published: float, high: float
) -> None:
    """Megatron-Bridge docs/performance-summary.md (26.08); not fitted. high: by docs/STATUS.md. Its
    benchmarks force the balance."""
    (model, training), (_, num_gpus, seq_len, batch) = own, run
    every = {"dp_shard": num_gpus, "ep": 8, "zero_stage": 1, "moe_dispatcher": "hybridep"}
    given = {"trainer": "megatron-bridge", "moe_imbalance": 1.0, "layout": every | layout}
    found = estimate_job(read_job(job_values(model, *run, **given, **training)))
    assert found.fits
    assert found.tokens_per_second_per_gpu / published - 1 == pytest.approx(high, abs=5e-3)
    low, most = found.interval.step_seconds
    assert low < batch * seq_len / published / num_gpus < most
