"""Where the minutes of a run of tests went: `pytest -p tests.timing`.

A loop that is the same everywhere is timed before and after, so that a slow machine shows.
"""

import time
from collections import Counter

import pytest

LOOPS = 5_000_000
FILES = 10


def loop_seconds() -> float:
    """Seconds of a fixed loop in plain Python, on an otherwise idle core."""
    begin, total = time.perf_counter(), 0
    for number in range(LOOPS):
        total += number * number
    return time.perf_counter() - begin


class Timing:
    """Adds up what tests, set-up and tear-down of each file took, over all processes."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.loop, self.begin = loop_seconds(), time.perf_counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        minutes = (time.perf_counter() - self.begin) / 60
        chosen = terminalreporter.config.option.markexpr
        terminalreporter.section("minutes")
        terminalreporter.line(f"{minutes:.1f} minutes of tests chosen by {chosen!r}")
        terminalreporter.line(
            f"{LOOPS:,} turns of a fixed loop took {self.loop:.2f} s before, "
            f"{loop_seconds():.2f} s after"
        )
        terminalreporter.line("the longest files, in minutes:")
        for name, seconds in self.files.most_common(FILES):
            terminalreporter.line(f"{seconds / 60:6.1f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist reports to this one
        config.pluginmanager.register(Timing(), "timing")
