"""An error names the nearest remedy: a file beside it, a config.json, a GPU to start from."""

from pathlib import Path
from typing import Any

import pytest

from planner.api.input.text import read_text
from planner.errors import Fault
from planner.intake.machines import load_gpu, read_cluster, read_gpu
from planner.intake.models import read_model
from planner.intake.near_files import near_file
from tests.unit.conftest import Say, faults_of


def remedy_of(call: Any) -> str:
    return faults_of(call)[0].remedy


@pytest.mark.parametrize(("call", "words"), [
    (lambda: read_model("mistralai/Mistral-Large-9"),
        "download config.json of mistralai/Mistral-Large-9 from Hugging Face and pass its path"),
    (lambda: read_model("mistralai/Mistral-Large-9"), "did you mean mistral-"),
    (lambda: read_model("my-own"), "config.json"),
    (lambda: read_model("mistralai/Mistral-Large-9", allow_files=False),
        "send the keys of its config.json"),
    # weights are not a model
    (lambda: read_model("model-00001.safetensors"), "the config.json that stands beside them"),
    (lambda: load_gpu("h1000"), "did you mean h100"),
    (lambda: load_gpu("h1000"), "{base: h100-sxm-80gb, name: mine, memory: 96 GiB}"),
    (lambda: read_cluster("my-cluster"), "write gpu and num_gpus out"),
])  # fmt: skip
def test_what_is_not_known_is_a_step_away(call: Any, words: str) -> None:
    assert words in remedy_of(call)


def test_a_gpu_is_described_by_the_nearest_one() -> None:
    mine = {"base": "h100-sxm-80gb", "name": "mine", "memory": "96 GiB"}
    assert read_gpu(mine).memory_bytes == 96 * 2**30


def test_a_missing_file_names_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("")
    (tmp_path / "unlike.txt").write_text("")
    assert near_file(tmp_path / "jobs.yaml") == f"did you mean {tmp_path}/job.yaml?"
    assert near_file(tmp_path / "job.json") == f"did you mean {tmp_path}/job.yaml?"
    assert near_file(tmp_path / "train.toml") is None
    assert near_file(tmp_path / "no" / "job.yaml") == f"the folder {tmp_path}/no does not exist"
    assert remedy_of(lambda: read_text(str(tmp_path / "jbo.yaml"), "--job")).startswith(
        f"did you mean {tmp_path}/job.yaml? Or give"
    )
    (tmp_path / "config.json").write_text("{}")
    assert f"{tmp_path}/config.json" in remedy_of(lambda: read_model(str(tmp_path / "confg.json")))


@pytest.mark.parametrize(("rule", "says"), [
    ("is required", "layout is required; add it"),
    ("no such thing", "layout: no such thing; add it"),
    ("must be 1", "layout must be 1; add it"),
])  # fmt: skip
def test_what_was_not_given_has_no_value(rule: str, says: str) -> None:
    assert str(Fault("layout", None, rule, "add it")) == says


def test_short_and_long_help_are_the_same(say: Say) -> None:
    assert say("show", "-h").out == say("show", "--help").out != ""
