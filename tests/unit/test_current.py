"""`recommend --current` and `--job` over trainers' files: answer, patch, files, API."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from current_cases import FOLDER
from fastapi.testclient import TestClient

import planner
from planner.errors import SpecError
from planner.intake.current import format_of
from planner.intake.trainer_files.titan_printed import printed_run
from tests.conftest import ROOT, job_values, needed_program
from tests.unit.conftest import Say, Told

LOGS = FOLDER.parent / "titan_logs"
FEW = ["--gpu", "h100-sxm-80gb", "--num-gpus", "8", "--fix", "cp=1", "--fix", "pp=1", "--top-k=2"]
EIGHT = FOLDER / "llama3_8b.toml"


def recommended(say: Say, path: Path, *more: object) -> Told:
    return say("recommend", "--current", path, *FEW, "--global-batch-size", "64", *more)


def test_the_answer_says_how_many_times_as_fast_and_saves_the_new_file_whole(
    say: Say, tmp_path: Path
) -> None:
    shown = recommended(say, EIGHT, "--save-dir", tmp_path / "out").out
    assert "What you run today: llama3_8b.toml (TorchTitan TOML)" in shown
    assert re.search(r"Number 1 is 1\.\d+ times as fast; \d fields change\.", shown)
    today = shown.partition("What you run today")[2].partition("tok/s/GPU     MFU")[0]
    assert "% faster" not in today
    assert re.search(r"precision +bf16 -> float8", shown)
    written = tmp_path / "out" / "current"
    new, changes = ((written / name).read_text() for name in ("llama3_8b.toml", "changes.diff"))
    assert "[validation]" in new
    assert "# lr scheduler warm up" in new
    assert changes.startswith("--- a/llama3_8b.toml\n")
    assert "\n+enable = true\n" in changes


def test_the_difference_is_a_patch(say: Say, tmp_path: Path) -> None:
    needed_program("patch", "patch")
    path = tmp_path / "llama3_8b.toml"
    path.write_bytes(EIGHT.read_bytes())
    shown = recommended(say, path).out
    patch, command = shown[shown.index("--- a/") :], ["patch", "-p1", "-s"]
    subprocess.run(command, input=patch, text=True, cwd=tmp_path, check=True, timeout=300)
    versus = recommended(say, path, "--json").json["versus_current"]
    assert versus["keep"], "patched, it runs number 1"
    assert (versus["changed"], versus["diff"]) == ({}, "")
    assert versus["times_as_fast"] == pytest.approx(1.0)


def test_the_json_names_the_source(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = EIGHT.read_text().replace("local_batch_size = 1", "local_batch_size = 8")
    path.write_text(text.replace('mode = "selective"', 'mode = "none"'))
    asked = ("recommend", "--current", path, *FEW)
    versus = say(*asked, "--json").json["versus_current"]
    assert versus["source"] == {"format": "torchtitan-toml", "name": "mine.toml"}
    assert versus["missing_bytes"] > 10 * 2**30
    assert not versus["estimate"]["fits"]
    assert versus["settings"]["training.local_batch_size"][0] == 8
    words = r"Your file would run out of memory by [\d.]+ GiB\."
    assert re.search(words, say(*asked).out)


def test_what_the_trainer_refuses(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    tp16 = EIGHT.read_text().replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 16")
    path.write_text(tp16)
    shown = recommended(say, path, "--num-gpus", "16", "--top-k", "1").out
    assert "Its trainer would refuse your file." in shown
    assert "tp=16" in shown


def test_a_toml_prices_as_a_job(say: Say) -> None:
    machine = ("--gpu", "h100", "--num-gpus", "64")
    assert say("estimate", "--job", EIGHT, *machine, "--json").json["valid"]
    ours = planner.read_current(str(EIGHT), cluster={"gpu": "h100", "num_gpus": 64})
    assert ours.layout.dp_shard == 64


CONFIGURATIONS = (("axolotl.yaml", {"dp_shard": 4, "tp": 2}), ("ds_z2.json", {"zero_stage": 2}))


@pytest.mark.parametrize(("name", "layout"), CONFIGURATIONS)
def test_python_reads_configurations_as_the_command_does(name: str, layout: dict) -> None:
    job = job_values("llama3.1-8b", "h100-sxm-80gb", 16, 4096, 256)
    found = planner.read_current(ROOT / "tests/cases/40-config-files" / name, **job)
    assert layout.items() <= found.layout.model_dump().items()


def test_what_is_missing_is_named_once_with_its_flag(say: Say) -> None:
    lines = say("estimate", "--job", EIGHT, code=2).err.splitlines()
    fields = ["error: cluster.gpu", "error: cluster.num_gpus"]
    assert [line.split(" is not in ")[0] for line in lines] == fields
    assert "--gpu h100-sxm-80gb" in lines[0]


def test_a_log_brings_what_it_measured(say: Say) -> None:
    log = LOGS / "0.2.2-fsdp2-tp2.log"
    asked = ("recommend", "--current", log, "--gpu", "h100", "--top-k", "1")
    versus = say(*asked, "--json").json["versus_current"]
    assert versus["source"]["format"] == "torchtitan-log"
    assert (versus["layout"]["dp_shard"], versus["layout"]["tp"], versus["diff"]) == (2, 2, "")
    assert versus["measured"]["tokens_per_second_per_gpu"] > 0
    assert "selective" in versus["notes"][0]
    words = r"Measured at \d+ tokens/s/GPU; predicted / measured step"
    assert re.search(words, say(*asked).out)


def test_a_log_that_prints_its_config_says_the_rest() -> None:
    config: dict[str, Any] = {
        "model": {"name": "llama3", "flavor": "8B", "converters": []},
        "training": {"local_batch_size": 2, "seq_len": 4096},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "3"},
        "parallelism": {"fsdp_reshard_after_forward": "never"},
    }
    start = "[titan] 2026-01-01 - root - INFO - Running with configs: "
    lines = start + json.dumps(config, indent=2)
    text = "\n".join(f"[rank0]:{line}" for line in lines.splitlines()) + "\n[rank0]:more"
    given = {"cluster": {"num_gpus": 8}, "training": {"trainer_version": "0.2.1"}, "layout": {}}
    found: dict[str, Any] = printed_run(text, given)
    assert found["model"] == "llama3.1-8b"
    want = {"ac": "selective-layer-3", "zero_stage": 2, "dp_shard": 8}
    assert found["layout"] | want == found["layout"]
    want = {"global_batch_size": 16, "trainer_version": "0.2.1"}
    assert found["training"] | want == found["training"]


def test_a_layout_in_json_is_compared(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text('{"tp": 4}')
    asked = ("--model=llama3-8b", *FEW, "--seq-len=4096", "--global-batch-size=32", "--json")
    versus = say("recommend", *asked, "--current", path).json["versus_current"]
    assert (versus["source"], versus["diff"], versus["layout"]["tp"]) == (None, "", 4)
    assert versus["times_as_fast"] > 1


@pytest.mark.parametrize("text", [
    '{"model": "llama3-8b", "training": {"trainer": "torchtitan"}}',
    "model: llama3-8b\ntraining:\n  trainer: torchtitan\n",
])  # fmt: skip
def test_a_job_on_standard_input_that_names_torchtitan_is_no_command_of_it(text: str) -> None:
    assert format_of(text, "standard input") is None
    assert format_of("torchrun -m torchtitan.train", "standard input") == "torchtitan-command"


def test_a_file_of_nobody_is_refused(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert "error:" in say("recommend", "--current", path, *FEW, code=2).err
    with pytest.raises(SpecError, match="no trainer's"):
        planner.read_current(str(path))


def test_over_http_a_text_is_a_job(app: TestClient) -> None:
    current = {"current": {"name": "train.toml", "text": EIGHT.read_text()}}
    machine = {"cluster": {"gpu": "h100", "num_gpus": 8}}
    body = {**current, **machine, "search": {"fix": {"cp": 1, "pp": 1}, "top_k": 1}}
    answer = app.post("/plan", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["versus_current"]["diff"].startswith("--- a/train.toml")
    assert answer.json()["job"]["layout"]["dp_shard"] == 8
    missing = app.post("/plan", json=current)
    assert (missing.status_code, missing.json()["field"]) == (422, "cluster.gpu")
