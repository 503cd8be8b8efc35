"""A search in two halves: the same answer alone, beside itself, and in forked copies."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from api.second_core import Forks, second_core
from planner.beside import OtherCore, both
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.ports import Ports
from planner.search import bounds, screen
from planner.search.one_size import OneSize, search_size
from planner.search.space.enumerate import build_space
from planner.search.variations import budgets, floors
from planner.specs.job import Job


@dataclass
class Counting:
    """Runs work in forked copies, and counts it."""

    forks: Forks = field(default_factory=Forks)
    started: int = 0

    def start(self, work: Callable[[], object]) -> Any:
        self.started += 1
        return self.forks.start(work)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small searches are halved too."""
    monkeypatch.setattr(bounds, "BAND", 64)
    monkeypatch.setattr(screen, "BAND", 64)
    for module, many in ((bounds, 64), (screen, 64), (budgets, 8), (floors, 8)):
        monkeypatch.setattr(module, "MANY", many)


def job(model: str = "mixtral-8x7b", num_gpus: object = 64, **training: object) -> Job:
    return read_job(
        {
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus},
            "training": {"seq_len": 4096, "global_batch_size": 256, **training},
        }
    )


def found(asked: Job, beside: OtherCore | None) -> OneSize:
    return search_size(asked, asked.cluster, lambda _: None, beside=beside)


@pytest.mark.parametrize(
    ("model", "trainer"), [("mixtral-8x7b", "torchtitan"), ("llama3-70b", "megatron")]
)
@pytest.mark.usefixtures("halves")
def test_halves_beside_each_other_find_what_they_find_in_turn(model: str, trainer: str) -> None:
    asked, beside = job(model, trainer=trainer), Counting()
    alone, apart = found(asked, None), found(asked, beside)
    assert beside.started >= 2
    assert alone.candidates == apart.candidates
    assert alone.rejected == apart.rejected
    one, other = alone.screened, apart.screened
    assert (one.num_priced, one.num_fitting) == (other.num_priced, other.num_fitting)
    for name in ("seconds", "device_bytes", "bare_seconds", "budgets"):
        values = (getattr(each.cell_bounds, name) for each in (one, other))
        assert np.array_equal(*values, equal_nan=True)


def test_a_search_in_halves_ranks_what_one_in_one_piece_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = job()
    whole = found(asked, None)
    for module, many in ((bounds, 64), (screen, 64), (budgets, 8), (floors, 8)):
        monkeypatch.setattr(module, "MANY", many)
    monkeypatch.setattr(bounds, "BAND", 64)
    monkeypatch.setattr(screen, "BAND", 64)
    in_halves = found(asked, None)
    near = 1.05 * whole.best_seconds
    assert [one for one in whole.candidates if one[0] < near] == [
        one for one in in_halves.candidates if one[0] < near
    ]


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_a_screen_in_halves_keeps_what_one_in_one_piece_keeps(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(num_gpus=16, trainer=trainer)
    beside = Counting()
    pricer = Pricer.build(asked.model, asked.cluster, asked.training, beside=beside)
    space = build_space(pricer.rules_context, asked.search)
    monkeypatch.setattr(screen, "MANY", 2**40)
    whole = screen.screen(pricer, space, count=10)
    before = beside.started
    monkeypatch.setattr(screen, "MANY", 1)
    for module in (bounds, screen):
        monkeypatch.setattr(module, "BAND", 32)
    monkeypatch.setattr(screen, "ROUND", 64)
    halved = screen.screen(pricer, space, count=10)
    near = [one.step_seconds[: one.num_fitting] for one in (whole, halved)]
    least = near[0].min()
    assert beside.started > before
    first, second = (np.sort(steps[steps <= 1.05 * least]) for steps in near)
    assert len(first) > 3
    assert np.array_equal(first, second)


class Fixed:
    """A clock that stands still, and ids that are all alike."""

    def now(self) -> Any:
        from datetime import UTC, datetime

        return datetime(2026, 1, 1, tzinfo=UTC)

    def new_id(self, prefix: str) -> str:
        return prefix


def test_sizes_beside_each_other_make_the_same_plan() -> None:
    asked, beside = job("llama3-8b", "8..64"), Counting()
    alone, apart = (
        recommend(asked, ports=Ports(clock=Fixed(), ids=Fixed(), beside=each))
        for each in (None, beside)
    )
    assert beside.started == 2  # sizes, and what is said of others than the ranked
    assert alone == apart


def test_work_in_a_copy_changes_nothing_here() -> None:
    seen: list[int] = []

    def work() -> int:
        seen.append(os.getpid())
        return seen[0]

    here, there = both(Forks(), os.getpid, work)
    assert here == os.getpid() != there
    assert seen == []


def test_what_a_copy_cannot_do_is_done_here() -> None:
    parent = os.getpid()

    def dies_in_a_copy() -> int:
        if os.getpid() != parent:
            os._exit(9)
        return 7

    assert both(Forks(), lambda: 1, dies_in_a_copy) == (1, 7)


def test_an_error_of_either_half_is_raised_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, copies = os.fork, list[int]()

    def forked() -> int:
        copies.append(fork())
        return copies[-1]

    def fails() -> int:
        raise ValueError("half")

    monkeypatch.setattr(os, "fork", forked)

    for halves in ((fails, lambda: 1), (lambda: 1, fails)):
        with pytest.raises(ValueError, match="half"):
            both(Forks(), *halves)
    assert len(copies) == 2
    for copy in copies:
        with pytest.raises(ChildProcessError):
            os.waitpid(copy, os.WNOHANG)


def test_a_process_with_threads_is_not_copied() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert both(Forks(), os.getpid, os.getpid) == (os.getpid(), os.getpid())
        assert both(Forks(spinners=1), os.getpid, os.getpid)[1] != os.getpid()
    finally:
        done.set()
        thread.join()


def test_one_core_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert second_core() is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert second_core(spinners=1) == Forks(1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert second_core() is None
