"""The outputs shown in README.md are what the commands print."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_readme_shows_what_the_commands_print() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "readme.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
