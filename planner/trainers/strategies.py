"""How a trainer shards its states, and whose layers, autograd and pipeline it runs."""

from dataclasses import dataclass

from planner.schedules.base import Runtime
from planner.trainers.release import named
from planner.trainers.transports import MEGATRON_ROWS, TORCH_ROWS, Transport, TransportRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Properties of one way of sharding for the cost model, the rules and the search.

    stages: ZeRO stages that a search tries, the one that shards most first.
    degrees_decide: every group of dp_shard x cp > 1 ranks shards, so that stage 0 means one rank;
        otherwise stage 0 replicates over the group.
    keeps_copies: for the whole run, every rank holds its parameters unsharded in `param_dtype` and
        its gradients in equally large buffers; otherwise it holds shards in `master_dtype` and
        gathers them.
    reduces_by_unit: a unit's gradients are reduced when its backward ends, under the rest of the
        backward, and a pipeline keeps them whole until its last microbatch; otherwise gradients
        are reduced once a step.
    gradients_in_master_dtype: the optimizer reads gradients in `master_dtype`; otherwise in the
        dtype in which they accumulate.
    copies_buffers: a gather arrives in one buffer and is copied out of it into the unit's weights,
        and gradients are copied into the buffer that is reduced, both on the stream that computes.
    offloads_shards: CPU offload keeps the shards themselves on the host and copies each one as its
        unit runs; otherwise it moves the optimizer alone, which copies within its step.
    casts_shards: a rank quantises its shard before a low-precision gather.
    gathers_quantised_experts: grouped expert weights travel in low precision too.
    gathers_float8: the layout's float8_all_gather is a choice.
    in_plain_torch: torch alone shards so, and the planner's reference program can run it.
    """

    name: str
    stages: tuple[int, ...]
    degrees_decide: bool
    keeps_copies: bool
    reduces_by_unit: bool
    gradients_in_master_dtype: bool
    copies_buffers: bool
    offloads_shards: bool
    casts_shards: bool
    gathers_quantised_experts: bool
    gathers_float8: bool
    in_plain_torch: bool
    source: str


FSDP2 = Sharding(
    name="FSDP2",
    stages=(3, 2, 0),
    degrees_decide=True,
    keeps_copies=False,
    reduces_by_unit=True,
    gradients_in_master_dtype=True,
    copies_buffers=True,
    offloads_shards=True,
    casts_shards=True,
    gathers_quantised_experts=False,
    gathers_float8=True,
    in_plain_torch=True,
    source="torch/distributed/fsdp/_fully_shard; torchao float8/fsdp_utils.py",
)
DISTRIBUTED_OPTIMIZER = Sharding(
    name="distributed optimizer",
    stages=(1, 0),
    degrees_decide=False,
    keeps_copies=True,
    reduces_by_unit=False,
    gradients_in_master_dtype=False,
    copies_buffers=False,
    offloads_shards=False,
    casts_shards=False,
    gathers_quantised_experts=True,
    gathers_float8=False,
    in_plain_torch=False,
    source="Megatron-LM core/optimizer/distrib_optimizer.py, cpu_offloading; Rajbhandari 2020",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Facts of the code that computes, as the cost model and the rules need them.

    runtime: whose pipeline runtime plays a schedule.
    transports: how it moves activations between pipeline ranks; the first row that holds counts.
    splits_backward_by_group: weight gradients that are computed later walk autograd's graph again,
        once for each group of parameters: all that was saved stays until then, recomputation is
        repeated, and a selectively checkpointed region cannot be entered twice. Otherwise only the
        inputs of products stay, and nothing is recomputed.
    buffers_every_receive: a stage has a receive buffer for every microbatch.
    keeps_stage_outputs: a stage keeps what it sent until its backward; otherwise its data are freed
        once they are sent. Its first layer saves its input (`benchmarks/megatron_stage.py`).
    saves_gathered_inputs: a column-parallel linear keeps its input gathered over TP; otherwise it
        keeps its own share and gathers again.
    rings_attention: context parallelism runs as torch's ring, whose pieces are separate tensors.
    scores_first: autograd keeps routed rows in fp32 for the product with their scores.
    expert_path: whose kernels permute tokens, a key of `work.expert_path.PATHS`.
    gathers_cut_rows: where TP cuts an expert, its ranks exchange their own tokens and then gather
        the routed rows; otherwise every TP rank exchanges all tokens.
    hides_combine: shared experts run while the routed ones' outputs come back.
    whole_table_gradient: under TP every rank sums the gradient of the whole token table.
    """

    runtime: Runtime
    transports: tuple[TransportRow, ...]
    splits_backward_by_group: bool
    buffers_every_receive: bool
    keeps_stage_outputs: bool
    saves_gathered_inputs: bool
    rings_attention: bool
    scores_first: bool
    expert_path: str
    gathers_cut_rows: bool
    hides_combine: bool
    whole_table_gradient: bool
    source: str

    def transport(self, schedule: str, trainer_version: str | None, *, overlap: bool) -> Transport:
        """Transport of a schedule's sends under a release.

        overlap: False where the run switched overlap of sends off.
        """
        year = named(trainer_version).year
        rows = self.transports
        return next(row.transport for row in rows if row.holds(schedule, year, overlap))


TORCH = Framework(
    runtime="torch",
    transports=TORCH_ROWS,
    splits_backward_by_group=True,
    buffers_every_receive=True,
    keeps_stage_outputs=False,
    saves_gathered_inputs=True,
    rings_attention=True,
    scores_first=True,
    expert_path="torch",
    gathers_cut_rows=False,
    # models/moe.py: "to implicitly overlap the shared expert compute with token combine"
    hides_combine=True,
    whole_table_gradient=True,
    source="torch/distributed/pipelining (stage.py, _backward.py), tensor/parallel/loss.py, "
    "tensor/experimental/_attention.py; torchtitan models/moe.py",
)
MEGATRON = Framework(
    runtime="megatron",
    transports=MEGATRON_ROWS,
    splits_backward_by_group=False,
    buffers_every_receive=False,
    keeps_stage_outputs=False,
    saves_gathered_inputs=False,
    rings_attention=False,
    scores_first=False,
    expert_path="fused",
    gathers_cut_rows=True,
    hides_combine=False,  # --moe-shared-expert-overlap is off by default
    whole_table_gradient=False,
    source="Megatron-LM core/pipeline_parallel/schedules.py (deallocate_output_tensor), "
    "tensor_parallel/layers.py, tensor_parallel/cross_entropy.py, transformer/moe",
)
