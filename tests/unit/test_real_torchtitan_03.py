"""Tests about the real TorchTitan, under 0.3 beside the 0.2 that the others run."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing

pytestmark = [pytest.mark.torch, pytest.mark.slow]
FOLDER = os.environ.get("TORCHTITAN_03_PATH", str(Path(sys.prefix) / "titan03"))
FILES = ("test_intake_real_torchtitan.py", "test_export_real_torchtitan.py")


def test_exports_and_configs_are_those_of_torchtitan_0_3() -> None:
    if not any(distributions(name="torchtitan", path=[FOLDER])):
        missing("torchtitan 0.3", "`make test-slow` installs it")
    files = [f"tests/unit/{name}" for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-m", "slow", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TORCHTITAN_PATH": FOLDER},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "about torchtitan 0.3.x" not in done.stdout  # those are the ones that run here
