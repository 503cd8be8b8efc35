"""What is shown while a command works: on a terminal, and only there; and how far a sweep is."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.api.cli.accuracy import PUBLIC_ROWS
from planner.api.cli.root import run
from planner.api.cli.studying import bar, sweep_stand
from planner.api.cli.working import working
from planner.api.jobs.observer import Observer

JOB = [
    "--model", "llama3.2-1b", "--gpu", "h100", "--num-gpus", "1", "--seq-len", "2k",
    "--global-batch-size", "4", "--top-k", "1",
]  # fmt: skip


class Terminal(io.StringIO):
    """A stream that a person watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _own_database(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PLANNER_DATABASE_URL", sqlite_url)


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from now on; pytest puts its own there before each phase of a test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_terminal_shows_words_and_how_many_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with working("pricing", total=3) as shown:
        shown.done()
        shown.say("nearly")
        shown.shown.refresh()  # type: ignore[union-attr]
    assert "nearly" in terminal.getvalue()
    assert "1/3" in terminal.getvalue()


def test_who_asked_for_quiet_or_watches_nothing_sees_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = watched(monkeypatch)
    with working("pricing", quiet=True) as shown:
        shown.say("words")
        shown.done()
    assert terminal.getvalue() == ""
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stderr", piped)
    with working("pricing"):
        pass
    assert piped.getvalue() == ""


@pytest.mark.parametrize(("command", "words"), [
    (["recommend", *JOB], "looking at all layouts"),
    (["calibrate"], "learning from all measurements"),
    (["accuracy", "--jobs", "FEW"], "fitting again"),
    (["estimate", "--job", "JOB"], "pricing"),
])  # fmt: skip
def test_commands_that_take_long_say_so_on_a_terminal(
    command: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = watched(monkeypatch)
    few, job = tmp_path / "few.jsonl", tmp_path / "job.yaml"
    few.write_text(PUBLIC_ROWS.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    job.write_text(
        "model: llama3-8b\ncluster: {gpu: h100, num_gpus: 8}\ntraining: {seq_len: 2k, "
        "global_batch_size: 8}\nlayout: {}\n"
    )
    line = [{"FEW": str(few), "JOB": str(job)}.get(word, word) for word in command]
    assert run(line) == 0
    assert words in terminal.getvalue()
    capsys.readouterr()
    terminal.truncate(0)
    assert run([*line, "--json"]) == 0
    assert words not in terminal.getvalue()


STANDING: dict[str, Any] = {
    "event": "sweep", "message": "w", "jobs": 1, "num_jobs": 2, "layouts": 2, "num_layouts": 6,
    "running": 3, "failures": 1, "probes": 5, "max_probes": 20, "gpu_seconds": 120.0,
    "max_gpu_seconds": 3600.0, "quarantined": [],
}  # fmt: skip


def test_long_words_leave_the_count_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal, observer = watched(monkeypatch), Observer()
    with bar(observer, "layouts", sweep_stand):
        observer.on_event({**STANDING, "message": "a long layout " * 20})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"layouts .* 2/6 .* 2 of 6 layouts, 3 running, 1 fail.*…", shown)


def test_a_sweep_counts_layouts_and_says_what_it_has_spent() -> None:
    words = "2 of 6 layouts, 3 running, 1 failure, 120 of 3600 GPU-seconds"
    stand = sweep_stand(STANDING)
    assert (stand.done, stand.total, stand.words, stand.passing) == (2, 6, f"{words} · w", False)
    assert stand.line == f"w ({words})"
    quiet = sweep_stand({**STANDING, "message": "", "quarantined": ["node07"]})
    assert (quiet.line, quiet.passing) == (f"{words}, 1 host out", True)
