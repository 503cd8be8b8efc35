"""What all rings share: the real command line in a subprocess, fresh databases, and one real
plan.
"""

import gc
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from sqlalchemy import Engine, Pool, event, text

from tests import zygote

if TYPE_CHECKING:
    from fastapi.testclient import TestClient
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.pool import ConnectionPoolEntry

    from planner.api.wiring import Wiring
    from tests.slurm_cluster import SlurmCluster

# a shell that starts tests in the background ignores it for all of them
signal.signal(signal.SIGINT, signal.default_int_handler)
# threads of linear algebra wait busily for each other, on cores that other tests are using
os.environ.update(
    dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)
ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {"dp_shard": 8, "ac": "full"}
# minutes each: they begin before all others, so that none is alone at the end of its tier
LONGEST = ("abuse", "pages_run", "feature_pairs", "http_abuse", "slurm_faults", "web_page")
RINGS = ("unit", "property", "golden", "contract", "torch_memory", "e2e", "gpu")  # cheapest first
# a test of SQL: on SQLite and on PostgreSQL
EACH_DATABASE = pytest.mark.parametrize("database", ["sqlite", "postgres"], indirect=True)
END_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
PLANNER = (sys.executable, "-m", "planner.api.cli")
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def missing(what: str, remedy: str) -> NoReturn:
    """Skips a test that this machine lacks something for. In CI that is an error."""
    reason = f"no {what}: {remedy}"
    if IN_CI:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def needed(module: str) -> Any:
    """The imported module, one of the tests' own dependencies; `missing` without it. What Python
    warns of when it first compiles that module is its owner's.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return import_module(module)
    except ImportError as error:
        missing(f"{module} ({error})", "`make test` installs it")


def needed_program(name: str, package: str) -> None:
    """`missing` without a program of the system."""
    if shutil.which(name) is None:
        missing(name, f"apt-get install {package}")


def compiles() -> bool:
    """Whether torch.compile has what it calls on a CPU: a C++ compiler, and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and any(map(shutil.which, ("c++", "g++", "clang++")))


def needed_compiler() -> None:
    """`missing` where torch.compile cannot compile for a CPU."""
    if not compiles():
        missing("C++ compiler or Python.h", "apt-get install g++ python3-dev")


def job_values(
    model: Any, gpu: Any, num_gpus: Any, seq_len: int, batch: int, /, *, layout: Any = None,
    search: Any = None, **training: Any,
) -> dict[str, Any]:  # fmt: skip
    """A job as a person writes it."""
    cluster = {"gpu": gpu, "num_gpus": num_gpus}
    training = {"seq_len": seq_len, "global_batch_size": batch, **training}
    more = {"layout": layout, "search": search}
    given = {key: value for key, value in more.items() if value is not None}
    return {"model": model, "cluster": cluster, "training": training, **given}


JOB = job_values("llama3-8b", "h100-sxm-80gb", 8, 8192, 64)
MAIN_JOB = (
    "--model", "llama3-8b", "--gpu", "h100-sxm-80gb", "--num-gpus", "8", "--seq-len", "8192",
    "--global-batch-size", "64",
)  # fmt: skip
# Its best layouts are pipelines that recompute a part of each stage.
PIPED = {"fix": {"cpu_offload": False, "pp": 8}}  # else nothing has to be recomputed
SHORT_OF_MEMORY = job_values("llama3-8b", "l40s", 8, 8192, 64, trainer="megatron", search=PIPED)
# Its fastest layout recomputes by a memory budget, which no run behind the calibration used.
WHOLE = {"tp": 1, "cp": 1, "pp": 1, "precision": "bf16", "dp_replicate": 1, "compile": True}
UNMEASURED_JOB = {**JOB, "search": {"fix": WHOLE, "prefer": "fastest", "top_k": 1}}


def one_fast(first: object, *others: object) -> list[Any]:
    """Values of a parametrized test: the first at every commit, the others in the slow tier."""
    return [first, *slow(*others)]


def slow(*values: object) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.slow) for one in values]


