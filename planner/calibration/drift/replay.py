"""Going through the nights as they came, and what was found on the way.

Letters: A layouts, F families of layouts, T nights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.calibration import student
from planner.calibration.drift.findings import Drift, SlowHost, StepChange, creeps
from planner.calibration.drift.nights import BoolTable, Nights
from planner.calibration.drift.noise import Noise
from planner.calibration.drift.scores import (
    AS_LIKELY,
    COVERAGE,
    MOST_MOVED,
    RECOVERED_NIGHTS,
    TOGETHER,
    WINDOW,
    student_quantile,
    threshold_of,
)


def drift_of(nights: Nights, runs_per_false_alarm: float) -> Drift:
    """The changes in this history.

    runs_per_false_alarm: how many runs of the sweep, in the mean, until a change is found though
        none happened, in any of its layouts.
    """
    replay = Replay(nights, runs_per_false_alarm)
    for night in range(len(nights.runs)):
        replay.advance(night)
    return replay.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level that these layouts have had since a night, and the night after which it was found."""

    layouts: tuple[int, ...]
    found: int
    since: int


class Replay:
    """The test for drift, stepped through the nights of a history one by one.

    seconds (A, T): log seconds that count, without those of slow hosts.
    steps (A, T): their differences to the night before on the same level, over sqrt(2).
    starts (A,): first night of each layout's present level.
    slow, ended: hosts that are slow, and were.
    """

    def __init__(self, nights: Nights, runs_per_false_alarm: float) -> None:
        self.nights, self.runs = nights, runs_per_false_alarm
        self.seconds = nights.log_seconds.copy()
        self.starts = np.zeros(len(nights.layouts), dtype=np.int64)
        self.steps = np.full(self.seconds.shape, np.nan)
        self.last = np.full(len(nights.layouts), -1)
        self.levels: list[Level] = []
        self.slow: dict[str, tuple[int, int]] = {}  # host: found, since
        self.ended: list[tuple[str, int, int, int]] = []  # and until
        self.members = _families(nights.jobs)
        self.thresholds: dict[int, float] = {}

    def advance(self, night: int) -> None:
        for host, (found, since) in list(self.slow.items()):
            self._leave_out(host, night)
            self._take_in_again(host, found, since, night)
        self._add_steps(night, self.starts)
        while True:
            noise = Noise.at(self.seconds, self.steps, self.starts, night)
            if noise is None:
                return
            if not self._slow_host(noise, night) and not self._new_level(noise, night):
                return

    def _threshold(self, series: int) -> float:
        if series not in self.thresholds:
            self.thresholds[series] = threshold_of(self.runs, series)
        return self.thresholds[series]

    def _add_steps(self, night: int, starts: NDArray[np.int64]) -> None:
        for layout in np.flatnonzero(np.isfinite(self.seconds[:, night])):
            before = self.last[layout]
            if before >= starts[layout]:
                step = self.seconds[layout, night] - self.seconds[layout, before]
                self.steps[layout, night] = step / np.sqrt(2.0)
            self.last[layout] = night

    def _all_steps(self, night: int) -> None:
        """All differences anew, after readings were left out or taken in again."""
        self.steps[:], self.last[:] = np.nan, -1
        for one in range(night + 1):
            self._add_steps(one, _starts_at(self.levels, one, len(self.starts)))

    def _new_level(self, noise: Noise, night: int) -> bool:
        """Looks for a change and takes it in."""
        evidence = noise.evidence(self.members)
        families = int((evidence > 0).any(axis=1).sum())
        series = families + self._num_hosts()
        family, at = np.unravel_index(int(np.argmax(evidence)), evidence.shape)
        if not families or evidence[family, at] <= self._threshold(series):
            return False
        since = int(at) + noise.first
        layouts = noise.changed(self.members[family], since)
        # a level found from fewer layouts, and dated later, was this one
        same = [
            one for one in self.levels if one.since >= since and set(one.layouts) <= set(layouts)
        ]
        self.levels = [one for one in self.levels if one not in same]
        found = min((one.found for one in same), default=night)
        self.levels.append(Level(layouts=layouts, found=found, since=since))
        self.starts[list(layouts)] = since
        self.steps[list(layouts), since] = np.nan
        return True

    # ---- hosts -----------------------------------------------------------------------------------

    def _num_hosts(self) -> int:
        """Hosts that can be told apart."""
        return len(self.nights.on) if len(self.nights.on) > 1 else 0

    def _slow_host(self, noise: Noise, night: int) -> bool:
        """Looks for a slow host, and leaves out its readings from then on."""
        hosts = [host for host in self.nights.on if host not in self.slow]
        found = {
            host: best
            for host in (hosts if self._num_hosts() else ())
            if (best := noise.host_evidence(self.nights.on[host])) is not None
        }
        host = max(found, key=lambda one: found[one][0], default="")
        series = len(self.members) + self._num_hosts()
        if not found or found[host][0] <= self._threshold(series):
            return False
        since = found[host][1]
        self.slow[host] = night, since
        # what was found since then may have been this host
        self.levels = [one for one in self.levels if one.found < since]
        self.starts = _starts_at(self.levels, night, len(self.starts))
        for one in range(since, night + 1):
            self._leave_out(host, one)
        self._all_steps(night)
        return True

    def _leave_out(self, host: str, night: int) -> None:
        self.seconds[self.nights.on[host][:, night], night] = np.nan

    def _take_in_again(self, host: str, found: int, since: int, night: int) -> None:
        """Counts the host's readings again once they agree with other hosts'."""
        on = self.nights.on[host]
        own = [one for one in range(found + 1, night + 1) if on[:, one].any()][-RECOVERED_NIGHTS:]
        if len(own) < RECOVERED_NIGHTS or own[-1] != night:
            return
        then = self._against_others(host, since, found)
        now = self._against_others(host, own[0], night)
        if then is None or now is None or now > 0.5 * then:
            return
        del self.slow[host]
        self.ended.append((host, found, since, own[0]))
        for one in range(own[0], night + 1):
            rows = on[:, one]
            self.seconds[rows, one] = self.nights.log_seconds[rows, one]
        self._all_steps(night - 1)

    def _against_others(self, host: str, first: int, last: int) -> float | None:
        """Median log ratio of the host's readings to the layouts' level without it."""
        ratios: list[float] = []
        on, nights = self.nights.on[host], slice(first, last + 1)
        for layout, start in enumerate(self.starts):
            mine = self.nights.log_seconds[layout, nights][on[layout, nights]]
            level = self.seconds[layout, start : last + 1]
            if np.isfinite(mine).any() and np.isfinite(level).any():
                ratios.extend(mine[np.isfinite(mine)] - np.nanmedian(level))
        return float(np.median(ratios)) if ratios else None

    # ---- the result ------------------------------------------------------------------------------

    def result(self) -> Drift:
        """Findings, with intervals from all nights."""
        last = len(self.nights.runs) - 1
        noise = Noise.at(self.seconds, self.steps, self.starts, last) if last >= 0 else None
        if noise is None:
            return Drift()
        slow = [(host, *at, None) for host, at in self.slow.items()]
        sd = float(np.median(noise.layout_sd))
        series = len(self.members) + self._num_hosts()
        changes = tuple(_Changes(self.nights, self.seconds, self.steps, list(self.levels)).found())
        compared = self._threshold(2 * len(self.seconds))
        return Drift(
            changes=changes,
            creeps=tuple(creeps(self.seconds, noise.layout_sd, compared, changes)),
            hosts=tuple(self._host(sd, *one) for one in [*self.ended, *slow]),
            outliers=tuple(noise.outliers()),
            series=series,
            threshold=self._threshold(series),
            night_sd=sd,
        )

    def _host(self, sd: float, host: str, found: int, since: int, until: int | None) -> SlowHost:
        last = len(self.nights.runs) - 1 if until is None else until - 1
        change = self._against_others(host, since, last) or 0.0
        on = self.nights.on[host][:, since : last + 1]
        nights = int(on.any(axis=0).sum())
        half = student.TWO_SIDED_90 * sd / math.sqrt(max(1, nights))
        end = len(self.nights.runs) - 1
        newest = self._against_others(host, end, end)
        return SlowHost(
            host=host,
            found=found,
            since=since,
            until=until,
            change=float(np.expm1(change)),
            low=float(np.expm1(change - half)),
            high=float(np.expm1(change + half)),
            newest=None if newest is None else float(np.expm1(newest)),
            layouts=tuple(int(one) for one in np.flatnonzero(on.any(axis=1))),
        )


