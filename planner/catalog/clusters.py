"""The catalogue of GPUs and clusters.

A GPU's file is an inline `cluster.gpu` mapping with its `sources`. A cluster's file is a `cluster`
mapping that also has `aliases`, `source` and `notes`.
"""

from collections.abc import Mapping

from planner.catalog.files import document, known_names, named, names_of
from planner.errors import UnknownNameError

LABELS = frozenset({"aliases", "source", "notes"})
UNKNOWN = {  # what to do with a machine that the catalogue does not have
    "gpus": "describe it by the nearest one, for example gpu: {base: h100-sxm-80gb, name: mine, "
    "memory: 96 GiB}",
    "clusters": "write gpu and num_gpus out, inline or in a YAML file",
}


def gpu_names() -> tuple[str, ...]:
    return names_of("gpus")


def cluster_names() -> tuple[str, ...]:
    return names_of("clusters")


def gpu_aliases() -> Mapping[str, str]:
    """Every accepted GPU name, in lower case -> catalogue name."""
    return known_names("gpus")


def catalogue_name(kind: str, name: str, field: str) -> str:
    """The catalogue name of a name or alias, in any case.

    kind: "gpus" or "clusters".
    Raises UnknownNameError naming the closest.
    """
    found = named(kind, name)
    if found is None:
        what = {"gpus": "GPU", "clusters": "cluster"}[kind]
        raise UnknownNameError(field, name, known_names(kind), what, also=UNKNOWN[kind])
    return found


def cluster_document(name: str) -> Mapping[str, object]:
    """The cluster's file as written, with its source and notes. Raises UnknownNameError."""
    return document("clusters", catalogue_name("clusters", name, "cluster"))


def gpu_document(name: str) -> Mapping[str, object]:
    """The GPU's file as written, with its sources. Raises UnknownNameError."""
    return document("gpus", catalogue_name("gpus", name, "cluster.gpu"))
