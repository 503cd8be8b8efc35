"""How often drift is found where there is none, and how soon where there is, on simulated nights.

    python -m benchmarks.drift [--years N] [--histories N]

Noise is drawn, so everything is known: night to night by 0.7% (a standard deviation), of which the
layouts of one night share a part. The rate of false alarms is held against the one that was asked
for, one in 365 runs of the sweep, with an exact interval of its count.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import chi2

from planner.calibration.drift.findings import Drift
from planner.calibration.drift.nights import Nights
from planner.calibration.drift.replay import drift_of
from planner.columns import FloatColumn
from planner.units import counted

RUNS_PER_FALSE_ALARM = 365.0
YEAR = 365
NIGHT_SD = 0.007
LAYOUTS_A_JOB = 3
BEFORE, AFTER = 30, 30  # nights before a change, and nights that it may take to be found
STEPS = (0.01, 0.02, 0.03, 0.05, 0.10)
SLOPES = (0.005, 0.02)  # a night, for SLOPE_NIGHTS
SLOPE_NIGHTS = 6
NUM_HOSTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How nights differ.

    shared: part of the variance that the layouts of one night share.
    carried: correlation with the night before. degrees: of Student's t; None for a normal.
    outliers: share of readings that are 10% off.
    """

    name: str
    sd: float = NIGHT_SD
    shared: float = 0.2
    carried: float = 0.0
    degrees: float | None = None
    outliers: float = 0.0

    def draw(self, rng: np.random.Generator, layouts: int, nights: int) -> FloatColumn:
        """Log seconds about a level, (A, T)."""
        own, together = self._series(rng, (layouts, nights)), self._series(rng, (1, nights))
        seconds = self.sd * (np.sqrt(1 - self.shared) * own + np.sqrt(self.shared) * together)
        off = rng.random((layouts, nights)) < self.outliers
        return np.asarray(seconds + np.where(off, np.log(1.10), 0.0))

    def _series(self, rng: np.random.Generator, shape: tuple[int, int]) -> FloatColumn:
        if self.degrees is None:
            drawn = rng.normal(size=shape)
        else:
            drawn = rng.standard_t(self.degrees, size=shape)
            drawn = drawn / np.sqrt(self.degrees / (self.degrees - 2.0))
        for night in range(1, shape[1]):
            fresh = np.sqrt(1 - self.carried**2) * drawn[:, night]
            drawn[:, night] = self.carried * drawn[:, night - 1] + fresh
        return np.asarray(drawn)


NORMAL = Noise(name="normal")
KINDS = (
    NORMAL,
    Noise(name="normal, half of it shared", shared=0.5),
    Noise(name="Student's t, 3 degrees", degrees=3.0),
    Noise(name="1 reading in 100 is 10% off", outliers=0.01),
    Noise(name="AR(1), 0.4 of the night before", carried=0.4),
    Noise(name="AR(1) 0.4, half shared, t 4", carried=0.4, shared=0.5, degrees=4.0),
)


def nights_of(log_seconds: FloatColumn, hosts: Sequence[FloatColumn] = ()) -> Nights:
    """Simulated nights: three layouts a job. hosts (A, T) each: 1 where a layout ran there."""
    layouts, nights = log_seconds.shape
    names = tuple(f"layout-{index}" for index in range(layouts))
    runs = tuple(f"{night:04d}" for night in range(nights))
    return Nights(
        layouts=names,
        jobs=tuple(f"job-{index // LAYOUTS_A_JOB}" for index in range(layouts)),
        runs=runs,
        at=runs,
        log_seconds=log_seconds,
        on={f"host-{index}": on > 0 for index, on in enumerate(hosts)},
    )


# ---- false alarms --------------------------------------------------------------------------------


def poisson_interval(count: int, years: float) -> tuple[float, float]:
    """Exact 90% interval of a rate a year. Source: Garwood 1936."""
    low = 0.0 if count == 0 else float(chi2.ppf(0.05, 2 * count)) / 2
    return low / years, float(chi2.ppf(0.95, 2 * count + 2)) / 2 / years


