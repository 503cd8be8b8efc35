"""Dimensions of attention, which layers with a window may have others of than the rest.

An operation names dimensions, and a name has one size in a model: where layers differ, those with a
window have names of their own.
"""

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import numpy as np

from planner.columns import FloatColumn
from planner.specs.model import LayerKind, ModelSpec
from planner.work.ops import Moves, Op

CUT = ("heads", "kv_heads")
OTHERS = (
    "qk_dim", "q_dim", "v_dim", "heads_and_kv", "kv_heads_repeated", "kv_width", "qo_width",
    "q_lora", "q_up", "kv_lora", "kv_lora_rope", "kv_up", "qk_rope",
)  # fmt: skip
WINDOWED = {name: f"windowed_{name}" for name in (*CUT, *OTHERS)}
TP_DIMS = frozenset({*CUT, *(WINDOWED[name] for name in CUT)})
T = TypeVar("T")


def head_sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    """Size of each dimension of attention on one rank.

    kv_heads_repeated: after repeat_kv; a single head is expanded without a copy.
    q_dim: a head of the query projection, with the gate where it has that too.
    q_up: input of MLA's up projection of queries.
    """
    sizes = _sizes(model, tp)
    other = model.at(1)
    if other is not model:
        sizes |= {WINDOWED[name]: size for name, size in _sizes(other, tp).items()}
    return sizes


def _sizes(model: ModelSpec, tp: FloatColumn) -> dict[str, FloatColumn]:
    ones, latent = np.ones_like(tp), model.kv_lora_rank
    gated = model.attention_output_gate and not projects_gate(model)
    heads, kv_heads = (
        model.num_attention_heads / tp,
        np.maximum(model.num_key_value_heads / tp, 1.0),
    )
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "qk_dim": model.qk_head_dim * ones,
        "q_dim": (model.qk_head_dim + model.v_dim * gated) * ones,
        "v_dim": model.v_dim * ones,
        "heads_and_kv": heads + (heads if model.uses_mla else kv_heads),
        "kv_heads_repeated": np.where(kv_heads > 1.0, heads, kv_heads),
        "kv_width": kv_heads * (model.qk_head_dim + model.v_dim),
        "qo_width": heads * (model.qk_head_dim + model.v_dim),
        "q_lora": model.q_lora_rank * ones,
        "q_up": model.q_lora_rank * (1 + model.fused_query_gate) * ones,
        "kv_lora": latent * ones,
        "kv_lora_rope": (latent + model.qk_rope_head_dim) * ones,
        "kv_up": (model.qk_nope_head_dim + model.v_dim) * ones,
        "qk_rope": model.qk_rope_head_dim * ones,
    }


def projects_gate(model: ModelSpec) -> bool:
    """Whether the gate of attention's output has a projection of its own."""
    own = model.attention_output_gate and model.uses_mla and not model.fused_query_gate
    return model.attention_head_gate or own


def of_kind(model: ModelSpec, kind: LayerKind, attention: tuple[Op, ...]) -> tuple[Op, ...]:
    """Attention of a layer, under the names of its own dimensions."""
    return attention if model.at(kind.window) is model else _renamed(attention)


def _renamed(part: T) -> T:
    """The part of an operation, with the names of dimensions of layers with a window."""
    if isinstance(part, str):
        return WINDOWED.get(part, part)  # type: ignore[return-value]
    if isinstance(part, tuple) and not isinstance(part, Moves):
        return tuple(map(_renamed, part))  # type: ignore[return-value]
    if is_dataclass(part) and not isinstance(part, type):
        renamed = {one.name: _renamed(getattr(part, one.name)) for one in fields(part)}
        return replace(part, **renamed)
    return part
