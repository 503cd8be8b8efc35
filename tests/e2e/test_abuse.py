"""Minutes of everything at once, alone in a file: the other scripts run beside them."""

import json
import sys

import pytest

from tests.conftest import ROOT, ran


def abused(name: str, *arguments: str) -> str:
    done = ran(sys.executable, "-m", f"benchmarks.abuse.{name}", *arguments, cwd=ROOT, timeout=3000)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_minutes_of_everything_leave_all_whole_and_nothing_grown() -> None:
    found = json.loads(abused("soak", "--minutes", "5", "--json", "--database", "sqlite"))
    assert (found["quantities that grew!"], found["kills"] > 0) == (0, True)
