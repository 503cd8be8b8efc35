"""The scripts of benchmarks/abuse, in small: they end well, so what they hold still holds."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, clean_environment


def ran(module: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.abuse.{module}", *arguments],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_everything_at_once_leaves_a_database_whole() -> None:
    """A minute; `benchmarks.abuse.soak` by itself goes on for hours."""
    found = json.loads(ran("soak", "--minutes", "1", "--database", "sqlite", "--json"))
    assert found["kills"] > 0
    assert found["outages of the database"] > 0
    assert found["quantities that grew!"] == found["jobs still open!"] == 0


@pytest.mark.slow
def test_the_service_answers_as_its_document_says() -> None:
    printed = ran("schema", "--examples", "8")
    assert "Stateful" in printed
