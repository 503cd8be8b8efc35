"""Whether a probe can run is asked of its interpreter, and answered with what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import ProbeError
from planner.intake.jobs import read_job
from probes import preflight, selfcheck
from probes.launch import ROOT, Launcher, LaunchSettings
from probes.pools.local import LocalPool, LocalSettings
from probes.pools.nvidia import Survey
from probes.pools.replay import ReplayPool
from probes.pools.slurm import SlurmPool
from probes.preflight import Need, ask, command, problem_in
from tests.conftest import job_values, needed

CPU = read_job(job_values("debug-tiny", "cpu", 2, 64, 4))
NEED = Need.of(CPU, "reference")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_good_until", {})


def interpreter(folder: Path, says: str, code: int = 0) -> str:
    """A stand-in that answers every question alike, and counts how often it is asked."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho x >> {folder}/asked\ncat <<'END'\n{says}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines())


def pool(folder: Path, python: str) -> LocalPool:
    return LocalPool(Launcher(LaunchSettings(folder=folder / "probes", python=python)))


def test_an_interpreter_without_a_problem_is_asked_once(tmp_path: Path) -> None:
    local = pool(tmp_path, interpreter(tmp_path, 'welcome\n{"problem": null, "package": null}'))
    for _ in range(3):
        local.check(NEED)
    assert asked(tmp_path) == 1, "its answer stands for a while"


def test_what_is_missing_is_named_with_its_extra_and_asked_again(tmp_path: Path) -> None:
    answer = '{"problem": "cannot import torch (no such)", "package": "torch"}'
    local = pool(tmp_path, interpreter(tmp_path, answer))
    for _ in range(2):
        with pytest.raises(ProbeError) as caught:
            local.check(NEED)
    words = "cannot import torch (no such); pip install '.[probe]' in planner's checkout"
    assert words in str(caught.value)
    assert "PLANNER_PROBE_PYTHON" in str(caught.value), "it is not our interpreter that lacks it"
    assert "\n" not in str(caught.value)
    assert asked(tmp_path) == 2, "somebody may have installed it meanwhile"
    remedy = preflight.remedy("torch", sys.executable)
    assert remedy == "pip install '.[probe]' in planner's checkout"


@pytest.mark.parametrize(
    ("says", "code", "words"),
    [
        ("no json here", 1, "ended with 1 and said nothing"),
        ("[1]", 0, "cannot be asked whether it has torch"),
    ],
)
def test_an_interpreter_that_cannot_be_asked_says_so(
    tmp_path: Path, says: str, code: int, words: str
) -> None:
    with pytest.raises(ProbeError, match=words):
        pool(tmp_path, interpreter(tmp_path, says, code)).check(NEED)


def test_no_interpreter_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"no interpreter for probes .*set PLANNER_PROBE_PYTHON"):
        pool(tmp_path, str(tmp_path / "none")).check(NEED)
    (tmp_path / "probes").rmdir()
    (tmp_path / "probes").write_text("a file")
    with pytest.raises(ProbeError, match=r"it is no folder.*PLANNER_PROBE_FOLDER"):
        pool(tmp_path, sys.executable).check(NEED)


def test_the_program_of_the_check_says_what_cannot_be_imported(tmp_path: Path) -> None:
    """By the real program, with a torch in the way that is broken or absent."""
    for raised, words, package in (
        (
            "ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
            "cannot import torch (No module named 'torch')",
            "torch",
        ),
        (
            "OSError('libcudart.so.12: cannot open shared object file')",
            "cannot import torch (OSError: libcudart.so.12",
            "torch",
        ),
    ):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text(f"raise {raised}\n")
        done = subprocess.run(
            command(sys.executable, "cpu", "probes.worker"),
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        )
        said = problem_in(done, sys.executable)
        assert words in said
        assert said.endswith("; pip install '.[probe]' in planner's checkout"), package


def test_a_program_that_cannot_be_imported_stops_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "LAUNCHER", "json")
    name = "a_program_that_nobody_has"
    assert selfcheck.found("cpu", name)["package"] == name
    assert selfcheck.found("cpu", "program.py") == {"problem": None, "package": None}


def test_a_machine_without_the_gpu_says_so_before_it_is_asked_for_torch(tmp_path: Path) -> None:
    asked_for = {"model": "debug-tiny", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8}}
    job = read_job({**asked_for, "training": {"seq_len": 64, "global_batch_size": 8}})
    launcher = Launcher(LaunchSettings(folder=tmp_path, python=str(tmp_path / "none")))
    nothing = Survey(gpus=(), problem="no nvidia-smi")
    local = LocalPool(launcher, LocalSettings(survey=lambda: nothing))
    with pytest.raises(ProbeError, match="no NVIDIA GPU to probe on: no nvidia-smi"):
        local.check(Need.of(job, "reference"))


@pytest.mark.torch
def test_a_build_of_torch_without_cuda_is_told_before_a_probe_on_gpus() -> None:
    torch = needed("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch was built with CUDA")
    done = ask(command(sys.executable, "cuda", "program.py"), root=ROOT, seconds=120.0)
    said = problem_in(done, sys.executable)
    assert "was built without CUDA; install a build of torch" in said


def test_torchtitan_is_asked_for_before_anything_runs(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "{}")
    with pytest.raises(ProbeError, match="torchtitan is not installed; pip install torchtitan=="):
        pool(tmp_path, python).check(Need.of(CPU, "torchtitan"))


def test_slurm_without_its_commands_and_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = SlurmPool(LaunchSettings(folder=tmp_path, python=interpreter(tmp_path, "{}")))
    for wait in (False, True):
        with pytest.raises(ProbeError, match="sbatch is not installed here; use --pool local"):
            slurm.check(NEED, wait=wait)
    ReplayPool([]).check(NEED)


def test_slurm_asks_a_node_and_gives_its_own_words_where_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "scancel").write_text("#!/bin/sh\n")
    (tmp_path / "scancel").chmod(0o755)
    launch = LaunchSettings(folder=tmp_path, python="python-of-the-nodes")
    slurm = SlurmPool(launch, partition="gpu")

    def says(script: str) -> None:
        (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
        (tmp_path / "srun").chmod(0o755)

    says("echo '{\"problem\": null}'")
    slurm.check(NEED)
    line = (tmp_path / "asked").read_text()
    assert "--partition gpu" in line
    assert "python-of-the-nodes -m probes.selfcheck cpu probes.worker" in line
    says('echo \'{"problem": "cannot import torch (none)", "package": "torch"}\'')
    words = "on a node of the cluster python-of-the-nodes cannot import torch"
    with pytest.raises(ProbeError, match=words):
        slurm.check(NEED)
    slurm.check(NEED, wait=False)
    says("echo 'srun: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(ProbeError, match="Slurm: invalid partition specified"):
        slurm.check(NEED)
