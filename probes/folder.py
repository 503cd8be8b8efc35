"""The folder of a probe: the names of the files that runner, program and reader agree on."""

import os
import tempfile
from pathlib import Path

TASK, RESULT, BEGIN, END, LOG = "task.json", "result.json", "begin.json", "end.json", "output.log"
NODE_ENDS, NODE_LOGS = "end.node*.json", "output.node*.log"
NODE_STARTS = "guardian.node*.json"
KERNEL_LOG, KERNEL_LOGS = "kernel.log", "kernel*.log"  # what kernels logged meanwhile
OTHERS, ALL_OTHERS = "others.txt", "others*.txt"  # who else holds memory of its GPUs
FOUND = "found.json"  # versions that the interpreter of the program has
STOP = "stop"  # asks the guardians of all nodes to end the probe


def lease_folder() -> Path:
    """Where this user's leases are: in the folder of its session, else in the temporary folder."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return Path(session) / "planner-leases"
    return Path(tempfile.gettempdir()) / f"planner-leases-{os.getuid()}"
