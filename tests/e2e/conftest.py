"""What tests of this ring share: planning processes that start at once, and light probes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from planner.api.http import lanes
from planner.probes.launch import LaunchSettings
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_wait import SlurmPace
from tests import zygote
from tests.conftest import Cli
from tests.served import in_process
from tests.slurm_cluster import SlurmCluster
from tests.stand_ins import light_python, worker

Say = Callable[..., str]
# of `surroundings`, for a probe with the real program under the real torchrun
REAL_PROBE = {
    "PLANNER_PROBE_PROGRAM": "planner.probes.worker",
    "PLANNER_PROBE_PYTHON": sys.executable,
}


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service without workers, for tests that do not ask what else is stored."""
    url = f"sqlite:///{tmp_path_factory.mktemp('shared') / 'x.db'}"
    with in_process(url, probe_workers=0, task_workers=0) as client:
        yield client


@pytest.fixture
def client(sqlite_url: str) -> Iterator[TestClient]:
    """A service without workers over a new database."""
    with in_process(sqlite_url, probe_workers=0, task_workers=0) as made:
        yield made


@pytest.fixture
def say(cli: Cli) -> Say:
    """What a command prints, which ends with 0."""

    def run(*words: object) -> str:
        done = cli(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """Settings of probes that import no torch and touch nothing outside the test's folder."""
    return {
        "PLANNER_PROBE_FOLDER": str(tmp_path / "probes"),
        "PLANNER_LEASE_FOLDER": str(tmp_path / "leases"),
        "PLANNER_PROBE_PROGRAM": worker.__file__,
        "PLANNER_PROBE_PYTHON": str(light_python.install(tmp_path)),
    }


@pytest.fixture
def pool(cluster: SlurmCluster, tmp_path: Path) -> SlurmPool:
    """The running Slurm, asked every second, for probes that import no torch."""
    python = str(light_python.install(tmp_path))
    launch = LaunchSettings(folder=tmp_path / "probes", worker=worker.__file__, python=python)
    return SlurmPool(launch, pace=SlurmPace(files=0.1, slurm=1.0))


@pytest.fixture(autouse=True, scope="module")
def planning_forks() -> Iterator[None]:
    """A service within the tests' own process plans in forks, as nice as other tests; a real one
    spawns and stands back.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.api.http.lanes.NICENESS", dict.fromkeys(lanes.NICENESS, 0))
        forks = SimpleNamespace(get_context=lambda _: zygote.FORKS)
        patch.setattr("planner.api.http.lanes.multiprocessing", forks)
        yield
