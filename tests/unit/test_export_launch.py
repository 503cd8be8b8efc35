"""The scripts of an export, run from any folder with stand-ins for torchrun and Slurm."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from export_cases import cluster, layout, model, to_megatron, to_titan, training
from real_torchtitan import written

from planner.export.base import Export
from tests.conftest import ran

STAND_INS = {
    "torchrun": """\
import json, os, sys
names = {"path": "PYTHONPATH", "allocator": "PYTORCH_CUDA_ALLOC_CONF"}
said = {key: os.environ.get(name, "") for key, name in names.items()}
print(json.dumps({"cwd": os.getcwd(), "words": sys.argv[1:], **said}))
""",
    "scontrol": """\
import os, sys
shown = sys.argv[1:3] == ["show", "job"]
print("   Command=" + os.environ["SUBMITTED"] if shown else "host1\\nhost2")
""",
    "srun": """\
import os, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
os.execvp(words[0], words)
""",
}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env python3\n{text}")
        (folder / name).chmod(0o755)
    return folder


def run(
    tools: Path, words: list[str], where: Path, **variables: str
) -> "subprocess.CompletedProcess[str]":
    unset = dict.fromkeys(("PYTHONPATH", "MEGATRON_PATH", "HEAD_NODE"), "")
    found = f"{tools}:{os.environ['PATH']}"
    return ran(*words, cwd=where, env={**unset, "PATH": found, **variables})


def titan(num_gpus: int = 8) -> Export:
    return to_titan(layout(num_gpus), model("llama2-7b"), cluster(num_gpus), training(), "0.2.2")


def megatron(num_gpus: int = 8) -> Export:
    gpus, job = cluster(num_gpus), training(trainer="megatron")
    return to_megatron(layout(num_gpus, "megatron"), model("llama2-7b"), gpus, job)


@pytest.mark.parametrize("inside", [True, False])
def test_torchtitan_runs_from_anywhere(tools: Path, tmp_path: Path, inside: bool) -> None:
    exported = titan()
    written(exported, folder := tmp_path / "my run")
    script = "launch.sh" if inside else str(folder / "launch.sh")
    words = ["bash", script, "--metrics.log_freq", "1"]
    done = run(tools, words, folder if inside else tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    # train.toml and planner_model.py are found
    assert (said["cwd"], said["path"]) == (str(folder), str(folder))
    assert said["words"][-4:] == ["--job.config_file", "train.toml", "--metrics.log_freq", "1"]
    pasted = run(tools, list(exported.command), folder)
    assert json.loads(pasted.stdout)["words"] == said["words"][:-2]


@pytest.mark.parametrize("version", ["0.2.2", "0.3.0"])
@pytest.mark.parametrize("num_gpus", [8, 16])
def test_every_argument_is_passed(version: str, num_gpus: int, tools: Path, tmp_path: Path) -> None:
    values = {"pp": 4, "layers_per_stage": (18, 21, 21, 20), "ac": "memory-budget-0.5"}
    chosen, machines = layout(num_gpus, **values, reduce_dtype="bfloat16"), cluster(num_gpus)
    exported = to_titan(chosen, model("llama3.1-70b"), machines, training(), version)
    written(exported, folder := tmp_path / "run")
    done = run(tools, ["bash", "launch.sh", "--more"], folder, HEAD_NODE="node-1")
    said = json.loads(done.stdout)
    assert (said["allocator"], said["path"]) == ("expandable_segments:True", str(folder))
    passed = [word for word in said["words"] if word != "--more"][-len(exported.arguments) :]
    assert passed == list(exported.arguments)
    assert "--more" in said["words"]
    assert ("--rdzv_endpoint=node-1:29500" in said["words"]) == (num_gpus == 16)


def test_megatron_runs_from_anywhere_once_it_is_named(tools: Path, tmp_path: Path) -> None:
    exported = megatron()
    folder, checkout = tmp_path / "run", tmp_path / "Megatron-LM"
    written(exported, folder)
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").write_text("")
    there = run(tools, ["bash", str(folder / "launch.sh")], checkout)
    named = run(tools, list(exported.command), folder, MEGATRON_PATH=str(checkout))
    for done in (there, named):
        assert done.returncode == 0, done.stderr
        words = json.loads(done.stdout)["words"]
        assert words[2] == str(checkout / "pretrain_gpt.py")
        assert tuple(words[3:]) == exported.arguments
    lost = run(tools, list(exported.command), folder)
    assert lost.returncode == 2
    assert "set MEGATRON_PATH" in lost.stderr


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("make", [titan, megatron])
def test_a_batch_script_finds_its_launcher(make, inside: bool, tools: Path, tmp_path: Path) -> None:
    exported = make(16)
    folder, spool = tmp_path / "my run", tmp_path / "spool"
    written(exported, folder)
    spool.mkdir()
    (tmp_path / "pretrain_gpt.py").write_text("")
    (spool / "slurm_script").write_text((folder / "slurm.sbatch").read_text())  # Slurm runs a copy
    where = folder if inside else tmp_path
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[1-2]"}
    variables |= {"SLURM_SUBMIT_DIR": str(where), "SUBMITTED": str(folder / "slurm.sbatch")}
    words = ["bash", str(spool / "slurm_script")]
    done = run(tools, words, where, **variables, MEGATRON_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "--rdzv_endpoint=host1:29500" in json.loads(done.stdout)["words"]
    assert exported.command == ("sbatch", "slurm.sbatch")
