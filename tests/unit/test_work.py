"""Work as operations: FLOP, shards and saved activations against closed and published forms."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cost.price import Pricer, Prices
from planner.intake.models import read_model
from planner.specs.mixers import COMPRESSED, Mixer
from planner.specs.model import LayerKind, ModelSpec
from planner.work import axes, blocks
from planner.work.ops import Collective, Elementwise, Gemm, Ops
from tests import pricing
from tests.conftest import ROOT
from tests.pricing import batch_of, price, rows

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
    model: Any = "llama3-8b", num_gpus: int = 1, trainer: str = "torchtitan", **training: Any
) -> Pricer:
    given = {"moe_imbalance": 1.0, **training}
    return pricing.pricer(model, num_gpus, trainer=trainer, **given)


def flops(p: Pricer, **layout: Any) -> np.ndarray:
    return price(p, **layout).stage_seconds.costs.forward_flops[:, 0]


def microbatch_flops(p: Pricer, **layout: Any) -> float:
    """Forward FLOP of one microbatch of one sequence on one rank that holds all layers."""
    counts = [count for _, count in p.model.distinct_layers()] + [1.0, 1.0]
    return float(counts @ flops(p, **layout))


def layer_bytes(p: Pricer, **layout: Any) -> float:
    return float(price(p, **layout).stage_seconds.costs.saved_bytes[0, 0])


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
        states = 2 * model.mamba_width * model.ssm_state_size
        return 2.0 * (model.mamba_chunk_size * inside + states)
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
    kinds = ["sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": 2, "sliding_window": window, "layer_types": kinds}
    p = pricer({"base": "llama3-8b", **layers}, seq_len=seq)
    assert p.model.layer_windows() == (window, 0)
    windowed, full = flops(p)[:2]
    per_key = 2.0 * seq * p.model.num_attention_heads * 2 * p.model.head_dim
    fewer = seq / 2 - (window - window**2 / (2 * seq))
    assert full - windowed == pytest.approx(per_key * fewer, rel=1e-9)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "gemma2-9b", "qwen2.5-14b"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_divides_every_matmul(name: str, tp: int) -> None:
    one, several = (pricer(name, num_gpus, "megatron") for num_gpus in (1, 8))
    assert tp * flops(several, tp=tp) == pytest.approx(flops(one), rel=1e-12)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_cp_divides_all_work_attention_too(name: str, method: str) -> None:
    """Head-tail balance: every rank has the same share of the causal triangle."""
    quarter = flops(pricer(name, 4), cp=4, cp_method=method)
    assert 4 * quarter == pytest.approx(flops(pricer(name)), rel=1e-12)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b"])
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_ep_moves_expert_work_without_adding_any(name: str, ep: int) -> None:
    """ep ranks bring a microbatch each: a share is one microbatch's with all experts."""
    assert flops(pricer(name, 8), ep=ep) == pytest.approx(flops(pricer(name)), rel=1e-12)


@pytest.mark.parametrize(("etp", "routers"), [(1, 1), (4, 4)])
def test_experts_under_tp_are_divided_by_tokens_or_by_width(etp: int, routers: int) -> None:
    """Experts over 2 ranks of 4 x 2: sequences at etp 1, widths at etp = tp; so the router."""
    p = pricer("mixtral-8x7b", 8)
    whole = flops(pricer("mixtral-8x7b"))[0]
    router = 2.0 * SEQ * p.model.hidden_size * p.model.num_experts
    local = flops(p, tp=4, dp_shard=2, ep=2, etp=etp)[0]
    assert 4 * local == pytest.approx(whole + (routers - 1) * router, rel=1e-12)


def test_mla_down_projections_are_replicated_under_tp() -> None:
    """DeepSeek's narrow projections have no heads: every TP rank runs them whole."""
    p = pricer("deepseek-v2", 8)
    whole, local = microbatch_flops(pricer("deepseek-v2")), microbatch_flops(p, tp=8)
    model = p.model
    ranks = model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim
    narrow = 2.0 * SEQ * model.hidden_size * ranks
    assert 8 * local - whole == pytest.approx(7 * narrow * model.num_hidden_layers, rel=1e-9)


def test_imbalance_scales_the_busiest_ranks_experts() -> None:
    """Its rows do, from which its seconds are; flops are those of a mean rank."""
    both = [pricer("mixtral-8x7b", 8, moe_imbalance=x) for x in (1.0, 1.5)]
    even, skewed = (microbatch_flops(p, ep=8) for p in both)
    assert skewed == even
    few, many = (local_sizes(p, ep=8)["tokens_per_expert"][0] for p in both)
    assert many == pytest.approx(1.5 * few, rel=1e-9)


