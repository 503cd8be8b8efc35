"""The folder of a probe: the names of the files that runner, program and reader agree on."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

TASK, RESULT, BEGIN, END, LOG = "task.json", "result.json", "begin.json", "end.json", "output.log"
NODE_ENDS, NODE_LOGS = "end.node*.json", "output.node*.log"
NODE_STARTS = "guardian.node*.json"
KERNEL_LOGS = "kernel*.log"  # what kernels logged meanwhile
OTHERS, ALL_OTHERS = "others.txt", "others*.txt"  # who else holds memory of its GPUs
FOUND = "found.json"  # versions that the interpreter of the program has
MOST_BYTES = 16_000_000  # of a file that is read whole; a result of a thousand steps has 0.1 MB


def read_whole(path: Path) -> str:
    """The text of a file that a program wrote. Raises OSError for one of more than MOST_BYTES."""
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        size = path.stat().st_size
        raise OSError(errno.EFBIG, f"{size:,} bytes, more than {MOST_BYTES:,}", str(path))
    return raw.decode("utf-8", "replace")


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk that holds the folder, or would."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def lease_folder() -> Path:
    """Where this user's leases are: in the folder of its session, else in the temporary folder."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return Path(session) / "planner-leases"
    return Path(tempfile.gettempdir()) / f"planner-leases-{os.getuid()}"
