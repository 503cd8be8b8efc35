"""A few kills of the service and its workers under load; `benchmarks.abuse.kills` has them all."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, clean_environment, needed


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_kills_lose_nothing_and_do_nothing_twice(database: str) -> None:
    if database == "postgres":
        needed("psycopg")
    asked = ["--kills", "6", "--json", "--database", database]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.abuse.kills", *asked],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(done.stdout)
    assert found["kills of a worker"] + found["kills of a service"] == 6
    assert found["plans answered"] > 0
    assert found["probes accepted"] > 0
