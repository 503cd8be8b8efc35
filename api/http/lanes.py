"""Work that keeps a core busy: in processes of its own, a few at once, in a line that is fair.

A search takes seconds, an estimate tens of milliseconds. In threads they would slow every other
answer, and nothing could end them; a process is ended when its client goes, and the others answer
meanwhile. Estimates have a lane of their own, so that none waits for a search.
"""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from pebble import ProcessExpired, ProcessPool

from planner.api.errors import PlanningError, TooManyRequestsError
from planner.api.settings import Settings
from planner.units import counted

Result = TypeVar("Result")
PLANNING, PRICING = "planning", "pricing"
NICENESS = {PLANNING: 19, PRICING: 15}  # of the processes, below the one that answers
# of the mean time that work takes: how much the newest counts
NEWEST = 0.2
FIRST_SECONDS = 3.0  # a guess, until something has ended


@dataclass(eq=False, kw_only=True)
class Lane:
    """A process pool with a fair queue: keys take turns, and each key's requests keep their order.

    name: of the lane, in metrics.
    processes: how many work at once.
    most_waiting: how many more may wait, of all and of one key.
    seconds: how long one may work.
    niceness: of the processes, below the one that answers.
    """

    name: str
    processes: int
    most_waiting: int
    most_waiting_per_key: int
    seconds: float
    niceness: int
    mean_seconds: float = FIRST_SECONDS
    running: int = 0
    # the first key is the next one
    _lines: dict[str, deque[asyncio.Event]] = field(default_factory=dict)
    # of one process each: ending one disturbs no other
    _pools: list[ProcessPool] = field(default_factory=list)
    _idle: list[ProcessPool] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    async def run(
        self, key: str, work: Callable[..., Result], *args: object, admitted: bool = False
    ) -> Result:
        """The result of `work`, in a process, once it is the key's turn.

        Cancelling the caller ends the process. Arguments and answer are pickled. admitted: it is
        part of something that was let in. Raises TooManyRequestsError at once where too many wait,
        PlanningError, and what `work` raises.
        """
        async with self._turn(key, admitted), self._process() as pool:
            started = time.monotonic()
            try:
                with anyio.fail_after(self.seconds):
                    future = pool.schedule(_beside, args=(self.niceness, work, args))
                    found: Result = await asyncio.wrap_future(future)
                    return found
            except TimeoutError:
                raise PlanningError(
                    f"it was not done within {self.seconds:.0f} s; ask for fewer sizes or layouts "
                    "(`search.allow`, `search.fix`), or raise PLANNER_PLANNING_SECONDS"
                ) from None
            except (ProcessExpired, BrokenProcessPool):
                raise PlanningError(
                    "the process that planned was ended from outside, perhaps for its memory; "
                    "ask again, or for fewer sizes"
                ) from None
            finally:
                took = time.monotonic() - started
                self.mean_seconds += NEWEST * (took - self.mean_seconds)

    def close(self) -> None:
        for pool in self._pools:
            pool.stop()  # type: ignore[no-untyped-call]
        for pool in self._pools:
            pool.join()

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[ProcessPool]:
        if self._idle:
            pool = self._idle.pop()
        else:
            context = multiprocessing.get_context("spawn")  # a fork would take our locks along
            pool = ProcessPool(max_workers=1, context=context)
            self._pools.append(pool)
        try:
            yield pool
        finally:
            self._idle.append(pool)

    @contextlib.asynccontextmanager
    async def _turn(self, key: str, admitted: bool) -> AsyncIterator[None]:
        if self.running >= self.processes:
            await self._wait(key, admitted)
        else:
            self.running += 1
        try:
            yield
        finally:
            self._next()

    async def _wait(self, key: str, admitted: bool) -> None:
        """Until another hands its place on."""
        line = self._lines.get(key, deque())
        full = self.waiting >= self.most_waiting or len(line) >= self.most_waiting_per_key
        if full and not admitted:
            whose = f"of key {key} " if self.waiting < self.most_waiting else ""
            raise TooManyRequestsError(
                f"{counted(len(line) if whose else self.waiting, 'request')} {whose}wait already; "
                "ask again later",
                retry_after_seconds=self.mean_seconds * (self.waiting + 1) / self.processes,
            )
        turn = asyncio.Event()
        self._lines.setdefault(key, line).append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it was handed the place and does not need it
                self._next()
            else:
                line.remove(turn)
                if not line:
                    del self._lines[key]
            raise

    def _next(self) -> None:
        """Hands the place to the next key's first, or gives it up."""
        if not self._lines:
            self.running -= 1
            return
        key = next(iter(self._lines))
        line = self._lines.pop(key)
        line.popleft().set()
        if line:
            self._lines[key] = line  # it goes to the end


def open_lanes(settings: Settings) -> dict[str, Lane]:
    """PLANNING for searches, PRICING for what takes milliseconds."""
    processes = {PLANNING: settings.planning_processes, PRICING: settings.pricing_processes}
    return {
        name: Lane(
            name=name,
            processes=processes[name],
            seconds=settings.planning_seconds,
            niceness=NICENESS[name],
            most_waiting=settings.most_waiting_plans,
            most_waiting_per_key=settings.most_waiting_plans_per_key,
        )
        for name in (PLANNING, PRICING)
    }


def _beside(niceness: int, work: Callable[..., Result], args: tuple[object, ...]) -> Result:
    with contextlib.suppress(OSError):
        os.nice(max(0, niceness - os.nice(0)))
    return work(*args)
