"""Work as operations: FLOP, shards and saved activations against closed and published forms."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import precision
from planner.columns import LayoutBatch
from planner.cost.price import Pricer, Prices
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.precision import PRECISIONS
from planner.specs.mixers import COMPRESSED, Mixer
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.registry import resolve_layout
from planner.work import axes, blocks
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Ops
from tests.conftest import ROOT

CATALOGUE = sorted(path.stem for path in Path(ROOT, "planner/catalog/models").glob("*.yaml"))
SEQ = 4096
DENSE = LayerKind(moe=False, window=0)
# Korthikanti et al. 2022, table 3: GPT-3 175B.
GPT3: dict[str, Any] = {
    "name": "gpt3-like", "hidden_size": 12288, "num_hidden_layers": 96, "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "head_dim": 128, "intermediate_size": 4 * 12288, "vocab_size": 51200, "mlp": "gelu",
    "norm": "layernorm",
}  # fmt: skip
S, B, H, A = 2048, 2, 12288, 96


def pricer(
    model: Any = "llama3-8b",
    num_gpus: int = 1,
    trainer: str = "torchtitan",
    gpu: str = "h100-sxm-80gb",
    **training: Any,
) -> Pricer:
    values = {"seq_len": SEQ, "global_batch_size": 64, "trainer": trainer}
    values |= {"moe_imbalance": 1.0, **training}
    cluster = read_cluster({"gpu": gpu, "num_gpus": num_gpus})
    return Pricer.build(read_model(model), cluster, read_training(values))


def price(p: Pricer, **layout: Any) -> Prices:
    return p.price(
        LayoutBatch.from_layouts(
            [resolve_layout(layout, trainer=p.training.trainer, num_gpus=p.cluster.num_gpus)]
        )
    )


def counts(model: ModelSpec) -> np.ndarray:
    return np.array([count for _, count in model.distinct_layers()] + [1.0, 1.0])


def microbatch_flops(p: Pricer, **layout: Any) -> float:
    """Forward FLOP of one microbatch of one sequence on one rank that holds all layers."""
    return float(counts(p.model) @ price(p, **layout).stage_seconds.forward_flops[:, 0])


def layer_bytes(p: Pricer, **layout: Any) -> float:
    return float(price(p, **layout).stage_seconds.saved_bytes[0, 0])


# ---- FLOP ----------------------------------------------------------------------------------------


def closed_form_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """2 x parameters that a token meets (head included) + attention over what the mask shows."""
    head_of_its_own = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    matrices = model.matmul_parameters_per_token() + head_of_its_own
    queries = np.arange(1, seq_len + 1)
    kinds = model.layer_kinds()
    attention = 0.0
    for window in (kind.window for kind in kinds if kind.attends):
        own, seen = model.at(window), np.minimum(queries, window or seq_len).mean()
        attention += 2.0 * seen * own.num_attention_heads * (own.qk_head_dim + own.v_dim)
    scans = sum(scan_flops_per_token(model, kind.mixer) for kind in kinds)
    # a layer of multi-token prediction attends as the last one, and has the head again
    more = attention / max(model.num_attention_layers, 1)
    more += 2.0 * model.vocab_size * model.hidden_size
    mixes = 2 * 2.0 * model.num_hidden_layers * model.hc_mult**2 * model.hidden_size
    return 2.0 * matrices + attention + scans + mixes + more * model.mtp_num_layers


def scan_flops_per_token(model: ModelSpec, mixer: Mixer) -> float:
    """What recurrences multiply besides their weights, chunk by chunk (Dao and Gu 2024, section 6;
    Yang et al. 2024, section 3)."""
    if mixer == "lightning":
        width, block = model.linear_value_head_dim, model.lightning_block_size
        return 4.0 * model.linear_value_width * (block + width)
    if mixer.endswith("mamba2"):
        inside = model.mamba_n_groups * model.ssm_state_size + model.mamba_width
        return 2.0 * (
            model.mamba_chunk_size * inside + 2 * model.mamba_width * model.ssm_state_size
        )
    if mixer == "dsa":  # as transformers scores: every pair of tokens, and a weight a head
        return 2.0 * SEQ * model.index_n_heads * (model.index_head_dim + 1)
    if mixer in COMPRESSED:  # as transformers: all tokens, all entries, and scores of all entries
        rate, chosen = model.entries(mixer)
        entries = SEQ / rate if rate else 0
        index = model.index_n_heads * model.index_head_dim * entries * (chosen > 0)
        return 2.0 * (index + (SEQ + entries) * model.num_attention_heads * 2 * model.head_dim)
    if mixer == "msa":
        return 2.0 * SEQ * model.index_n_heads * model.index_head_dim
    if mixer.endswith("-delta"):
        keys, values = model.linear_key_head_dim, model.linear_value_head_dim
        chunk = 64 * (3 * keys + 2 * values) + 3 * keys * values
        return 2.0 * model.linear_num_value_heads * chunk
    return 0.0


@pytest.mark.parametrize("name", CATALOGUE)
def test_forward_flops_per_token_are_the_closed_form(name: str) -> None:
    """Norms and biases are counted as parameters, not as FLOP: below 0.1% for every model."""
    p = pricer(name)
    ours, closed = microbatch_flops(p) / SEQ, closed_form_flops_per_token(p.model, SEQ)
    assert ours == pytest.approx(closed, rel=1e-3)
    assert ours < closed


def test_unfused_attention_computes_the_whole_square() -> None:
    flash = pricer("gpt3-175b")
    unfused = pricer("gpt3-175b", attention_kernel="unfused", trainer="megatron")
    model = flash.model
    square = 2.0 * SEQ * model.num_hidden_layers * model.num_attention_heads * 2 * model.head_dim
    added = microbatch_flops(unfused) - microbatch_flops(flash)
    assert added / SEQ == pytest.approx(square / 2, rel=1e-3)


def test_windows_bound_the_context() -> None:
    """Mistral's 4096-token window at 32768 tokens: (w - w^2 / 2s) keys a query instead of s / 2."""
    seq, window = 32768, 4096
    base = {
        "base": "llama3-8b",
        "sliding_window": window,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    p = pricer(base, seq_len=seq)
    assert p.model.layer_windows() == (window, 0)
    windowed, full = price(p).stage_seconds.forward_flops[:2, 0]
    per_key = 2.0 * seq * p.model.num_attention_heads * 2 * p.model.head_dim
    fewer = seq / 2 - (window - window**2 / (2 * seq))
    assert full - windowed == pytest.approx(per_key * fewer, rel=1e-9)


# ---- shards sum to the whole ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "gemma2-9b", "qwen2.5-14b"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_divides_every_matmul(name: str, tp: int) -> None:
    p = pricer(name, num_gpus=8, trainer="megatron")
    whole = price(pricer(name, trainer="megatron")).stage_seconds.forward_flops
    assert tp * price(p, tp=tp).stage_seconds.forward_flops == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_cp_divides_all_work_attention_too(name: str, method: str) -> None:
    """Head-tail balance: every rank has the same share of the causal triangle."""
    p = pricer(name, num_gpus=4)
    whole = price(pricer(name)).stage_seconds.forward_flops
    quarter = price(p, cp=4, cp_method=method).stage_seconds.forward_flops
    assert 4 * quarter == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b"])
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_ep_moves_expert_work_without_adding_any(name: str, ep: int) -> None:
    """ep ranks bring a microbatch each: a share is one microbatch's with all experts."""
    whole = price(pricer(name)).stage_seconds.forward_flops
    shared = price(pricer(name, num_gpus=8), ep=ep).stage_seconds.forward_flops
    assert shared == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("etp", [1, 4])
def test_experts_under_tp_are_divided_by_tokens_or_by_width(etp: int) -> None:
    """Experts over 2 ranks of 4 x 2: sequences at etp 1, widths at etp = tp; so the router."""
    model = read_model("mixtral-8x7b")
    p = pricer("mixtral-8x7b", num_gpus=8)
    whole = price(pricer("mixtral-8x7b")).stage_seconds.forward_flops[0, 0]
    router = 2.0 * SEQ * model.hidden_size * model.num_experts
    routers = 4 if etp == 4 else 1
    local = price(p, tp=4, dp_shard=2, ep=2, etp=etp).stage_seconds.forward_flops[0, 0]
    assert 4 * local == pytest.approx(whole + (routers - 1) * router, rel=1e-12)


def test_mla_down_projections_are_replicated_under_tp() -> None:
    """DeepSeek's narrow projections have no heads: every TP rank runs them whole."""
    model = read_model("deepseek-v2")
    whole = microbatch_flops(pricer("deepseek-v2"))
    local = microbatch_flops(pricer("deepseek-v2", num_gpus=8), tp=8)
    ranks = model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim
    narrow = 2.0 * SEQ * model.hidden_size * ranks
    assert 8 * local - whole == pytest.approx(7 * narrow * model.num_hidden_layers, rel=1e-9)


def test_imbalance_scales_the_busiest_ranks_experts() -> None:
    """Its rows do, from which its seconds are; flops are those of a mean rank."""
    skews = [pricer("mixtral-8x7b", num_gpus=8, moe_imbalance=x) for x in (1.0, 1.5)]
    even, skewed = (microbatch_flops(one, ep=8) for one in skews)
    assert skewed == even
    layout = resolve_layout({"ep": 8}, trainer="torchtitan", num_gpus=8)
    sizes = (
        axes.local_sizes(LayoutBatch.from_layouts([layout]), p.model, p.training, p.rules)
        for p in skews
    )
    rows = [one["tokens_per_expert"][0] for one in sizes]
    assert rows[1] == pytest.approx(1.5 * rows[0], rel=1e-9)


def test_expected_imbalance() -> None:
    """One rank holds all; more copies a rank are evener; more ranks make the worst worse."""
    copies, ep = np.array([8192.0]), np.array([8.0])
    assert axes.expected_imbalance(copies, np.array([1.0])) == 1.0
    assert axes.expected_imbalance(copies, ep) > axes.expected_imbalance(4 * copies, ep) > 1.0
    assert axes.expected_imbalance(copies, 8 * ep) > axes.expected_imbalance(copies, ep)
    loads = np.random.default_rng(0).poisson(8192, size=(2000, 8)).max(axis=1).mean() / 8192
    assert axes.expected_imbalance(copies, ep)[0] == pytest.approx(loads, abs=0.01)


# ---- the lists themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_dimension_has_a_size_and_every_site_a_rule(name: str) -> None:
    p = pricer(name, num_gpus=8)
    given = {"cp": 2, "micro_batch_size": 2}
    batch = LayoutBatch.from_layouts([resolve_layout(given, trainer="torchtitan", num_gpus=8)])
    sizes = axes.local_sizes(batch, p.model, p.training, p.rules)
    lists = [
        blocks.layer_ops(p.model, kind, flash)
        for kind, _ in p.model.distinct_layers()
        for flash in (True, False)
    ]
    others = [blocks.head_ops(p.model), blocks.embedding_ops(p.model)]
    for op in (op for ops in [*lists, *others] for op in ops):
        dims: list[str] = []
        if isinstance(op, Gemm):
            dims += [*op.rows, *op.cols, *op.depth, *op.batch, *op.output.dims]
        if isinstance(op, Elementwise):
            dims += op.dims
        if isinstance(op, Collective):
            assert op.site in axes.SITES
            dims += op.tensor.dims
        else:
            dims += [dim for tensor in op.saves for dim in tensor.dims]
        assert all(sizes[dim][0] > 0 for dim in dims), op


def test_sequence_parallel_tp_moves_eight_activations_a_layer() -> None:
    """SOURCE_TABLES, TP + SP: about 8 activations a layer, two gathers and scatters a way."""
    layer = blocks.layer_ops(read_model("llama3-8b"), DENSE, True)
    ops = [op for op in layer if isinstance(op, Collective)]
    tp = [op for op in ops if op.site.startswith("tp_")]
    assert [op.site for op in tp] == ["tp_enter", "tp_exit", "tp_enter", "tp_exit"]
    assert {op.tensor.dims for op in tp} == {("tokens", "hidden")}
    batch = LayoutBatch.from_layouts([resolve_layout({"tp": 8}, trainer="torchtitan", num_gpus=8)])
    rules = [rule for op in tp for rule in axes.SITES[op.site] if rule.applies(batch).all()]
    assert [(rule.forward, rule.backward) for rule in rules] == 2 * [
        ("all-gather", "reduce-scatter"),
        ("reduce-scatter", "all-gather"),
    ]


def test_tp_without_sequence_parallelism_reduces_twice_each_way() -> None:
    layer = blocks.layer_ops(read_model("llama3-8b"), DENSE, True)
    ops = [op for op in layer if isinstance(op, Collective)]
    batch = LayoutBatch.from_layouts(
        [resolve_layout({"tp": 8, "sequence_parallel": False}, trainer="torchtitan", num_gpus=8)]
    )
    rules = [
        rule
        for op in ops
        if op.site.startswith("tp_")
        for rule in axes.SITES[op.site]
        if rule.applies(batch).all()
    ]
    assert sorted(str(op) for rule in rules for op in (rule.forward, rule.backward)) == 4 * [
        "None"
    ] + 4 * ["all-reduce"]


@pytest.mark.parametrize("recipes", [precision.torchao(), precision.transformer_engine()])
def test_recipes_follow_the_layouts_precisions_and_never_save_more_than_bf16(
    recipes: tuple[precision.Recipe, ...],
) -> None:
    assert tuple(recipe.name for recipe in recipes) == tuple(PRECISIONS)
    saved = precision.column("saved_bytes", np.arange(len(PRECISIONS)), recipes)
    assert saved[0] == 2
    assert (saved <= 2).all()


# ---- saved activations: Korthikanti et al. 2022 --------------------------------------------------
# Their layer keeps 34 s b h + 5 a s^2 b bytes, of which 1 s b h each are the masks of dropout on
# the two residual branches. The catalogue's GPT-3 has none; facts/memory-activations-* have both.
# The mask of the attention dropout is in both (the 5).


def gpt3(tp: int = 1, num_gpus: int = 8, trainer: str = "megatron", **layout: Any) -> float:
    p = pricer(GPT3, num_gpus=num_gpus, trainer=trainer, seq_len=S, attention_kernel="unfused")
    return layer_bytes(p, tp=tp, micro_batch_size=B, **layout) / (S * B * H)


RESIDUAL_MASKS = 2.0
# fp32 mean and deviation of each row of both norms, which the paper leaves out
STATISTICS = 2 * 2 * 4.0 / H
SCORES = 5.0 * A * S / H


def test_activations_without_parallelism() -> None:
    assert gpt3(ac="none") == pytest.approx(34 - RESIDUAL_MASKS + SCORES + STATISTICS, rel=1e-9)


def test_activations_under_tp() -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)): norms' and matmuls' inputs and masks stay whole."""
    assert gpt3(8, ac="none", sequence_parallel=False) == pytest.approx(
        10 - RESIDUAL_MASKS + 24 / 8 + SCORES / 8 + STATISTICS, rel=1e-9
    )


def test_activations_under_tp_and_sequence_parallelism() -> None:
    assert gpt3(8, ac="none", sequence_parallel=True) == pytest.approx(
        (34 - RESIDUAL_MASKS + SCORES + STATISTICS) / 8, rel=1e-9
    )


def test_torch_keeps_the_gathered_inputs_that_megatron_gathers_again() -> None:
    """DTensor keeps all-gathered inputs of columns: 2 inputs of 2 s b h not divided by t."""
    ours = gpt3(8, ac="none", sequence_parallel=True, trainer="fsdp")
    assert ours == pytest.approx(4 + (30 - RESIDUAL_MASKS + SCORES + STATISTICS) / 8, rel=1e-9)


@pytest.mark.parametrize(
    ("tp", "parallel", "kept"), [(1, False, 34.0), (8, False, 10 + 24 / 8), (8, True, 34 / 8)]
)
def test_selective_attention_drops_the_score_matrix(tp: int, parallel: bool, kept: float) -> None:
    whole = (RESIDUAL_MASKS - STATISTICS) / (tp if parallel else 1)
    assert gpt3(tp, ac="selective-attention", sequence_parallel=parallel) == pytest.approx(
        kept - whole, rel=1e-9
    )


@pytest.mark.parametrize(
    ("tp", "parallel", "kept"), [(1, False, 2.0), (8, False, 2.0), (8, True, 2.0 / 8)]
)
def test_full_recomputation_keeps_the_layers_input(tp: int, parallel: bool, kept: float) -> None:
    """2 s b h; under sequence parallelism the input is a shard (Megatron and FSDP2 alike)."""
    assert gpt3(tp, ac="full", sequence_parallel=parallel) == pytest.approx(kept, rel=1e-9)


def test_flash_attention_never_keeps_the_scores() -> None:
    p = pricer(GPT3, num_gpus=8, trainer="megatron", seq_len=S)
    statistics = 4.0 * A * S * B
    by_hand = (34 - RESIDUAL_MASKS + STATISTICS) * S * B * H + statistics
    assert layer_bytes(p, ac="none", micro_batch_size=B) == pytest.approx(by_hand, rel=1e-9)


# ---- saved activations: Llama 3 8B by hand, 8192 tokens ------------------------------------------

T8, HID, Q, KV, FFN = 8192, 4096, 4096, 1024, 14336
LSE = 4 * 32


def llama(**layout: Any) -> Prices:
    return price(pricer("llama3-8b", num_gpus=8, seq_len=T8), **layout)


def test_selective_op_keeps_every_second_matmul_attention_and_the_input() -> None:
    """TorchTitan's policy keeps wq, wv, w1, w2, and attention's output with its statistics."""
    by_hand = 2 * (HID + Q + KV + FFN + HID) + 2 * Q + LSE
    assert llama(ac="selective-op").stage_seconds.saved_bytes[0, 0] == by_hand * T8


def test_selective_op_under_tp_keeps_shards_and_the_scattered_sums() -> None:
    kept = 2 * (HID + Q + KV + FFN) / 8 + 2 * HID + (2 * Q + LSE) / 8 + 2 * 2 * HID / 8
    assert llama(ac="selective-op", tp=8).stage_seconds.saved_bytes[0, 0] == kept * T8


def test_no_checkpointing_keeps_what_eager_autograd_keeps() -> None:
    """Two norm and two matmul inputs, q k v, attention's output, w1 w3 silu and their product."""
    by_hand = 2 * (2 * HID + 2 * HID + Q + 2 * KV + Q) + 2 * 4 + LSE + 2 * 4 * FFN
    assert llama(ac="none").stage_seconds.saved_bytes[0, 0] == by_hand * T8


