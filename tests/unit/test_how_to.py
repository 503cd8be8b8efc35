"""How-to pages: their files are what they say, their commands exist with these flags. What the
commands do is tested end to end.
"""

import re
from typing import Any

import pytest
import yaml

from planner.intake.jobs import read_job
from planner.intake.sweeps import read_sweep
from tests.conftest import ROOT, Cli

PAGE = ROOT / "docs" / "how-to" / "measure-to-decide.md"
BLOCK = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def blocks() -> list[str]:
    return [
        "".join(line[4:] for line in block.splitlines(keepends=True))
        for block in BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    ]


def files() -> list[Any]:
    return [yaml.safe_load(block) for block in blocks() if not block.startswith("planner-cli")]


def commands() -> list[list[str]]:
    lines = [
        line for block in blocks() if block.startswith("planner-cli") for line in block.splitlines()
    ]
    return [re.split(r"  +", line)[0].split()[1:] for line in lines]


def test_its_files_are_a_job_and_a_sweep() -> None:
    job, sweep = files()
    parsed = read_job(job)
    assert parsed.probe is not None
    assert parsed.probe.max_probes == 3
    assert len(read_sweep(sweep).jobs) == 1


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            " ".join(words[: 2 if words[0] in ("sweep", "measurements") else 1])
            for words in commands()
        }
    ),
)
def test_its_commands_have_these_flags(name: str, cli: Cli) -> None:
    shown = cli(*name.split(), "--help")
    assert shown.returncode == 0, shown.stderr
    for words in commands():
        if " ".join(words).startswith(name):
            for flag in (word for word in words if word.startswith("--")):
                assert re.search(rf"(?<![\w-]){flag}(?![\w-])", shown.stdout), (
                    f"{name} has no {flag}"
                )
