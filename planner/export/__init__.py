"""From a layout to what a person pastes: TorchTitan's TOML or flags, Megatron-LM's arguments, scripts that start them."""

from typing import TYPE_CHECKING

from planner.errors import UnknownNameError

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
    """The layout in the words of one of FORMATS. Raises UnknownNameError for a format or a version we do not write."""
    from planner.export.megatron import export as to_megatron
    from planner.export.torchtitan import export as to_torchtitan

    writers = {"torchtitan": to_torchtitan, "megatron": to_megatron}
    if to not in writers:
        raise UnknownNameError("format", to, FORMATS, "export format")
    return writers[to](layout, model, cluster, training, version)
