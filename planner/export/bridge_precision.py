"""Mixed precision for Megatron-Bridge: the name of a preset, or a preset's fields with changes.

`mixed_precision` of a recipe is a name or a configuration. No override sets a field inside a name,
so changes are written as a whole configuration with its class, the form in which Bridge writes one
itself. A preset's grad_reduce_in_fp32 and fp8_param_gather overwrite ddp's.
Source: Megatron-Bridge 0.2 to 0.6 src/megatron/bridge/training/mixed_precision.py (MIXED_PRECISION_
    RECIPES, setup), training/utils/omegaconf_utils.py (_apply_overrides), utils/yaml_utils.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.export.megatron_read import Words

CLASS = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
_BF16: Mapping[str, object] = {"bf16": True, "grad_reduce_in_fp32": True}
_FP8: Mapping[str, object] = {**_BF16, "fp8": "hybrid", "fp8_param_gather": True}
PRESETS: Mapping[str, Mapping[str, object]] = {
    "bf16_mixed": _BF16,
    "fp16_mixed": {"fp16": True, "grad_reduce_in_fp32": False},
    "bf16_with_fp8_delayed_scaling_mixed": {
        **_FP8, "fp8_recipe": "delayed", "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "bf16_with_fp8_current_scaling_mixed": {
        **_FP8, "fp8_recipe": "tensorwise", "first_last_layers_bf16": True,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {
        **_FP8, "fp8_recipe": "blockwise", "fp8_param_gather": False,
    },
    "bf16_with_mxfp8_mixed": {
        **_FP8, "fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "bf16_with_nvfp4_mixed": {
        **_BF16, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True,
    },
}  # fmt: skip
"""Fields that differ from MixedPrecisionConfig's own defaults, without the data types."""
_NONE: Mapping[str, object] = {
    "fp8": None, "fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False,
    "first_last_layers_bf16": False, "fp4": None,
}  # fmt: skip
"""Fields that a YAML file's merge would leave as they are in a recipe's own configuration."""
_GATHERS = ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
_UNPRICED = ("first_last_layers_bf16", "fp4_param_gather")


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """A preset, and the fields of the whole configuration where it is not that preset.

    changed: names of the fields that differ.
    """

    preset: str
    fields: Mapping[str, object]
    changed: tuple[str, ...]

    @property
    def note(self) -> str:
        """Why a configuration stands where a name could."""
        names = ", ".join(f"{name} {str(self.fields[name]).lower()}" for name in self.changed)
        return (
            f"mixed_precision is {self.preset} with {names}: a name cannot carry that, so the "
            "configuration is written out."
        )


def mixed_precision(words: Words, gathers_fp4: bool = True) -> MixedPrecision:
    """The precision of Megatron-LM's arguments, named with _.

    gathers_fp4: whether the release has fp4_param_gather.
    """
    preset = _preset(words)
    known = PRESETS[preset]
    fields: dict[str, object] = {**_NONE, **known}
    fields |= {name: name in words for name in ("bf16", "fp16")}
    fields["grad_reduce_in_fp32"] = "accumulate_allreduce_grads_in_fp32" in words
    fields |= {name: "fp8_param_gather" in words for name in _GATHERS if name in known}
    fields |= {name: False for name in _UNPRICED if name in known}
    if "fp4_recipe" in known:
        fields["fp4_recipe"] = words.get("fp4_recipe", ("nvfp4",))[0]
    if not gathers_fp4:
        fields.pop("fp4_param_gather", None)
    changed = [name for name, value in fields.items() if value and known.get(name) != value]
    changed += [name for name, value in known.items() if value and fields.get(name) is False]
    dtype = {"_target_": f"torch.{_dtype(words)}", "_call_": False}
    whole = {"_target_": CLASS, **fields, "params_dtype": dtype, "pipeline_dtype": dtype}
    if _dtype(words) == "float32":
        whole["fp32"] = True
    return MixedPrecision(preset, whole if changed else {}, tuple(changed))


def _preset(words: Words) -> str:
    """The preset whose formats are the arguments'."""
    if "fp4_format" in words:
        return "bf16_with_nvfp4_mixed"
    low = words.get("fp8_recipe", ("delayed",))[0] if "fp8_format" in words else None
    plain = "fp16_mixed" if "fp16" in words else "bf16_mixed"
    return next(
        (name for name, one in PRESETS.items() if low and one.get("fp8_recipe") == low), plain
    )


def _dtype(words: Words) -> str:
    return "float16" if "fp16" in words else "bfloat16" if "bf16" in words else "float32"
