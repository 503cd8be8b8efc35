"""Owner of a job: a process, named so that no other host, boot or container has the same name.

An owner's name is "host:pid:boot:namespace:start:random:oom_kills". Two containers may share a
host's name, and a process may get the number of one that ended; then another part differs.
"""

import os
import platform
import secrets
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path

_PROC = Path("/proc")
_BOOT = _PROC / "sys/kernel/random/boot_id"
_START_FIELD = 19  # of /proc/PID/stat after the command's name: clock ticks since the boot


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a machine. boot, namespace, start, oom_kills: empty where the system is silent.

    oom_kills: processes that the machine had killed for want of memory when this one began to own.
    """

    host: str
    pid: int
    boot: str
    namespace: str
    start: str
    random: str
    oom_kills: str = ""

    def __str__(self) -> str:
        return ":".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, name: str) -> "Process | None":
        """The process of this name; None for a name that is none of ours (an older version's)."""
        parts = name.split(":")
        if len(parts) not in (6, 7) or not parts[1].isdigit():
            return None
        return cls(parts[0], int(parts[1]), *parts[2:])


def owner() -> str:
    return str(_this(os.getpid()))


@lru_cache(maxsize=1)
def _this(pid: int) -> Process:
    """Our own process; a fork has a name of its own."""
    return Process(
        host=platform.node().replace(":", "-"),
        pid=pid,
        boot=_read(_BOOT).strip(),
        namespace=_namespace(),
        start=_start_of(pid) or "",
        random=secrets.token_hex(4),
        oom_kills=_oom_kills(),
    )


def has_crashed(name: str | None) -> bool:
    """Whether an owner was a process that we would see if it were there, and it is not.

    Only of this boot and this PID namespace can we tell; any other owner counts as alive until
    its lease expires.
    """
    that, this = Process.parse(name or ""), _this(os.getpid())
    if that is None or not (this.boot and this.namespace):
        return False
    if (that.boot, that.namespace) != (this.boot, this.namespace):
        return False
    return _start_of(that.pid) != that.start


def was_killed(name: str | None) -> bool:
    """Whether a crashed owner's machine lives, and has had memory for everybody since it began.

    Then nothing says that what it worked on took it down.
    """
    that, now = Process.parse(name or ""), _oom_kills()
    return that is not None and has_crashed(name) and that.oom_kills == now != ""


def _oom_kills() -> str:
    found = [line for line in _read(_PROC / "vmstat").splitlines() if line.startswith("oom_kill ")]
    return found[0].split()[1] if found else ""


def _namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid").removeprefix("pid:[").removesuffix("]")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process started; None where there is no such process."""
    stat = _read(_PROC / str(pid) / "stat")
    fields = stat.rpartition(")")[2].split()
    if len(fields) <= _START_FIELD or fields[0] in "ZX":
        return None  # gone, or ended and not yet waited for
    return fields[_START_FIELD]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
