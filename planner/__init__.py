"""Finds the parallel layout that trains a large model fastest on a given cluster.

    import planner

    plan = planner.recommend(
        model="llama3-8b",
        cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8},
        training={"seq_len": 8192, "global_batch_size": 64},
    )
    print(plan.ranked[0].layout, plan.ranked[0].estimate.tokens_per_second_per_gpu)

Names are loaded when they are first used, so that `import planner` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from planner.version import VERSION as __version__

if TYPE_CHECKING:
    from planner.errors import (
        InfeasibleError,
        PlannerError,
        SpecError,
        UnknownNameError,
        UnsupportedError,
    )
    from planner.intake.trainer_files.files import read_current
    from planner.library import EstimateList, estimate, estimate_many, recommend, study_of
    from planner.specs.cluster import ClusterSpec
    from planner.specs.estimate import Estimate
    from planner.specs.job import Job
    from planner.specs.layout import Layout
    from planner.specs.model import ModelSpec
    from planner.specs.plan import Plan
    from planner.specs.training import TrainingSpec

_HOMES = {
    "planner.errors": (
        "InfeasibleError", "PlannerError", "SpecError", "UnknownNameError", "UnsupportedError",
    ),
    "planner.intake.trainer_files.files": ("read_current",),
    "planner.library": ("EstimateList", "estimate", "estimate_many", "recommend", "study_of"),
    "planner.specs.cluster": ("ClusterSpec",),
    "planner.specs.estimate": ("Estimate",),
    "planner.specs.job": ("Job",),
    "planner.specs.layout": ("Layout",),
    "planner.specs.model": ("ModelSpec",),
    "planner.specs.plan": ("Plan",),
    "planner.specs.training": ("TrainingSpec",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ClusterSpec", "Estimate", "EstimateList", "InfeasibleError", "Job", "Layout", "ModelSpec",
    "Plan", "PlannerError", "SpecError", "TrainingSpec", "UnknownNameError", "UnsupportedError",
    "__version__", "estimate", "estimate_many", "read_current", "recommend", "study_of",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