def tiers(few: int, many: int, **strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a check of drawn values a test of few examples, and a slow one of many."""
    from hypothesis import HealthCheck, given, settings

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]

    def decorate(check: Callable[..., None]) -> Any:
        drawn = {
            count: settings(max_examples=count, suppress_health_check=checks)(
                given(**strategies)(check)
            )
            for count in (few, many)
        }

        @pytest.mark.parametrize("examples", one_fast(few, many))
        def test(examples: int) -> None:
            drawn[examples]()

        return test

    return decorate


def pytest_configure() -> None:
    """Lets no property depend on the machine's speed; no garbage is looked for in what stays."""
    from hypothesis import HealthCheck, settings

    gc.disable()  # until all is collected
    at_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("at any speed", at_any_speed)
    settings.load_profile("at any speed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LONGEST, what is in no ring, and the rings in their order."""

    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        if name in LONGEST:
            return LONGEST.index(name) - len(LONGEST) - 1
        ring = item.nodeid.split("/")[1]
        return RINGS.index(ring) if ring in RINGS else -1

    items.sort(key=place)
    gc.enable()
    gc.freeze()


@pytest.fixture
def job() -> dict[str, Any]:
    return deepcopy({**JOB, "search": {"fix": {"tp": 1, "cp": 1, "pp": 1}, "top_k": 3}})


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'planner.db'}"


@pytest.fixture
def wiring(sqlite_url: str) -> "Wiring":
    """Over a fresh SQLite database: what `cli` finds, too."""
    from planner.api.settings import Settings
    from planner.api.wiring import wire

    return wire(Settings(database_url=sqlite_url))


@pytest.fixture
def cli(sqlite_url: str) -> Cli:
    """Runs `planner-cli` on a fresh SQLite database, in a fork that has imported it already."""
    return commands(zygote.run, sqlite_url)


@pytest.fixture
def executable(sqlite_url: str) -> Cli:
    """Starts `python -m planner.api.cli` as a user does, where a fork would not show the same."""
    return commands(lambda words, **given: ran(*PLANNER, *words, **given), sqlite_url)


def commands(run: Cli, database_url: str) -> Cli:
    def cli(
        *arguments: str | Path, input: str = "", env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        given = {**clean_environment(), "PLANNER_DATABASE_URL": database_url, **(env or {})}
        return run([*map(str, arguments)], input=input, env=given, timeout=300.0)

    return cli


def ran(
    *command: object, env: Mapping[str, str] | None = None, **given: Any
) -> "subprocess.CompletedProcess[str]":
    """A command in a clean environment and these variables, with its output captured."""
    given = {"timeout": 300, "check": False, "env": {**clean_environment(), **(env or {})}, **given}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **given)


def clean_environment() -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("PLANNER_") and key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    return {**kept, "PYTHONPATH": str(ROOT)}


def judged(package: str, folder: str, *command: str, lines: str = "") -> list[str]:
    """Lines that a program of ours prints beside a real package, which this folder has."""
    if not any(distributions(name=package, path=[folder])):
        missing(package, "`make test-slow` installs it")
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), folder])}
    done = ran(sys.executable, *command, input=lines, cwd=ROOT, env=path, timeout=None)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def api_keys(scopes: Mapping[str, str]) -> Any:
    """PLANNER_API_KEYS of these names; the secret of each is its name."""
    hashed = {name: hashlib.sha256(name.encode()).hexdigest() for name in scopes}
    return ",".join(f"{name}:{scopes[name]}:{digest}" for name, digest in hashed.items())


