"""Reads Megatron-DeepSpeed's arguments as Megatron-LM's of the same meaning.

Source: github.com/deepspeedai/Megatron-DeepSpeed megatron/arguments.py, model/transformer.py
    (get_num_experts_per_layer); bigscience-workshop/Megatron-DeepSpeed megatron/arguments.py.
"""

from collections.abc import Mapping

from planner.errors import fault
from planner.export.megatron_read import SHARDING, Words, whole, word

NAME = "megatron-deepspeed"
MARK = "deepspeed"
_RENAMED = {
    "ds_sequence_parallel_size": "context_parallel_size", "cpu_optimizer": "optimizer_cpu_offload",
    "moe_expert_parallel_size": "expert_model_parallel_size", "topk": "moe_router_topk",
    "num_key_value_heads": "num_query_groups", "pad_vocab_size_to": "vocab_size",
}  # fmt: skip
# argument -> others of Megatron-LM
_MEANT: Mapping[str, Words] = {
    "checkpoint_activations": {"recompute_granularity": ("full",)},
    "glu_activation": {"swiglu": ()},
    "num_key_value_heads": {"group_query_attention": ()},
    "ds_sequence_parallel_size": {"cp_comm_type": ("a2a",)},
}
_SHARDS: Words = {"use_distributed_optimizer": ()}
ZERO: Mapping[int, Words] = {
    1: _SHARDS,
    2: {**_SHARDS, "data_parallel_sharding_strategy": (SHARDING[2],)},
    # the default of overlap_comm
    3: {**_SHARDS, "data_parallel_sharding_strategy": (SHARDING[3],), "overlap_grad_reduce": ()},
}
NOTE = "ZeRO is that of --zero-stage; the JSON of --deepspeed_config is not read"


def read_deepspeed(given: Words) -> Words:
    """The arguments, by the names that Megatron-LM has for them.

    Raises SpecError without --zero-stage, and for layers with different numbers of experts.
    """
    words = {_RENAMED.get(name, name): values for name, values in given.items()}
    if "zero_stage" not in given:
        rule = "is not in the command, and the JSON of --deepspeed_config is not read"
        raise fault("--zero-stage", None, rule, "add it, with the stage of the JSON")
    words |= ZERO.get(whole(given, "zero_stage"), {})
    for name, meant in _MEANT.items():
        words |= meant if name in given else {}
    experts = [*given.get("num_experts", ())]
    if len({*experts}) > 1:
        rule = "are different numbers of experts, which are not priced"
        raise fault("--num-experts", " ".join(experts), rule, "give one number")
    if experts in ([], ["1"]):
        words.pop("num_experts", None)
        return words
    every, layers = whole(given, "expert_interval", 2), whole(given, "num_layers")
    places = [int(layer % every == 0) for layer in range(1, layers + 1)]
    usual = {"moe_token_dispatcher_type": ("alltoall",), "expert_tensor_parallel_size": ("1",)}
    topk = word(given, "topk") or "1"
    return {**words, **usual, "moe_layer_freq": (str(places),), "moe_router_topk": (topk,),
            "num_experts": experts[:1]}  # fmt: skip
