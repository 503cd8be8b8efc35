"""Two pieces of work at once: here one after the other, or the second in a forked copy."""

import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from planner.api.second_core import Forked
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.ports import Ports, in_turn


class Fixed:
    """A clock that stands still, and ids that are all alike."""

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def new_id(self, prefix: str) -> str:
        return prefix


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
    job = read_job(
        {
            "model": "llama3.2-1b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": "1..4"},
            "training": {"seq_len": 2048, "global_batch_size": 16},
        }
    )
    in_turns, at_once = (
        recommend(job, ports=Ports(clock=Fixed(), ids=Fixed(), both=one))
        for one in (in_turn, both())
    )
    assert len(copies) == 2  # sizes, and what is said of others than the ranked
    assert in_turns == at_once


def test_work_in_a_copy_changes_nothing_here() -> None:
    seen: list[int] = []

    def work() -> int:
        seen.append(os.getpid())
        return seen[0]

    here, there = both()(os.getpid, work)
    assert here == os.getpid() != there
    assert seen == []


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
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert both()(os.getpid, os.getpid) == (os.getpid(), os.getpid())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    monkeypatch.setattr(sys, "platform", "darwin")
    assert both()(os.getpid, os.getpid) == (os.getpid(), os.getpid())
    assert copies == []
