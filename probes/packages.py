"""Our packages for the interpreter of probes, which may be another than ours.

It gets no other package of ours: its torch, numpy and pydantic are built for it.
"""

import contextlib
import hashlib
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("planner", "probes")  # all that a probe imports of us


def search_path(folder: Path) -> str:
    """PYTHONPATH of all that runs in that interpreter: ours, and our packages last.

    folder: the parent folder of probes.
    """
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(linked(folder))]))


def linked(folder: Path) -> Path:
    """The folder beside the probes that holds links to our packages and nothing else.

    Any number of processes may make it at once; one for each place that planner is installed in.
    """
    name = hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
    links = folder.absolute() / f"packages-{name}"
    links.mkdir(parents=True, exist_ok=True, mode=0o700)
    for package in PACKAGES:
        with contextlib.suppress(FileExistsError):
            (links / package).symlink_to(ROOT / package, target_is_directory=True)
    return links


def mounts(folder: Path) -> list[Path]:
    """Folders that a container mounts: the links, and what they point to."""
    return [linked(folder), *(ROOT / package for package in PACKAGES)]
