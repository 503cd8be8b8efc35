"""Devices that a run keeps between its probes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from planner.api.jobs.side_by_side import HeldDevices
from planner.errors import ProbeError


class CountingPool:
    """Notes what is held of it."""

    fails = False

    def __init__(self, at_once: int | None) -> None:
        self.at_once, self.held, self.open = at_once, list[tuple[str, int, float]](), 0

    def capacity(self, cluster: Any) -> Any:
        return SimpleNamespace(at_once=self.at_once)

    @contextmanager
    def hold(self, name: str, cluster: Any, num_devices: int, seconds: float) -> Iterator[str]:
        if self.fails:
            raise ProbeError("the controller is away")
        self.held.append((name, num_devices, seconds))
        self.open += 1
        yield name
        self.open -= 1


def probe(devices: int) -> Any:
    cluster = SimpleNamespace(gpu=SimpleNamespace(name="h100"))
    request = SimpleNamespace(time_limit_seconds=100.0)
    job = SimpleNamespace(cluster=cluster)
    return SimpleNamespace(job=job, devices=devices, request=request)


def held(at_once: int | None = 32, *, fails: bool = False) -> tuple[CountingPool, HeldDevices]:
    pool = CountingPool(at_once)
    pool.fails = fails
    return pool, HeldDevices(pool, "run-1")  # type: ignore[arg-type]


def test_a_part_is_lent_to_one_probe_at_a_time_and_again_to_the_next() -> None:
    pool, devices = held()
    with devices.lent(probe(8)) as first, devices.lent(probe(8)) as second:
        assert (first, second) == ("run-1-1", "run-1-2")
    with devices.lent(probe(8)) as again, devices.lent(probe(16)) as larger:
        assert again in ("run-1-1", "run-1-2")
        assert larger == "run-1-3"
    assert pool.held == [("run-1-1", 8, 800.0), ("run-1-2", 8, 800.0), ("run-1-3", 16, 800.0)]
    assert pool.open == 3
    devices.close()
    assert pool.open == 0


def test_a_failed_probe_gives_its_part_back() -> None:
    pool, devices = held()
    with pytest.raises(KeyError), devices.lent(probe(8)):
        raise KeyError("rope")
    with devices.lent(probe(8)):
        assert len(pool.held) == 1


@pytest.mark.parametrize(("at_once", "fails"), [(32, True), (None, False)])
def test_where_nothing_can_be_held_the_pool_runs_it(at_once: int | None, fails: bool) -> None:
    """It says why it fails; without a limit there is nothing to hold."""
    pool, devices = held(at_once, fails=fails)
    with devices.lent(probe(8)) as whole:
        assert whole is pool
    assert pool.held == []