def test_a_capacity_fills_every_expert_alike() -> None:
    """Of 4,096 tokens to two of eight experts one rank sends each 1,024, or its capacity of them,
    rounded up; quantised experts pad that to what their kernels take, 32 rows in MXFP8."""
    for capacity, sent in ((1.0, 1024), (1.2501, 1281), (0.5, 512)):
        p = pricer(
            "mixtral-8x7b", 8, trainer="megatron", moe_imbalance=None, moe_capacity_factor=capacity
        )
        for precision, multiple in (("bf16", 1), ("mxfp8", 32)):
            sizes = local_sizes(p, ep=8, precision=precision)
            assert sizes["tokens_per_expert"] == pytest.approx([8 * sent])
            padded = -(-8 * sent // multiple) * multiple
            assert sizes["tokens_grouped"] == pytest.approx([padded])


def local_sizes(p: Pricer, **layout: Any) -> dict[str, Any]:
    return axes.local_sizes(batch_of(p, **layout), p.model, p.training, p.rules)


def test_expected_imbalance() -> None:
    """One rank holds all; more copies a rank are evener; more ranks make the worst worse."""
    copies, ep = np.array([8192.0]), np.array([8.0])
    assert axes.expected_imbalance(copies, np.array([1.0])) == 1.0
    assert axes.expected_imbalance(copies, ep) > axes.expected_imbalance(4 * copies, ep) > 1.0
    assert axes.expected_imbalance(copies, 8 * ep) > axes.expected_imbalance(copies, ep)
    loads = np.random.default_rng(0).poisson(8192, size=(2000, 8)).max(axis=1).mean() / 8192
    assert axes.expected_imbalance(copies, ep)[0] == pytest.approx(loads, abs=0.01)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_dimension_has_a_size_and_every_site_a_rule(name: str) -> None:
    p = pricer(name, 8)
    sizes, kinds = local_sizes(p, cp=2, micro_batch_size=2), p.model.distinct_layers()
    lists = [blocks.layer_ops(p.model, kind, flash) for kind, _ in kinds for flash in (True, False)]
    others = [blocks.head_ops(p.model), blocks.embedding_ops(p.model)]
    for op in itertools.chain(*lists, *others):
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


def test_tp_without_sequence_parallelism_reduces_twice_each_way() -> None:
    layer = blocks.layer_ops(read_model("llama3-8b"), DENSE, True)
    sites = [op.site for op in layer if isinstance(op, Collective) and op.site.startswith("tp_")]
    batch = rows({"tp": 8, "sequence_parallel": False})
    rules = [rule for site in sites for rule in axes.SITES[site] if rule.applies(batch).all()]
    every = sorted(str(one) for rule in rules for one in (rule.forward, rule.backward))
    assert every == 4 * ["None"] + 4 * ["all-reduce"]


# ---- saved activations: Korthikanti et al. 2022 --------------------------------------------------
# Their layer keeps 34 s b h + 5 a s^2 b bytes, of which 1 s b h each are the masks of dropout on
# the two residual branches. The catalogue's GPT-3 has none; facts/memory-activations-* have both.
# The mask of the attention dropout is in both (the 5).


def gpt3(tp: int = 1, trainer: str = "megatron", **layout: Any) -> float:
    p = pricer(GPT3, 8, trainer, seq_len=S, attention_kernel="unfused")
    return layer_bytes(p, tp=tp, micro_batch_size=B, **layout) / (S * B * H)


RESIDUAL_MASKS = 2.0
# fp32 mean and deviation of each row of both norms, which the paper leaves out
STATISTICS = 2 * 2 * 4.0 / H
SCORES = 5.0 * A * S / H
WHOLE = 34 - RESIDUAL_MASKS + STATISTICS
UNDER_TP = 10 - RESIDUAL_MASKS + 24 / 8 + STATISTICS  # norms' and matmuls' inputs stay whole


@pytest.mark.parametrize(("tp", "parallel", "ac", "kept"), [
    (1, False, "none", WHOLE + SCORES),
    # s b h (10 + 24 / t + 5 a s / (h t))
    (8, False, "none", UNDER_TP + SCORES / 8),
    (8, True, "none", (WHOLE + SCORES) / 8),
    (1, False, "selective-attention", WHOLE),
    (8, False, "selective-attention", UNDER_TP),
    (8, True, "selective-attention", WHOLE / 8),
    # 2 s b h; under sequence parallelism the input is a shard (Megatron and FSDP2 alike)
    (1, False, "full", 2.0),
    (8, False, "full", 2.0),
    (8, True, "full", 2.0 / 8),
])  # fmt: skip
def test_activations_of_the_paper(tp: int, parallel: bool, ac: str, kept: float) -> None:
    found = gpt3(tp, ac=ac, sequence_parallel=parallel)
    assert found == pytest.approx(kept, rel=1e-9)


def test_torch_keeps_the_gathered_inputs_that_megatron_gathers_again() -> None:
    """DTensor keeps all-gathered inputs of columns: 2 inputs of 2 s b h not divided by t."""
    ours = gpt3(8, ac="none", sequence_parallel=True, trainer="fsdp")
    assert ours == pytest.approx(4 + (WHOLE - 4 + SCORES) / 8, rel=1e-9)


# ---- saved activations: Llama 3 8B by hand, 8192 tokens ------------------------------------------

T8, HID, Q, KV, FFN = 8192, 4096, 4096, 1024, 14336
LSE = 4 * 32


def llama8(**training: Any) -> Pricer:
    return pricer("llama3-8b", 8, **{"seq_len": T8, **training})


def llama(**layout: Any) -> Prices:
    return price(llama8(), **layout)


def kept(**layout: Any) -> float:
    return layer_bytes(llama8(), **layout) / T8


def test_selective_op_keeps_every_second_matmul_attention_and_the_input() -> None:
    """TorchTitan's policy keeps wq, wv, w1, w2, and attention's output with its statistics; under
    TP shards of them, and the scattered sums."""
    by_hand = 2 * (HID + Q + KV + FFN + HID) + 2 * Q + LSE
    assert kept(ac="selective-op") == by_hand
    under_tp = 2 * (HID + Q + KV + FFN) / 8 + 2 * HID + (2 * Q + LSE) / 8 + 2 * 2 * HID / 8
    assert kept(ac="selective-op", tp=8) == under_tp


def test_no_checkpointing_keeps_what_eager_autograd_keeps() -> None:
    """Two norm and two matmul inputs, q k v, attention's output, w1 w3 silu and their product; a
    compiled layer recomputes silu."""
    by_hand = 2 * (2 * HID + 2 * HID + Q + 2 * KV + Q) + 2 * 4 + LSE + 2 * 4 * FFN
    assert kept(ac="none") == by_hand
    assert kept(ac="none", compile=True) == by_hand - 2 * FFN


def test_every_second_layer_keeps_half_of_it_all() -> None:
    none, half, full = (kept(ac=ac) for ac in ("none", "selective-layer-2", "full"))
    assert half == pytest.approx((none + full) / 2)
    assert kept(ac="selective-layer-1") == full == 2 * HID


MEGATRON, EARLY = {"trainer": "megatron"}, {"trainer_version": "0.1.0"}


@pytest.mark.parametrize(("training", "layout", "share", "redone"), [
    ({}, {"ac": "none"}, 0.0, 0.0),
    ({}, {"ac": "selective-op"}, 0.0, 2.0 * T8 * HID * (KV + Q + FFN)),  # wk, wo and w3
    ({}, {"ac": "full"}, 1.0, 0.0),
    ({}, {"ac": "selective-layer-4"}, 1 / 4, 0.0),
    # all but its last product (w2), where recomputation stops early
    ({}, {"ac": "full", "compile": True}, 1.0, -2.0 * T8 * HID * FFN),
    (EARLY, {"ac": "full"}, 1.0, -2.0 * T8 * HID * FFN),
    (MEGATRON, {"ac": "full", "zero_stage": 1}, 1.0, 0.0),
])  # fmt: skip
def test_recomputed_flops_of_each_mode(
    training: dict[str, str], layout: dict[str, Any], share: float, redone: float
) -> None:
    """share: of a layer's forward. Embedding and head are outside checkpointing."""
    s = price(llama8(**training), **layout).stage_seconds
    layer, *ends = s.costs.recompute_flops[:, 0]
    assert layer == pytest.approx(share * s.costs.forward_flops[0, 0] + redone, rel=1e-12)
    assert ends == [0, 0]


def test_memory_budget_runs_from_full_to_none() -> None:
    shares = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
    modes = ("full", *(f"memory-budget-{share}" for share in shares), "none")
    found = [llama(ac=ac, compile=True) for ac in modes]
    saved = [one.stage_seconds.costs.saved_bytes[0, 0] for one in found]
    redone = [one.parts["recompute"][0] for one in found]
    assert saved == sorted(saved)
    assert redone == pytest.approx(sorted(redone, reverse=True), rel=1e-9)
    assert (saved[0], saved[-1]) == (saved[1], saved[-2])
    assert (redone[1], redone[-2]) == (pytest.approx(redone[0], rel=1e-9), 0.0)


def test_memory_budget_keeps_attention_first() -> None:
    """Flash attention costs most seconds a byte, so a small budget spares its recomputation."""
    modes = ("full", "memory-budget-0.1")
    full, tenth = (
        llama(ac=ac, compile=True).stage_seconds.costs.recompute_flops[0, 0] for ac in modes
    )
    assert full - tenth >= 2.0 * T8 * (T8 / 2) * 32 * 256


def test_operations_are_made_once_and_hashed_as_their_tuple() -> None:
    model = read_model("llama3-8b")
    ops = blocks.layer_ops(model, DENSE, True)
    assert ops is blocks.layer_ops(model, DENSE, True)
    assert ops is not blocks.layer_ops(model, DENSE, False)
    assert isinstance(ops, Ops)
    assert (ops, hash(ops)) == (tuple(ops), hash(tuple(ops)))
    copied = pickle.loads(pickle.dumps(ops))
    assert copied == ops
    assert "_hash" not in vars(copied)  # strings have other hashes in another process
