"""Imports are declared and pinned; images are made of, and run, what exists; manifests are true."""

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import planner
from planner.api.cli.root import COMMANDS
from planner.api.http.app import create_app
from planner.api.settings import Settings
from tests.conftest import JOB, LAYOUT, ROOT, ran
from tests.unit.conftest import Say
from tests.zygote import module_of

WHOLE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = WHOLE["project"], WHOLE["tool"]["setuptools"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0].lower()


def wanted(*extras: str) -> list[str]:
    """Requirements of the base and of these extras."""
    return [*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])]


def declared(*extras: str) -> set[str]:
    return {distribution(one) for one in wanted(*extras)}


def files_in(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_everything_declared_has_a_range_and_the_tests_a_pin() -> None:
    pinned = {distribution(line) for line in lines_of("constraints.txt")}
    for requirement in wanted(*EXTRAS):
        name = distribution(requirement)
        assert "<" in requirement or name in ("types-pyyaml", "setuptools"), requirement
        assert name in pinned or name == "setuptools", f"{name} is not in constraints.txt"


def lines_of(name: str) -> list[str]:
    """Of a file of requirements, without comments."""
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins(file: Path) -> dict[str, str]:
    """The exact releases that a file of requirements names."""
    found = re.findall(r"^([\w.-]+)(?:\[.*\])?==([^\s;]+)", file.read_text(), re.MULTILINE)
    return {distribution(name).replace("_", "-"): version for name, version in found}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "hashes").iterdir()))
def test_all_that_is_installed_has_a_hash_and_the_pinned_release(name: str) -> None:
    """`make hashes` writes these files; no address of an index is in them."""
    file, judged = ROOT / "hashes" / f"{name}.txt", ROOT / f"{name}-requirements.txt"
    hashed = pins(file)
    entries = re.split(r"\n(?=\S)", file.read_text().strip())
    assert all(re.search(r"==\S+.* \\\n( +--hash=sha256:[0-9a-f]{64}.*\n?)+$", e) for e in entries)
    assert "://" not in file.read_text()
    wanted = pins(judged if judged.exists() else ROOT / "constraints.txt")
    assert not judged.exists() or hashed == wanted
    assert {one: hashed[one] for one in hashed.keys() & wanted.keys()}.items() <= wanted.items()


@pytest.mark.parametrize(("name", "extras"), [
    ("service", ("server", "postgres")),
    ("probe", ("server", "postgres", "probe")),
    ("test", ("dev", "docs", "server", "postgres")),
])  # fmt: skip
def test_what_is_declared_has_a_hash(name: str, extras: tuple[str, ...]) -> None:
    assert declared(*extras) - pins(ROOT / "hashes" / f"{name}.txt").keys() == set()


def test_there_is_one_version_number(say: Say, sqlite_url: str) -> None:
    """Of package, library, command and OpenAPI; the cost model has its own, `model_version`."""
    from setuptools.config.pyprojecttoml import read_configuration

    app = create_app(Settings(database_url=sqlite_url))
    assert {
        read_configuration(ROOT / "pyproject.toml")["project"]["version"],
        say("--version").out.strip(),
        app.version,
        app.openapi()["info"]["version"],
        re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0],
    } == {planner.__version__}


