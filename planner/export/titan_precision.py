"""Precisions as TorchTitan's converters: settings in 0.2, Python in 0.3, and back.

Sources: torchtitan 0.2.2 components/quantization/{float8,mx}.py and config/job_config.py
    (Quantize); 0.3.0 components/quantization/{float8,mx,nvfp4}.py.
"""

from collections.abc import Mapping

from planner.export.base import Draft, Settings
from planner.precision import PRECISIONS, bf16_tail
from planner.trainers.registry import TRAINERS
from planner.units import counted

FLOAT8, MX = (PRECISIONS[name].titan_converters["0.2"] for name in ("float8-tensorwise", "mxfp8"))
ROWWISE = {"float8-rowwise": "rowwise", "float8-rowwise-gw-hp": "rowwise_with_gw_hp"}
"""Precision -> its recipe_name in both lines."""
SMALL = "auto_filter_small_kn"  # in `filter_fqns`: torchao also leaves out layers too small to gain


def precision_02(draft: Draft) -> Settings:
    """model.converters and their settings; head, router and small layers stay in bf16."""
    layout, moe = draft.layout, draft.model.is_moe
    precision = PRECISIONS[layout.precision]
    converter = precision.titan_converters.get("0.2")
    tensorwise = layout.precision == "float8-tensorwise"
    if layout.float8_all_gather and not tensorwise:
        rule, blocking = "goes with float8-tensorwise only", layout.precision in ROWWISE
        draft.gap("float8_all_gather", rule, "set it to false", blocking=blocking)
    if converter is None:
        return {"model.converters": []}
    skipped = [
        *([SMALL] if precision.torchao.small else []),
        "output",
        *(["router.gate"] if moe else []),
    ]
    experts = moe and (converter == MX or layout.pp * layout.cp == 1)
    for_experts = precision.titan_expert_converters.get("0.2", "")
    converters = [converter, for_experts] if experts else [converter]
    settings: Settings = {"model.converters": converters, f"{converter}.filter_fqns": skipped}
    if moe and not experts:
        draft.notes.append(
            "The experts stay in bf16: TorchTitan 0.2's float8 for grouped GEMMs excludes PP and "
            "CP."
        )
    if tensorwise:
        settings[f"{FLOAT8}.enable_fsdp_float8_all_gather"] = layout.float8_all_gather
        settings[f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp"] = layout.float8_all_gather
    else:
        settings[f"{converter}.recipe_name"] = ROWWISE.get(layout.precision, "mxfp8_cublas")
    if experts:
        settings[f"{for_experts}.fqns"] = ["experts"]
    _notes_02(draft, converter, tensorwise)
    return settings


def _notes_02(draft: Draft, converter: str, tensorwise: bool) -> None:
    layout = draft.layout
    experts = ", a nightly one for the experts." if draft.model.is_moe else "."
    draft.notes.append(f"Low precision needs torchao beside torchtitan{experts}")
    if not layout.compile:
        draft.notes.append(
            "Low precision without torch.compile is slower than bf16: its casts are not fused."
        )
    if tensorwise and layout.tp > 1:
        draft.notes.append(
            "TorchTitan 0.2.2 looks for a converter named `float8` when it plans TP, so TP's "
            "own all-gathers stay in bf16 "
            "(models/llama3/infra/parallelize.py)."
        )


def read_precision_02(settings: Mapping[str, object]) -> dict[str, object]:
    """Precision and float8_all_gather; inverse of `precision_02`.

    It ignores converters that do not set a precision.
    settings: those of a file, completed by `titan_defaults.DEFAULTS`.
    """
    listed = settings["model.converters"]
    converters = listed if isinstance(listed, list) else []
    if MX in converters or "mx" in converters:
        return {"precision": "mxfp8", "float8_all_gather": False}
    if FLOAT8 not in converters and "float8" not in converters:
        return {"precision": "bf16", "float8_all_gather": False}
    recipe = settings.get(f"{FLOAT8}.recipe_name")
    rowwise = next((name for name, theirs in ROWWISE.items() if theirs == recipe), None)
    return {
        "precision": rowwise or "float8-tensorwise",
        "float8_all_gather": settings[f"{FLOAT8}.enable_fsdp_float8_all_gather"],
    }


def precision_03(draft: Draft) -> list[str]:
    """Converters of the model as Python expressions."""
    layout, moe, name = draft.layout, draft.model.is_moe, draft.layout.precision
    if layout.float8_all_gather:
        rule = "is gone from TorchTitan 0.3 with float8-tensorwise"
        remedy, blocking = "set it to false, or export for 0.2", name.startswith("float8")
        draft.gap("float8_all_gather", rule, remedy, blocking=blocking)
    precision = PRECISIONS[name]
    converter = precision.titan_converters.get("0.3")
    if converter is None or (precision.torchao.dense_only and moe):
        return []
    compiled = f"model_compile_enabled={layout.compile}"
    skipped = '["lm_head", "router.gate"]' if moe else '["lm_head"]'
    which = 'fqns=["layers"], '
    if name in ROWWISE:
        recipe = f'recipe_name="{ROWWISE[name]}", ' if name != "float8-rowwise" else ""
        which = f"{recipe}filter_fqns={skipped}, "
    if name == "mxfp8" and moe:
        which = 'fqns=["attention", "feed_forward", "shared_experts"], '
    if name == "nvfp4":
        which = f"fqns={_nvfp4_layers(draft)}, "
    draft.notes.append("Low precision needs torchao beside torchtitan.")
    converters = [f"{converter}.Config({which}{compiled})"]
    for_experts = precision.titan_expert_converters.get("0.3", "")
    return [*converters, f"{for_experts}.Config({compiled})"] if moe else converters


def _nvfp4_layers(draft: Draft) -> str:
    """Expression for the layers to convert.

    It leaves out the last ones, as TorchTitan's own llama3_8b_nvfp4 does.
    """
    recipe = TRAINERS["torchtitan"].recipes("0.3")[PRECISIONS.names.index("nvfp4")]
    layers = draft.model.num_hidden_layers
    if bf16_tail(recipe, layers) >= layers:
        rule = f"converts none of {counted(layers, 'layer')}: TorchTitan keeps the last in bf16"
        draft.gap("precision", rule, "use bf16 or mxfp8")
    return f"nvfp4_bf16_tail_fqns({layers}, {recipe.bf16_layers})"


def read_precision_03(module: str | None) -> dict[str, object]:
    """The precision in the job's module; inverse of `precision_03`."""
    found = [
        precision.name
        for precision in PRECISIONS.values()
        if module is not None
        and "0.3" in precision.titan_converters
        and precision.titan_converters["0.3"] in module
    ]
    name = found[0] if found else "bf16"
    if name in ROWWISE and module is not None:
        gw_hp = f'"{ROWWISE["float8-rowwise-gw-hp"]}"' in module
        name = "float8-rowwise-gw-hp" if gw_hp else "float8-rowwise"
    return {"precision": name, "float8_all_gather": False}
