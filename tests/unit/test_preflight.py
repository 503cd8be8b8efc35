"""Whether a probe can run is asked of its interpreter, and answered with what to do."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.errors import ProbeError
from planner.intake.jobs import read_job
from planner.probes import preflight, selfcheck
from planner.probes.launch import Launcher, LaunchSettings
from planner.probes.pools.local import LocalPool, LocalSettings
from planner.probes.pools.nvidia import Survey
from planner.probes.pools.replay import ReplayPool
from planner.probes.pools.slurm import SlurmPool
from planner.probes.pools.slurm_commands import COMMANDS
from planner.probes.preflight import Need, ask, command, problem_in
from planner.probes.protocol import ProbeTask
from tests.conftest import ROOT, job_values, needed

CPU = read_job(job_values("debug-tiny", "cpu", 2, 64, 4))
NEED = Need.of(CPU, "reference")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_good_until", {})


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def interpreter(folder: Path, says: str, code: int = 0) -> str:
    """A stand-in that answers every question alike, and counts how often it is asked."""
    text = f"echo x >> {folder}/asked\ncat <<'END'\n{says}\nEND\nexit {code}"
    return script(folder / "python", text)


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
    remedy = "pip install '.[probe]' in planner's checkout"
    assert f"cannot import torch (no such); {remedy}" in str(caught.value)
    assert "PLANNER_PROBE_PYTHON" in str(caught.value), "it is not our interpreter that lacks it"
    assert "\n" not in str(caught.value)
    assert asked(tmp_path) == 2, "somebody may have installed it meanwhile"
    assert preflight.remedy("torch", sys.executable) == remedy


@pytest.mark.parametrize(("says", "code", "words"), [
    ("no json here", 1, "ended with 1 and said nothing"),
    ("[1]", 0, "cannot be asked whether it has torch"),
])  # fmt: skip
def test_a_broken_interpreter_says_so(tmp_path: Path, says: str, code: int, words: str) -> None:
    with pytest.raises(ProbeError, match=words):
        pool(tmp_path, interpreter(tmp_path, says, code)).check(NEED)


def test_no_interpreter_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"no interpreter for probes .*set PLANNER_PROBE_PYTHON"):
        pool(tmp_path, str(tmp_path / "none")).check(NEED)
    shutil.rmtree(tmp_path / "probes")
    (tmp_path / "probes").write_text("a file")
    with pytest.raises(ProbeError, match=r"it is no folder.*PLANNER_PROBE_FOLDER"):
        pool(tmp_path, sys.executable).check(NEED)


@pytest.mark.parametrize(("raised", "words"), [
    ("ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
        "cannot import torch (No module named 'torch')"),
    ("OSError('libcudart.so.12: cannot open shared object file')",
        "cannot import torch (OSError: libcudart.so.12"),
])  # fmt: skip
def test_the_check_names_what_cannot_be_imported(tmp_path: Path, raised: str, words: str) -> None:
    """By the real program, with a torch in the way that is broken or absent."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {raised}\n")
    asking = command(sys.executable, NEED, "planner.probes.worker")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(asking, capture_output=True, text=True, check=False, cwd="/", env=path)
    said = str(problem_in(done, sys.executable))
    assert words in said
    assert said.endswith("; pip install '.[probe]' in planner's checkout")


def test_a_program_that_cannot_be_imported_stops_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "LAUNCHER", "json")
    name = "a_program_that_nobody_has"
    assert selfcheck.found("cpu", [name])["package"] == name
    assert selfcheck.found("cpu", ["program.py", name])["package"] == name
    assert selfcheck.found("cpu", ["program.py"]) == {"problem": None, "package": None}


def test_a_machine_without_the_gpu_says_so_before_it_is_asked_for_torch(tmp_path: Path) -> None:
    launcher = Launcher(LaunchSettings(folder=tmp_path, python=str(tmp_path / "none")))
    nothing = Survey(gpus=(), problem="no nvidia-smi")
    local = LocalPool(launcher, LocalSettings(survey=lambda: nothing))
    with pytest.raises(ProbeError, match="no NVIDIA GPU to probe on: no nvidia-smi"):
        local.check(on_gpus("h100-sxm-80gb"))


