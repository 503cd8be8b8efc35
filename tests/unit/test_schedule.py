"""Scheduled times in real time zones, whose clocks jump; and the hours in which probes start."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import strategies as st

from planner.api.jobs.schedule import in_zone, is_within, next_due, window_of
from planner.errors import SpecError
from tests.conftest import tiers

ZONES = sorted(name for name in available_timezones() if "/" in name)
MOMENTS = st.datetimes(datetime(1995, 1, 1), datetime(2035, 1, 1)).map(
    lambda moment: moment.replace(tzinfo=UTC)
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def times(schedule: str, after: datetime, zone: str, number: int) -> list[datetime]:
    found = [after]
    for _ in range(number):
        due = next_due(schedule, found[-1], zone)
        assert due is not None
        found.append(due)
    return found[1:]


def test_a_time_that_does_not_exist_comes_at_the_next_instant_that_does() -> None:
    # in Berlin 02:00 to 03:00 of 2026-03-29 does not exist
    found = times("30 2 * * *", at("2026-03-28T12:00+01:00"), "Europe/Berlin", 2)
    assert found == [at("2026-03-29T03:00+02:00"), at("2026-03-30T02:30+02:00")]


def test_a_time_that_comes_twice_is_taken_once() -> None:
    first, second = at("2026-10-25T02:30+02:00"), at("2026-10-26T02:30+01:00")
    before = at("2026-10-24T12:00+02:00")
    assert times("30 2 * * *", before, "Europe/Berlin", 2) == [first, second]
    for minutes in (0, 45, 60):
        passed = first + timedelta(minutes=minutes)
        assert next_due("30 2 * * *", passed, "Europe/Berlin") == second, minutes


def test_stars_go_by_elapsed_time() -> None:
    hours = times("0 * * * *", at("2026-10-25T00:30+02:00"), "Europe/Berlin", 4)
    assert {later - earlier for earlier, later in pairwise(hours)} == {timedelta(hours=1)}


HOURS, MINUTES = st.integers(0, 23), st.integers(0, 59)


@tiers(60, 1500, zone=st.sampled_from(ZONES), after=MOMENTS, hour=HOURS, minute=MINUTES)
def test_every_day_has_one_run(zone: str, after: datetime, hour: int, minute: int) -> None:
    """Each date of the zone that exists has its time once: at that time, or where the clock skips
    it at the first instant after; and whoever asks in between hears the same.
    """
    schedule, place = f"{minute} {hour} * * *", ZoneInfo(zone)
    due = next_due(schedule, after, zone)
    assert due > after
    between = after + (due - after) / 2
    if between < due:
        assert next_due(schedule, between, zone) == due
    local = due.astimezone(place)
    if (local.hour, local.minute) != (hour, minute):
        skipped = (due - timedelta(minutes=1)).astimezone(place).replace(tzinfo=None)
        jump = local.replace(tzinfo=None) - skipped
        assert jump > timedelta(minutes=1), "only where the clock jumps"
        assert local.fold == 0
    elif local.fold:
        first = due - (local.replace(fold=0).utcoffset() - local.utcoffset())  # type: ignore[operator]
        assert first.astimezone(place).replace(tzinfo=None) != local.replace(tzinfo=None)
    days = [one.astimezone(place).date() for one in times(schedule, due, zone, 3)]
    assert len({local.date(), *days}) == 4
    assert (days[-1] - local.date()).days in (3, 4), "a zone may leave out a whole day"


@tiers(40, 800, zone=st.sampled_from(ZONES), after=MOMENTS, step=st.sampled_from([5, 15, 30]))
def test_every_quarter_comes_in_order(zone: str, after: datetime, step: int) -> None:
    found = times(f"*/{step} * * * *", after, zone, 12)
    assert found == sorted(set(found))
    assert all(one.astimezone(ZoneInfo(zone)).minute % step == 0 for one in found)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "Europe/Berlin\0"])
def test_what_is_no_zone_is_refused(zone: str) -> None:
    with pytest.raises(SpecError, match="time_zone"):
        next_due("0 2 * * *", at("2026-01-01T00:00+00:00"), zone)


@pytest.mark.parametrize(("hours", "clock", "zone", "inside"), [
    ("22:00-06:00", "21:59+02:00", "Europe/Berlin", False),
    ("22:00-06:00", "22:00+02:00", "Europe/Berlin", True),
    ("22:00-06:00", "23:59+02:00", "Europe/Berlin", True),
    ("22:00-06:00", "05:59+02:00", "Europe/Berlin", True),
    ("22:00-06:00", "06:00+02:00", "Europe/Berlin", False),
    ("09:00-17:00", "12:00+00:00", "UTC", True),
    ("09:00-17:00", "12:00+00:00", "Asia/Tokyo", False),
    (None, "23:59+02:00", "UTC", True),
])  # fmt: skip
def test_hours_of_day_and_night(hours: str | None, clock: str, zone: str, inside: bool) -> None:
    assert is_within(hours, at(f"2026-07-01T{clock}"), zone) is inside


def test_a_moment_is_shown_in_its_zone() -> None:
    noon = at("2026-07-01T12:00+00:00")
    assert in_zone(noon, "Asia/Tokyo") == "2026-07-01 21:00 Asia/Tokyo"


@pytest.mark.parametrize("hours", ["22-6", "22:00", "24:00-06:00", "06:00-06:00", "22:00-06:60"])
def test_what_are_no_hours_is_refused(hours: str) -> None:
    with pytest.raises(SpecError, match=r"sweep\.budget\.hours"):
        window_of(hours)
