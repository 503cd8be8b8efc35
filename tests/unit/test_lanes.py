"""Heavy work in processes: turns between keys, refusals, what ends a process."""

import contextlib
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import anyio
import pytest

from planner.api.errors import PlanningError, TooManyRequestsError
from planner.api.http.lanes import Lane
from planner.errors import Fault, InfeasibleError, PlannerError, SpecError

NICENESS = min(19, os.nice(0) + 7)  # above our own, however the tests were started


@pytest.fixture
def lane() -> Iterator[Callable[..., Lane]]:
    limits: dict[str, Any] = {
        "name": "x", "niceness": NICENESS, "processes": 1, "most_waiting": 8,
        "most_waiting_per_key": 4, "seconds": 60.0,
    }  # fmt: skip
    with contextlib.ExitStack() as ends:

        def make(**changes: Any) -> Lane:
            made = Lane(**{**limits, **changes})
            ends.callback(made.close)
            return made

        yield make


@pytest.fixture
def line(lane: Callable[..., Lane]) -> Lane:
    return lane()


def stamp(path: Path, name: str) -> None:
    with path.open("a") as file:
        file.write(f"{name}\n")


def long_sleep(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


def refuse() -> None:
    raise InfeasibleError("nothing fits", remedy="take more GPUs", nearest_miss={"tp": 8})


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await anyio.sleep(0.01)


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    async def limited(given: dict[str, Any]) -> None:
        with anyio.fail_after(120):
            await test(**given)

    return wraps(test)(lambda **given: anyio.run(limited, given))


@awaited
async def test_keys_take_lane_however_many_one_asks(lane: Any, tmp_path: Path) -> None:
    path, line = tmp_path / "order", lane(most_waiting_per_key=8)
    async with anyio.create_task_group() as group:
        for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
            group.start_soon(line.run, name[0], stamp, path, name)
            await anyio.sleep(0)  # they ask in this order
    # a1 was first; then each key in turn, and in its own order
    assert path.read_text().split() == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert (line.running, line.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "keys", "whose"),
    [
        ({"most_waiting": 2}, "abcd", "2 requests wait"),
        ({"most_waiting_per_key": 1}, "aaa", "1 request of key a"),
    ],
)
@awaited
async def test_a_line_has_an_end(
    lane: Any, limits: dict[str, int], keys: str, whose: str, tmp_path: Path
) -> None:
    line = lane(**limits)
    async with anyio.create_task_group() as group:
        for key in keys[:-1]:
            group.start_soon(line.run, key, long_sleep, tmp_path / "pid")
            await anyio.sleep(0)
        with pytest.raises(TooManyRequestsError, match=whose) as raised:
            await line.run(keys[-1], os.getpid)
        assert raised.value.retry_after_seconds > 0
        group.cancel_scope.cancel()
    assert (line.running, line.waiting) == (0, 0), "who was let in has left"


@awaited
async def test_what_was_let_in_may_wait_for_its_next_part(lane: Any) -> None:
    line = lane(most_waiting=0)
    found: list[int] = []

    async def part() -> None:
        found.append(await line.run("a", os.getpid, admitted=True))

    async with anyio.create_task_group() as group:
        group.start_soon(line.run, "a", os.getpid)
        await anyio.sleep(0)
        group.start_soon(part)
    assert len(found) == 1


@awaited
async def test_cancelling_ends_the_process_and_hands_the_place_on(
    line: Lane, tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    async with anyio.create_task_group() as group:
        group.start_soon(line.run, "a", long_sleep, path)
        await until(lambda: path.exists() and bool(path.read_text()))
        group.cancel_scope.cancel()
    pid = int(path.read_text())
    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert await line.run("b", os.getpid) != pid
    assert (line.running, line.waiting) == (0, 0)


@awaited
async def test_work_has_a_time(lane: Any, tmp_path: Path) -> None:
    line = lane(seconds=0.2)
    with pytest.raises(PlanningError, match="PLANNER_PLANNING_SECONDS"):
        await line.run("a", long_sleep, tmp_path / "pid")
    assert line.running == 0


@awaited
async def test_a_process_that_dies_is_said_and_replaced(line: Lane) -> None:
    with pytest.raises(PlanningError, match="memory"):
        await line.run("a", os._exit, 9)
    assert await line.run("a", os.nice, 0) == NICENESS, "it leaves the core to the answers"


@awaited
async def test_refusals_cross_whole(line: Lane) -> None:
    with pytest.raises(InfeasibleError) as raised:
        await line.run("a", refuse)
    assert raised.value.as_dict()["nearest_miss"] == {"tp": 8}
    assert raised.value.remedy == "take more GPUs"


FAULT = Fault("a", 1, "is wrong", "mend it")


@pytest.mark.parametrize("error", [
    SpecError([FAULT, Fault("b", None, "is missing", "add")]),
    TooManyRequestsError("much; later", retry_after_seconds=3.0),
    SpecError(FAULT).renamed(str.upper),
])  # fmt: skip
def test_every_error_is_pickled_as_it_stands(error: PlannerError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert again.as_dict() == error.as_dict()
