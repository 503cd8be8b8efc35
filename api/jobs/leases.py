"""Who holds what is being worked on, and for how long: owners, leases, and the heart that prolongs
one.
"""

import logging
import os
import platform
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from planner.errors import ConflictError, PlannerError
from planner.ports import Lease, ProbeRecord, TaskRecord

if TYPE_CHECKING:
    from api.wiring import Wiring

LEASE_SECONDS = 30.0
BEAT_SECONDS = 3.0
Record = TypeVar("Record", TaskRecord, ProbeRecord)
log = logging.getLogger("planner.leases")


def owner() -> str:
    """Who we are: host, process, thread."""
    return f"{platform.node()}:{os.getpid()}:{threading.get_ident()}"


def lease(wiring: "Wiring") -> Lease:
    """A lease from now on."""
    return Lease(owner=owner(), now=wiring.clock.now(), seconds=LEASE_SECONDS)


def lease_after(wiring: "Wiring", other: datetime | None) -> Lease:
    """A lease from now on, or from the end of a dead owner's where that would still last."""
    now = lease(wiring)
    return (
        now if other is None else replace(now, now=max(now.now, other + timedelta(microseconds=1)))
    )


def is_gone(name: str | None) -> bool:
    """Whether an owner was a process of this host that no longer exists."""
    host, _, rest = (name or "").partition(":")
    pid = rest.partition(":")[0]
    if host != platform.node() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@dataclass
class Heart(ABC, Generic[Record]):
    """Prolongs a lease while its work runs; sets `stop` when somebody asks to cancel or the lease
    is lost.

    words: what the work says, for the next beat.
    """

    wiring: "Wiring"
    held: Record
    stop: threading.Event
    words: str = field(default="", kw_only=True)
    cancelled: bool = field(default=False, kw_only=True)
    lost: bool = field(default=False, kw_only=True)
    _done: threading.Event = field(default_factory=threading.Event, kw_only=True)

    def __enter__(self) -> Self:
        self._owner = owner()
        self._thread = threading.Thread(
            target=self._run, name=f"heart of {self.held.id}", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @abstractmethod
    def _prolong(self, now: Lease) -> bool:
        """Stores the new lease; whether somebody asked to cancel. Raises ConflictError where the
        lease is lost.
        """

    def _run(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        try:
            asked = self._prolong(
                Lease(owner=self._owner, now=self.wiring.clock.now(), seconds=LEASE_SECONDS)
            )
        except ConflictError:
            self.lost = True
            self.stop.set()
        except PlannerError as error:
            # the lease lasts for several more
            log.warning("%s: no heartbeat: %s", self.held.id, error)
        else:
            if asked:
                self.cancelled = True
                self.stop.set()
