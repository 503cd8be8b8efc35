"""Tests about the real TorchTitan, under 0.3 beside the 0.2 that the others run."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import judged

pytestmark = [pytest.mark.torch, pytest.mark.slow]
FOLDER = os.environ.get("TORCHTITAN_03_PATH", str(Path(sys.prefix) / "titan03"))
FILES = ("tests/unit/test_intake_real_torchtitan.py", "tests/unit/test_export_real_torchtitan.py")


def test_exports_and_configs_are_those_of_torchtitan_0_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_PATH", FOLDER)
    options = ("-m", "pytest", "-rs", "-m", "slow", "-p", "no:cacheprovider")
    lines = judged("torchtitan", FOLDER, *options, *FILES)
    assert any(" passed" in line for line in lines)
    assert not any("about torchtitan 0.3.x" in line for line in lines)  # these run here
