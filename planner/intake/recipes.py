"""Completes a job with experts by NVIDIA's recipe (`trainers.recipes`).

Only where its layout names no dispatcher: who names one writes a configuration of his own, as a
plan does. Written values stand, and values that the trainer would refuse beside them are not taken.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from planner.rules import Context, violations
from planner.rules.experts import overlapping
from planner.specs.cluster import ClusterSpec
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.recipes import ExpertRecipe, expert_recipe


def with_recipe(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    layout: Layout,
    asked: Mapping[Any, Any],
) -> tuple[TrainingSpec, Layout]:
    """Training and layout, where the recipe gives all that was left out.

    asked: the layout as it was written.
    """
    recipe = None
    if layout.ep > 1 and model.is_moe and "moe_dispatcher" not in asked:
        recipe = expert_recipe(model, cluster, training, layout.precision)
    if recipe is None:
        return training, layout
    ours = layout.model_copy(update={"moe_dispatcher": recipe.dispatcher})
    refused = {one.field for one in violations(layout, model, cluster, training)}
    for filled in _from_most(training, recipe):
        if {one.field for one in violations(ours, model, cluster, filled)} <= refused:
            return filled, ours
    return training, layout


def _from_most(training: TrainingSpec, recipe: ExpertRecipe) -> tuple[TrainingSpec, ...]:
    """Jobs to try in turn: the whole recipe, without its overlap, with only its dispatcher.

    Graphs of a recipe that drops tokens hold experts, so who writes that none is has other graphs.
    """
    chosen = "moe_capacity_factor" in training.model_fields_set
    if chosen and recipe.drops and training.moe_capacity_factor is None:
        return (training,)
    capacity = 1.0 if recipe.drops and not chosen else training.moe_capacity_factor
    ep = training.overlap.ep
    overlaps = dict.fromkeys((recipe.overlap, False)) if ep is None else (ep,)
    filled = (_filled(training, recipe.graphs, overlap, capacity) for overlap in overlaps)
    return (*filled, training)


def with_exchange(model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> TrainingSpec:
    """The training with `overlap.ep` off, unless the job or a recipe decides about it."""
    job = Context(model=model, cluster=cluster, training=training)
    leaves_open = training.overlap.ep is None and not overlapping(job)
    return _without_overlap(training) if leaves_open else training


@lru_cache(maxsize=256)
def _without_overlap(training: TrainingSpec) -> TrainingSpec:
    overlap = training.overlap.model_copy(update={"ep": False})
    return training.model_copy(update={"overlap": overlap})


@lru_cache(maxsize=256)  # jobs that share their training are priced together
def _filled(
    training: TrainingSpec, graphs: str, overlap: bool, capacity: float | None
) -> TrainingSpec:
    return training.model_copy(
        update={
            "moe_capacity_factor": capacity,
            "cuda_graphs": training.cuda_graphs or graphs,
            "overlap": training.overlap.model_copy(update={"ep": overlap}),
        }
    )


def recipe_note(job: Job) -> str | None:
    """A sentence on values taken from a recipe; None without any."""
    asked = job.request.get("layout")
    if job.layout is None or not isinstance(asked, Mapping) or "moe_dispatcher" in asked:
        return None
    recipe = expert_recipe(job.model, job.cluster, job.training, job.layout.precision)
    if recipe is None or job.layout.ep == 1 or job.layout.moe_dispatcher != recipe.dispatcher:
        return None
    training = job.request["training"]
    taken = [f"moe_dispatcher {recipe.dispatcher}"]
    if not training.get("cuda_graphs") and job.training.cuda_graphs:
        taken.append(f"cuda_graphs {job.training.cuda_graphs}")
    if "moe_capacity_factor" not in training and job.training.moe_capacity_factor:
        taken.append(f"moe_capacity_factor {job.training.moe_capacity_factor:g}")
    if "ep" not in (training.get("overlap") or {}):
        taken.append(f"overlap.ep {str(job.training.overlap.ep).lower()}")
    return (
        f"the layout names no dispatcher: {', '.join(taken)} are those of NVIDIA's recipe for such "
        f"a model on {job.cluster.gpu.name} since NeMo {recipe.since[2:].replace('-', '.')}; write "
        "them if the run has others"
    )
