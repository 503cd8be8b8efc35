"""Every causal language model of the real transformers: read to the last weight, or refused."""

from collections import Counter
from pathlib import Path

import pytest
from real_torchtitan import FOLDER

from tests.conftest import ROOT, judged

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_each_type_is_read_to_the_last_weight_or_refused_by_its_block(tmp_path: Path) -> None:
    command = ("benchmarks/model_types.py", "--markdown", str(tmp_path / "page.md"))
    counts = Counter(line.split()[0] for line in judged("transformers", FOLDER, *command))
    assert counts["equal"] >= 137
    assert counts["equal"] + counts["refused"] >= 192
    shown = (ROOT / "docs" / "reference" / "model-types.md").read_text(encoding="utf-8")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == shown
