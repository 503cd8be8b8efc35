"""Job: what is read into it, what is refused with which words, what a stored plan's job holds."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from planner.catalog.models import model_names
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.intake.models import read_model
from planner.specs.job import ProbeSpec
from tests.conftest import job_values
from tests.unit.conftest import faults_of

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf_configs"


def values(**changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 32)
    for key, value in changes.items():
        part, _, name = key.partition("__")
        job[part] = {**job.get(part, {}), name: value} if name else value
    return job


@pytest.mark.parametrize("name", [*model_names(), *map(str, sorted(CONFIGS.glob("*.json")))])
def test_a_model_written_out_means_the_same_model(name: str) -> None:
    model = read_model(name)
    assert read_model(json.loads(json.dumps(inline_keys(model)))) == model


def test_files_are_read_into_the_job(tmp_path: Path) -> None:
    folder, machine = tmp_path / "my-model", tmp_path / "machine.yaml"
    folder.mkdir()
    shutil.copy(CONFIGS / "llama3.1-8b.json", folder / "config.json")
    machine.write_text("gpu: h100-sxm-80gb\nnum_gpus: 16\n")
    job = read_job(values(model=str(folder / "config.json"), cluster=str(machine)))
    shutil.rmtree(folder)
    machine.unlink()
    again = read_job(json.loads(json.dumps(job.request)), allow_files=False)
    assert (again.model, again.cluster) == (job.model, job.cluster)
    assert again.model.name == "my-model"


def test_what_is_no_file_stays_as_it_was_asked() -> None:
    asked = values(model="meta-llama/Meta-Llama-3-8B", cluster="h100-256")
    assert read_job(asked).request == asked


@pytest.mark.parametrize(("field", "value", "words"), [
    ("training__seq_len", "8x",
        "must be a whole number, or one with k or M; give for example 8192"),
    ("training__global_batch_size", "8k", "must be a whole number; give digits alone"),
    ("training__seq_len", -1, "must be above 0; give a number above 0"),
    ("training__moe_imbalance", 0.5, "must be at least 1; give 1 or more"),
    ("training__total_tokens", "many", 'must be a number; give for example 2e12 or "15T"'),
    ("training__expandable_segments", "no",
        "must be true or false; give true or false without quotes"),
    ("training__torch_version", "banana", "is no release of torch; use 1.0 to 1.13 or 2.x"),
    ("training__torch_version", "9.9", "is no release of torch"),
    ("layout", {"zero_stage": 4}, "must be at most 3; give 3 or less"),
    ("layout", {"tp": True}, "must be a whole number; give digits alone"),
    ("search", {"fix": [1]}, "must be a mapping of keys to values; write for example {tp: 8}"),
    ("search", {"allow": {"tp": 4}}, "must be a list; write for example [1, 2]"),
])  # fmt: skip
def test_every_fault_says_what_would_pass(field: str, value: object, words: str) -> None:
    faults = faults_of(read_job, values(**{field: value}))
    assert any(f"{fault.rule}; {fault.remedy}".startswith(words) for fault in faults)


@pytest.mark.parametrize("version", ["2.11.0", "2.13", "2.10.0a0+nv26.01", "1.13.1", "v2.4.0"])
def test_releases_of_torch(version: str) -> None:
    assert read_job(values(training__torch_version=version)).training.torch_version == version


def test_a_number_with_a_suffix_is_kept_as_the_number_it_means() -> None:
    """Two jobs that ask the same are the same question, however its length was written."""
    job = read_job(values(training__seq_len="8k", training__total_tokens="15T"))
    assert (job.training.seq_len, job.training.total_tokens) == (8192, 15e12)
    assert job.request["training"]["seq_len"] == 8192


def test_a_budget_follows_the_cluster_unless_it_is_stated() -> None:
    assert ProbeSpec(max_probes=2).gpu_seconds(8) == 2 * 8 * 150.0
    assert ProbeSpec(max_probes=1).gpu_seconds(2) == 1800.0
    assert ProbeSpec(max_probes=9, max_gpu_seconds=60.0).gpu_seconds(512) == 60.0