@pytest.mark.torch
def test_a_build_of_torch_without_cuda_is_told_before_a_probe_on_gpus(tmp_path: Path) -> None:
    torch = needed("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch was built with CUDA")
    need = Need(job=CPU, trainer="reference", device="cuda")
    done = ask(command(sys.executable, need, "program.py"), folder=tmp_path, seconds=120.0)
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
    run = partial(slurm.run, ProbeTask(id="probe-1", job=CPU.request, device="cpu"))
    for call in (run, partial(slurm.check, NEED), partial(slurm.check, NEED, wait=True)):
        with pytest.raises(ProbeError, match="sbatch is not installed here; use --pool local"):
            call()
    ReplayPool([]).check(NEED)


def test_slurm_asks_a_node_and_gives_its_own_words_where_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in COMMANDS:
        script(tmp_path / name, "")
    slurm = SlurmPool(LaunchSettings(folder=tmp_path, python="node-python"), partition="gpu")

    def says(text: str) -> None:
        script(tmp_path / "srun", f'echo "$@" > {tmp_path}/asked\n{text}')

    says("echo '{\"problem\": null}'")
    slurm.check(NEED)
    line = (tmp_path / "asked").read_text()
    assert "--partition gpu" in line
    asking = "-m planner.probes.selfcheck cpu planner.probes.worker --compiles --several-gpus"
    assert f"node-python {asking}" in line
    says('echo \'{"problem": "cannot import torch (none)", "package": "torch"}\'')
    words = "on a node of the cluster node-python cannot import torch"
    with pytest.raises(ProbeError, match=words):
        slurm.check(NEED)
    slurm.check(NEED, wait=False)
    says("echo 'srun: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(ProbeError, match="Slurm: invalid partition specified"):
        slurm.check(NEED)


def on_gpus(gpu: str, **more: Any) -> Need:
    return Need.of(read_job(job_values("llama3-8b", gpu, 8, 8192, 64, **more)), "reference")


FLAGS = ["--compiles", "--several-gpus"]
BF16 = {"dp_shard": 8, "precision": "bf16", "compile": False}
FLOAT8 = {**BF16, "precision": "float8-rowwise"}


@pytest.mark.parametrize(("gpu", "more", "arguments"), [
    ("h100-sxm-80gb", {}, ["torchao.float8", *FLAGS]),
    ("b200", {}, ["torchao.float8", "torchao.prototype.mx_formats", *FLAGS]),
    ("a100-sxm-80gb", {}, FLAGS),
    ("h100-sxm-80gb", {"search": {"fix": {"precision": "bf16"}}}, FLAGS),
    ("h100-sxm-80gb", {"search": {"fix": BF16}}, ["--several-gpus"]),
    ("h100-sxm-80gb", {"layout": BF16}, ["--several-gpus"]),
    ("h100-sxm-80gb", {"layout": FLOAT8}, ["torchao.float8", "--several-gpus"]),
])  # fmt: skip
def test_candidates_needs_are_checked(gpu: str, more: dict[str, Any], arguments: list[str]) -> None:
    _, *asked = command("python", on_gpus(gpu, **more), "a.worker")[3:]
    assert asked == ["a.worker", *arguments]


@pytest.mark.parametrize(("more", "arguments"), [
    ({}, ["torchao.float8", *FLAGS]),
    ({"emulate_rank": 0}, ["torchao.float8", "--compiles"]),
    ({"emulate_rank": 0, "fake_tensors": True}, ["torchao.float8"]),
    ({"kernels": [{"kind": "x"}]}, []),
])  # fmt: skip
def test_a_task_needs_what_it_runs(more: dict[str, Any], arguments: list[str]) -> None:
    layout = {"dp_shard": 8, "precision": "float8-rowwise", "compile": True}
    job = on_gpus("h100-sxm-80gb", layout=layout).job
    task = ProbeTask.model_validate({"id": "probe-1", "job": job.request, "device": "cuda", **more})
    assert Need.of_task(task, job).arguments() == arguments


def test_a_missing_torchao_is_told_with_both_ways_out() -> None:
    said = selfcheck._import("torchao_that_nobody_has")
    assert said is not None
    done = subprocess.CompletedProcess([], 0, json.dumps({**said, "package": "torchao"}), "")
    remedy = "; pip install '.[probe]' in planner's checkout, or fix precision to bf16"
    assert str(problem_in(done, sys.executable)).endswith(remedy)


def torch_of(gpus: int) -> Any:
    """A torch that sees so many GPUs."""
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: gpus)
    return SimpleNamespace(cuda=cuda)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two GPUs that lacks nothing; programs in its folder `bin` alone."""
    for name in ("bin", "tmp", "include"):
        (tmp_path / name).mkdir()
    (tmp_path / "include" / "Python.h").touch()
    script(tmp_path / "bin" / "gcc", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "tmp"))
    for name in ("CC", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(selfcheck, "LAUNCHER", "json")
    monkeypatch.setitem(sys.modules, "torch", torch_of(2))
    monkeypatch.setattr(selfcheck.sysconfig, "get_path", lambda _: str(tmp_path / "include"))
    monkeypatch.setattr(selfcheck, "SHARED_BYTES", 0)
    return tmp_path


def lacks(**more: bool) -> str:
    """What the machine is told to lack, in the line that a user reads."""
    asked = {"compiles": True, "several_gpus": True, **more}
    said = json.dumps(selfcheck.found("cuda", ["program.py"], **asked))
    return problem_in(subprocess.CompletedProcess([], 0, said, ""), "python") or "nothing"


def test_a_torch_that_no_probe_ran_on(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, lacking in (("2.10.0+cu130", True), ("2.11.0a0+nv26.01", False), ("3.0", False)):
        monkeypatch.setattr(sys.modules["torch"], "__version__", version, raising=False)
        assert lacks().startswith(f"python has torch {version}, and probes need 2.11") is lacking
        assert lacks().endswith("set PLANNER_PROBE_PYTHON to one that has it") is lacking


def test_no_c_compiler_and_no_headers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "include" / "Python.h").unlink()
    headers = (
        r"python finds no \S+/Python.h for torch.compile; install Python's headers "
        r"\(python3-dev\), or fix compile to false"
    )
    assert re.fullmatch(headers, lacks())
    monkeypatch.setenv("CC", "gcc-of-nobody -O2")
    assert "finds no C compiler for torch.compile (CC is gcc-of-nobody); install gcc" in lacks()
    monkeypatch.delenv("CC")
    (machine / "bin" / "gcc").unlink()
    assert "(none of clang, gcc, cc); install gcc, set CC" in lacks()
    assert lacks(compiles=False) == "nothing"


def test_too_little_shared_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "SHARED_BYTES", 10**18)
    assert "of /dev/shm, of which NCCL needs 1 GB; start the container with --shm-size" in lacks()
    assert lacks(several_gpus=False) == "nothing"
    monkeypatch.setitem(sys.modules, "torch", torch_of(1))
    assert lacks() == "nothing", "one GPU shares with none"
    monkeypatch.setitem(sys.modules, "torch", torch_of(2))
    monkeypatch.setattr(selfcheck, "SHARED_MEMORY", str(machine / "none"))
    assert "finds no " in lacks()


def test_a_cache_folder_that_cannot_be_made(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(machine / "file" / "cache"))
    assert "TRITON_CACHE_DIR=" in lacks()
    assert "Not a directory); set TORCHINDUCTOR_CACHE_DIR" in lacks()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_cache_folder_on_a_noexec_mount(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder = machine / "tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "noexec,size=1m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this root may not mount: {done.stderr}")
    try:
        assert f"TMPDIR={folder}: Operation not permitted); set TORCHINDUCTOR_CACHE_DIR" in lacks()
        assert lacks(compiles=False) == "nothing"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(machine / "cache"))
        assert lacks() == "nothing"
    finally:
        subprocess.run(["/bin/umount", str(folder)], check=True)
