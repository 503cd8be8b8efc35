"""The web page in a real browser, on the real service."""

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import JOB, UNMEASURED_JOB, clean_environment, missing

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
if BROWSER is None:
    missing("Chromium", "apt-get install chromium")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """URL of `planner-cli serve`."""
    environment = {**clean_environment(), "PLANNER_DATABASE_URL": f"sqlite:///{tmp_path / 'x.db'}"}
    arguments = [sys.executable, "-m", "api.cli", "serve", "--port", "0"]
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        said = next(line for line in running.stderr if "running on" in line)
        yield re.findall(r"http://[\d.:]+", said)[0]
        running.terminate()
        running.stderr.read()


def shown(url: str, folder: Path) -> str:
    """The page after its scripts, as the browser has it."""
    assert BROWSER is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'browser'}",
        "--virtual-time-budget=20000",
    ]
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return html.unescape(done.stdout)


def test_a_plan_is_shown_by_its_address(service: str, tmp_path: Path) -> None:
    plan = httpx.post(f"{service}/plan", json=JOB, timeout=300.0).json()
    page = shown(f"{service}/#{plan['id']}", tmp_path)
    assert plan["headline"][0] in page
    ranked = page[page.index('<tbody id="ranked">') : page.index("Why number 1")]
    assert ranked.count("<tr>") == len(plan["ranked"])
    layouts = re.findall(r"<td>\d+\*?</td><td>([^<]*)</td>", ranked)
    assert len(set(layouts)) == len(plan["ranked"]), "no two layouts read alike"
    for entry in plan["ranked"]:
        assert f"{round(entry['estimate']['tokens_per_second_per_gpu']):,}" in ranked
    assert all(reason in page for reason in plan["ranked"][0]["reasons"])
    assert "train.toml" in page
    assert plan["id"] in page[page.index('<tbody id="stored">') :]


def test_what_number_1_rests_on_stands_under_it(service: str, tmp_path: Path) -> None:
    plan = httpx.post(f"{service}/plan", json=UNMEASURED_JOB, timeout=300.0).json()
    page = shown(f"{service}/#{plan['id']}", tmp_path)
    assert f'<p id="rests">It {plan["rests_on"]}.</p>' in page
    assert "<td>1*</td>" in page
    assert "<td>2</td>" in page


def test_an_unknown_plan_is_said(service: str, tmp_path: Path) -> None:
    page = shown(f"{service}/#plan-nope", tmp_path)
    assert "no plan of id 'plan-nope'" in page
