"""Leases on devices of this machine: one lock per device.

The kernel drops a lock with the last process that has it open: the runner, or the guardian of the
probe that uses the device. So a device is free again if, and only if, no process of the probe is
left, in whatever order they ended.

A GPU is locked for all users of the machine by a name in the kernel (an abstract Unix socket),
which nobody can read, write or put a link under. Each user's own lock files are in a folder that
only that user may open; they hold the token of the probe that had the device last.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
import uuid
from pathlib import Path

from planner.errors import ProbeError
from planner.probes import guardian

MACHINE = "planner-lease"
SHARED = "gpu-"  # devices that all users of a machine share
MOST_TOKEN_BYTES = 4096
PRIVATE = 0o077  # what nobody else may have of a folder


class LeaseLocks:
    """The locks of one lease.

    machine: the name under which the machine's users see each other's locks.
    token: written into the files. With it, processes of an earlier owner that was killed together
        with its guardian can be found and ended.
    """

    def __init__(self, folder: Path, *, machine: str = MACHINE) -> None:
        self.folder, self.machine, self.token = folder, machine, uuid.uuid4().hex
        self._held: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that carry the locks."""
        return tuple(one for held in self._held.values() for one in held)

    def lock(self, name: str) -> bool:
        """Whether the device is ours now. Raises ProbeError if no lock can be made."""
        held: list[int] = []
        if name.startswith(SHARED):
            taken = self._take_name(name)
            if taken is None:
                return False
            held.append(taken)
        try:
            descriptor = self._open(f"{name}.lock")
            held.append(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _close(held)
            return False
        except BaseException:
            _close(held)
            raise
        self._held[name] = held
        before = os.read(descriptor, MOST_TOKEN_BYTES)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            guardian.kill_all(str(json.loads(before)["token"]))
        os.ftruncate(descriptor, 0)
        owner = {"token": self.token, "pid": os.getpid(), "since": time.time()}
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        return True

    def unlock(self, name: str) -> None:
        _close(self._held.pop(name))

    def release(self) -> None:
        for name in list(self._held):
            self.unlock(name)

    def _take_name(self, name: str) -> int | None:
        """The socket that has the device's name on this machine; None where another has it."""
        digest = hashlib.sha256(f"{self.machine}\n{name}".encode()).hexdigest()
        with contextlib.ExitStack() as undo:
            ours = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                ours.bind(f"\0{MACHINE}-{digest}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None
                raise _no_lease(name, error.strerror or str(error)) from None
            undo.pop_all()
            return ours.detach()

    def _open(self, name: str) -> int:
        """Opens our lock file, and nothing that another user could have put in its place."""
        path = self.folder / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_folder(self.folder)
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            symlink = error.errno == errno.ELOOP
            raise _no_lease(path, "is a link" if symlink else str(error.strerror)) from None
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
        raise _no_lease(path, "is not a file of ours alone")


def check_folder(folder: Path) -> None:
    """Raises ProbeError unless the folder is ours and closed to others."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _no_lease(folder, "is a link or a file")
    if found.st_uid != os.geteuid():
        raise _no_lease(folder, "belongs to another user")
    if found.st_mode & PRIVATE:
        raise _no_lease(folder, "is open to others (`chmod 700` closes it)")


def _no_lease(place: object, why: str) -> ProbeError:
    return ProbeError(
        f"{place}: no lease can be taken ({why}); set PLANNER_LEASE_FOLDER to a folder of yours"
    )


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