def side_by_side(work: Callable[..., object], *given: tuple[Any, ...]) -> None:
    """Calls it with each of these arguments, all at once, and waits for the ends."""
    threads = [threading.Thread(target=work, args=one) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Fixed:
    """A clock that stands still, and ids that count."""

    count = 0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def new_id(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"


fixed_now = Fixed().now


def engine_of(url: str, *limits: Any) -> Engine:
    """Of the database of a URL as a user writes it. limits: of the engine's own waiting."""
    from planner.api.storage.engine import make_engine, normalise_url

    return make_engine(normalise_url(url), *limits)


@pytest.fixture(scope="session")
def plan() -> Any:
    """One real plan."""
    from planner.api.wiring import SystemClock
    from planner.intake.jobs import read_job
    from planner.plan.recommend import recommend

    asked = read_job({**JOB, "search": {"top_k": 3}})
    return recommend(asked, now=SystemClock().now, plan_id="plan-of-the-tests")


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


def _as_server_user() -> tuple[Sequence[str], str | None]:
    """PostgreSQL refuses to run as root: (prefix of its commands, owner of its folder)."""
    if os.geteuid() != 0:
        return (), None
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        missing("user postgres to run PostgreSQL as", "apt-get install postgresql")
    if shutil.which("runuser") is None:
        missing("runuser to run PostgreSQL as another user", "apt-get install util-linux")
    return ("runuser", "-u", "postgres", "--"), "postgres"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The query part of URLs of a private PostgreSQL."""
    yield from running_postgres()


def running_postgres() -> Iterator[str]:
    """A private PostgreSQL in a temporary folder, reached over its Unix socket; yields the query
    part of its URLs.
    """
    needed("psycopg")
    _, owner = _as_server_user()
    with tempfile.TemporaryDirectory(prefix="planner-pg-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if owner is not None:
            shutil.chown(folder, owner, owner)
        settings = ("-U", "planner", "--auth=trust", "--no-sync", "-E", "UTF8")
        _postgres("initdb", "-D", folder / "data", *settings)
        control_postgres(folder, "start")
        try:
            yield f"host={folder}"
        finally:
            control_postgres(folder, "-m", "immediate", "stop")


def control_postgres(folder: Path, *order: str) -> None:
    """Starts or stops the server of a folder."""
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    files = ("-D", folder / "data", "-l", folder / "log")
    _postgres("pg_ctl", *files, "-w", "-t", "300", "-o", options, *order)


def _postgres(program: str, *arguments: object) -> None:
    programs, (prefix, _) = _programs(), _as_server_user()
    if programs is None:
        missing("PostgreSQL under /usr/lib/postgresql", "apt-get install postgresql")
    done = ran(*prefix, programs / program, *arguments, cwd="/", env=os.environ)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """A fresh, empty database."""
    name = f"planner_{uuid.uuid4().hex[:12]}"
    _ask_postgres(postgres_server, f"CREATE DATABASE {name}")
    yield f"postgresql://planner@/{name}?{postgres_server}"
    _ask_postgres(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


def _ask_postgres(server: str, statement: str) -> None:
    import psycopg

    admin = f"postgresql://planner@/postgres?{server}"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(statement)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A fresh, empty database of each kind that is supported."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite database, of which tests take copies."""
    path = tmp_path_factory.mktemp("migrated") / "planner.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: str) -> str:
    """The URL of a migrated database, which tests empty."""
    url = f"postgresql://planner@/migrated?{postgres_server}"
    _ask_postgres(postgres_server, "CREATE DATABASE migrated")
    _migrate(url)
    return url


def _migrate(url: str) -> None:
    from planner.api.storage.migrate import upgrade

    engine = engine_of(url)
    upgrade(engine)
    engine.dispose()


@pytest.fixture
def migrated_sqlite_url(sqlite_url: str, tmp_path: Path, migrated_file: Path) -> str:
    shutil.copyfile(migrated_file, tmp_path / "planner.db")
    return sqlite_url


@pytest.fixture
def migrated_postgres_url(migrated_postgres: str) -> str:
    """What earlier tests left is deleted: to copy a database takes thirty times as long."""
    from planner.api.storage.tables import Base

    engine = engine_of(migrated_postgres)
    with engine.begin() as connection:
        connection.execute(text(END_OTHERS))
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(table.delete())
    engine.dispose()
    return migrated_postgres


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """The kind of `migrated_url`: SQLite, unless the test is one of EACH_DATABASE."""
    return getattr(request, "param", "sqlite")


@pytest.fixture
def migrated_url(request: pytest.FixtureRequest, database: str) -> str:
    """A migrated database with nothing in it."""
    return request.getfixturevalue(f"migrated_{database}_url")


def _close_in_the_end(connection: "DBAPIConnection", record: "ConnectionPoolEntry") -> None:
    """Python 3.13 complains of connections that go unclosed, as those of engines that go do."""
    weakref.finalize(record, connection.close)


event.listen(Pool, "connect", _close_in_the_end)


@pytest.fixture
def app(migrated_url: str) -> "Iterator[TestClient]":
    """The service over a migrated database."""
    from tests.served import in_process

    with in_process(migrated_url) as served:
        yield served


@pytest.fixture
def memory() -> Engine:
    """An empty database in memory, with all tables."""
    from planner.api.storage.tables import Base

    engine = engine_of("sqlite://")
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SlurmCluster]":
    """A running Slurm cluster of two nodes."""
    from tests.slurm_cluster import running_slurm

    yield from running_slurm(tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def cluster(
    slurm_cluster: "SlurmCluster", monkeypatch: pytest.MonkeyPatch
) -> "Iterator[SlurmCluster]":
    """The running cluster, which our commands ask. Idle again after the test, all daemons up."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    monkeypatch.setenv("PATH", slurm_cluster.environment["PATH"])
    yield slurm_cluster
    for name in ("slurmctld", "n1", "n2"):
        if name not in slurm_cluster.daemons:
            slurm_cluster.start(name)
    slurm_cluster.wait_until_idle()


@pytest.fixture(scope="session")
def slurm(slurm_cluster: "SlurmCluster") -> Path:
    """The configuration file of the running cluster."""
    return slurm_cluster.conf
