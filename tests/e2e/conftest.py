"""What all tests of this ring have: services whose planning processes start at once."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests import zygote


@pytest.fixture(autouse=True, scope="module")
def planning_forks() -> Iterator[None]:
    """A service within the tests' own process plans in forks; a real one spawns."""
    with pytest.MonkeyPatch.context() as patch:
        forks = SimpleNamespace(get_context=lambda _: zygote.FORKS)
        patch.setattr("api.http.lanes.multiprocessing", forks)
        yield
