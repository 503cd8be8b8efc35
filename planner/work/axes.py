"""Each parallel axis in one place: the dimensions that it divides and the collectives it inserts.

Letters: U rows of a batch (unique layouts); every size is a column (U,).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, LayoutBatch
from planner.precision import column
from planner.specs.layout import AC_KINDS, CP_METHODS, MOE_DISPATCHERS
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules
from planner.work.expert_precision import expert_precision
from planner.work.heads import head_sizes
from planner.work.mixers import mixer_sizes

ULYSSES = CP_METHODS.index("ulysses")
ALLTOALL = CP_METHODS.index("alltoall")
ALLGATHER = CP_METHODS.index("allgather")
# modes that recompute whole layers, experts and exchange included
WHOLE_LAYERS = [AC_KINDS.index(kind) for kind in ("full", "block", "uniform")]
# Of bounds alone, instead of a CP method that is not Ulysses, or of a dispatcher: each operation
# takes the least that the trainer's own take.
ANY = -1
SENDS_COPIES = MOE_DISPATCHERS.index("alltoall")


def local_sizes(
    batch: LayoutBatch, model: ModelSpec, training: TrainingSpec, rules: TrainerRules
) -> Mapping[str, FloatColumn]:
    """Size of every named dimension on one rank, one microbatch.

    tokens: the rank's share of a microbatch outside sequence-parallel regions.
    tokens_sp: inside them.
    tokens_saved: of the input that a column-parallel linear saves (Megatron saves the shard and
        gathers it again).
    tokens_moe: the rank's own tokens, as its router reads them.
    tokens_routed: rows that a rank's experts compute: top-k copies, but for those that no expert
        computes, times the load of the busiest rank.
    tokens_sent: rows that the busiest rank exchanges.
    tokens_copied: copies of its own tokens that a rank lays out for sending; 0 where the
        dispatcher's kernel reads the tokens themselves.
    tokens_unsorted: rows in which copies go back to the tokens' order. TorchTitan's TP ranks share
        the tokens of one exchange, but each lays out all of them.
    tokens_regrouped: received rows that a kernel lays out by local expert; 0 for a trainer whose
        order is right without it, at ep = 1.
    tokens_grouped: the same as tokens_routed with padding rows.
    tokens_gathered, tokens_scattered, tokens_exchanged: of buffers that exist only where TP
        gathers, or TP or EP sends; else 0.
    tokens_batched: of microbatches of several sequences; else 0.
    tokens_ring: own tokens, where attention runs as torch's ring over CP; else 0.
    tokens_ring_all: the tokens whose keys are here at once; else 0.
    """
    tp, cp, etp = (column.astype(np.float64) for column in (batch.tp, batch.cp, batch.etp))
    tokens = batch.micro_batch_size * (training.seq_len / cp)
    sp = np.where(batch.sequence_parallel, tp, 1.0)
    sizes: dict[str, FloatColumn] = weight_sizes(model, tp, etp)
    ring = np.where(
        rules.framework.rings_attention & (batch.cp > 1) & (batch.cp_method != ULYSSES), tokens, 0.0
    )
    ones = np.ones_like(tp)
    sizes |= {
        "tokens": tokens,
        "tokens_sp": tokens / sp,
        "tokens_saved": tokens if rules.framework.saves_gathered_inputs else tokens / sp,
        "tokens_gathered": np.where(batch.sequence_parallel & (batch.tp > 1), tokens, 0.0),
        "tokens_scattered": np.where(batch.tp > 1, tokens / sp, 0.0),
        "tokens_batched": np.where(batch.micro_batch_size > 1, tokens, 0.0),
        "tokens_ring": ring,
        "tokens_ring_all": ring * np.where(batch.cp_method == ALLGATHER, cp, 1.0),
        "context": training.seq_len * ones,
        "attended": training.seq_len / 2.0 * ones,
        "chosen": min(model.index_topk, training.seq_len // max(model.compress_rate_csa, 1)) * ones,
        "vocab_loss": model.vocab_size / (tp if loss_is_parallel(training, rules) else ones),
    }
    if model.num_experts:
        sizes |= _expert_sizes(model, training, rules, batch, (tokens, sp))
    return sizes


def weight_sizes(model: ModelSpec, tp: FloatColumn, etp: FloatColumn) -> dict[str, FloatColumn]:
    """Size of every dimension that a layer's weights have on one rank.

    With tp and etp of 1 they are those of the whole weights.
    """
    ones = np.ones_like(tp)
    return {
        "hidden": model.hidden_size * ones,
        "hidden_pair": 2 * model.hidden_size * ones,
        "hidden_cut": model.hidden_size / tp,
        **head_sizes(model, tp),
        "ffn": model.intermediate_size / tp,
        "wide_ffn": 2 * model.intermediate_size / tp,
        "layers": model.num_hidden_layers * ones,
        "per_layer": model.hidden_size_per_layer_input * ones,
        "norm_rank": model.gated_norm_rank * ones,
        "vocab": model.vocab_size / tp,
        "shared_ffn": model.shared_expert_intermediate_size / tp,
        "expert_ffn": model.moe_intermediate_size / etp,
        "expert_hidden": model.expert_input_size * ones,
        **mixer_sizes(model, tp),
    }


def loss_is_parallel(training: TrainingSpec, rules: TrainerRules) -> bool:
    return (
        rules.vocab_parallel_loss
        if training.vocab_parallel_loss is None
        else training.vocab_parallel_loss
    )


def _expert_sizes(
    model: ModelSpec,
    training: TrainingSpec,
    rules: TrainerRules,
    batch: LayoutBatch,
    columns: tuple[FloatColumn, FloatColumn],
) -> dict[str, FloatColumn]:
    tokens, sp = columns
    ep = batch.ep.astype(np.float64)
    gathers = rules.framework.gathers_cut_rows
    apart = tokens / np.where(batch.etp > 1, 1.0, sp)
    own = tokens / sp if gathers else apart
    local = model.num_experts / ep
    load = busiest_load(batch, model, training)
    computing = model.num_computing_per_tok
    routed = apart * computing * load
    sent, copies = own * computing, batch.moe_dispatcher == SENDS_COPIES
    return {
        "tokens_moe": own,
        "experts": model.num_choices * np.ones_like(tokens),
        "experts_local": local,
        "tokens_routed": routed,
        "tokens_sent": sent * load,
        "tokens_copied": np.where(copies, sent, 0.0),
        "tokens_unsorted": np.where(copies, sent if gathers else tokens * computing, 0.0),
        "tokens_regrouped": np.where((ep > 1) | (rules.expert_alignment > 0), routed, 0.0),
        "tokens_grouped": routed + local * _padding_rows(batch, training, rules, routed / local),
        "tokens_exchanged": np.where(ep > 1, routed, 0.0),
        "tokens_per_expert": routed / local,
        "tokens_of_mean_expert": apart * computing / local,
    }


def _padding_rows(
    batch: LayoutBatch, training: TrainingSpec, rules: TrainerRules, rows: FloatColumn
) -> FloatColumn:
    """Rows that pad one expert's group of this many, (U,).

    A trainer that pads in any precision allocates a whole multiple an expert, because the host does
    not read the counts (torchtitan models/moe/utils.py _permute). Another rounds each count up, by
    (multiple - 1) / 2 rows on average (Megatron-LM core/transformer/moe/experts.py, Fp8Padding).
    """
    recipes = rules.recipes(training.trainer_version)
    multiple = column("group_multiple", expert_precision(batch, recipes), recipes)
    if rules.expert_alignment:
        return np.maximum(multiple, rules.expert_alignment)
    if training.moe_capacity_factor is not None:
        return np.asarray(-rows % multiple)
    return np.asarray((multiple - 1.0) / 2.0)


def busiest_load(batch: LayoutBatch, model: ModelSpec, training: TrainingSpec) -> FloatColumn:
    """Load of the busiest expert rank over the mean, stated or expected, (U,).

    With a capacity every expert takes the same rows of a rank, rounded up (Megatron-LM core 0.14
    transformer/moe/moe_utils.py, get_capacity).
    """
    if training.moe_imbalance is not None:
        return np.full(len(batch), training.moe_imbalance)
    shards = np.where(batch.sequence_parallel & (batch.etp == 1), batch.tp, 1) * batch.cp
    copies = batch.micro_batch_size * (training.seq_len / shards) * model.num_computing_per_tok
    if training.moe_capacity_factor is not None:
        share = copies / model.num_experts
        return np.asarray(np.ceil(share * training.moe_capacity_factor) / share)
    return expected_imbalance(copies, batch.ep.astype(np.float64))


def overlapping_exchange(batch: LayoutBatch) -> BoolColumn:
    """Layouts on which the exchange can run under another microbatch's compute, (U,)."""
    return np.asarray(
        (batch.ep > 1)
        & ((batch.pp == 1) | (batch.virtual_stages > 1))
        & ~np.isin(batch.ac_kind, WHOLE_LAYERS)
        & (batch.moe_dispatcher != MOE_DISPATCHERS.index("allgather"))
    )


