"""Step times of a sweep's layouts, night by night."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn

BoolTable = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One measured step of one layout.

    layout: names the question, the layout, its pool and program. job: the question alone.
    run: names the run of the sweep; what one run measured is one night. at: ISO 8601.
    """

    layout: str
    job: str
    run: str
    at: str
    step_seconds: float
    hosts: frozenset[str] = frozenset()
    software: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nights:
    """Readings by night, in order.

    log_seconds (A, T): NaN where a layout was not measured.
    on (by host) (A, T): whether a reading is of that host.
    software: of each reading, by layout and night.
    """

    layouts: tuple[str, ...]
    jobs: tuple[str, ...]
    runs: tuple[str, ...]
    at: tuple[str, ...]
    log_seconds: FloatColumn
    on: Mapping[str, BoolTable] = field(default_factory=dict)
    software: Mapping[tuple[int, int], Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> "Nights":
        """Readings as a table; several of one layout in one run are averaged."""
        ordered = sorted(readings, key=lambda one: (one.at, one.run, one.layout))
        runs = list(dict.fromkeys(one.run for one in ordered))
        jobs = {one.layout: one.job for one in ordered}
        layouts = sorted(jobs)
        row = {name: index for index, name in enumerate(layouts)}
        night = {name: index for index, name in enumerate(runs)}
        shape = (len(layouts), len(runs))
        total, count = np.zeros(shape), np.zeros(shape)
        hosts = sorted({host for one in ordered for host in one.hosts})
        on = {host: np.zeros(shape, dtype=np.bool_) for host in hosts}
        software, at = dict[tuple[int, int], Mapping[str, str]](), dict[str, str]()
        for one in ordered:
            place = row[one.layout], night[one.run]
            total[place] += np.log(one.step_seconds)
            count[place] += 1
            software[place] = one.software
            at.setdefault(one.run, one.at)
            for host in one.hosts:
                on[host][place] = True
        with np.errstate(invalid="ignore", divide="ignore"):
            log_seconds = np.where(count > 0, total / count, np.nan)
        return cls(
            layouts=tuple(layouts),
            jobs=tuple(jobs[name] for name in layouts),
            runs=tuple(runs),
            at=tuple(at[name] for name in runs),
            log_seconds=log_seconds,
            on=on,
            software=software,
        )

    def ran_elsewhere(self, host: str, since: int) -> bool:
        """Whether every set of versions that a host measured with since ran on others too."""
        here = set[frozenset[tuple[str, str]]]()
        there = set[frozenset[tuple[str, str]]]()
        for (layout, night), software in self.software.items():
            if night >= since:
                found = here if self.on[host][layout, night] else there
                found.add(frozenset(software.items()))
        return here <= there

    def versions_changed(
        self, layouts: Sequence[int], since: int
    ) -> dict[str, tuple[str | None, str | None]]:
        """Software of these layouts that changed from the run before this night to the one on it.

        (before, after) by name.
        """
        found: dict[str, tuple[str | None, str | None]] = {}
        for layout in layouts:
            nights = [night for row, night in self.software if row == layout]
            old = max((night for night in nights if night < since), default=None)
            new = min((night for night in nights if night >= since), default=None)
            if old is not None and new is not None:
                one, two = self.software[layout, old], self.software[layout, new]
                names = sorted({*one, *two})
                pairs = {name: (one.get(name), two.get(name)) for name in names}
                found |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        return found
