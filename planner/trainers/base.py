"""Trainer as one value, in one file, that answers everything the planner asks of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from planner.precision import Recipe
from planner.schedules import schedules_of
from planner.specs.gpu import GpuSpec
from planner.specs.model import ModelSpec
from planner.specs.training import CudaGraphs, TrainingSpec
from planner.trainers.attention import AttentionRow, attention_kernels
from planner.trainers.muon import EXCHANGED, Muon
from planner.trainers.release import Known, Release, Releases, named, release_in
from planner.trainers.strategies import Framework, Sharding
from planner.trainers.tp_overlap import TpOverlap

NEVER = ("0", "")  # no release, no month
LayerSplit = Literal["effective", "even", "uneven"]


def lacks_nothing(model: ModelSpec, release: Release) -> list[str]:
    """Empty, for a trainer that takes any model."""
    return []


def lacks_mixers(model: ModelSpec, release: Release) -> list[str]:
    """Blocks that an ordinary transformer lacks, for a trainer without any."""
    return model.unusual


@dataclass(frozen=True, slots=True)
class Change:
    """Fields of a trainer that have another value in some releases."""

    releases: Releases
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerRules:
    """One trainer. Sets hold the values of a layout's field that it can run.

    Who it is:
    name, aliases: in `training.trainer`.
    code: name of the trainer whose code it runs with defaults of its own, so that its rules,
        releases and measurements hold; "" where the code is its own.
    expert_recipes: layouts that name no dispatcher are completed by `trainers.recipes`.
    ships: its own releases, each with the one of `code` that it rests on.
    title: as people write it.
    vendors: whose GPUs it runs on, each with the fork that it takes ("" for the trainer itself).
    history, default_release: its releases, oldest first, and the one taken where none is named;
        empty where its repository is what runs.
    changes: fields that differ by release; `at` applies them.
    distributions: layout defaults of programs that ship it, by name.
    offered: releases that a message may suggest; None where releases do not matter.
    own_code: it trains the model's own code; messages say so.
    export_format: the format in which a plan for it is written.

    What it trains:
    lacks: what of a model it has no class or argument for, in words.
    optimizers: those it has; empty for any.
    muon: how it runs Muon.

    What it assumes where a layout leaves a field unset:
    zero_stage, zero_stage_under_pp, ac, layout_defaults.
    vocab_parallel_loss, expandable_segments, chunked_loss, fused_cross_entropy: default of the
        training field of that name.
    default_cuda_graphs: what a release captures by itself, where it can (`rules.cuda_graphs`).

    What it runs and refuses:
    cp_words: how it names CP methods, where that is otherwise.
    zero_stages, precisions, ac_kinds, cp_methods, moe_dispatchers: values of the layout's field of
        that name.
    cuda_graphs: values of the training field of that name.
    captures_dropless: graphs of a whole step may hold experts that drop no token.
    captures_routing: graphs of layers hold the routers, and not only what comes before them.
    compiles, always_compiles: torch.compile of the blocks; it has no other way.
    chunks_loss, fuses_cross_entropy, compiles_loss: its loss may run in chunks, in place, compiled.
    steps_in_backward: it offers optimizer-in-backward.
    offloads_activations: it can keep the activations of some layers on the host.
    offloads_partly: CPU offload can leave a share of the optimizer's states on the device.
    replicates_kv_heads: tp may be a multiple of the KV heads.
    seq_divisor_always: seq_len must divide by 2 x cp x tp, even where cp = 1 or nothing shards
        sequences over TP.
    etp_one_or_tp: etp must be 1 or tp.
    sp_with_experts: tp with ep needs sequence parallelism.
    zero_2_under_pp: gradients may stay sharded between pipeline microbatches.
    split: how layers go to stages. "effective": evenly, embedding and head counting as one layer
        each, stages differing by at most one; "even": the same count on every stage, where
        embedding and head may count as one layer each; "uneven": any.
    writes_splits: it has an argument for any split.
    ep_over_replicas: expert parallelism may span dp_replicate (Megatron), not only the sharding
        ranks (TorchTitan).

    What a search tries:
    searched_ac, searched_precisions: modes and recipes, besides the GPU's 16-bit format.
    by_request: fields of the layout that stay at the trainer's default unless the user fixes or
        allows other values.
    turns_recomputation: variations of the best layouts recompute just as much as they must
        (memory-budget-X, block-N).

    How it computes:
    sharding, framework: the two strategies.
    tp_overlaps: how it hides tensor-parallel communication. The first row that holds for a layout
        counts; without one it hides nothing.
    recipes_in: precision recipes of a release, in the order of the precision codes.
    whole_owners: where the optimizer's state is sharded, a rank owns whole parameters. Gradients
        are reduced to one owner after another, and parameters are broadcast by one after another
        before the next step begins. Otherwise every tensor is split.
    fused_kernels: norms, activations and rotary run as fused kernels without torch.compile
        (Transformer Engine, flash-attn).
    drops_residual: it trains with `ModelSpec.residual_dropout`; otherwise models have none.
    tf32: its products in fp32 run as TF32 where the GPU has it. torch's do not
        (torch.backends.cuda.matmul.allow_tf32 is off by default since 1.12), unless a trainer sets
        torch.set_float32_matmul_precision.
    attention: which attention kernel its releases bring, newest first.
    attention_kernels: values of the training field of that name that it can be told; "flash" and
        what the release brings are always among what it runs.
    early_stop: eager recomputation stops once backward has what it needs, as torch's non-reentrant
        checkpoint does by default; otherwise it runs the whole layer again.
    unlisted: kernels, or sites of collectives, whose outputs its selective-op repeats.
    repeats_kv_until: last release and month with keys and values copied to all query heads.
    composite_norm_until: last release and month on a torch before 2.8, whose RMSNorm is a chain.
    composite_norm_since: month before which its configurations named a fused kernel.
    scores_inside: its experts multiply their activation by the scores of the router.
    compiles_exchange: torch.compile covers what runs between the router and the experts.
    overlaps_exchange: it can run the exchange of experts under another microbatch's compute.
    clips_qk, drops_tokens: it can do what `training.qk_clip` and `moe_capacity_factor` ask for.
    fuses_experts: in graphs of a whole step, MXFP8 experts run as one kernel (`trainer_kernels`).
    expert_alignment: rows added to each expert's tokens so that the grouped matmul is aligned in
        any precision (TOKEN_GROUP_ALIGN_SIZE_M in 16 bits), or `Recipe.group_multiple` where that
        is more; 0 where only quantised experts are padded.
    gradient_dtype: dtype of gradients between microbatches.
    fused_sums: the GEMM that computes a weight's gradient adds it to them; otherwise a separate
        kernel does.
    loss_bytes, fused_loss_bytes: bytes per logit at the peak of the loss, eager and with fused
        kernels. Eager: fp32 log-softmax, its incoming and its outgoing gradient (aten::log_softmax,
        nll_loss backward); flash-attn's loss works in place.
    sharded_loss_bytes, fused_sharded_loss_bytes: the same where TP shards the vocabulary. The
        eager backward of DTensor's loss_parallel holds log-softmax, one gradient, the exponential
        and their sum (distributed/tensor/parallel/loss.py).
    eager_loss_until: last month in which torch.compile did not compile the loss.
    ends_in_root: embedding and head are in FSDP's root unit, with what no layer holds. It stays
        gathered from the first forward to the end of the backward, where its gradients are reduced.
    loss_leftover_bytes: bytes per logit that the loss reads and frees before its backward allocates
        more than that at once. The allocator caches them; a pipeline holds them until then.
    placeholders_since: first month in which Transformer Engine's GEMMs, which add to the fp32
        gradient, return an empty 16-bit one. It is cached for every shape of weight
        (get_dummy_wgrad in pytorch/module/base.py). "" where nothing does this.
    gradients_apart: gradients are computed in the compute dtype for the whole stage and then added
        to those in fp32, so that both exist at once (DeepSpeed's BF16_Optimizer). Otherwise a GEMM
        adds to the fp32 gradient directly.
    memory_extra_sd: standard deviation of the logarithm of measured over predicted peak bytes, in
        addition to the profile's, for a trainer whose saved tensors were not compared with its
        allocator's peak.
    source: where all of this comes from, except where a comment names another source.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    code: str = ""
    expert_recipes: bool = False
    ships: Mapping[str, str] = field(default_factory=dict)
    vendors: Mapping[str, str]
    history: tuple[Known, ...] = ()
    default_release: str = ""
    changes: tuple[Change, ...] = ()
    distributions: Mapping[str, Mapping[str, object]]
    offered: tuple[str | None, ...] = ()
    own_code: bool = False
    export_format: str
    lacks: Callable[[ModelSpec, Release], list[str]] = lacks_nothing
    optimizers: tuple[str, ...] = ()
    muon: Muon = EXCHANGED
    zero_stage: int
    zero_stage_under_pp: int
    ac: str
    layout_defaults: Mapping[str, object]
    vocab_parallel_loss: bool = True
    expandable_segments: bool
    chunked_loss: bool = False
    fused_cross_entropy: bool = False
    zero_stages: frozenset[int]
    precisions: frozenset[str]
    ac_kinds: frozenset[str]
    cp_methods: frozenset[str]
    cp_words: Mapping[str, str] = field(default_factory=dict)
    moe_dispatchers: frozenset[str] = frozenset({"alltoall"})
    cuda_graphs: frozenset[str] = frozenset({"none"})
    default_cuda_graphs: CudaGraphs = "none"
    captures_dropless: bool = True
    captures_routing: bool = True
    compiles: bool = False
    always_compiles: bool = False
    chunks_loss: bool = False
    fuses_cross_entropy: bool = False
    compiles_loss: bool = False
    steps_in_backward: bool = False
    offloads_partly: bool = False
    offloads_activations: bool = False
    replicates_kv_heads: bool = False
    seq_divisor_always: bool = False
    etp_one_or_tp: bool = False
    sp_with_experts: bool = False
    zero_2_under_pp: bool = True
    split: LayerSplit
    writes_splits: bool = True
    ep_over_replicas: bool
    searched_ac: tuple[str, ...]
    searched_precisions: tuple[str, ...]
    by_request: frozenset[str] = frozenset()
    turns_recomputation: bool = True
    sharding: Sharding
    framework: Framework
    tp_overlaps: tuple[TpOverlap, ...] = ()
    recipes_in: Callable[[Release], tuple[Recipe, ...]]
    whole_owners: bool = False
    fused_kernels: bool
    drops_residual: bool
    tf32: bool
    attention: tuple[AttentionRow, ...]
    attention_kernels: frozenset[str]
    early_stop: bool
    unlisted: frozenset[str] = frozenset()
    repeats_kv_until: tuple[str, str]
    composite_norm_until: tuple[str, str]
    composite_norm_since: str
    expert_alignment: int
    compiles_exchange: bool = True
    scores_inside: bool = False
    overlaps_exchange: bool = False
    clips_qk: bool = False
    drops_tokens: bool = False
    fuses_experts: bool = False
    gradient_dtype: str = "float32"
    fused_sums: bool
    loss_bytes: float
    fused_loss_bytes: float
    sharded_loss_bytes: float
    fused_sharded_loss_bytes: float
    eager_loss_until: str
    ends_in_root: bool = False
    loss_leftover_bytes: float
    placeholders_since: str
    gradients_apart: bool = False
    memory_extra_sd: float = 0.0
    source: str

    @property
    def code_name(self) -> str:
        return self.code or self.name

    @property
    def dials(self) -> frozenset[str]:
        """Modes of recomputation that variations of the best layouts turn."""
        turned = frozenset({"memory-budget", "block"}) & self.ac_kinds
        return turned if self.turns_recomputation else frozenset()

    @property
    def schedules(self) -> tuple[str, ...]:
        """The pipeline schedules it can run, in the order in which a search tries them."""
        return schedules_of(self.framework.runtime)

    def release(self, text: str | None) -> Release:
        """The release whose rules hold where a job names this one."""
        number = named(text).number
        text = self.ships.get(f"{number.major}.{number.minor}", text) if number else text
        return release_in(self.name, self.history, self.default_release, text)

    def at(self, release: Release) -> "TrainerRules":
        return _at(self, release)

    def fused_attention(
        self, training: TrainingSpec, gpu: GpuSpec, model: ModelSpec
    ) -> tuple[str, ...]:
        """Kernels that a job's fused attention may run with, the likeliest first."""
        release = self.release(training.trainer_version)
        return attention_kernels(self.attention, training, release, gpu, model)

    def recipes(self, trainer_version: str | None) -> tuple[Recipe, ...]:
        """How the release computes in each precision, in the order of the precision codes."""
        return self.recipes_in(self.release(trainer_version))

    def tp_overlaps_at(self, release: Release) -> tuple[TpOverlap, ...]:
        """How a release hides tensor-parallel communication; the first row that holds counts."""
        return tuple(row for row in self.tp_overlaps if row.releases.hold(release))


@lru_cache(maxsize=256)
def _at(trainer: TrainerRules, release: Release) -> TrainerRules:
    for change in trainer.changes:
        if change.releases.hold(release):
            values: dict[str, Any] = {**change.fields}
            trainer = replace(trainer, **values)
    return trainer
