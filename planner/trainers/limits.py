"""What each trainer refuses beyond the sets of values in `specs.trainers`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["effective", "even", "uneven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLimits:
    """One trainer's refusals.

    compiles: torch.compile of the blocks.  optimizer_in_backward: offers it.  replicates_kv_heads:
    tp may be a multiple of the KV heads.  seq_divisor_always: seq_len must divide by 2 x cp x tp
    whatever is on.  etp_one_or_tp: no other value.
    ddp_alone: plain data parallelism combines with nothing else.  sp_with_experts: tp with ep needs
        sequence parallelism.
    zero_2_under_pp: gradients may stay sharded between pipeline microbatches.
    split: how layers go to stages. "effective": evenly, embedding and head counting as one layer
    each, stages differing by at most one; "even": the same count on every stage, where embedding
    and head may count as one layer each; "uneven": any.
    """

    compiles: bool = False
    optimizer_in_backward: bool = False
    replicates_kv_heads: bool = False
    seq_divisor_always: bool = False
    etp_one_or_tp: bool = False
    ddp_alone: bool = False
    sp_with_experts: bool = False
    zero_2_under_pp: bool = True
    split: Split
    source: str

    @property
    def counts_embedding_and_head(self) -> bool:
        """Whether two stages may hold no layer, only the embedding or the head."""
        return self.split != "uneven"


LIMITS: Mapping[str, TrainerLimits] = {
    "torchtitan": TrainerLimits(
        compiles=True, optimizer_in_backward=True, seq_divisor_always=True, etp_one_or_tp=True,
        ddp_alone=True, split="effective",
        source="torchtitan 0.2.2: parallel_dims.py (_validate, seq_len_divisor), "
            "models/llama3/infra/parallelize.py (DDP), "
        "components/optimizer.py, distributed/pipeline_parallel.py generate_llm_fqn_per_model_part",
    ),
    "megatron": TrainerLimits(
        replicates_kv_heads=True, sp_with_experts=True, split="even",
        source="Megatron core 0.16: transformer_config.py (num_query_groups; "
            "account_for_embedding_in_pipeline_split, "
        "account_for_loss_in_pipeline_split), moe_layer.py (sequence parallelism with expert "
            "parallelism)",
    ),
    "megatron-deepspeed": TrainerLimits(
        zero_2_under_pp=False, split="uneven",
        source="DeepSpeed pipe/module.py partition_layers; engine.py: ZeRO-2 and ZeRO-3 are "
            "incompatible with pipeline parallelism",
    ),
    "fsdp": TrainerLimits(
        compiles=True, optimizer_in_backward=True, etp_one_or_tp=True, split="effective",
        source="plain torch: FSDP2 and torch.distributed.pipelining",
    ),
    "internevo": TrainerLimits(
        zero_2_under_pp=False, split="uneven",
        source="InternEvo internlm/core/parallel/comm/zero.py; partition_uniform of its pipeline",
    ),
}  # fmt: skip
