"""Writes a layout as what a person pastes: TorchTitan's TOML or flags, Megatron-LM's arguments.

The scripts that start the trainer come with them.
"""

from typing import TYPE_CHECKING

from planner.errors import Fault, UnknownNameError

if TYPE_CHECKING:
    from planner.export.base import Export
    from planner.specs.cluster import ClusterSpec
    from planner.specs.layout import Layout
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

FORMATS = ("torchtitan", "megatron")


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

    A legal layout has no blockers: they are what the rules say about that trainer's release.
    """
    from planner.export.megatron import export as to_megatron
    from planner.export.torchtitan import export as to_torchtitan
    from planner.trainers.registry import version_under

    writers = {"torchtitan": to_torchtitan, "megatron": to_megatron}
    if to not in writers:
        raise UnknownNameError("format", to, FORMATS, "export format")
    written = writers[to](layout, model, cluster, training, version)
    own = version or version_under(training, to)
    target = training.model_copy(update={"trainer": to, "trainer_version": own})
    return written.refused(_refusals(layout, model, cluster, target))


def _refusals(
    layout: "Layout", model: "ModelSpec", cluster: "ClusterSpec", training: "TrainingSpec"
) -> "list[Fault]":
    """What the rules say against the layout; what concerns the whole job comes first."""
    from planner.rules import Context, violations
    from planner.rules.support import obstacles

    context = Context(model=model, cluster=cluster, training=training)
    found = [*obstacles(context), *violations(layout, model, cluster, training)]
    return [Fault(one.field, one.value, one.rule, one.remedy) for one in found]
