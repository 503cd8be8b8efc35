"""Our package for the interpreter of probes, which may be another than ours.

It gets no other package that we have: its torch, numpy and pydantic are built for it.
"""

import contextlib
import hashlib
import os
from pathlib import Path

import planner

HOME = Path(planner.__file__).resolve().parent


def search_path(folder: Path) -> str:
    """PYTHONPATH of all that runs in that interpreter: ours, and our package last.

    folder: the parent folder of probes.
    """
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(linked(folder))]))


def linked(folder: Path) -> Path:
    """The folder beside the probes that holds a link to our package and nothing else.

    Any number of processes may make it at once; one for each place that planner is installed in.
    """
    name = hashlib.sha256(str(HOME).encode()).hexdigest()[:12]
    links = folder.absolute() / f"packages-{name}"
    links.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        (links / HOME.name).symlink_to(HOME, target_is_directory=True)
    return links


def mounts(folder: Path) -> list[Path]:
    """Folders that a container mounts: the link, our package and, in a checkout, its probes."""
    return [linked(folder), HOME, Path(__file__).resolve().parent]
