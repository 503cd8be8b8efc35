"""Every causal language model of the real transformers: read to the last weight, or refused."""

import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

import pytest
from real_torchtitan import FOLDER

from tests.conftest import ROOT, clean_environment, missing

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_each_type_is_read_to_the_last_weight_or_refused_by_its_block(tmp_path: Path) -> None:
    if not any(distributions(name="transformers", path=[FOLDER])):
        missing("transformers", "`make test-slow` installs it")
    done = subprocess.run(
        [sys.executable, "benchmarks/model_types.py", "--markdown", str(tmp_path / "page.md")],
        env={**clean_environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), FOLDER])},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    counts = Counter(line.split()[0] for line in done.stdout.splitlines())
    assert counts["equal"] >= 133
    assert counts["equal"] + counts["refused"] >= 192
    shown = (ROOT / "docs" / "reference" / "model-types.md").read_text(encoding="utf-8")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == shown