@dataclass(frozen=True, slots=True)
class _Changes:
    """Levels as changes, once all nights are known.

    levels: with first nights that are sought once more by the nights that came since.
    """

    nights: Nights
    seconds: NDArray[np.float64]
    steps: NDArray[np.float64]
    levels: list[Level]

    def found(self) -> list[StepChange]:
        """Joins changes that began within `TOGETHER` nights in the same direction into one."""
        for place, one in enumerate(self.levels):
            self.levels[place] = replace(one, since=self._first_night(one))
        groups: list[tuple[bool, Level]] = []
        for one in sorted(self.levels, key=lambda level: (level.since, level.found)):
            slower = self._gap(one)[0] > 0
            for place, (alike, other) in enumerate(groups):
                apart = one.since - other.since > TOGETHER or set(one.layouts) & set(other.layouts)
                if alike == slower and not apart:
                    groups[place] = slower, self._joined(one, other)
                    break
            else:
                groups.append((slower, one))
        changes = [self._change(level) for _, level in groups]
        return sorted(changes, key=lambda one: (one.found, one.since))

    def _joined(self, one: Level, other: Level) -> Level:
        """One level of both, from the night that all their layouts speak for."""
        joined = Level(
            layouts=tuple(sorted({*one.layouts, *other.layouts})),
            found=min(one.found, other.found),
            since=min(one.since, other.since),
        )
        return replace(joined, since=self._first_night(joined))

    def _change(self, level: Level) -> StepChange:
        rows, since = list(level.layouts), level.since
        gap, sd, degrees = self._gap(level)
        half = student_quantile(0.5 + 0.5 * COVERAGE, degrees) * sd
        _, after = _neighbours(self.levels, level, len(self.nights.runs))
        measured = np.flatnonzero(np.isfinite(self.seconds[rows]).any(axis=0))
        on = (host for host, where in self.nights.on.items() if where[rows, since:after].any())
        return StepChange(
            layouts=level.layouts,
            found=level.found,
            since=since,
            last_before=int(measured[measured < since][-1]),
            change=float(np.expm1(gap)),
            low=float(np.expm1(gap - half)),
            high=float(np.expm1(gap + half)),
            versions=self.nights.versions_changed(level.layouts, since),
            hosts=tuple(sorted(on)),
        )

    def _gap(self, level: Level) -> tuple[float, float, float]:
        before, after = _neighbours(self.levels, level, len(self.nights.runs))
        noise = self._noise_around(level.since, after)
        return noise.level_change(list(level.layouts), before, level.since, after)

    def _noise_around(self, since: int, after: int) -> Noise:
        night = min(after - 1, since + WINDOW // 2)
        noise = Noise.at(
            self.seconds, self.steps, _starts_at(self.levels, night, len(self.seconds)), night
        )
        assert noise is not None, "a change has enough nights"
        return noise

    def _first_night(self, level: Level) -> int:
        """The likeliest first night; of those about as likely, one on which a version changed."""
        before, after = _neighbours(self.levels, level, len(self.nights.runs))
        noise = self._noise_around(level.since, after)
        likely = {
            one: value
            for one, value in noise.likelihoods(list(level.layouts), before, after).items()
            if one <= level.found and abs(one - level.since) <= MOST_MOVED
        }
        best = max(likely.values(), default=0.0)
        among = [one for one, value in likely.items() if best - value <= AS_LIKELY]
        changed = [one for one in among if self.nights.versions_changed(level.layouts, one)]
        return max(changed or among, key=lambda one: likely[one], default=level.since)


def _starts_at(levels: Sequence[Level], night: int, count: int) -> NDArray[np.int64]:
    """First nights of the levels of a night, as they are known now, (A,)."""
    starts = np.zeros(count, dtype=np.int64)
    for one in levels:
        if one.since <= night:
            rows = list(one.layouts)
            starts[rows] = np.maximum(starts[rows], one.since)
    return starts


def _neighbours(levels: Sequence[Level], level: Level, end: int) -> tuple[int, int]:
    """Nights at which the level before began, and at which this one ended.

    Levels that this one is joined from are neither.
    """
    own = set(level.layouts)
    firsts = [
        one.since
        for one in levels
        if own & set(one.layouts)
        and not (own >= set(one.layouts) and abs(one.since - level.since) <= TOGETHER)
    ]
    before = max((one for one in firsts if one < level.since), default=0)
    return before, min((one for one in firsts if one > level.since), default=end)


def _families(jobs: Sequence[str]) -> BoolTable:
    """Groups of layouts that are watched together, (F, A): each alone, each job's, and all."""
    count = len(jobs)
    rows = [tuple(index == own for index in range(count)) for own in range(count)]
    rows += [tuple(one == job for one in jobs) for job in dict.fromkeys(jobs)]
    rows.append((True,) * count)
    return np.array(list(dict.fromkeys(rows)), dtype=np.bool_)
