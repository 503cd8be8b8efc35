"""Reads Megatron-DeepSpeed's arguments as Megatron-LM's of the same meaning.

Source: github.com/deepspeedai/Megatron-DeepSpeed megatron/arguments.py, model/transformer.py
    (get_num_experts_per_layer); bigscience-workshop/Megatron-DeepSpeed megatron/arguments.py.
"""

import json
import re
from collections.abc import Mapping

from planner.errors import fault
from planner.export.megatron_read import SHARDING, Words, whole, word
from planner.intake.trainer_files.flags import Command

NAME = "megatron-deepspeed"
MARK = "deepspeed"
_RENAMED = {
    "ds_sequence_parallel_size": "context_parallel_size", "cpu_optimizer": "optimizer_cpu_offload",
    "moe_expert_parallel_size": "expert_model_parallel_size", "topk": "moe_router_topk",
    "num_key_value_heads": "num_query_groups", "pad_vocab_size_to": "vocab_size",
    "checkpoint_num_layers": "recompute_num_layers",
}  # fmt: skip
# argument -> others of Megatron-LM
_MEANT: Mapping[str, Words] = {
    "checkpoint_activations": {
        "recompute_granularity": ("full",),
        "recompute_method": ("uniform",),
    },
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
UNREAD = "the JSON of --deepspeed_config"
_NAMED = re.compile(r"^sed .*?(\S+\.json)$|--deepspeed_config[= ](\S+)")
_FILLED = re.compile(r"^s/([^/]+)/([^/]*)/")


def named(command: str) -> list[str]:
    """Files of JSON that a command names: DeepSpeed's, and a template that `sed` fills in."""
    return [name for found in _NAMED.findall(command) for name in found if name]


def zero_of(command: Command, files: Mapping[str, str]) -> Mapping[str, object] | None:
    """`zero_optimization` of DeepSpeed's JSON: a file, or one that the script itself writes.

    None where the JSON is not there, or is only known once the script runs.
    """
    script = command.script
    words = [field.text for one in script.commands if one[0].text == "sed" for field in one]
    for text in (*files.values(), *script.documents):
        for filled in filter(None, map(_FILLED.match, words)):
            text = text.replace(filled[1], filled[2] or "0")
        text = re.sub(r"\$\{?(\w+)\}?", lambda found: script.value(found[1]) or "0", text)
        try:
            zero = json.loads(text).get("zero_optimization")
        except (ValueError, AttributeError):
            continue
        if isinstance(zero, Mapping):
            return zero
    return None


def read_deepspeed(given: Words, zero: Mapping[str, object] | None = None) -> Words:
    """The arguments, by the names that Megatron-LM has for them.

    zero: of DeepSpeed's JSON, whose stage is the one that runs.
    Raises SpecError where no stage is known, and for layers with different numbers of experts.
    """
    words = {_RENAMED.get(name, name): values for name, values in given.items()}
    if zero is None and "zero_stage" not in given:
        rule = f"is not in the command, and {UNREAD} is not beside the script"
        raise fault("--zero-stage", None, rule, "add it, with the stage of the JSON")
    stated = word(given, "zero_stage") if zero is None else str(zero.get("stage", 0))
    stage = whole({"zero_stage": [stated or ""]}, "zero_stage")
    # bf16_optimizer.py, which cuts its states, is the one of bf16 without ZeRO
    words |= ZERO.get(max(stage, int("bf16" in given)), {})
    words |= {"grad_reduce_in_bf16": ()} if "bf16" in given else {}  # sums are in bf16, too
    if not any(name.startswith("use_flash_attn") for name in given):
        words["attention_backend"] = ("unfused",)
    offload = (zero or {}).get("offload_optimizer")
    if isinstance(offload, Mapping) and offload.get("device") in ("cpu", None):
        words["optimizer_cpu_offload"] = ()
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
    tp = word(given, "tensor_model_parallel_size") or "1"
    etp = tp if "enable_expert_tensor_parallelism" in given else "1"
    usual = {"moe_token_dispatcher_type": ("alltoall",), "expert_tensor_parallel_size": (etp,)}
    topk = word(given, "topk") or "1"
    return {**words, **usual, "moe_layer_freq": (str(places),), "moe_router_topk": (topk,),
            "num_experts": experts[:1]}  # fmt: skip
