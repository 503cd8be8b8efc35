"""A search in two halves: the same answer alone, beside itself, and in forked copies."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from api.second_core import Forks, collect, second_core
from planner.beside import OtherCore, both, sides
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.ports import Ports
from planner.search import bounds, cell_queue, parts, screen
from planner.search.one_size import OneSize, search_size
from planner.search.screen import Goal
from planner.search.space.enumerate import build_space
from planner.specs.job import Job


@dataclass
class Counting:
    """Runs work in forked copies, and counts it."""

    forks: Forks = field(default_factory=Forks)
    started: int = 0
    partners: int = 0

    def start(self, work: Callable[[], object]) -> Any:
        self.started += 1
        return self.forks.start(work)

    def partner(self, state: object) -> Any:
        self.partners += 1
        return self.forks.partner(state)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small searches are in two parts too, whose cells are not all known at once."""
    monkeypatch.setattr(bounds, "BAND", 64)
    monkeypatch.setattr(cell_queue, "BAND", 64)
    monkeypatch.setattr(parts, "MANY", 64)


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
def test_parts_beside_each_other_find_what_they_find_in_turn(model: str, trainer: str) -> None:
    asked, beside = job(model, trainer=trainer), Counting()
    alone, apart = found(asked, None), found(asked, beside)
    assert beside.partners >= 1
    assert alone.candidates == apart.candidates
    assert alone.rejected == apart.rejected
    one, other = alone.screened, apart.screened
    assert (one.num_priced, one.num_fitting) == (other.num_priced, other.num_fitting)
    assert np.array_equal(one.floor_seconds, other.floor_seconds)


def test_a_search_in_parts_ranks_what_one_in_one_piece_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = job()
    whole = found(asked, None)
    monkeypatch.setattr(parts, "MANY", 64)
    monkeypatch.setattr(bounds, "BAND", 64)
    monkeypatch.setattr(cell_queue, "BAND", 64)
    in_parts = found(asked, None)
    near = 1.05 * whole.best_seconds
    assert [one for one in whole.candidates if one[0] < near] == [
        one for one in in_parts.candidates if one[0] < near
    ]


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_a_screen_in_parts_keeps_what_one_in_one_piece_keeps(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(num_gpus=16, trainer=trainer)
    beside = Counting()
    pricer = Pricer.build(asked.model, asked.cluster, asked.training, beside=beside)
    space = build_space(pricer.rules_context, asked.search)
    monkeypatch.setattr(parts, "MANY", 2**40)
    whole = parts.screen(pricer, space, Goal(count=10))
    assert not beside.partners
    monkeypatch.setattr(parts, "MANY", 1)
    for module in (bounds, cell_queue):
        monkeypatch.setattr(module, "BAND", 32)
    monkeypatch.setattr(screen, "ROUND", 64)
    divided = parts.screen(pricer, space, Goal(count=10))
    near = [one.step_seconds[: one.num_fitting] for one in (whole, divided)]
    least = near[0].min()
    assert beside.partners == 1
    first, second = (np.sort(steps[steps <= 1.05 * least]) for steps in near)
    assert len(first) > 3
    assert np.array_equal(first, second)
    for each in (whole, divided):
        left_out = each.out_of_memory - (each.num_priced - each.num_fitting)
        assert each.num_priced + each.bounded_out + left_out == space.num_layouts


@dataclass
class Tally:
    """Remembers what was added to it, and in which process."""

    total: int = 0

    def add(self, number: int) -> tuple[int, int]:
        self.total += number
        return self.total, os.getpid()

    def die_elsewhere(self, parent: int) -> int:
        if os.getpid() != parent:
            os._exit(9)
        return self.total

    def fail(self) -> int:
        raise ValueError("tally")

    def die_in_the_answer(self, parent: int) -> "tuple[bytes, Deadly]":
        return b"." * 2**20, Deadly(parent)


@dataclass
class Deadly:
    """Ends the process that sends it, but for one."""

    spared: int

    def __reduce__(self) -> Any:
        if os.getpid() != self.spared:
            os._exit(9)
        return Deadly, (self.spared,)


def test_a_partner_keeps_its_state_and_leaves_ours_alone() -> None:
    mine, its = Tally(), Tally()
    with sides(Forks(), [mine, its]) as both_of_them:
        assert [total for total, _ in both_of_them.each(Tally.add, 3)] == [3, 3]
        (_, here), (total, there) = both_of_them.each(Tally.add, 4)
    assert total == 7
    assert here == os.getpid() != there
    assert (mine.total, its.total) == (7, 0)


def test_what_a_dead_partner_was_asked_is_done_here_from_the_start() -> None:
    its = Tally()
    with sides(Forks(), [Tally(), its]) as both_of_them:
        both_of_them.each(Tally.add, 3)
        assert both_of_them.each(Tally.die_elsewhere, os.getpid()) == [3, 3]
        assert both_of_them.each(Tally.add, 2) == [(5, os.getpid()), (5, os.getpid())]


def test_what_a_partner_that_died_in_its_answer_was_asked_is_done_here() -> None:
    with sides(Forks(), [Tally(), Tally()]) as both_of_them:
        answers = both_of_them.each(Tally.die_in_the_answer, os.getpid())
        assert [(len(dots), deadly.spared) for dots, deadly in answers] == 2 * [
            (2**20, os.getpid())
        ]


def test_a_partner_is_asked_several_things_before_it_answers() -> None:
    its = Tally()
    partner = Forks().partner(its)
    assert partner is not None
    pieces = [partner.start(Tally.add, number) for number in (1, 2, 3)]
    assert [pieces[place].result()[0] for place in (1, 0, 2)] == [3, 1, 6]  # type: ignore[index]
    partner.stop()
    assert its.total == 0


def test_of_several_things_asked_a_dead_partner_all_are_answered_here() -> None:
    partner = Forks().partner(Tally())
    assert partner is not None
    first = partner.start(Tally.add, 1)
    deadly = partner.start(Tally.die_elsewhere, os.getpid())
    last = partner.start(Tally.add, 2)
    assert first.result() == (1, partner.process)  # type: ignore[attr-defined]
    assert last.result() == (3, os.getpid())
    assert deadly.result() == 1


def test_one_state_alone_needs_no_partner() -> None:
    beside = Counting()
    with sides(beside, [Tally()]) as alone:
        assert alone.each(Tally.add, 1) == [(1, os.getpid())]
    assert not beside.partners


def test_an_error_of_a_partner_is_raised_and_it_is_gone_in_the_end() -> None:
    partner = Forks().partner(Tally())
    assert partner is not None
    with pytest.raises(ValueError, match="tally"):
        partner.start(Tally.fail).result()
    partner.stop()
    collect()
    with pytest.raises(ChildProcessError):
        os.waitpid(partner.process, os.WNOHANG)  # type: ignore[attr-defined]


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
    collect()
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