def test_a_compiled_layer_recomputes_silu() -> None:
    prices = (llama(ac="none", compile=flag) for flag in (False, True))
    eager, compiled = (price.stage_seconds.saved_bytes[0, 0] for price in prices)
    assert eager - compiled == 2 * FFN * T8


def test_torch_before_2_8_keeps_fp32_copies_in_norms() -> None:
    old = price(
        pricer("llama3-8b", num_gpus=8, seq_len=T8, torch_version="2.6.0"), ac="none"
    ).stage_seconds.saved_bytes[0, 0]
    new = price(
        pricer("llama3-8b", num_gpus=8, seq_len=T8, torch_version="2.8.0"), ac="none"
    ).stage_seconds.saved_bytes[0, 0]
    # the fp32 input and the fp32 product instead of the input
    assert old - new == 2 * (2 * 4 - 2) * HID * T8


def test_every_second_layer_keeps_half_of_it_all() -> None:
    none, half, full = (
        llama(ac=ac).stage_seconds.saved_bytes[0, 0] for ac in ("none", "selective-layer-2", "full")
    )
    assert half == pytest.approx((none + full) / 2)
    assert llama(ac="selective-layer-1").stage_seconds.saved_bytes[0, 0] == full == 2 * HID * T8


def test_recomputed_flops_of_each_mode() -> None:
    """full: the whole forward of a layer, but for its last product (w2) where recomputation stops
    early, as compiled and as in torchtitan 0.1; selective-op: wk, wo and w3; none: nothing.
    """
    last = 2.0 * T8 * HID * FFN
    for ac, redone in (
        ("none", 0.0),
        ("selective-op", 2.0 * T8 * HID * (KV + Q + FFN)),
        ("full", None),
        ("selective-layer-4", None),
    ):
        s = llama(ac=ac).stage_seconds
        whole = s.forward_flops[0, 0]
        expected = {"full": whole, "selective-layer-4": whole / 4}.get(ac, redone)
        assert s.recompute_flops[0, 0] == pytest.approx(expected, rel=1e-12)
        assert (s.recompute_flops[1:] == 0).all(), "embedding and head are outside checkpointing"
    old = pricer("llama3-8b", num_gpus=8, seq_len=T8, trainer_version="0.1.0")
    for stopped in (llama(ac="full", compile=True), price(old, ac="full")):
        s = stopped.stage_seconds
        assert s.recompute_flops[0, 0] == pytest.approx(s.forward_flops[0, 0] - last, rel=1e-12)
    megatron = price(
        pricer("llama3-8b", num_gpus=8, seq_len=T8, trainer="megatron"), ac="full", zero_stage=1
    ).stage_seconds
    assert megatron.recompute_flops[0, 0] == pytest.approx(megatron.forward_flops[0, 0], rel=1e-12)


