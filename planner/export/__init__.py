"""Writes a layout as text to paste: TorchTitan's TOML or flags, Megatron-LM's arguments.

Plain FSDP becomes an Accelerate configuration and a module that calls `fully_shard`, or DeepSpeed's
JSON. The scripts that start the trainer come with them.
"""

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from planner.errors import Fault, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.export.base import Export
    from planner.specs.cluster import ClusterSpec
    from planner.specs.layout import Layout
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

FORMATS = ("torchtitan", "megatron", "megatron-bridge", "accelerate", "deepspeed")
"""Export formats: each is a module here, whose `write` turns a draft into the export.

It says what its settings cannot express; what the trainer refuses, the rules say.
"""
OF_FSDP = ("accelerate", "deepspeed")  # formats of trainer fsdp


def export(
    layout: "Layout",
    model: "ModelSpec",
    cluster: "ClusterSpec",
    training: "TrainingSpec",
    *,
    to: str = "torchtitan",
    version: str | None = None,
) -> "Export":
    """The layout in one of FORMATS. Raises UnknownNameError for any other format.

    A legal layout has no blockers: they are what the rules say about that trainer's release, what
    concerns the whole job first.
    """
    return exports([layout], model, cluster, training, to=to, version=version)[0]


def exports(
    layouts: "Sequence[Layout]",
    model: "ModelSpec",
    cluster: "ClusterSpec",
    training: "TrainingSpec",
    *,
    to: str = "torchtitan",
    version: str | None = None,
) -> "list[Export]":
    """`export` of several layouts; the rules are asked of all at once."""
    from planner.columns import LayoutBatch
    from planner.export.base import Draft
    from planner.rules import Context, violations_of
    from planner.rules.support import obstacles
    from planner.trainers.registry import TRAINERS, version_under

    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS, "export format")
    write: Callable[[Draft], Export] = import_module(f"planner.export.{to.replace('-', '_')}").write
    runs = "fsdp" if to in OF_FSDP else to  # whose rules hold
    asked = version if runs == to else None  # a release of Accelerate is none of the trainer's
    own = asked or version_under(training, runs)
    target = training.model_copy(update={"trainer": runs, "trainer_version": own})
    context = Context(model=model, cluster=cluster, training=target)
    of_job = obstacles(context)
    of_each = violations_of(layouts, LayoutBatch.from_layouts(layouts), context)
    made = [
        write(Draft(layout, model, cluster, training, version)).refused(
            [Fault(one.field, one.value, one.rule, one.remedy) for one in (*of_job, *broken)]
        )
        for layout, broken in zip(layouts, of_each, strict=True)
    ]
    priced = TRAINERS[training.trainer].title
    note = f"Priced under {priced}, for which nothing is written: this is {TRAINERS[runs].title}'s."
    unwritten = training.trainer not in (*FORMATS, "fsdp")
    return [replace(one, notes=(note, *one.notes)) if unwritten else one for one in made]
