"""Reads the model and precision of a Python module for TorchTitan as syntax, without running it.

It reads calls with literal arguments. In 0.2: `...ModelArgs(dim=4096, ...)` and
`replace(llama3_args["8B"], ...)`. In 0.3: `model_registry("8B", ...)` and
`...Model.Config(dim=..., layers=..._layers(n_layers=..., ...))`.
"""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress

from planner.errors import SpecError
from planner.intake.trainer_files.known_models import model_of, named
from planner.intake.trainer_files.statement import StatedModel
from planner.trainers.titan_networks import ARGUMENTS

_FAMILY = re.compile(
    r"(?:from torchtitan\.models\.(\w+) import|from torchtitan\.models import (\w+))"
)
_NAME = re.compile(r'^"""(\S+) for TorchTitan ')


def read_module(source: str, asks: str = "", package: str = "") -> StatedModel:
    """The model that the module registers or asks for.

    asks: the call by which its configuration does; the first in the module unless given.
    package: where a copy of TorchTitan's own module takes its flavors from.
    """
    try:
        trees = [ast.parse(text) for text in (asks, source)]
    except (SyntaxError, ValueError, RecursionError):
        return StatedModel(value=None, lacking="its module is no Python that can be read")
    found = _FAMILY.search(source)
    family = package if found is None else found[1] or found[2]
    hint = _NAME.search(source)
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    flavor = next((one for call in calls if (one := flavor_of(call)) not in (None, "custom")), None)
    if flavor is not None:
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
    return ast.unparse(call.func).rpartition(".")[2]


def _literals(call: ast.Call) -> dict[str, object]:
    found: dict[str, object] = {}
    for keyword in call.keywords:
        with suppress(ValueError, SyntaxError):
            if keyword.arg is not None:
                found[keyword.arg] = ast.literal_eval(keyword.value)
    return found


def flavor_of(call: ast.AST) -> str | None:
    """The flavor that a call names.

    "8B" in model_registry("8B"), replace(llama3_args["8B"], ...) and llama3_configs["8B"](...).
    """
    name = _called(call) if isinstance(call, ast.Call) else ""
    match call:
        case ast.Call(args=[ast.Constant(value=str(text)), *_]) if name == "model_registry":
            return text
        case ast.Call(args=[ast.Subscript(slice=ast.Constant(value=key)), *_]) if name == "replace":
            return str(key)
        case ast.Call(func=ast.Subscript(slice=ast.Constant(value=key))):
            return str(key)
    return None


def _hugging_face(keys: Mapping[str, object], family: str) -> dict[str, object]:
    """TorchTitan's shapes as Hugging Face keys."""
    found = {
        ours: keys[theirs] for theirs, ours in ARGUMENTS.items() if keys.get(theirs) is not None
    }
    width, multiple, dim = (keys.get(name) for name in ("ffn_dim_multiplier", "multiple_of", "dim"))
    multiple = 256 if multiple is None else multiple
    open_width = family == "llama3" and "intermediate_size" not in found
    if open_width and isinstance(multiple, int) and isinstance(dim, int):
        wide = int(2 * 4 * dim / 3)
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
