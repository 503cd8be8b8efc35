"""What an installed package carries beside its code: migrations, the accuracy report."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from planner.api.storage.migrate import HEAD, current_revision
from planner.version import VERSION
from tests.conftest import ROOT, job_values, needed, ran

TINY = job_values("debug-tiny", "cpu", 2, 64, 4, layout={"dp_shard": 2, "ac": "none"})
Run = Callable[..., "subprocess.CompletedProcess[str]"]
LEFT_OUT = (
    ".git", "build", "*.egg-info", "__pycache__", ".venv", "tests", "benchmarks", ".*_cache",
)  # fmt: skip
PIP = (sys.executable, "-m", "pip", "--quiet")


def outside(*command: object, cwd: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """A command that does not see the checkout."""
    return ran(*command, cwd=cwd, env={"PYTHONPATH": "", **more}, timeout=1200)


def copied(folder: Path) -> Path:
    """The checkout as its users have it."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built with the tests' setuptools."""
    needed("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source, offline = copied(folder), ("--no-deps", "--no-index", "--no-build-isolation")
    done = outside(*PIP, "wheel", *offline, "--wheel-dir", folder / "wheels", source, cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    (found,) = (folder / "wheels").iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """planner-cli of an environment with the wheel, which has other packages from the tests'."""
    folder = tmp_path_factory.mktemp("installed")
    home = folder / "venv"
    venv.create(home, symlinks=True, with_pip=False)
    paths = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (site / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    into = (*PIP, "--python", home / "bin" / "python", "install", "--no-deps", "--no-index")
    done = outside(*into, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    ours = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert ours == {"planner", "tests.pth"}, "an installed name that may be somebody else's"

    def run(
        *arguments: str, database: Path, cwd: Path = folder, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        more |= {"PLANNER_DATABASE_URL": f"sqlite:///{database}"}
        return outside(home / "bin" / "planner-cli", *arguments, cwd=cwd, **more)

    return run


@pytest.mark.slow
def test_it_plans_and_probes_beside_folders_named_as_ours(installed: Run, tmp_path: Path) -> None:
    needed("torch")
    for name in ("api", "probes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('of another project')")
    own = {"PYTHONPATH": ".", "PLANNER_PROBE_FOLDER": str(tmp_path / "runs")}
    run = partial(installed, database=tmp_path / "x.db", cwd=tmp_path, **own)
    plans(run)
    (tmp_path / "job.json").write_text(json.dumps(TINY))
    probed = run("probe", "--job", "job.json", "--json")
    assert probed.returncode == 0, probed.stderr
    assert json.loads(probed.stdout)["probes"][0]["state"] == "done"


def plans(run: Run) -> None:
    """Whether a command line does."""
    job = "--model llama3.2-1b --gpu h100-sxm-80gb --num-gpus 8 --seq-len 2048"
    fast = "--global-batch-size 64 --fix pp=1 --fix tp=1 --fix cp=1 --json"
    planned = run("recommend", *job.split(), *fast.split())
    assert (planned.returncode, planned.stderr) == (0, "")
    assert json.loads(planned.stdout)["ranked"]


@pytest.mark.slow
def test_an_installed_package_carries_its_migrations(installed: Run, tmp_path: Path) -> None:
    done = installed("db", "upgrade", database=tmp_path / "x.db")
    assert done.returncode == 0, done.stderr
    assert current_revision(create_engine(f"sqlite:///{tmp_path / 'x.db'}")) == HEAD


@pytest.mark.slow
def test_an_installed_package_carries_its_accuracy(installed: Run, tmp_path: Path) -> None:
    """The report on rows that are not installed themselves; to make it anew takes them, which is
    said in one line.
    """
    run = partial(installed, "accuracy", database=tmp_path / "x.db")
    done = run("--where", "trainer=torchtitan", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["headline"]["overall"]["time"]["rows"] > 10
    refused = run("--recompute")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "--recompute needs the published rows" in refused.stderr


CORE = ("test_memory", "test_collectives", "test_schedules", "test_job", "test_units")


@pytest.mark.slow
@pytest.mark.parametrize("constraints", ["constraints.txt", "constraints-min.txt"])
def test_a_fresh_environment_with_the_base_alone_plans(
    constraints: str, wheel: Path, tmp_path: Path
) -> None:
    """At the newest versions that we test with, built there as from a checkout, and at the oldest
    that pyproject.toml allows.
    """
    package = copied(tmp_path) if constraints == "constraints.txt" else wheel
    home = tmp_path / "venv"
    binaries = home / "bin"
    venv.create(home, symlinks=True, with_pip=False)
    run = partial(outside, cwd=tmp_path, PLANNER_DATABASE_URL=f"sqlite:///{tmp_path / 'x.db'}")
    pip = (*PIP, "--python", binaries / "python", "install", "--no-compile")
    done = run(*pip, "--constraint", ROOT / constraints, package)
    assert done.returncode == 0, done.stderr
    planner = partial(run, binaries / "planner-cli")
    assert planner("--version").stdout == f"{VERSION}\n"
    plans(planner)
    assert planner("recommend", "--help").returncode == 0
    refused = planner("serve")
    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)
    assert "pip install '.[server]' in planner's checkout" in refused.stderr
    done = run(*pip, "pytest", "hypothesis", "httpx")
    assert done.returncode == 0, done.stderr
    tests = [ROOT / "tests" / "unit" / f"{name}.py" for name in CORE]
    options = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=", "--rootdir", ROOT)
    done = run(binaries / "python", "-m", "pytest", *options, *tests, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-3000:]
