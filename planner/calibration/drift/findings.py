"""What a history of nights says."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """A change of level that is no noise.

    layouts: places of those that changed. found: the night after which it was found.
    since: its first night. last_before: the night before, on which one of them was measured.
    change: 0.02 is 2% slower; low, high: its 90% interval.
    versions: of software that changed then, (before, after) by name.
    hosts: all that the layouts ran on since.
    """

    layouts: tuple[int, ...]
    found: int
    since: int
    last_before: int
    change: float
    low: float
    high: float
    versions: Mapping[str, tuple[str | None, str | None]]
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowHost:
    """A host on which layouts take longer than on others.

    until: None while it is slow.
    newest: its change on the newest night; None where it measured nothing then.
    """

    host: str
    found: int
    since: int
    until: int | None
    change: float
    low: float
    high: float
    newest: float | None
    layouts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """One reading of the newest night far from those before. change: against their median."""

    layout: int
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Creep:
    """A layout whose newest nights are slower than a level that it had; see `creep`.

    change: 0.02 is 2% slower. first, last: the nights of that level. best: it is the best so far,
    not that of the first nights.
    """

    layout: int
    change: float
    first: int
    last: int
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What a history says.

    series: layouts, groups of them, and hosts that are watched.
    threshold: in standard deviations; None while nothing has enough nights.
    night_sd: of a layout's log step time from night to night, median of all; None likewise.
    """

    changes: tuple[StepChange, ...] = ()
    hosts: tuple[SlowHost, ...] = ()
    outliers: tuple[Outlier, ...] = ()
    creeps: tuple[Creep, ...] = ()
    series: int = 0
    threshold: float | None = None
    night_sd: float | None = None