def test_memory_budget_runs_from_full_to_none() -> None:
    none, full = llama(ac="none", compile=True), llama(ac="full", compile=True)
    most, least = (llama(ac=f"memory-budget-{share}", compile=True) for share in (1, 0))
    assert most.stage_seconds.saved_bytes[0, 0] == none.stage_seconds.saved_bytes[0, 0]
    assert least.stage_seconds.saved_bytes[0, 0] == full.stage_seconds.saved_bytes[0, 0]
    assert most.parts["recompute"][0] == 0.0
    assert least.parts["recompute"][0] == pytest.approx(full.parts["recompute"][0], rel=1e-9)
    shares = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
    budgets = [llama(ac=f"memory-budget-{share}", compile=True) for share in shares]
    saved = [b.stage_seconds.saved_bytes[0, 0] for b in budgets]
    redone = [b.parts["recompute"][0] for b in budgets]
    assert saved == sorted(saved)
    assert redone == sorted(redone, reverse=True)


def test_memory_budget_keeps_attention_first() -> None:
    """Flash attention costs most seconds a byte, so a small budget spares its recomputation."""
    full, tenth = (
        llama(ac=ac, compile=True).stage_seconds.recompute_flops[0, 0]
        for ac in ("full", "memory-budget-0.1")
    )
    attention = 2.0 * T8 * (T8 / 2) * 32 * 256
    assert full - tenth >= attention


def test_attention_and_windows_are_in_the_list() -> None:
    ops = blocks.layer_ops(read_model("gemma2-9b"), LayerKind(moe=False, window=4096), True)
    assert [op.window for op in ops if isinstance(op, Attention)] == [4096]


def test_operations_are_made_once_and_hashed_as_their_tuple() -> None:
    model = read_model("llama3-8b")
    ops = blocks.layer_ops(model, DENSE, True)
    assert ops is blocks.layer_ops(model, DENSE, True)
    assert ops is not blocks.layer_ops(model, DENSE, False)
    assert isinstance(ops, Ops)
    assert ops == tuple(ops)
    assert hash(ops) == hash(tuple(ops)) == hash(ops)
    copied = pickle.loads(pickle.dumps(ops))
    assert copied == ops
    assert "_hash" not in vars(copied)  # strings have other hashes in another process
