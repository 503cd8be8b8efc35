"""Rules on recurrent mixers and on sparse attention under TP, CP and pipelines."""

import math
from collections.abc import Sequence

import numpy as np

from planner.columns import BoolColumn, IntColumn, LayoutBatch
from planner.rules.base import Context, Rule, by_split, choices, divides, divisors, under
from planner.specs.layout import CP_METHODS
from planner.specs.mixers import LEAST_HEADS, SHARING
from planner.specs.model import ModelSpec
from planner.trainers.megatron_models import builds_itself, is_hybrid

_CUTTERS = frozenset({"megatron", "megatron-bridge"})


def _heads(c: Context) -> int:
    """The number that TP times CP divides."""
    return math.gcd(*c.model.recurrent_heads)


def _recurrent(c: Context) -> bool:
    return not {"attention", "attention-shared", "none"}.issuperset(c.model.mixers)


def _absorbs(c: Context) -> bool:
    """Whether sparse attention runs in Megatron-LM's kernels."""
    return c.model.indexed and c.trainer.fused_kernels


def _padded(tp: IntColumn, c: Context) -> BoolColumn:
    heads = np.maximum(c.model.num_attention_heads // tp, 1)
    return np.asarray((heads % LEAST_HEADS != 0) & (LEAST_HEADS % heads != 0))


def split_between_indexers(model: ModelSpec, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage, as even as they get where every stage begins with an indexer.

    None where there are not so many.
    """
    layers = model.num_hidden_layers
    starts = [i for i, mixer in enumerate(model.mixers) if mixer not in SHARING]
    chosen = [0]
    for stage in range(1, stages):
        later = [i for i in starts if i > chosen[-1]]
        if not later:
            return None
        chosen.append(min(later, key=lambda i: abs(i - stage * layers / stages)))
    ends = [*chosen[1:], layers]
    return tuple(end - start for start, end in zip(chosen, ends, strict=True))


def _begins_with(x: LayoutBatch, c: Context, shares: Sequence[bool]) -> BoolColumn:
    """Whether a stage begins with one of these layers.

    A trainer's own split counts as broken where it is uneven.
    """
    layers, stages = c.model.num_hidden_layers, x.pp * x.virtual_stages
    numbers, row = np.unique(stages, return_inverse=True)
    broken = [layers % n != 0 or any(shares[:: layers // n]) for n in numbers.tolist()]
    given = [
        any(shares[start] for start in np.cumsum(split)[:-1] if start < layers)
        for split in x.splits
    ]
    usual = np.array(broken, dtype=np.int64)[row].reshape(stages.shape)
    return np.asarray((x.pp > 1) & (by_split(x, usual, given) > 0))


def _reaches_across(c: Context) -> str:
    """Inputs of layers besides the stream that one stage sends to the next; "" for none."""
    shared = "attention-shared" in c.model.mixers
    found = ["per-layer embeddings"] * (c.model.hidden_size_per_layer_input > 0)
    return " and ".join(found + ["keys and values of earlier layers"] * shared)


def _parts_hashed(x: LayoutBatch, c: Context) -> BoolColumn:
    """Whether the first stage has fewer layers than a table routes; a trainer's split is even."""
    needed, ends = c.model.num_hash_layers, c.model.num_hidden_layers + 2
    usual = -(-ends // np.maximum(x.pp * x.virtual_stages, 1)) - 1
    first = by_split(x, usual, [split[0] for split in x.splits])
    return np.asarray((x.pp > 1) & (first < needed))


MIXER_RULES: tuple[Rule, ...] = (
    # transformers' base_model_pp_plan hands on hidden states; Megatron-Bridge 0.6
    # models/gemma/gemma4_provider.py: "currently supports PP=1 only"
    Rule(
        key="layers read what no stage hands on",
        field="pp",
        applies=lambda c: _reaches_across(c) != "",
        broken=lambda pp: pp > 1,
        rule=lambda x, c: (
            f"layers of {c.model.name} read {_reaches_across(c)}, which no trainer hands from one "
            f"stage of pp={x.pp} to the next"
        ),
        remedy="set pp to 1",
    ),
    # Megatron-Core ssm/gated_delta_net.py, mamba_context_parallel.py; transformer_config.py
    # (linear_num_key_heads must be a multiple of tp x cp)
    Rule(
        key="tp x cp does not divide the heads of a recurrent mixer",
        field="tp",
        applies=_recurrent,
        broken=lambda tp, cp, c: ~divides(_heads(c), tp * cp),
        rule=lambda x, c: (
            f"tp={x.tp} x cp={x.cp} does not divide the {_heads(c)} groups of heads that recurrent "
            f"layers of {c.model.name} have"
        ),
        remedy=lambda x, c: f"try tp x cp {choices(divisors(_heads(c)))}",
    ),
    # transformers' tensor-parallel plan gathers what it projects, and its scan has no ranks
    Rule(
        key="the trainer does not cut recurrent mixers",
        field="tp",
        applies=lambda c: (
            _recurrent(c) and c.training.trainer not in _CUTTERS and not c.model.compresses
        ),
        broken=lambda tp, cp: tp * cp > 1,
        rule="tp={x.tp}, cp={x.cp}: under {c.trainer.title} every rank runs recurrent layers whole",
        remedy="set tp and cp to 1, or training.trainer to megatron",
    ),
    # Megatron-LM dev of 2026-08-21 transformer_config.py ("only supports TP size 1"; CP of packed
    # sequences in contiguous parts); transformers' plan cuts experts and nothing else
    Rule(
        key="compressed attention is not cut",
        field="tp",
        applies=lambda c: c.model.compresses,
        broken=lambda tp, cp: tp * cp > 1,
        rule="tp={x.tp}, cp={x.cp}: every rank runs {c.model.name}'s compressed attention whole",
        remedy="set tp and cp to 1",
    ),
    # Megatron-Bridge 0.6 models/deepseek/deepseek_v4_bridge.py: their table reads the tokens
    Rule(
        key="hash-routed layers stand behind the embedding",
        field="layers_per_stage",
        reads=frozenset({"pp", "virtual_stages", "split"}),
        applies=lambda c: c.model.num_hash_layers > 0,
        broken=_parts_hashed,
        rule="a table chooses experts by the token in {c.model.num_hash_layers} layers, which "
        "pp={x.pp} separates from the embedding",
        remedy="give the first stage {c.model.num_hash_layers} layers in layers_per_stage, or use "
        "fewer stages",
    ),
    # Megatron-Bridge 0.2 to 0.6 models/mamba/mamba_provider.py, models/hybrid/hybrid_provider.py
    Rule(
        key="Megatron-Bridge cuts no hybrid model into chunks",
        field="virtual_stages",
        applies=lambda c: is_hybrid(c.model) and builds_itself(c.release),
        broken=lambda pp, virtual_stages: (pp > 1) & (virtual_stages > 1),
        rule="Megatron-Bridge gives each rank of hybrid models such as {c.model.name} one chunk, "
        "not {x.virtual_stages}",
        remedy="set virtual_stages to 1, or training.trainer to megatron",
    ),
    # Megatron-Bridge 0.5, 0.6 models/mimo_v2_flash/mimo_v2_flash_provider.py
    Rule(
        key="MiMo-V2-Flash under Megatron-Bridge",
        field="cp",
        applies=lambda c: c.model.sliding_sinks and builds_itself(c.release),
        broken=lambda cp, tp, c: (cp > 1) | (tp > min(c.kv_heads)),
        rule=lambda x, c: (
            f"tp={x.tp}, cp={x.cp}: Megatron-Bridge runs {c.model.name} without CP, on as many TP "
            f"ranks as it has groups of heads, {min(c.kv_heads)}"
        ),
        remedy=lambda x, c: f"set cp to 1 and tp to at most {min(c.kv_heads)}",
    ),
    # core 0.17 and 0.18 transformer/transformer_config.py (__post_init__)
    Rule(
        key="gated DeltaNet under context parallelism came with a release",
        field="cp",
        applies=lambda c: "gated-delta" in c.model.mixers and under("megatron", before="0.18")(c),
        broken=lambda cp: cp > 1,
        rule="{c.trainer.title} {c.release.number} has no gated DeltaNet with cp={x.cp}",
        remedy="set cp to 1, or training.trainer_version to 0.18 or later",
    ),
    # core 0.19 experimental_attention_variant/absorbed_mla.py
    Rule(
        key="sparse attention over TP needs sequence parallelism",
        field="sequence_parallel",
        applies=_absorbs,
        broken=lambda tp, sequence_parallel: (tp > 1) & ~sequence_parallel,
        rule="{c.trainer.title} has sparse attention with tp={x.tp} only beside it",
        remedy="set sequence_parallel to true",
    ),
    # dsa_cudnn_kernels.py, _flash_mla_head_padding: others fall back to scores of the whole square
    Rule(
        key="tp leaves heads that the sparse kernel does not pad",
        field="tp",
        applies=_absorbs,
        broken=_padded,
        rule=lambda x, c: (
            f"tp={x.tp} leaves {c.model.num_attention_heads // x.tp} heads a rank; sparse "
            f"attention runs divisors and multiples of {LEAST_HEADS}"
        ),
        remedy="set tp to 1",
    ),
    # transformer_config.py: "DSAttention context parallelism currently supports allgather only"
    Rule(
        key="sparse attention gathers keys over CP",
        field="cp_method",
        applies=_absorbs,
        broken=lambda cp, cp_method: (cp > 1) & (cp_method != CP_METHODS.index("allgather")),
        rule="{c.trainer.title} has no sparse attention with cp_method {x.cp_method}",
        remedy="set cp_method to allgather, or cp to 1",
    ),
    Rule(
        key="a stage begins under a shortcut",
        field="layers_per_stage",
        reads=frozenset({"pp", "virtual_stages", "split"}),
        applies=lambda c: c.model.moe_shortcut,
        broken=lambda x, c: _begins_with(
            x, c, [False, *(kind.moe for kind in c.model.layer_kinds()[:-1])]
        ),
        rule="a stage of pp={x.pp} begins with a layer of {c.model.name} to which the outputs of "
        "experts of the layer before are added, and no trainer hands them on",
        remedy="give each stage an even number of layers in layers_per_stage",
    ),
    # dsa.py: "Cross-PP top-k sharing is not supported"
    Rule(
        key="a stage begins with a layer that has no indexer",
        field="layers_per_stage",
        reads=frozenset({"pp", "virtual_stages", "split"}),
        applies=lambda c: bool(SHARING & {*c.model.mixers}) and c.trainer.fused_kernels,
        broken=lambda x, c: _begins_with(x, c, [mixer in SHARING for mixer in c.model.mixers]),
        rule="{c.trainer.title} shares chosen tokens only within a stage, and a stage of "
        "pp={x.pp} begins with a layer that has no indexer",
        remedy=lambda x, c: (
            f"set layers_per_stage to {list(split)}"
            if (split := split_between_indexers(c.model, x.pp * x.virtual_stages))
            else "use fewer stages"
        ),
    ),
)
