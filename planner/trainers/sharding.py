"""How a trainer spreads parameters, gradients and optimizer states over data-parallel ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What the cost model, the rules and the search ask of one way of sharding.

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
