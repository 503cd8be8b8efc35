"""Every error a user can meet, as one tree.

PlannerError
  SpecError            the request is wrong: field, value, rule, remedy      -> HTTP 422, exit 2
    UnknownNameError   no such model, GPU, cluster, schedule; names the closest
  InfeasibleError      the request is sound but nothing fits                 -> HTTP 409, exit 3
    UnsupportedError   ... but its trainer cannot run it; names what could
  ProbeError           a probe or a backend failed                           -> HTTP 502, exit 4
  MissingPackageError  a package of one of our extras is not installed     -> HTTP 503, exit 4
  StoreError           storage: NotFoundError (404), ConflictError (409)

`api/errors.py` is the only table from these to HTTP status and exit code.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

PREDICATES = ("is", "must", "has", "have", "holds", "hold", "needs", "cannot", "ended")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: the field, what was given, the rule it breaks, what would pass."""

    field: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        if self.value is None:  # nothing was given: the rule says what is missing
            verb = self.rule.partition(" ")[0] in PREDICATES
            return f"{self.field}{'' if verb else ':'} {self.rule}; {self.remedy}"
        shown = repr(self.value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return f"{self.field}={shown}: {self.rule}; {self.remedy}"


class PlannerError(Exception):
    """Base of all errors that are not bugs of ours."""

    kind = "planner_error"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as it stands: constructors take other things than the message."""
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def as_dict(self) -> dict[str, object]:
        """The error object of the contract: type, field, value, message, remedy."""
        return {
            "type": self.kind,
            "field": None,
            "value": None,
            "message": str(self),
            "remedy": None,
        }


class SpecError(PlannerError):
    """The request is wrong. It carries every fault found; the first one is the headline."""

    kind = "invalid_request"

    def __init__(self, faults: Fault | Sequence[Fault]) -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        if not self.faults:
            raise ValueError("SpecError needs at least one fault")
        super().__init__("; ".join(str(fault) for fault in self.faults))

    def renamed(self, name: Callable[[str], str]) -> "SpecError":
        """A copy with the field names that a surrounding request uses."""
        error = SpecError([replace(fault, field=name(fault.field)) for fault in self.faults])
        error.kind = self.kind
        return error

    def as_dict(self) -> dict[str, object]:
        first = self.faults[0]
        body: dict[str, object] = {
            "type": self.kind,
            "field": first.field,
            "value": _plain(first.value),
            "message": first.rule,
            "remedy": first.remedy,
        }
        if len(self.faults) > 1:
            body["errors"] = [
                {**asdict(fault), "value": _plain(fault.value)} for fault in self.faults
            ]
        return body


def fault(field: str, value: object, rule: str, remedy: str) -> SpecError:
    return SpecError(Fault(field, value, rule, remedy))


class UnknownNameError(SpecError):
    """No such name in the catalogue; the remedy names the closest known ones."""

    kind = "unknown_name"

    def __init__(
        self, field: str, value: str, known: Iterable[str], what: str, *, also: str = ""
    ) -> None:
        """also: what can be done if no known name is meant."""
        names = sorted(known)
        close = difflib.get_close_matches(str(value).lower(), names, n=3, cutoff=0.5)
        remedy = f"known: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
        if close:
            remedy = f"did you mean {' or '.join(close)}?"
        both = remedy if not also else f"{remedy} Or {also}" if close else f"{remedy}; or {also}"
        super().__init__(Fault(field, value, f"no {what} of this name", both))


class InfeasibleError(PlannerError):
    """A sound request for which no layout fits.

    It names the binding limit, the nearest miss and the smallest change that would fit.
    """

    kind = "nothing_fits"

    def __init__(
        self,
        message: str,
        *,
        remedy: str,
        field: str = "cluster",
        nearest_miss: object = None,
        rejected: object = None,
    ) -> None:
        self.remedy, self.field = remedy, field
        self.nearest_miss, self.rejected = nearest_miss, rejected
        super().__init__(message)

    def as_dict(self) -> dict[str, object]:
        return {
            **super().as_dict(),
            "field": self.field,
            "remedy": self.remedy,
            "nearest_miss": self.nearest_miss,
            "rejected": self.rejected,
        }


class UnsupportedError(InfeasibleError):
    """A sound request that its trainer cannot run, whatever the layout.

    could: trainers that can, with their release.
    violations: one for each thing that the trainer lacks.
    """

    kind = "nothing_runs"

    def __init__(
        self,
        message: str,
        *,
        remedy: str,
        field: str,
        could: Sequence[str],
        violations: Sequence[object],
    ) -> None:
        self.could, self.violations = tuple(could), tuple(violations)
        super().__init__(message, remedy=remedy, field=field)

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "could": list(self.could), "violations": list(self.violations)}


class ProbeError(PlannerError):
    """A probe or a backend failed, with the message that it gave."""

    kind = "probe_failed"


class PartedError(PlannerError):
    """An error whose text is "what is wrong; what to do about it"."""

    def as_dict(self) -> dict[str, object]:
        """The contract's error object, with what to do about it as its remedy."""
        message, parted, remedy = str(self).rpartition("; ")
        return {
            **super().as_dict(),
            "message": message if parted else remedy,
            "remedy": remedy if parted else None,
        }


class MissingPackageError(PartedError):
    """A package of one of our extras that is not installed."""

    kind = "missing_package"


def how_to_install(extra: str) -> str:
    """How to install an extra. The package is on no registry, where another bears its name."""
    return f"pip install '.[{extra}]' in planner's checkout"


class StoreError(PartedError):
    """The database could not do what was asked."""

    kind = "store_error"


class NotFoundError(StoreError):
    """No object has this id."""

    kind = "not_found"


class ConflictError(StoreError):
    """The object exists already, or changed in the meantime."""

    kind = "conflict"


def _plain(value: object) -> object:
    """A JSON-safe form of a faulty value; NaN and nested values become short text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:197] + "..."
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
