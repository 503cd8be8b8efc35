"""One thread, one fake world: other ranks exist in name only, collectives return at once."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.conftest import IN_CI

WORLD = 8
collect_ignore_glob = [] if IN_CI or find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session")
def world() -> Iterator[int]:
    """A process group of 8 ranks of which this process is the first."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield WORLD
    dist.destroy_process_group()
    torch.set_num_threads(before)


@pytest.fixture
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what CUDA's attention kernels allocate inside, which no tracker on a CPU can see."""
    from planner.work import attention, blocks

    def nothing(model: Any) -> tuple[()]:
        return ()

    blocks.layer_ops.cache_clear()
    monkeypatch.setattr(attention, "_flash_workspace", nothing)
    yield
    blocks.layer_ops.cache_clear()
