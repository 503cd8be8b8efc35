"""The catalogue of GPUs and clusters: one YAML each in `gpus/` and `clusters/`.

The files have the format that users write. A GPU's file is an inline `cluster.gpu` mapping with its
`sources`. A cluster's file is a `cluster` mapping that also has `aliases`, `source` and `notes`.
The file name is the catalogue name.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files

import yaml

from planner.errors import UnknownNameError

LABELS = frozenset({"aliases", "source", "notes"})
# libyaml's parser where it is built in: ten times faster
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@lru_cache(maxsize=2)
def _names(kind: str) -> tuple[str, ...]:
    """Catalogue names, sorted. No file is read for this."""
    folder = files("planner.catalog").joinpath(kind)
    found = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    return tuple(name.removesuffix(".yaml") for name in found)


@cache
def _document(kind: str, name: str) -> Mapping[str, object]:
    text = files("planner.catalog").joinpath(f"{kind}/{name}.yaml").read_text(encoding="utf-8")
    document: Mapping[str, object] = yaml.load(text, Loader=_LOADER)
    return document


@lru_cache(maxsize=2)
def _aliases(kind: str) -> dict[str, str]:
    """Every name of an entry, in lower case -> catalogue name. Reads every file."""
    known = {name: name for name in _names(kind)}
    for name in _names(kind):
        typed = _document(kind, name).get("aliases", ())
        for alias in typed if isinstance(typed, list) else ():
            known.setdefault(_normal(str(alias)), name)
    return known


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def gpu_names() -> tuple[str, ...]:
    return _names("gpus")


def cluster_names() -> tuple[str, ...]:
    return _names("clusters")


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
    typed = _normal(name)
    if typed in _names(kind):
        return typed
    known = _aliases(kind)
    if typed not in known:
        what = {"gpus": "GPU", "clusters": "cluster"}[kind]
        raise UnknownNameError(field, name, known, what, also=UNKNOWN[kind])
    return known[typed]


def cluster_document(name: str) -> Mapping[str, object]:
    """The cluster's file as written, with its source and notes. Raises UnknownNameError."""
    return dict(_document("clusters", catalogue_name("clusters", name, "cluster")))


def gpu_document(name: str) -> Mapping[str, object]:
    """The GPU's file as written, with its sources. Raises UnknownNameError."""
    return dict(_document("gpus", catalogue_name("gpus", name, "cluster.gpu")))
