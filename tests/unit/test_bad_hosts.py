"""Which hosts are found bad: more failures than chance, or layouts that run faster elsewhere."""

import random

import pytest
from hypothesis import strategies as st

from planner.api.jobs.failures import FALSE_ALARMS, HostWatch, at_least
from tests.conftest import tiers


def layout(number: int) -> tuple[str, str]:
    return ("question", f"layout {number}")


def host(number: int) -> frozenset[str]:
    return frozenset({f"node{number:02d}"})


@pytest.fixture
def watch() -> HostWatch:
    """Ten layouts measured on each of eight hosts, none slow."""
    made = HostWatch()
    for number in range(80):
        made.measured(layout(number), host(number % 8), 1.0, 1.0)
    return made


@pytest.mark.parametrize(("failed", "tried", "rate"), [(3, 10, 0.1), (1, 1, 0.5), (5, 200, 0.01)])
def test_the_tail_of_the_binomial(failed: int, tried: int, rate: float) -> None:
    drawn = random.Random(1)
    times = 20_000
    hits = sum(sum(drawn.random() < rate for _ in range(tried)) >= failed for _ in range(times))
    assert at_least(failed, tried, rate) == pytest.approx(hits / times, abs=0.01)


def test_a_host_on_which_far_more_fails_is_bad_and_said_once(watch: HostWatch) -> None:
    for number in range(4):
        assert watch.new_bad() == []
        watch.failed(layout(100 + number), host(3), "hang")
    (bad,) = watch.new_bad()
    said = ["4 of 14 probes failed on it, 0 of 70 elsewhere"]
    assert (bad.host, bad.evidence) == ("node03", said)
    watch.failed(layout(200), host(3), "hang")
    assert watch.new_bad() == []


def test_a_layout_that_fails_everywhere_is_to_blame_itself(watch: HostWatch) -> None:
    for number in range(20):  # far more than on the six others
        for place in (3, 5):
            watch.failed(layout(100 + number), host(place), "hang")
    assert watch.new_bad() == []


@pytest.mark.parametrize("kind", ["oom", "invalid-layout", "timeout", "preempted", "import-error"])
def test_what_is_no_fault_of_a_host(watch: HostWatch, kind: str) -> None:
    for number in range(80):
        watch.failed(layout(100 + number), host(3), kind)
    assert watch.new_bad() == []


@tiers(20, 300, seed=st.integers(0, 2**32 - 1))
def test_equal_hosts_are_seldom_found_bad(seed: int) -> None:
    drawn = random.Random(seed)
    watch = HostWatch()
    for number in range(1500):
        place = host(drawn.randrange(64))
        if drawn.random() < 0.01:
            watch.failed(layout(number), place, "hang")
        else:
            watch.measured(layout(number), place, drawn.lognormvariate(0, 0.05), 1.0)
    found = watch.new_bad()
    # at a thousandth a run, two at once do not happen in some hundreds of runs
    assert len(found) <= 1, (FALSE_ALARMS, found)


def test_a_slow_host_is_suspected_then_confirmed_by_the_same_layouts_elsewhere() -> None:
    watch, drawn = HostWatch(), random.Random(7)
    for number in range(200):
        # the model is off by a third everywhere: that is no host's fault
        slow = 1.33 * (1.3 if number % 10 == 4 else 1.0)
        seconds = slow * drawn.lognormvariate(0, 0.05)
        watch.measured(layout(number), host(number % 10), seconds, 1.0)
    assert watch.new_bad() == [], "no layout was compared yet"
    ((name, again),) = watch.to_confirm()
    assert (name, len(again)) == ("node04", 2)
    watch.measured(again[0], host(1), 1.33, 1.0)
    assert watch.new_bad() == [], "one layout may be chance"
    watch.measured(again[1], host(2), 1.33, 1.0)
    (bad,) = watch.new_bad()
    assert (bad.host, len(bad.evidence)) == ("node04", 2)
    assert "s a step there" in bad.evidence[0]
    assert list(watch.to_confirm()) == []


def test_a_suspect_whose_layouts_are_as_slow_elsewhere_is_cleared() -> None:
    watch = HostWatch()
    for number in range(100):
        watch.measured(layout(number), host(number % 10), 1.3 if number % 10 == 4 else 1.0, 1.0)
    ((_, again),) = watch.to_confirm()
    for one in again:
        watch.measured(one, host(1), 1.3, 1.0)
    assert watch.new_bad() == []


def test_hosts_that_nobody_told_are_nothing() -> None:
    watch, nobody = HostWatch(), frozenset[str]()
    watch.failed(layout(1), nobody, "hang")
    watch.measured(layout(1), nobody, 1.0, 1.0)
    assert (watch.new_bad(), list(watch.to_confirm()), watch.num_hosts) == ([], [], 0)
