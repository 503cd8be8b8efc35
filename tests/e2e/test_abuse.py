"""The scripts of benchmarks/abuse, in small: they end well, so what they hold still holds."""

import json
import sys

import pytest

from tests.conftest import ROOT, needed, ran

pytestmark = pytest.mark.slow


def abused(module: str, *arguments: str) -> str:
    done = ran(
        sys.executable, "-m", f"benchmarks.abuse.{module}", *arguments, cwd=ROOT, timeout=3000
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def test_the_service_answers_as_its_document_says() -> None:
    assert "Stateful" in abused("schema", "--examples", "8")


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_kills_lose_nothing_and_do_nothing_twice(database: str) -> None:
    if database == "postgres":
        needed("psycopg")
    found = json.loads(abused("kills", "--kills", "6", "--json", "--database", database))
    assert found["kills of a worker"] + found["kills of a service"] == 6
    assert found["outages of the database"] == 1
    assert min(found["plans answered"], found["probes accepted"]) > 0


def test_ten_minutes_of_everything_leave_all_whole_and_nothing_grown() -> None:
    found = json.loads(abused("soak", "--minutes", "10", "--json", "--database", "sqlite"))
    assert (found["quantities that grew!"], found["kills"] > 0) == (0, True)
