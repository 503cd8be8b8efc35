"""Low-precision linear layers through torchao: float8 (tensorwise, rowwise, blockwise) and mxfp8.

Embedding, router and head are in the parameter dtype. So are routed experts, whose grouped products
torchao converts only in prototypes.
Source: torchao float8/README.md, torchtitan 0.2.2 components/quantization/{float8,mx}.py.
"""

from typing import Any

from torch import nn

from planner.probes.reference.model import Transformer
from planner.specs.layout import Layout

ROWWISE = {"float8-rowwise": "rowwise", "float8-rowwise-gw-hp": "rowwise_with_gw_hp"}
LOW = ("float8-tensorwise", *ROWWISE, "float8-blockwise", "mxfp8")
# multiple of both widths of a converted matrix; 16 for the other recipes (torch._scaled_mm)
DIVISOR = {"float8-blockwise": 128, "mxfp8": 32}


def converts(layout: Layout) -> bool:
    """Whether the layout asks for a low-precision recipe."""
    return layout.precision in LOW


def apply(model: Transformer, layout: Layout, *, emulate: bool) -> None:
    """Converts the linear layers of the blocks in place.

    emulate: compute in high precision with the recipe's casts, for devices without float8 units.
    Raises ImportError that names the package to install, if torchao is missing or lacks the recipe.
    """
    if not converts(layout):
        return
    try:
        _convert(model, layout, emulate=emulate)
    except ImportError as error:
        raise ImportError(
            f"layout.precision={layout.precision} needs torchao with that recipe; pip install "
            f"torchao ({error})"
        ) from error


def _convert(model: Transformer, layout: Layout, *, emulate: bool) -> None:
    divisor = DIVISOR.get(layout.precision, 16)

    def wanted(module: nn.Module, name: str) -> bool:
        inside = name.startswith("layers.") and not name.endswith(("router", "shared_gate"))
        return (
            inside
            and isinstance(module, nn.Linear)
            and module.in_features % divisor == 0
            and module.out_features % divisor == 0
        )

    if layout.precision == "mxfp8":
        from torchao.quantization import quantize_

        quantize_(model, _mxfp8(emulate=emulate), filter_fn=wanted)
        return
    if layout.precision == "float8-blockwise":
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig
        from torchao.quantization import quantize_

        quantize_(model, Float8BlockwiseLinearConfig(), filter_fn=wanted)
        return
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(
        model, config=_float8(layout, emulate=emulate), module_filter_fn=wanted
    )


def _float8(layout: Layout, *, emulate: bool) -> Any:
    from torchao.float8 import Float8LinearConfig

    if layout.precision in ROWWISE:
        config = Float8LinearConfig.from_recipe_name(ROWWISE[layout.precision])
        return config if not emulate else Float8LinearConfig(**{**vars(config), "emulate": True})
    return Float8LinearConfig(
        enable_fsdp_float8_all_gather=layout.float8_all_gather, emulate=emulate
    )


def _mxfp8(*, emulate: bool) -> Any:
    """The configuration of mxfp8.

    torchao calls it MXLinearConfig up to 0.15, then MXFP8TrainingOpConfig.
    """
    try:
        from torchao.prototype.mx_formats.config import MXLinearConfig
    except ImportError:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

        recipe = (
            MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL if emulate else MXFP8TrainingRecipe.MXFP8_RCEIL
        )
        return MXFP8TrainingOpConfig.from_recipe(recipe)
    return MXLinearConfig.from_recipe_name("mxfp8_emulated" if emulate else "mxfp8_cublas")


def after_step(parts: list[nn.Module], layout: Layout) -> None:
    """Computes the scales of all weights in one reduction.

    The next step's float8 all-gathers use them.
    """
    if layout.float8_all_gather:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for part in parts:
            precompute_float8_dynamic_scale_for_fsdp(part)
