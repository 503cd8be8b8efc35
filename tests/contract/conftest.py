"""The databases that stores are held against: in memory, an SQLite file, PostgreSQL."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from planner.api.storage.migrate import ensure_current
from tests.conftest import engine_of


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    memory = request.param == "memory"
    url = "sqlite://" if memory else request.getfixturevalue(f"migrated_{request.param}_url")
    made = engine_of(url)
    ensure_current(made)
    yield made
    made.dispose()
