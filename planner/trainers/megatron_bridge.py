"""Megatron-Bridge, which NeMo's recipes run: Megatron-LM with its recipes' defaults."""

from dataclasses import replace

from planner.precision import Recipe, transformer_engine
from planner.specs.layout import COMMON
from planner.trainers.base import Change
from planner.trainers.megatron import MEGATRON, NATIVE_OVERLAP, native
from planner.trainers.muon import BRIDGED
from planner.trainers.release import Release, Releases


def _recipes(release: Release) -> tuple[Recipe, ...]:
    """Transformer Engine's recipes with parameters in fp8 (training/mixed_precision.py)."""
    return native(transformer_engine(), True)


MEGATRON_BRIDGE = replace(
    MEGATRON,
    name="megatron-bridge",
    title="Megatron-Bridge",
    aliases=("nemo",),
    code=MEGATRON.name,
    expert_recipes=True,
    # 3rdparty/Megatron-LM and docs/releases/software-versions.md of its tags; of its main branch of
    # 2026-08-22 for 0.7
    ships={**{f"0.{number}": f"0.{number + 13}" for number in range(1, 8)}, "0.2": "NeMo 25.11"},
    vendors={"nvidia": ""},
    distributions={},
    offered=(),
    export_format="megatron-bridge",
    # perf_recipes/_common.py (_benchmark_common): grad_reduce_in_fp32 = False,
    # cross_entropy_fusion_impl = "te"
    layout_defaults={**COMMON, "reduce_dtype": "bfloat16"},
    fused_cross_entropy=True,
    changes=(*MEGATRON.changes, Change(Releases(), {"muon": BRIDGED})),
    # CommOverlapConfig(tp_comm_overlap=True): no layout has to ask for it
    tp_overlaps=(replace(NATIVE_OVERLAP, releases=Releases()), MEGATRON.tp_overlaps[-1]),
    recipes_in=_recipes,
    source="Megatron-Bridge 0.2 to 0.6 src/megatron/bridge: recipes, perf_recipes, training",
)
