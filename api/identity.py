"""Names: ids of objects, hashes of jobs, the user of this process, and the caller.

The caller is a key of the service, or a person at the command line. The service sets it for each
request; work in threads of the request sees it too.
"""

import getpass
import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from planner.api.errors import ForbiddenError
from planner.api.settings import Quota

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_TIME_LETTERS, _RANDOM_LETTERS = 9, 8
_LABELS = frozenset(
    {"id", "group", "sweep", "complete", "source", "trust", "notes", "measured", "peer"}
)


class TimeOrderedIds:
    """Ids such as "plan-1j9x3k2d4-7fq0m2zt": milliseconds, then 40 random bits.

    Later ones sort after earlier ones.
    """

    def new_id(self, prefix: str) -> str:
        milliseconds = time.time_ns() // 1_000_000
        random = int.from_bytes(os.urandom(5), "big")
        when = _letters(milliseconds, _TIME_LETTERS)
        return f"{prefix}-{when}-{_letters(random, _RANDOM_LETTERS)}"


def _letters(number: int, width: int) -> str:
    letters = ""
    for _ in range(width):
        number, digit = divmod(number, 32)
        letters = _ALPHABET[digit] + letters
    return letters


def hash_of_job(job: Mapping[str, Any]) -> str:
    """SHA-256 of what the job asks, whatever its id, its labels and the order of its keys."""
    asked = {key: value for key, value in job.items() if key not in _LABELS}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_of(*parts: bytes) -> str:
    """SHA-256 of byte strings, each with its length, so that no two lists of parts meet."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def local_user() -> str:
    """The user of this process, as stored rows name them."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a container's user without a name
        return f"cli:{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Asker:
    """The caller. admin: may change what others asked for. quota: None where nothing is limited."""

    name: str
    admin: bool
    quota: Quota | None = None

    def check_owner(self, what: str, subject: str, asked_by: str | None) -> None:
        """Raises ForbiddenError where somebody else asked for the subject."""
        if not self.admin and asked_by != self.name:
            raise ForbiddenError(
                f"{what} {subject} was asked for by {asked_by or 'an earlier version'}, not by "
                f"{self.name}; ask its owner, or a key with the scope admin"
            )


_asker: ContextVar[Asker | None] = ContextVar("asker", default=None)


def set_asker(asker: Asker) -> None:
    """Sets the caller for the rest of this request."""
    _asker.set(asker)


def asker() -> Asker:
    """The caller; outside of a request the user of this process, who may do everything."""
    return _asker.get() or Asker(local_user(), admin=True)
