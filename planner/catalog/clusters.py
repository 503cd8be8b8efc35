"""The catalogue of GPUs and clusters: one YAML each in `gpus/` and `clusters/`, in the format of a
user's own.

A GPU's file is an inline `cluster.gpu` mapping with its `sources`; a cluster's file is a `cluster`
mapping with `aliases`, `source` and `notes` beside it. The file name is the catalogue name.
"""

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from planner.errors import Fault, SpecError, UnknownNameError

if TYPE_CHECKING:
    from planner.specs.cluster import ClusterSpec
    from planner.specs.gpu import GpuSpec

_LABELS = frozenset({"aliases", "source", "notes"})
_MAX_CHARACTERS = 100_000
# libyaml where it is built in: ten times faster
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
    """Every name under which an entry is known, in lower case -> catalogue name."""
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
    """Every accepted GPU name in lower case -> catalogue name."""
    return dict(_aliases("gpus"))


UNKNOWN = {  # what to do where no name of the catalogue is meant
    "gpus": "describe it by the nearest one, for example gpu: {base: h100-sxm-80gb, name: mine, "
    "memory: 96 GiB}",
    "clusters": "write gpu and num_gpus out, inline or in a YAML file",
}


def _find(kind: str, name: str, field: str, what: str) -> str:
    known = _aliases(kind)
    typed = _normal(name)
    if typed not in known:
        raise UnknownNameError(field, name, known, what, also=UNKNOWN[kind])
    return known[typed]


def load_gpu(name: str, *, field: str = "cluster.gpu") -> "GpuSpec":
    """The GPU of this catalogue name or alias, any case.  Raises UnknownNameError naming the
    closest.
    """
    return _gpu(_find("gpus", name, field, "GPU"))


@lru_cache(maxsize=256)
def _gpu(name: str) -> "GpuSpec":
    from planner.specs.gpu import GpuSpec

    return GpuSpec.from_user({**_documents("gpus")[name], "name": name}, f"gpus/{name}.yaml")


def load_cluster(name: str, *, field: str = "cluster") -> "ClusterSpec":
    """The cluster of this catalogue name or alias, any case.  Raises UnknownNameError naming the
    closest.
    """
    return _cluster(_find("clusters", name, field, "cluster"))


@lru_cache(maxsize=256)
def _cluster(name: str) -> "ClusterSpec":
    from planner.specs.cluster import ClusterSpec

    keys = {key: value for key, value in _documents("clusters")[name].items() if key not in _LABELS}
    return ClusterSpec.from_user(keys, f"clusters/{name}.yaml")


def cluster_document(name: str) -> Mapping[str, object]:
    """The cluster's file as written, with its source and notes.  Raises UnknownNameError."""
    return dict(_documents("clusters")[_find("clusters", name, "cluster", "cluster")])


def read_mapping(path: str, field: str) -> Mapping[object, object]:
    """The mapping in a user's YAML or JSON file.  Raises SpecError when it cannot be read or holds
    something else.
    """
    remedy = "give the path of a YAML file with gpu and num_gpus, or a catalogue name"
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = yaml.safe_load(text) if len(text) <= _MAX_CHARACTERS else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError(Fault(field, path, f"cannot be read ({reason})", remedy)) from None
    inner = document.get("cluster", document) if isinstance(document, Mapping) else None
    if not isinstance(inner, Mapping):
        raise SpecError(Fault(field, path, "holds no mapping of keys to values", remedy))
    return {key: value for key, value in inner.items() if key not in _LABELS}
