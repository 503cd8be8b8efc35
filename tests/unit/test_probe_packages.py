"""The interpreter of probes has its own torch, and of the service's packages ours alone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from planner.intake.jobs import read_job
from planner.probes import packages
from planner.probes.packages import linked, mounts, search_path
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.protocol import ProbeTask
from planner.probes.variables import DeviceLease, environment
from tests.conftest import ROOT, job_values, needed, side_by_side

JOB = job_values("debug-tiny", "cpu", 2, 64, 4, layout={"dp_shard": 2, "ac": "none"})
SHOW = """
import json, numpy, planner, planner.probes.guardian, sys, torch
print(json.dumps([torch.OWNER, numpy.OWNER, planner.__path__[0], planner.probes.guardian.__file__]))
"""
SERVICE = """
import json, sys
from pathlib import Path
from planner.intake.jobs import read_job
from planner.probes.variables import DeviceLease, environment
from planner.probes.preflight import Need, ask, command
from planner.probes.protocol import ProbeTask
python, folder, job = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
task = ProbeTask(id="probe-1", job=job, device="cpu")
need = Need(job=read_job(job), trainer="reference", device="cpu")
done = ask(command(python, need, "program.py"), folder=folder, seconds=60.0)
print(json.dumps([environment(folder, task, DeviceLease(), {}), done.stdout, done.stderr]))
"""


def stub(folder: Path, text: str) -> None:
    """A package of this text."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)


def interpreter(folder: Path) -> str:
    """A new virtual environment, with a torch and a numpy that say whose they are."""
    venv.create(folder, symlinks=True, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    for name in ("torch", "numpy"):
        stub(site / name, "OWNER = 'the interpreter'")
    stub(site / "torch" / "distributed", "")
    runs = "import sys, torch\nsys.stderr.write(torch.OWNER)\n"
    (site / "torch" / "distributed" / "run.py").write_text(runs)
    return str(folder / "bin" / "python")


def ran(*command: str, folder: Path, **env: str) -> list[Any]:
    """What it prints; of our environment it has all but PYTHONPATH."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, env={**clean, **env}, cwd=folder, capture_output=True, text=True, check=True
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def test_another_interpreter_has_its_own_torch_beside_our_packages(tmp_path: Path) -> None:
    """The service is installed with a torch of its own, and sets the environment of a probe."""
    service, python = tmp_path / "site-packages", interpreter(tmp_path / "venv")
    # as pip installs it; its numpy serves it from the tests' environment, so only torch is a stub
    shutil.copytree(
        ROOT / "planner", service / "planner", ignore=shutil.ignore_patterns("__pycache__")
    )
    stub(service / "torch", "OWNER = 'the service'")
    # as `site` does: the service's folder is searched, and PYTHONPATH does not name it
    start = f"import sys; sys.path.insert(0, {str(service)!r})\n{SERVICE}"
    given, elsewhere = (python, str(tmp_path / "probes"), json.dumps(JOB)), tmp_path / "elsewhere"
    service_of = (sys.executable, "-c", start, *given)
    ours, checked, said = ran(*service_of, folder=tmp_path, PYTHONPATH=str(elsewhere))
    assert json.loads(checked) == {"problem": None, "package": None}, checked
    assert said == "the interpreter"
    *before, links = map(Path, ours["PYTHONPATH"].split(os.pathsep))
    assert before == [elsewhere], "ours come last"
    assert [path.name for path in links.iterdir()] == ["planner"]
    torch, numpy, *files = ran(python, "-c", SHOW, folder=Path("/"), **ours)
    assert (torch, numpy) == ("the interpreter", "the interpreter")
    guardian = service / "planner" / "probes" / "guardian.py"
    assert [Path(file).resolve() for file in files] == [service / "planner", guardian]


def test_the_links_are_made_once_by_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[str]] = []

    def make() -> None:
        found.append({path.name for path in linked(tmp_path / "probes").iterdir()})

    side_by_side(make, *[()] * 8)
    assert found == [{"planner"}] * 8
    before = linked(tmp_path / "probes")
    assert [path.name for path in (tmp_path / "probes").iterdir()] == [before.name]
    monkeypatch.setattr(packages, "HOME", tmp_path)
    assert linked(tmp_path / "probes") != before, "another installation has links of its own"


def test_a_probe_of_the_checkout_searches_what_we_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    task = ProbeTask(id="probe-1", job=read_job(JOB).request, device="cpu")
    found = environment(tmp_path, task, DeviceLease(), {})["PYTHONPATH"]
    assert found == search_path(tmp_path) == f"{ROOT}{os.pathsep}{linked(tmp_path)}"
    monkeypatch.delenv("PYTHONPATH")
    assert search_path(tmp_path) == str(linked(tmp_path))


def test_a_container_is_given_our_packages_and_not_what_lies_beside_them(tmp_path: Path) -> None:
    """The service's site-packages may be where the image has its own."""
    options = SlurmOptions(container_image="image").container(mounts(tmp_path))
    places = [pair.partition(":")[0] for pair in options[-1].split(",")]
    assert places == [str(linked(tmp_path)), str(ROOT / "planner"), str(ROOT / "probes")]


@pytest.mark.torch
def test_an_interpreter_of_probes_needs_four_packages_beside_torch() -> None:
    """What the survey asks for; packaging comes with torch's own requirements of most installs."""
    needed("torch")
    kept = {"numpy", "pydantic", "yaml", "packaging"}
    others = {"pydantic_settings", "optuna", "cmaes", "typer", "rich", "sqlalchemy", "alembic",
              "platformdirs", "tomlkit", "torchao"}  # fmt: skip
    assert not kept & others
    blocked = f"import sys\nfor name in {sorted(others)!r}: sys.modules[name] = None\n"
    names = ("worker", "reference.run", "campaign", "pools.slurm_node")
    run = f"import {', '.join(f'planner.probes.{name}' for name in names)}"
    done = subprocess.run(
        [sys.executable, "-c", blocked + run], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
