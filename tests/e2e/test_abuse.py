"""The scripts of benchmarks/abuse, in small: they end well, so what they hold still holds."""

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
def test_the_service_answers_as_its_document_says() -> None:
    printed = ran("schema", "--examples", "8")
    assert "Stateful" in printed