def false_alarms(noise: Noise, layouts: int, years: int, *, hosts: int = 0, seed: int = 0) -> int:
    """Changes and slow hosts found in so many years of nights without any."""
    found = 0
    for year in range(years):
        rng = np.random.default_rng([seed, layouts, year])
        seconds = noise.draw(rng, layouts, YEAR)
        where = rng.integers(0, max(1, hosts), size=seconds.shape)
        drift = drift_of(
            nights_of(seconds, [(where == host) * 1.0 for host in range(hosts)]),
            RUNS_PER_FALSE_ALARM,
        )
        found += len(drift.changes) + len(drift.hosts) + len(drift.creeps)
    return found


def false_alarm_lines(years: int) -> Iterator[str]:
    """A table: noise x layouts."""
    yield f"False alarms a year, asked for: at most 1 ({counted(years, 'year')} each)"
    yield ""
    yield "| night to night | layouts | hosts | a year | 90% interval |"
    yield "|---|---|---|---|---|"
    cases = [(noise, layouts, 0) for noise in KINDS for layouts in (1, 6, 20)]
    for noise, layouts, hosts in [*cases, (NORMAL, 6, NUM_HOSTS)]:
        count = false_alarms(noise, layouts, years, hosts=hosts)
        low, high = poisson_interval(count, years)
        yield (
            f"| {noise.name} | {layouts} | {hosts or ''} | {count / years:.2f} | "
            f"{low:.2f} to {high:.2f} |"
        )


