"""What is shown while a command works: on a terminal, and only there; and how far a sweep is."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.api.cli.accuracy import PUBLIC_ROWS
from planner.api.cli.output import working
from planner.api.cli.studying import bar, sweep_stand
from planner.api.jobs.leases import Observer
from tests.conftest import job_values
from tests.unit.conftest import Say


class Terminal(io.StringIO):
    """A stream that a person watches."""

    def isatty(self) -> bool:
        return True


Watched = Callable[[], Terminal]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Standard error from the call on; pytest puts its own there before each phase of a test."""
    monkeypatch.setenv("TERM", "xterm")

    def watch() -> Terminal:
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr  # type: ignore[return-value]

    return watch


def test_a_terminal_shows_words_and_how_many_are_done(watched: Watched) -> None:
    terminal = watched()
    with working("pricing", total=3) as shown:
        shown.done()
        shown.say("nearly")
        shown.shown.refresh()  # type: ignore[union-attr]
    assert "nearly" in terminal.getvalue()
    assert "1/3" in terminal.getvalue()


def test_who_asked_for_quiet_or_watches_nothing_sees_nothing(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream, quiet in ((watched(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with working("pricing", quiet=quiet) as shown:
            shown.say("words")
            shown.done()
        assert stream.getvalue() == ""


@pytest.mark.parametrize(("command", "words"), [
    ("recommend --job JOB --top-k 1 --fix pp=1", "looking at all layouts"),
    ("calibrate", "learning from all measurements"),
    ("accuracy --jobs FEW", "fitting again"),
    ("estimate --job PRICED", "pricing"),
])  # fmt: skip
def test_commands_that_take_long_say_so_on_a_terminal(
    command: str, words: str, tmp_path: Path, watched: Watched, say: Say
) -> None:
    terminal, job = watched(), job_values("llama3.2-1b", "h100", 1, 2048, 4)
    texts = {
        "FEW": PUBLIC_ROWS.read_text(encoding="utf-8").splitlines()[0],
        "JOB": json.dumps(job),
        "PRICED": json.dumps({**job, "layout": {}}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    line = [str(tmp_path / word) if word in texts else word for word in command.split()]
    say(*line)
    assert words in terminal.getvalue()
    terminal.truncate(0)
    say(*line, "--json")
    assert words not in terminal.getvalue()


STANDING: dict[str, Any] = {
    "event": "sweep", "message": "w", "jobs": 1, "num_jobs": 2, "layouts": 2, "num_layouts": 6,
    "running": 3, "failures": 1, "probes": 5, "max_probes": 20, "gpu_seconds": 120.0,
    "max_gpu_seconds": 3600.0, "quarantined": [],
}  # fmt: skip


def test_long_words_leave_the_count_of_layouts(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal, observer = watched(), Observer()
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
