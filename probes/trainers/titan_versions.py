"""Versions of TorchTitan and its packages: which go together."""

import re
from collections.abc import Mapping

from planner.export.torchtitan import WRITTEN

SUGGESTED = "0.2.2"
# first torch release with everything that a TorchTitan release line imports (torchtitan 0.3.0 calls
# torch.distributed.set_timeout, which 2.13 lacks)
NEEDS_TORCH = {"0.3": (2, 14)}
PACKAGES = ("torchtitan", "torch", "triton", "tensorboard", "datasets", "tokenizers", "tyro")


def clash(versions: Mapping[str, str], *, emulate: bool = False) -> str | None:
    """Packages that are missing or have a wrong version, and the command that fixes it."""
    titan, torch = versions.get("torchtitan"), versions.get("torch", "")
    if titan is None:
        return (
            f"torchtitan is not installed; pip install torchtitan=={SUGGESTED}, or use --trainer "
            "reference"
        )
    if line(titan) is None:
        known = ", ".join(WRITTEN)
        return (
            f"torchtitan {titan} is installed and the planner writes for {known}; pip install "
            f"torchtitan=={SUGGESTED}"
        )
    missing = [name for name in PACKAGES if name not in versions]
    if missing:
        return f"torchtitan {titan} needs {', '.join(missing)}; pip install {' '.join(missing)}"
    needed = NEEDS_TORCH.get(_line(titan))
    if needed is not None and _release(torch) < needed:
        wanted = ".".join(str(part) for part in needed)
        return (
            f"torchtitan {titan} needs torch {wanted} or a nightly of it, not {torch}; or pip "
            f"install torchtitan=={SUGGESTED}"
        )
    if emulate and titan.startswith("0.2.0"):
        return (
            f"torchtitan {titan} has no fake_backend mode to emulate a rank; pip install "
            f"torchtitan=={SUGGESTED}"
        )
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _line(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def line(version: str) -> str | None:
    """The version whose export serves an installed one.

    It is the version itself or its release line ("0.2", "0.3"); None if the planner
    exports to neither.
    """
    short = _line(version)
    lines = {_line(written) for written in WRITTEN}
    return version if version in WRITTEN else short if short in lines else None
