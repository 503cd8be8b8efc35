"""Two pieces of work at once: here one after the other, or the second in a forked copy."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.api.second_core import Forked
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.ports import in_turn
from tests.conftest import fixed_ports, job_values


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are started."""
    fork, found = os.fork, list[int]()

    def forked() -> int:
        found.append(fork())
        return found[-1]

    monkeypatch.setattr(os, "fork", forked)
    return found


def both() -> Forked:
    """What copies this process, whatever threads other tests have left idle in it."""
    return Forked(spinners=threading.active_count() - 1)


def test_sizes_side_by_side_make_the_same_plan(copies: list[int]) -> None:
    job = read_job(job_values("llama3.2-1b", "h100-sxm-80gb", "1..4", 2048, 16))
    in_turns, at_once = (
        recommend(job, ports=replace(fixed_ports(), both=one)) for one in (in_turn, both())
    )
    assert len(copies) == 2  # sizes, and what is said of others than the ranked
    assert in_turns == at_once


def test_what_a_copy_cannot_do_is_done_here() -> None:
    parent = os.getpid()

    def dies_in_a_copy() -> int:
        if os.getpid() != parent:
            os._exit(9)
        return 7

    assert both()(lambda: 1, dies_in_a_copy) == (1, 7)


def test_an_error_of_either_half_is_raised_and_leaves_no_process(copies: list[int]) -> None:
    def fails() -> int:
        raise ValueError("half")

    halves: list[tuple[Callable[[], int], Callable[[], int]]] = [(fails, int), (int, fails)]
    for one, other in halves:
        with pytest.raises(ValueError, match="half"):
            both()(one, other)
    assert len(copies) == 2
    for copy in copies:
        with pytest.raises(ChildProcessError):
            os.waitpid(copy, os.WNOHANG)


def test_a_process_with_threads_is_not_copied(copies: list[int]) -> None:
    before, done = both(), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert before(os.getpid, os.getpid) == (os.getpid(), os.getpid())
        assert copies == []
        assert both()(os.getpid, os.getpid)[1] == copies[0]
    finally:
        done.set()
        thread.join()


def test_one_core_has_no_other(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    for cores, platform in (({0}, sys.platform), ({0, 3}, "darwin")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        monkeypatch.setattr(sys, "platform", platform)
        assert both()(os.getpid, os.getpid) == (os.getpid(), os.getpid())
    assert copies == []