def test_images_are_made_of_what_is_there() -> None:
    lines = DOCKERFILE.splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in sources} == {one for one in ignored if one[:1] == "!"}
    stages = [line.split()[-1] for line in lines if line.startswith("FROM ")]
    assert {"service", "worker", "probe"} <= set(stages)
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")} - set(stages)
    assert all(re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", base) for base in bases), bases
    hashed = re.findall(r"--require-hashes --requirement (\S+)", DOCKERFILE)
    assert hashed == ["hashes/service.txt", "hashes/probe.txt"]
    assert all((ROOT / file).exists() for file in (*sources, *hashed))
    assert all("--timeout=" in line for line in lines if line.startswith("HEALTHCHECK"))


def test_images_run_commands_that_exist() -> None:
    commands = re.findall(r"^(?:CMD|ENTRYPOINT) (\[.*\])$", DOCKERFILE, re.MULTILINE)
    words = [json.loads(found) for found in commands]
    asked = {line[1] for line in words if line[0] == "planner-cli"}
    assert asked == {"serve", "worker", "probe"}
    assert asked <= COMMANDS.keys()


def test_manifests_name_every_kind_of_file_that_is_read() -> None:
    files = [path for path in (ROOT / "planner").rglob("*") if "__pycache__" not in path.parts]
    kinds = {path.suffix for path in files if path.is_file()} - {".py", ".typed"}
    data = SETUPTOOLS["package-data"]["planner"]
    assert {Path(pattern).suffix for pattern in data if pattern != "py.typed"} == kinds
    assert "py.typed" in data
    assert {f"*{kind}" for kind in kinds} <= set((ROOT / "MANIFEST.in").read_text().split())


def test_packages_are_found_by_the_patterns_that_install_them() -> None:
    from setuptools import find_packages

    installed = set(find_packages(str(ROOT), include=SETUPTOOLS["packages"]["find"]["include"]))
    folders = {module_of(path.parent) for path in files_in("planner", "api", "probes")}
    assert folders - installed == set(), "a folder of code without __init__.py is not installed"


# What is skipped in CI too, and listed there with its reason: only one line of TorchTitan is
# installed at a time, and one test is about builds of torch without CUDA.
LEGITIMATE_SKIPS = {
    "real_torchtitan.py": 3, "test_lease_locks.py": 3, "test_preflight.py": 3,
}  # fmt: skip


def test_what_a_machine_lacks_is_an_error_in_ci() -> None:
    """Tests call `missing` or `needed`, which fail in CI; they skip by themselves nowhere else."""
    asks = re.compile(r"importorskip|pytest\.skip\(|mark\.skip")
    files = {*files_in("tests")} - {ROOT / "tests" / "conftest.py", Path(__file__)}
    found = {path.name: len(asks.findall(path.read_text())) for path in sorted(files)}
    assert {name: count for name, count in found.items() if count} == LEGITIMATE_SKIPS


def test_what_is_installed_is_checked_by_each_commit_and_listed_by_an_audit() -> None:
    def steps(target: str) -> str:
        return ran("make", "--dry-run", target, "VENV=/nowhere", cwd=ROOT, check=True).stdout

    assert "-m pip check\n" in steps("test")
    for part in ("cyclonedx-py environment", "build/sbom.json", "build/licences.md"):
        assert part in steps("audit")
    assert {"cyclonedx-bom", "pip-licenses", "uv"} <= pins(ROOT / "hashes/audit.txt").keys()


def test_a_machine_that_lacks_tools_gets_one_line(tmp_path: Path) -> None:
    """Nothing is on it but a shell and Python, and nobody may install."""
    tools = {name: shutil.which(name) for name in ("dirname", "id", "cat")}
    for name, file in {**tools, "bash": "/bin/bash", "python3": sys.executable}.items():
        (tmp_path / name).symlink_to(str(file))
    done = ran("/bin/bash", ROOT / ".ci/run", env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done
    assert {"make", "g++", "patch", "curl"} <= set(done.stderr.split())


def test_the_base_alone_plans(tmp_path: Path) -> None:
    """Nothing that plans imports what an extra brings; what needs one names it, in one line."""
    apart = {"fastapi", "starlette", "uvicorn", "prometheus_client", "cronsim", "torch"}
    program = (
        f"import sys\nsys.modules |= dict.fromkeys({apart!r})\n"
        "from planner.api.cli.root import run\nsys.exit(run(sys.argv[1:]))\n"
    )
    env = {"PLANNER_DATABASE_URL": f"sqlite:///{tmp_path / 'x.db'}"}
    job = tmp_path / "job.json"
    job.write_text(json.dumps({**JOB, "layout": LAYOUT}))
    done = ran(sys.executable, "-c", program, "recommend", "--job", job, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    refused = ran(sys.executable, "-c", program, "serve", env=env)
    line = "error: no fastapi here; pip install '.[server]' in planner's checkout\n"
    assert (refused.returncode, refused.stderr) == (4, line)


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """constraints-min.txt is what tests/e2e/test_installed.py installs."""
    oldest = dict(line.lower().split("==") for line in lines_of("constraints-min.txt"))
    for one in wanted("server", "postgres"):
        bound = re.findall(r">=([\d.]+)", one)[0]
        assert Version(oldest[distribution(one)]) == Version(bound), one
