"""The interpreter of probes, which may be another than ours: its packages, torch's allocator.

Of ours it gets planner alone: its torch, numpy and pydantic are built for it.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import planner
from planner.errors import ProbeError

HOME = Path(planner.__file__).resolve().parent
ASK_SECONDS = 60.0
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # its second name is the older one
EXPANDABLE = re.compile(r"expandable_segments:\w+,?")
ASK = """\
import json
from importlib.metadata import distributions
found = [(one.metadata["Name"] or "", one.version) for one in distributions()]
print(json.dumps({name.lower(): version for name, version in found}))
"""


def told_by(
    command: Sequence[str], seconds: float, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command; output and exit. Raises OSError, TimeoutExpired. more: `env`, `cwd`."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, **more
    )


def versions_in(python: str) -> dict[str, str]:
    """Versions of an interpreter's packages by name, without importing any. Raises ProbeError."""
    if python == sys.executable:
        return {(one.name or "").lower(): one.version for one in distributions()}
    command = [python, "-c", ASK]
    try:
        done = told_by(command, ASK_SECONDS, cwd=os.sep)
        found: dict[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{python}: no answer within {ASK_SECONDS:g} s") from None
    except OSError as error:
        raise ProbeError(f"{python}: {error.strerror}") from None
    except ValueError:
        raise ProbeError(f"{python}: {' '.join(done.stderr.split())[-200:]}") from None
    return found


def search_path(folder: Path) -> str:
    """PYTHONPATH of what runs there: ours, and our package last. folder: the parent of probes."""
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


def allocator_settings(expandable: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Torch's allocator settings under both names, for all releases, beside those already set."""
    given = next((environment[name] for name in ALLOCATOR if environment.get(name)), "")
    asked = f"expandable_segments:{expandable}"
    value = ",".join(filter(None, [EXPANDABLE.sub("", given).strip(","), asked]))
    return dict.fromkeys(ALLOCATOR, value)
