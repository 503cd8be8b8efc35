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


def apply(model: Transformer, layout: Layout, *, emulate: bool) -> None:
    """Converts the linear layers of the blocks in place.

    emulate: compute in high precision with the recipe's casts, for devices without float8 units.
    Raises ImportError that names the package to install, if torchao is missing or lacks the recipe.
    """
    if layout.precision not in LOW:
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

    if layout.precision in ("mxfp8", "float8-blockwise"):
        from torchao.quantization import quantize_

        quantize_(model, _prototype(layout, emulate=emulate), filter_fn=wanted)
        return
    from torchao.float8 import convert_to_float8_training

    config = _float8(layout, emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def _float8(layout: Layout, *, emulate: bool) -> Any:
    from torchao.float8 import Float8LinearConfig

    if layout.precision in ROWWISE:
        config = Float8LinearConfig.from_recipe_name(ROWWISE[layout.precision])
        return config if not emulate else Float8LinearConfig(**{**vars(config), "emulate": True})
    gathered = layout.float8_all_gather
    return Float8LinearConfig(enable_fsdp_float8_all_gather=gathered, emulate=emulate)


def _prototype(layout: Layout, *, emulate: bool) -> Any:
    """The configuration of a blockwise recipe; mxfp8's is MXLinearConfig up to torchao 0.15."""
    if layout.precision == "float8-blockwise":
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig

        return Float8BlockwiseLinearConfig()
    try:
        from torchao.prototype.mx_formats.config import MXLinearConfig
    except ImportError:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

        name = "MXFP8_EMULATED_RCEIL" if emulate else "MXFP8_RCEIL"
        return MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe[name])
    return MXLinearConfig.from_recipe_name("mxfp8_emulated" if emulate else "mxfp8_cublas")


def after_step(parts: list[nn.Module], layout: Layout) -> None:
    """Scales of all weights in one reduction, for the next step's all-gathers in float8."""
    if layout.float8_all_gather:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for part in parts:
            precompute_float8_dynamic_scale_for_fsdp(part)
