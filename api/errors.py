"""The only table from errors to HTTP status and exit code; both edges read it.

Also the errors that exist only at the edges: who asks, and how.
"""

from dataclasses import dataclass
from http import HTTPStatus
from importlib.util import find_spec

from planner.errors import (
    ConflictError,
    InfeasibleError,
    MissingPackageError,
    NotFoundError,
    PartedError,
    PlannerError,
    ProbeError,
    SpecError,
    StoreError,
    how_to_install,
)

EXIT_OK, EXIT_BUG, EXIT_REQUEST, EXIT_NOTHING_FITS, EXIT_BACKEND, EXIT_INTERRUPTED = (
    0, 1, 2, 3, 4, 130,
)  # fmt: skip


class UnauthenticatedError(PartedError):
    """No key, or one that is not known."""

    kind = "unauthenticated"


class ForbiddenError(PartedError):
    """A known key without the scope that the request needs."""

    kind = "forbidden"


class BodyTooLargeError(SpecError):
    """More bytes than the service reads."""

    kind = "body_too_large"


class SlowBodyError(SpecError):
    """A body that does not come."""

    kind = "request_timeout"


class MediaTypeError(SpecError):
    """A body that does not call itself JSON."""

    kind = "unsupported_media_type"


class PassingError(PartedError):
    """An error that a retry may cure. retry_after_seconds: when that may help."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)


class TooManyRequestsError(PassingError):
    """More than the service takes at once, or from one key."""

    kind = "too_many_requests"


class PlanningError(PartedError):
    """A plan that did not end within the time that the service gives it, or whose process died."""

    kind = "planning_failed"


class UnknownEntryError(SpecError):
    """A path that names nothing in the catalogue."""

    kind = "unknown_name"


class NotReadyError(StoreError):
    """The database is there, but not at the revision that this version needs."""

    kind = "not_ready"


class QuotaError(PassingError):
    """More than a key may use."""

    kind = "quota_exceeded"

    def __init__(
        self, name: str, used: float, more: float, limit: float, *, retry_after_seconds: float
    ) -> None:
        self.name, self.more = name, more
        super().__init__(
            f"quota {name} of this key is {limit:g}: {used:g} used, {more:g} asked for; ask for "
            "less, wait, or let the operator raise PLANNER_QUOTAS",
            retry_after_seconds=retry_after_seconds,
        )

    def as_dict(self) -> dict[str, object]:
        """The contract's error object; the field is the quota's name."""
        return {**super().as_dict(), "field": self.name, "value": self.more}


class UnavailableError(PassingError, StoreError):
    """The database did not answer in time."""

    kind = "database_unavailable"


class UnreadableError(StoreError):
    """Something stored by another version, or changed by hand, that this version cannot read."""

    kind = "unreadable"


class StoredError(PartedError):
    """An error that ended a stored job, with the kind and message that were stored."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ErrorCodes:
    """HTTP status and exit code of an error."""

    status: HTTPStatus
    exit_code: int


TABLE: dict[type[PlannerError], ErrorCodes] = {
    SpecError: ErrorCodes(HTTPStatus.UNPROCESSABLE_ENTITY, EXIT_REQUEST),
    InfeasibleError: ErrorCodes(HTTPStatus.CONFLICT, EXIT_NOTHING_FITS),
    ProbeError: ErrorCodes(HTTPStatus.BAD_GATEWAY, EXIT_BACKEND),
    MissingPackageError: ErrorCodes(HTTPStatus.SERVICE_UNAVAILABLE, EXIT_BACKEND),
    StoreError: ErrorCodes(HTTPStatus.SERVICE_UNAVAILABLE, EXIT_BACKEND),
    UnreadableError: ErrorCodes(HTTPStatus.GONE, EXIT_BACKEND),
    NotFoundError: ErrorCodes(HTTPStatus.NOT_FOUND, EXIT_REQUEST),
    ConflictError: ErrorCodes(HTTPStatus.CONFLICT, EXIT_REQUEST),
    UnauthenticatedError: ErrorCodes(HTTPStatus.UNAUTHORIZED, EXIT_REQUEST),
    QuotaError: ErrorCodes(HTTPStatus.TOO_MANY_REQUESTS, EXIT_BACKEND),
    ForbiddenError: ErrorCodes(HTTPStatus.FORBIDDEN, EXIT_REQUEST),
    UnknownEntryError: ErrorCodes(HTTPStatus.NOT_FOUND, EXIT_REQUEST),
    BodyTooLargeError: ErrorCodes(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, EXIT_REQUEST),
    SlowBodyError: ErrorCodes(HTTPStatus.REQUEST_TIMEOUT, EXIT_REQUEST),
    MediaTypeError: ErrorCodes(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, EXIT_REQUEST),
    TooManyRequestsError: ErrorCodes(HTTPStatus.TOO_MANY_REQUESTS, EXIT_BACKEND),
    PlanningError: ErrorCodes(HTTPStatus.SERVICE_UNAVAILABLE, EXIT_BACKEND),
    PlannerError: ErrorCodes(HTTPStatus.INTERNAL_SERVER_ERROR, EXIT_BUG),
}


def codes_of(error: PlannerError) -> ErrorCodes:
    """HTTP status and exit code of an error: the table's row for its class or the nearest base.

    A stored error has the codes of its kind.
    """
    cls = _class_of(error.kind) if isinstance(error, StoredError) else type(error)
    return next(TABLE[base] for base in cls.__mro__ if base in TABLE)


def _class_of(kind: str) -> type[PlannerError]:
    """The highest class of this kind; PlannerError for a kind that is none of ours (a bug)."""
    classes = [PlannerError]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    return next((cls for cls in classes if cls.kind == kind), PlannerError)


def lines_of(error: PlannerError) -> list[str]:
    """Lines for a person: one a fault; without faults the message and what to do about it."""
    if isinstance(error, SpecError):
        return [_one_line(str(fault)) for fault in error.faults]
    remedy = getattr(error, "remedy", None)
    return [_one_line(f"{error}; {remedy}" if remedy else str(error))]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def need(*modules: str, extra: str) -> None:
    """Raises MissingPackageError, which says what to install, where one of the modules is not."""
    for module in modules:
        if find_spec(module) is None:
            raise MissingPackageError(f"no {module} here; {how_to_install(extra)}")
