"""When a sweep comes due and during which hours it may start probes, in a time zone.

The clock of a time zone jumps twice a year. A scheduled time that the jump leaves out comes at the
next instant that exists, one that comes twice is taken once: the first. A schedule of `*` minutes
or hours goes by elapsed time.
"""

import re
from datetime import UTC, datetime, time
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from planner.api.errors import need
from planner.errors import fault

HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


def zone_of(name: str) -> ZoneInfo:
    """The time zone of this name. Raises SpecError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        remedy = "use a name of the IANA database, for example Europe/Berlin"
        raise fault("sweep.time_zone", name, "is no time zone", remedy) from None


def next_due(schedule: str | None, after: datetime, time_zone: str = "UTC") -> datetime | None:
    """The first time of a cron schedule after this one, in UTC; None without a schedule.

    Raises SpecError.
    """
    zone = zone_of(time_zone)
    if schedule is None:
        return None
    need("cronsim", extra="server")
    from cronsim import CronSim, CronSimError

    try:
        times = CronSim(schedule, after.astimezone(UTC if zone.key == "UTC" else zone))
        # within an hour that comes twice it also names the first pass, which is over
        found = next(at for each in times if (at := each.astimezone(UTC)) > after)
    except (CronSimError, StopIteration, OverflowError):
        rule = "is no cron schedule that ever comes due"
        remedy = 'write minute, hour, day, month and weekday, for example "0 2 * * *"'
        raise fault("sweep.schedule", schedule, rule, remedy) from None
    return found


def window_of(hours: str) -> tuple[time, time]:
    """(first, end) of hours of the day, as "22:00-06:00". Raises SpecError."""
    found = HOURS.fullmatch(hours)
    if found is None or found.group(1, 2) == found.group(3, 4):
        remedy = 'write two times of the day, for example "22:00-06:00"'
        raise fault("sweep.budget.hours", hours, "is no span of a day", remedy)
    first_hour, first_minute, end_hour, end_minute = map(int, found.groups())
    return time(first_hour, first_minute), time(end_hour, end_minute)


def is_within(hours: str | None, at: datetime, time_zone: str) -> bool:
    """Whether a wall clock of the zone then shows a time in these hours; None are all hours."""
    if hours is None:
        return True
    first, end = window_of(hours)
    shown = at.astimezone(zone_of(time_zone)).time()
    return first <= shown < end if first < end else shown >= first or shown < end


def in_zone(at: datetime, time_zone: str) -> str:
    """A moment as people of the zone write it."""
    return f"{at.astimezone(zone_of(time_zone)):%Y-%m-%d %H:%M} {time_zone}"
