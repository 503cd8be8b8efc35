"""How-to pages: their files are what they say, their commands exist with these flags. What the
commands do is tested end to end.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.intake.jobs import read_job
from planner.intake.sweeps import read_sweep
from tests.conftest import ROOT, Cli, needed

PAGE = ROOT / "docs" / "how-to" / "measure-to-decide.md"
STUDIES = ROOT / "docs" / "how-to" / "look-at-a-study.md"
BLOCK = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def blocks(page: Path = PAGE) -> list[str]:
    return [
        "".join(line[4:] for line in block.splitlines(keepends=True))
        for block in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def files() -> list[Any]:
    return [yaml.safe_load(block) for block in blocks() if not block.startswith("planner-cli")]


def commands() -> list[list[str]]:
    lines = [
        line
        for page in (PAGE, STUDIES)
        for block in blocks(page)
        if block.startswith("planner-cli")
        for line in block.splitlines()
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_what_the_page_of_studies_says_runs(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block in order: commands for a stored plan, and Python that opens what they wrote."""
    needed("plotly")
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    ran, plan_id = 0, ""
    for block in blocks(STUDIES):
        if not block.startswith(("planner-cli", "optuna-dashboard", "pip")):
            exec(compile(block.replace("PLAN_ID", plan_id), str(STUDIES), "exec"), made)
            ran += 1
            continue
        for line in block.splitlines():
            words = shlex.split(re.split(r"  +", line)[0].replace("PLAN_ID", plan_id))
            if words[0] != "planner-cli":
                continue  # the dashboard is opened by test_study_storage
            done = cli(*words[1:], *(["--json"] if words[1] == "recommend" else []))
            assert done.returncode == 0, (line, done.stderr)
            if words[1] == "recommend":
                plan_id = json.loads(done.stdout)["id"]
            ran += 1
    assert ran >= 6
    assert {path.suffix for path in tmp_path.iterdir()} >= {".db", ".log", ".html"}
