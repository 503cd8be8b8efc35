"""Leases on devices of this machine: one file lock per device.

The kernel drops the lock with the last process that has the file open: the runner, or the guardian
of the probe that uses the device. So a device is free again if, and only if, no process of the
probe is left, in whatever order they ended.
"""

import contextlib
import fcntl
import json
import os
import time
import uuid
from pathlib import Path

from planner.errors import ProbeError
from probes import guardian


class LeaseLocks:
    """The lock files of one lease.

    token: written into the files. With it, processes of an earlier owner that was killed together
        with its guardian can be found and ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        self._held: dict[str, int] = {}

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that carry the locks."""
        return tuple(self._held.values())

    def lock(self, name: str) -> bool:
        """Whether the file is ours now. Raises ProbeError if the lock file cannot be created."""
        descriptor = self._open(f"{name}.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._held[name] = descriptor
        before = os.read(descriptor, 4096)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            guardian.kill_all(str(json.loads(before)["token"]))
        os.ftruncate(descriptor, 0)
        owner = {"token": self.token, "pid": os.getpid(), "since": time.time()}
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        return True

    def unlock(self, name: str) -> None:
        """Releases one device."""
        os.close(self._held.pop(name))

    def release(self) -> None:
        """Releases all devices."""
        for name in list(self._held):
            self.unlock(name)

    def _open(self, name: str) -> int:
        """Opens the file, which everybody may read and write: other users' probes wait for ours."""
        path = self.folder / name
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.chmod(0o1777)
            if path.exists():
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o666)
            return descriptor
        except OSError as error:
            raise ProbeError(
                f"{path}: no lease can be taken ({error.strerror}); set PLANNER_LEASE_FOLDER to a "
                "place of yours"
            ) from None
