"""The caller: a key of the service, or a person at the command line.

The service sets it for each request; work in threads of the request sees it too.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from planner.api.errors import ForbiddenError
from planner.api.identity import local_user
from planner.api.settings import Quota


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