# ---- detection -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of several simulated histories with one change.

    delays: nights until it was found, the first bad one counted. histories: how many there were.
    covered: how often the interval held the true change. first_night: how often it was named.
    """

    delays: tuple[int, ...]
    histories: int
    covered: int
    first_night: int

    @property
    def line(self) -> str:
        """Cells of a table."""
        share = f"{len(self.delays) / self.histories:.0%}"
        if not self.delays:
            return f"{share} | | | |"
        median, most = np.median(self.delays), np.quantile(self.delays, 0.9)
        parts = (self.covered / len(self.delays), self.first_night / len(self.delays))
        return f"{share} | {median:.0f} | {most:.0f} | {parts[0]:.0%} | {parts[1]:.0%} |"


def history(
    rng: np.random.Generator, noise: Noise, layouts: int, affected: int, rise: FloatColumn
) -> FloatColumn:
    """Nights of which the first layouts take longer from BEFORE on. rise (AFTER,): log ratio."""
    seconds = noise.draw(rng, layouts, BEFORE + AFTER)
    seconds[:affected, BEFORE:] += rise
    return seconds


def detection(
    rise: FloatColumn, *, noise: Noise, layouts: int, affected: int, histories: int, seed: int = 1
) -> Found:
    """How soon a change is found, and how well it is described."""
    delays, covered, first = [], 0, 0
    for index in range(histories):
        rng = np.random.default_rng([seed, layouts, affected, index])
        drift = drift_of(
            nights_of(history(rng, noise, layouts, affected, rise)), RUNS_PER_FALSE_ALARM
        )
        after = [one for one in drift.changes if one.found >= BEFORE]
        if after:
            delays.append(after[0].found - BEFORE + 1)
            covered += after[0].low <= np.expm1(rise[-1]) <= after[0].high
            first += after[0].since == BEFORE
    return Found(delays=tuple(delays), histories=histories, covered=covered, first_night=first)


def step(change: float) -> FloatColumn:
    """Slower from one night on, (AFTER,)."""
    return np.full(AFTER, np.log1p(change))


def slope(each: float) -> FloatColumn:
    """Slower night by night, (AFTER,)."""
    return np.asarray(np.minimum(np.arange(1, AFTER + 1), SLOPE_NIGHTS) * np.log1p(each))


def detection_lines(histories: int) -> Iterator[str]:
    """Tables: steps and slopes by layouts; steps under other noise."""
    yield f"Nights until a change is found, of {histories} histories each ({BEFORE} nights before)"
    yield ""
    yield "| change | layouts | slower | found | median | 9 in 10 by | in interval | first night |"
    yield "|---|---|---|---|---|---|---|---|"
    rises = [(f"{change:+.0%}", step(change)) for change in STEPS]
    rises += [(f"{each:+.1%} a night for {SLOPE_NIGHTS}", slope(each)) for each in SLOPES]
    for name, rise in rises:
        for layouts, affected in ((1, 1), (6, 1), (6, 6), (20, 20)):
            found = detection(
                rise, noise=NORMAL, layouts=layouts, affected=affected, histories=histories
            )
            yield f"| {name} | {layouts} | {affected} | {found.line}"
    yield ""
    yield "| noise | change | layouts | slower | found | median | 9 in 10 by | in | first |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for noise in (*KINDS[1:], replace(NORMAL, name="normal, 1.5%", sd=0.015)):
        for change in (0.02, 0.05):
            found = detection(step(change), noise=noise, layouts=6, affected=6, histories=histories)
            yield f"| {noise.name} | {change:+.0%} | 6 | 6 | {found.line}"


YOUNG = (3, 5, 10, 20)  # nights before a slope begins
EACH = 0.02  # slower by so much every night from then on


def young_delays(nights_before: int, layouts: int, histories: int, *, seed: int = 3) -> list[int]:
    """Nights until a slope is found, by the scan or against the first nights, in each history."""
    delays = []
    for index in range(histories):
        rng = np.random.default_rng([seed, nights_before, layouts, index])
        seconds = NORMAL.draw(rng, layouts, nights_before + AFTER)
        seconds[:, nights_before:] += np.arange(1, AFTER + 1) * np.log1p(EACH)
        for night in range(1, AFTER + 1):
            drift = drift_of(nights_of(seconds[:, : nights_before + night]), RUNS_PER_FALSE_ALARM)
            if drift.changes or drift.creeps:
                delays.append(night)
                break
    return delays


def young_lines(histories: int) -> Iterator[str]:
    """A table: a slope that begins early."""
    yield f"Nights until {EACH:+.0%} a night is found, of {histories} histories each"
    yield ""
    yield "| nights before | layouts | found in 30 nights | median | 9 in 10 by |"
    yield "|---|---|---|---|---|"
    for before in YOUNG:
        for layouts in (1, 6):
            found = young_delays(before, layouts, histories)
            yield (
                f"| {before} | {layouts} | {len(found) / histories:.0%} | {np.median(found):.0f} | "
                f"{np.quantile(found, 0.9):.0f} |"
            )


def host_history(rng: np.random.Generator, change: float) -> Nights:
    """Six layouts on four hosts, drawn each night, of which one is slow from BEFORE on."""
    seconds = NORMAL.draw(rng, 6, BEFORE + AFTER)
    where = rng.integers(0, NUM_HOSTS, size=seconds.shape)
    slow = (where == 0) & (np.arange(BEFORE + AFTER) >= BEFORE)
    on = [(where == host) * 1.0 for host in range(NUM_HOSTS)]
    return nights_of(seconds + slow * np.log1p(change), on)


def host_lines(histories: int) -> Iterator[str]:
    """A table: one slow host."""
    yield f"One slow host of {NUM_HOSTS}, 6 layouts, {histories} histories each"
    yield ""
    yield "| slower | named | median nights | another host named | taken for drift |"
    yield "|---|---|---|---|---|"
    for change in STEPS[1:]:
        found: list[Drift] = [
            drift_of(host_history(np.random.default_rng([2, index]), change), RUNS_PER_FALSE_ALARM)
            for index in range(histories)
        ]
        delays = [
            one.found - BEFORE + 1 for each in found for one in each.hosts if one.host == "host-0"
        ]
        others = sum(one.host != "host-0" for each in found for one in each.hosts)
        drifted = sum(bool(each.changes) for each in found)
        yield (
            f"| {change:+.0%} | {len(delays) / histories:.0%} | "
            f"{np.median(delays) if delays else float('nan'):.0f} | {others} | {drifted} |"
        )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--years", type=int, default=40, help="of nights without a change")
    parser.add_argument("--histories", type=int, default=100, help="with a change, each")
    given = parser.parse_args()
    for lines in (
        false_alarm_lines(given.years),
        detection_lines(given.histories),
        young_lines(given.histories),
        host_lines(given.histories),
    ):
        for line in lines:
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
