"""Drift in simulated nights: few false alarms, changes found and named, slow hosts, outliers."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.calibration.drift.findings import Drift, creeps
from planner.calibration.drift.nights import Nights, Reading
from planner.calibration.drift.replay import drift_of
from planner.calibration.drift.scores import threshold_of
from planner.columns import FloatColumn
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import drift as simulated

RUNS = 365.0


def found_in(log_seconds: FloatColumn, **more: Any) -> Drift:
    return drift_of(replace(simulated.nights_of(log_seconds), **more), RUNS)


def noise(seed: int, layouts: int, nights: int, **kind: Any) -> FloatColumn:
    drawn = replace(simulated.NORMAL, **kind).draw(np.random.default_rng(seed), layouts, nights)
    return np.asarray(drawn)


def slowed(
    seed: int, layouts: int, nights: int, since: int, until: int | None = None, by: float = 0.05
) -> FloatColumn:
    """Noise, and all layouts slower by this share on these nights."""
    seconds = noise(seed, layouts, nights)
    seconds[:, since:until] += np.log(1.0 + by)
    return seconds


def torch_by_night(layouts: int, versions: list[str]) -> Mapping[tuple[int, int], dict[str, str]]:
    nights = product(range(layouts), enumerate(versions))
    return {(layout, n): {"torch": version, "nccl": "2.27.3"} for layout, (n, version) in nights}


def name_of(value: Any) -> str:
    return str(getattr(value, "name", value))


ALARMS = [
    *((kind, 2, 0, 6) for kind in (simulated.KINDS[0], simulated.KINDS[-1])),
    *(pytest.param(kind, 10, 0, 16, marks=pytest.mark.slow) for kind in simulated.KINDS),
    (simulated.NORMAL, 1, simulated.NUM_HOSTS, 4),
    pytest.param(simulated.NORMAL, 5, simulated.NUM_HOSTS, 10, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "years", "hosts", "most"), ALARMS, ids=name_of)
def test_false_alarms_are_not_more_frequent_than_promised(
    kind: simulated.Noise, years: int, hosts: int, most: int
) -> None:
    """One a year: at that rate one trial in 37 (10 years), or in 220 (2 years), has more."""
    assert simulated.false_alarms(kind, 6, years, hosts=hosts, seed=3) <= most


def test_the_threshold_rises_with_what_is_watched_and_with_the_rate() -> None:
    assert threshold_of(365, 1) < threshold_of(365, 20) < threshold_of(3650, 20)
    assert threshold_of(365, 10) == pytest.approx(threshold_of(3650, 1))


def test_the_threshold_keeps_its_rate_where_noise_is_known() -> None:
    """Its formula against a plain simulation: a scan of standard normal nights, known in scale."""
    runs, rng, alarms, nights = 100.0, np.random.default_rng(1), 0, 0
    limit = threshold_of(runs, 1, window=60)
    for _ in range(150):
        values = rng.normal(size=60)
        sums = np.concatenate([[0.0], np.cumsum(values)])
        for night in range(20, 61):
            before = np.arange(3, night - 1)
            after = night - before
            gap = (sums[night] - sums[before]) / after - sums[before] / before
            nights += 1
            if np.max(np.abs(gap) / np.sqrt(1 / before + 1 / after)) > limit:
                alarms += 1
                break
    assert 0.5 < alarms * runs / nights < 1.8


STEPS = [(0.02, 6, 6, 5), (0.05, 6, 6, 3), (0.05, 1, 1, 5), (0.10, 6, 1, 3), (-0.04, 6, 6, 4)]


@pytest.mark.parametrize(("change", "layouts", "affected", "median"), STEPS)
def test_steps_are_found_in_days(change: float, layouts: int, affected: int, median: float) -> None:
    watched = {"layouts": layouts, "affected": affected, "histories": 20}
    found = simulated.detection(simulated.step(change), noise=simulated.NORMAL, **watched)
    assert len(found.delays) == found.histories
    assert np.median(found.delays) <= median
    assert found.covered >= 15, "of 20 intervals of 90%"
    assert found.first_night >= 15


def test_a_slope_of_12_percent_over_three_versions_is_found_on_the_sixth_night() -> None:
    """2% a night and nothing before it, as it went unnoticed against the last run alone."""
    versions = ["2.10.0"] * 3 + ["2.11.0"] * 2 + ["2.12.0"] * 2
    for seed in range(10):
        slower = np.arange(7) * np.log(1.02) + noise(seed, 1, 7, sd=0.003)
        (change, *_) = found_in(slower, software=torch_by_night(1, versions)).changes
        assert change.found <= 6
        assert 0.04 < change.low < change.change < 0.10
        assert change.versions == {"torch": ("2.10.0", "2.11.0")}


@pytest.mark.parametrize("before", [3, 5, 20])
def test_a_slope_that_begins_in_the_first_nights_is_found(before: int) -> None:
    """2% a night, on the fifth night of it at the latest: the scan alone found none after 5."""
    delays = simulated.young_delays(before, 1, 6)
    assert len(delays) == 6
    assert max(delays) <= 5


def test_against_the_first_nights_and_the_best_so_far() -> None:
    level = np.array([0.0, 0.001, -0.001, 0.0, 0.001])
    assert found_in(level[None]).creeps == ()
    slower = np.concatenate([level, [0.001, 0.06, 0.001]])  # one bad night is no level
    assert found_in(slower[None]).creeps == ()
    rising = np.concatenate([level, 0.02 * np.arange(1, 5)])
    (crept,) = found_in(rising[None]).creeps
    assert (crept.first, crept.last, crept.best) == (0, 2, False)
    assert crept.change == pytest.approx(np.expm1(0.06), rel=0.05), "both newest nights"
    # it began slow, became fast, and is slowly going back: against the best alone
    early = np.concatenate([np.full(3, 0.08), np.tile(level, 4), 0.02 * np.arange(1, 5)])
    found = found_in(early[None])
    assert all(one.best for one in found.creeps)
    assert found.creeps or any(one.change > 0 for one in found.changes)


def test_a_change_that_was_found_is_not_told_twice() -> None:
    found = found_in(slowed(4, 1, 60, 30, by=0.10))
    assert len(found.changes) == 1
    assert found.creeps == ()


@pytest.mark.parametrize("kind", [simulated.KINDS[2], simulated.KINDS[-1]], ids=name_of)
def test_the_plain_rule_raises_few_false_alarms(kind: simulated.Noise) -> None:
    """Every night of two years of six layouts: at most one alarm a year in the mean."""
    alarms = 0
    limit = threshold_of(RUNS, 12)
    for year in range(2):
        nights = kind.draw(np.random.default_rng([7, 6, year]), 6, 365)
        sd, before = np.full(6, simulated.NIGHT_SD), set[int]()
        for night in range(5, 366):
            now = {one.layout for one in creeps(nights[:, :night], sd, limit, ())}
            alarms += len(now - before)
            before = now
    assert alarms <= 3


def test_the_version_that_changed_is_named_though_the_night_is_not_sure() -> None:
    versions = ["2.11.0"] * 20 + ["2.12.0"] * 10
    for seed in range(10):
        seconds = slowed(seed, 3, 30, 20, by=0.03)
        (change,) = found_in(seconds, software=torch_by_night(3, versions)).changes
        assert (change.since, change.last_before, change.layouts) == (20, 19, (0, 1, 2))
        assert change.versions == {"torch": ("2.11.0", "2.12.0")}
        assert change.low < 0.03 < change.high


def test_layouts_that_did_not_change_are_not_named() -> None:
    seconds = noise(2, 6, 40)
    seconds[:3, 25:] += np.log(1.05)
    (change,) = found_in(seconds).changes
    assert change.layouts == (0, 1, 2)


def test_a_change_that_is_taken_back_is_two_changes() -> None:
    slower, faster = found_in(slowed(4, 3, 60, 20, 40)).changes
    assert (slower.since, faster.since) == (20, 40)
    assert slower.change > 0.03
    assert faster.change < -0.03


def test_a_later_night_says_the_same_of_earlier_ones() -> None:
    seconds = slowed(5, 4, 80, 30, by=0.03)
    seconds[:2, 60:] += np.log(1.06)
    whole, early = (
        [(one.found, one.since) for one in found_in(nights).changes]
        for nights in (seconds, seconds[:, :50])
    )
    assert [one for one in whole if one[0] < 50] == early
    assert found_in(seconds) == found_in(seconds)


def test_one_bad_night_is_an_outlier() -> None:
    for seed in range(10):
        seconds = slowed(seed, 6, 40, 39, by=0.10)
        on_the_night = found_in(seconds)
        assert on_the_night.changes == ()
        assert len(on_the_night.outliers) == 6
        assert on_the_night.outliers[0].change == pytest.approx(0.10, abs=0.03)
        assert found_in(np.hstack([seconds, noise(100 + seed, 6, 20)])).changes == ()


def test_missing_nights_are_neither_drift_nor_a_fault() -> None:
    seconds = noise(6, 5, 60)
    gone = np.random.default_rng(7).random(seconds.shape) < 0.4
    seconds[gone], seconds[:, 20:24] = np.nan, np.nan
    assert found_in(seconds).changes == ()
    seconds[:, 40:] += np.log(1.05)
    (change,) = found_in(seconds).changes
    assert abs(change.since - 40) <= 1
    assert change.last_before < change.since


@pytest.mark.parametrize("nights", [0, 1, 4])
def test_too_few_nights_say_nothing(nights: int) -> None:
    drift = found_in(noise(8, 3, nights))
    assert (drift.changes, drift.hosts, drift.threshold) == ((), (), None)
    assert drift_of(Nights.of([]), RUNS).changes == ()


def test_one_slow_host_is_no_drift() -> None:
    for seed in range(5):
        nights = simulated.host_history(np.random.default_rng([2, seed]), 0.05)
        drift = drift_of(nights, RUNS)
        (slow,) = drift.hosts
        assert drift.changes == ()
        assert (slow.host, slow.until) == ("host-0", None)
        assert slow.low < 0.05 < slow.high
        assert abs(slow.since - simulated.BEFORE) <= 3


HOSTS = ("host-0", "host-1", "host-2", "host-3")


def on_hosts(seed: int, layouts: int, nights: int) -> dict[str, Any]:
    """Where each layout ran each night."""
    where = np.random.default_rng(seed).integers(0, 4, size=(layouts, nights))
    return {name: where == host for host, name in enumerate(HOSTS)}


def test_a_host_that_was_repaired_counts_again() -> None:
    on = on_hosts(9, 6, 70)
    slow = on["host-2"] & (np.arange(70) >= 20) & (np.arange(70) < 45)
    (found,) = found_in(noise(9, 6, 70) + slow * np.log(1.05), on=on).hosts
    assert found.host == "host-2"
    assert 40 <= found.until <= 50


def test_a_stack_that_is_slower_on_all_hosts_is_drift() -> None:
    drift = found_in(slowed(10, 6, 50, 30, by=0.04), on=on_hosts(10, 6, 50))
    (change,) = drift.changes
    assert drift.hosts == ()
    assert (change.since, change.hosts) == (30, HOSTS)


def test_readings_become_nights() -> None:
    def reading(layout: str, run: str, seconds: float, host: str) -> Reading:
        return Reading(
            layout=layout, job="j", run=run, at=f"2026-10-0{run}T02:00:00+00:00",
            step_seconds=seconds, hosts=frozenset({host}), software={"torch": run},
        )  # fmt: skip

    rows = (("b", "2", 4.0, "x"), ("a", "1", 1.0, "x"), ("a", "2", 2.0, "y"), ("a", "2", 8.0, "x"))
    nights = Nights.of([reading(*row) for row in rows])
    assert (nights.layouts, nights.runs) == (("a", "b"), ("1", "2"))
    assert np.exp(nights.log_seconds[0]) == pytest.approx([1.0, 4.0])
    assert np.isnan(nights.log_seconds[1, 0])
    assert nights.on["x"].tolist() == [[True, True], [False, True]]
    assert nights.software[0, 1] == {"torch": "2"}
    assert nights.versions_changed([0, 1], 1) == {"torch": ("1", "2")}
