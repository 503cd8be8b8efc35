"""Reads the model and precision of a Python module for TorchTitan as syntax, without running it.

It reads calls with literal arguments. In 0.2: `...ModelArgs(dim=4096, ...)` and
`replace(llama3_args["8B"], ...)`. In 0.3: `model_registry("8B", ...)` and
`...Model.Config(dim=..., layers=..._layers(n_layers=..., ...))`.
"""

import ast
import re
from collections.abc import Iterator, Mapping

from planner.errors import SpecError
from planner.intake.trainer_files.shapes import named
from planner.intake.trainer_files.statement import StatedModel
from planner.intake.trainer_files.titan_flavors import model_of

# TorchTitan's name of a shape -> Hugging Face's. 0.2's ModelArgs and 0.3's builders use the same
# name where both have it.
_KEYS: Mapping[str, str] = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size", "head_dim": "head_dim", "hidden_dim": "intermediate_size",
    "inter_dim": "intermediate_size",
    "dense_hidden_dim": "intermediate_size", "moe_inter_dim": "moe_intermediate_size",
    "moe_hidden_dim": "moe_intermediate_size",
    "n_dense_layers": "first_k_dense_replace", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "enable_weight_tying": "tie_word_embeddings", "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "router_top_k": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    "rope_theta": "rope_theta",
    "norm_eps": "norm_eps", "route_norm": "norm_topk_prob", "router_route_norm": "norm_topk_prob",
    "score_func": "scoring_func",
    "router_score_func": "scoring_func", "route_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_limited_groups": "topk_group",
}  # fmt: skip
_FAMILY = re.compile(
    r"(?:from torchtitan\.models\.(\w+) import|from torchtitan\.models import (\w+))"
)
_NAME = re.compile(r'^"""(\S+) for TorchTitan ')


def read_module(source: str) -> StatedModel:
    """The model that the module registers or asks for."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return StatedModel(value=None, lacking="its module is no Python that can be read")
    found = _FAMILY.search(source)
    family = "" if found is None else found[1] or found[2]
    hint = _NAME.search(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        flavor = _flavor(call)
        if flavor is not None and flavor != "custom":
            return model_of(family, flavor, hint[1] if hint else "")
    keys: dict[str, object] = {}
    for call in calls:
        name = _called(call)
        if name.endswith(("ModelArgs", "MoEArgs", "_layers")) or (
            name == "Config" and {"dim", "vocab_size"} <= set(_literals(call))
        ):
            keys.update(_literals(call))
    if "dim" not in keys or "n_layers" not in keys:
        return StatedModel(value=None, lacking="its module holds no shapes that can be read")
    try:
        return named(_hugging_face(keys, family), hint=hint[1] if hint else "")
    except SpecError as error:
        return StatedModel(value=None, lacking=f"the shapes in its module make no model ({error})")


def _called(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )


def _literals(call: ast.Call) -> dict[str, object]:
    return dict(_pairs(call))


def _pairs(call: ast.Call) -> Iterator[tuple[str, object]]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            try:
                yield keyword.arg, ast.literal_eval(keyword.value)
            except (ValueError, SyntaxError):
                continue


def _flavor(call: ast.Call) -> str | None:
    """The flavor that a call names.

    "8B" in model_registry("8B"), replace(llama3_args["8B"], ...) and llama3_configs["8B"](...).
    """
    first = call.args[0] if call.args else None
    if (
        _called(call) == "model_registry"
        and isinstance(first, ast.Constant)
        and isinstance(first.value, str)
    ):
        return first.value
    if (
        _called(call) == "replace"
        and isinstance(first, ast.Subscript)
        and isinstance(first.slice, ast.Constant)
    ):
        return str(first.slice.value)
    if isinstance(call.func, ast.Subscript) and isinstance(call.func.slice, ast.Constant):
        return str(call.func.slice.value)
    return None


def _hugging_face(keys: Mapping[str, object], family: str) -> dict[str, object]:
    """TorchTitan's shapes as Hugging Face keys."""
    found = {ours: keys[theirs] for theirs, ours in _KEYS.items() if keys.get(theirs) is not None}
    width, multiple = keys.get("ffn_dim_multiplier"), keys.get("multiple_of", 256)
    if (
        family == "llama3"
        and "intermediate_size" not in found
        and isinstance(multiple, int)
        and isinstance(keys["dim"], int)
    ):
        wide = int(2 * 4 * keys["dim"] / 3)
        wide = int(width * wide) if isinstance(width, int | float) else wide
        found["intermediate_size"] = multiple * -(-wide // multiple)
    found.setdefault("tie_word_embeddings", False)
    if family == "qwen3":
        found["qk_norm"] = "head" if keys.get("qk_norm", True) else "none"
    if found.get("num_experts") and not keys.get("moe_enabled", True):
        found.pop("num_experts")
    if found.get("num_experts"):
        if family != "deepseek_v3":
            # the width of dense layers, and this model has none
            found.pop("intermediate_size", None)
        if keys.get("score_func", keys.get("router_score_func")) == "sigmoid":
            found["router_correction_bias"] = True
        shared, width_of_one = found.get("n_shared_experts"), found.get("moe_intermediate_size")
        if isinstance(shared, int) and isinstance(width_of_one, int):
            found["shared_expert_intermediate_size"] = shared * width_of_one
    return found
