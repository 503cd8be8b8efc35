"""How trainers run Muon: owners of matrices, and the communication that they need."""

from dataclasses import dataclass, replace

from planner.specs.training import MuonTpMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """One trainer's way.

    tp_mode: how a matrix that TP cuts is orthogonalised, unless the job says (`muon_tp_mode`).
        None: whole matrices cost each TP rank its share of them, and nothing travels over TP.
    whole_owners: where states are sharded, each data-parallel rank owns whole matrices (of its TP
        rank). Otherwise momenta travel to an owner, and updates back.
    pads_owners: buffers of parameters and gradients hold as much for each owner as for the busiest.
    reduces_whole: gradients are all-reduced over the owners, not reduce-scattered.
    named_sharded: Megatron-LM's optimizer is `dist_muon` where states are sharded, and
        --use-distributed-optimizer is refused; otherwise that flag shards Muon too.
    fused_gate: gate and up projection are one matrix.
    hides_sharded, hides_whole: communication of data parallelism may run under compute where the
        states are sharded, or not.
    hides_gathers: and gathers of parameters are among it.
    """

    tp_mode: MuonTpMode | None = None
    whole_owners: bool = False
    pads_owners: bool = False
    reduces_whole: bool = False
    named_sharded: bool = False
    fused_gate: bool = False
    hides_sharded: bool = True
    hides_whole: bool = True
    hides_gathers: bool = True
    source: str


EXCHANGED = Muon(source="distributed Muon, arXiv 2502.16982 section 2.3")
# `--optimizer muon --use-distributed-optimizer`, before core 0.18 `dist_muon`. Source: Megatron-LM
# core 0.16 to 0.20: core/optimizer/muon.py, emerging_optimizers.py, training/arguments.py ("Muon
# optimizer check").
LAYER_WISE = Muon(
    tp_mode="blockwise",
    whole_owners=True,
    pads_owners=True,
    fused_gate=True,
    source="Megatron-LM core/optimizer/layer_wise_optimizer.py",
)
# core 0.16 and 0.17: matrices are dealt out to and fro by size, and all ranks get all gradients
PING_PONG = replace(
    LAYER_WISE, pads_owners=False, reduces_whole=True, named_sharded=True, hides_whole=False
)
# No release of Megatron-Bridge gives buffers a layout for the owners, and none asserts what 0.16
# does: recipes/kimi (overlap_param_gather = False), training/optim.py, recipes/utils/
# optimizer_utils.py (its own mode).
BRIDGED = replace(PING_PONG, hides_whole=True, hides_gathers=False)
