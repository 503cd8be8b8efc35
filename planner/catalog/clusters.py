"""The catalogue of GPUs and clusters: one YAML each in `gpus/` and `clusters/`.

The files have the format that users write. A GPU's file is an inline `cluster.gpu` mapping with its
`sources`. A cluster's file is a `cluster` mapping that also has `aliases`, `source` and `notes`.
The file name is the catalogue name.
"""

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

import yaml

from planner.errors import UnknownNameError

if TYPE_CHECKING:
    pass

LABELS = frozenset({"aliases", "source", "notes"})
# libyaml's parser where it is built in: ten times faster
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@lru_cache(maxsize=2)
def _documents(kind: str) -> dict[str, Mapping[str, object]]:
    folder = files("planner.catalog").joinpath(kind)
    found = sorted(
        (item for item in folder.iterdir() if item.name.endswith(".yaml")),
        key=lambda item: item.name,
    )
    return {
        item.name.removesuffix(".yaml"): yaml.load(item.read_text(encoding="utf-8"), Loader=_LOADER)
        for item in found
    }


@lru_cache(maxsize=2)
def _aliases(kind: str) -> dict[str, str]:
    """Every name of an entry, in lower case -> catalogue name."""
    known = {name: name for name in _documents(kind)}
    for name, document in _documents(kind).items():
        typed = document.get("aliases", ())
        for alias in typed if isinstance(typed, list) else ():
            known.setdefault(_normal(str(alias)), name)
    return known


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def gpu_names() -> tuple[str, ...]:
    """Catalogue names of all GPUs, sorted."""
    return tuple(_documents("gpus"))


def cluster_names() -> tuple[str, ...]:
    """Catalogue names of all clusters, sorted."""
    return tuple(_documents("clusters"))


def gpu_aliases() -> Mapping[str, str]:
    """Every accepted GPU name, in lower case -> catalogue name."""
    return dict(_aliases("gpus"))


UNKNOWN = {  # what to do with a machine that the catalogue does not have
    "gpus": "describe it by the nearest one, for example gpu: {base: h100-sxm-80gb, name: mine, "
    "memory: 96 GiB}",
    "clusters": "write gpu and num_gpus out, inline or in a YAML file",
}


def catalogue_name(kind: str, name: str, field: str) -> str:
    """The catalogue name of a name or alias, in any case.

    kind: "gpus" or "clusters".
    Raises UnknownNameError naming the closest.
    """
    known = _aliases(kind)
    typed = _normal(name)
    if typed not in known:
        what = {"gpus": "GPU", "clusters": "cluster"}[kind]
        raise UnknownNameError(field, name, known, what, also=UNKNOWN[kind])
    return known[typed]


def cluster_document(name: str) -> Mapping[str, object]:
    """The cluster's file as written, with its source and notes. Raises UnknownNameError."""
    return dict(_documents("clusters")[catalogue_name("clusters", name, "cluster")])


def gpu_document(name: str) -> Mapping[str, object]:
    """The GPU's file as written, with its sources. Raises UnknownNameError."""
    return dict(_documents("gpus")[catalogue_name("gpus", name, "cluster.gpu")])