def expected_imbalance(copies: FloatColumn, ep: FloatColumn) -> FloatColumn:
    """Expected load of the busiest of `ep` ranks over the mean, for random routing.

    1 + sqrt(2 ln(ep) / copies): the maximum of ep Poisson loads of mean `copies` (token copies that
    a rank receives). Real routers with a balancing loss are close to this; `training.moe_imbalance`
    overrides it.
    Source: extreme value of normal variables (Cramer 1946, section 28.6).
    """
    return np.asarray(1.0 + np.sqrt(2.0 * np.log(np.maximum(ep, 1.0)) / np.maximum(copies, 1.0)))


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective that one axis inserts at a place in a layer.

    axis: whose group carries it.
    forward, backward: the NCCL operation of each direction.
    applies: True where this axis communicates here.
    of_parts: the tensor is one rank's part of the buffer that the operation gathers, scatters or
        passes round. The buffer is as many times larger as the group has ranks.
    """

    axis: str
    forward: str | None
    backward: str | None
    applies: Callable[[LayoutBatch], BoolColumn]
    of_parts: bool = False


def _shards_tokens(b: LayoutBatch) -> BoolColumn:
    return np.asarray(b.sequence_parallel & (b.tp > 1))


def _repeats_tokens(b: LayoutBatch) -> BoolColumn:
    return np.asarray(~b.sequence_parallel & (b.tp > 1))


def _by_method(method: int) -> Callable[[LayoutBatch], BoolColumn]:
    return lambda b: (b.cp > 1) & (b.cp_method == method)


SITES: Mapping[str, tuple[Communication, ...]] = {
    "tp_enter": (
        Communication("tp", "all-gather", "reduce-scatter", _shards_tokens),
        Communication("tp", None, "all-reduce", _repeats_tokens),
    ),
    "tp_exit": (
        Communication("tp", "reduce-scatter", "all-gather", _shards_tokens),
        Communication("tp", "all-reduce", None, _repeats_tokens),
    ),
    # Megatron-Core transformer/moe/token_dispatcher.py: routed rows are gathered over the ranks
    # that cut an expert, and their partial sums scattered back.
    "etp_enter": (Communication("etp", "all-gather", "reduce-scatter", lambda b: b.etp > 1),),
    "etp_exit": (Communication("etp", "reduce-scatter", "all-gather", lambda b: b.etp > 1),),
    # "tokens" are a rank's own. The keys and values of all ranks are gathered or passed round.
    "cp_enter": (
        Communication("cp", "all-gather", "reduce-scatter", _by_method(ALLGATHER), of_parts=True),
        Communication("cp", "rotate", "rotate-gradients", _by_method(ALLTOALL), of_parts=True),
        Communication("cp", "all-to-all", "all-to-all", _by_method(ULYSSES)),
    ),
    "cp_exit": (Communication("cp", "all-to-all", "all-to-all", _by_method(ULYSSES)),),
    # Recurrent mixers run over all tokens of some heads, whatever method attention has.
    # Megatron-Core ssm/mamba_context_parallel.py, ssm/gated_delta_net.py (tensor_a2a_cp2hp).
    "cp_heads": (Communication("cp", "all-to-all", "all-to-all", lambda b: b.cp > 1),),
    "ep_exchange": (Communication("ep", "all-to-all", "all-to-all", lambda b: b.ep > 1),),
}


Group = tuple[FloatColumn, FloatColumn]  # degree and stride of the ranks of each group


def group(axis: str, batch: LayoutBatch, rank_order: tuple[str, ...]) -> Group:
    """(degree, stride) of the ranks that form one group of this axis, each (U,).

    Ranks are numbered with the first axis of `rank_order` innermost. `fsdp` joins dp_shard and cp.
    `efsdp` are the ranks that share an expert's shard. `ep` regroups the same ranks from inside out
    (TorchTitan's mesh). `ddp` and `eddp` add replicas.
    """
    b = {
        name: getattr(batch, name).astype(np.float64)
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
    }
    stride, running = {}, np.ones_like(b["tp"])
    for name in rank_order:
        stride[name], running = running, running * b[name]
    one = np.ones_like(running)
    experts = b["ep"] * b["etp"]
    ranks = b["dp_shard"] * b["cp"] * b["tp"]
    sharding = np.where(
        b["cp"] > 1, np.minimum(stride["cp"], stride["dp_shard"]), stride["dp_shard"]
    )
    groups = {
        "tp": (b["tp"], stride["tp"]),
        "cp": (b["cp"], stride["cp"]),
        "ep": (b["ep"], np.where(b["etp"] > 1, b["etp"], one)),
        "etp": (b["etp"], one),
        "fsdp": (b["dp_shard"] * b["cp"], sharding),
        "efsdp": (np.maximum(ranks / experts, 1.0), experts),
        "replicate": (b["dp_replicate"], stride["dp_replicate"]),
        "ddp": (
            b["dp_replicate"] * b["dp_shard"] * b["cp"],
            np.minimum(sharding, stride["dp_replicate"]),
        ),
        "eddp": (np.maximum(b["dp_replicate"] * ranks / experts, 1.0), experts),
        "pp": (b["pp"], stride["pp"]),
    }
    return groups[axis]
