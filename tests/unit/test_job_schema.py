"""The schema of a job names every field, with help; a pasted text becomes a job."""

import json
import re

import pytest

from planner.api.input.current import read_pasted
from planner.api.job_schema import PARTS, job_schema
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.specs.cluster import ClusterRequest
from planner.specs.job import KEYS
from planner.specs.layout import Layout
from planner.specs.training import TrainingSpec
from tests.conftest import JOB


def test_every_part_of_a_job_is_in_it_and_references_lead_somewhere() -> None:
    schema = job_schema()
    assert set(schema["properties"]) == set(KEYS) == set(PARTS) | {"id"}
    named = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema)))
    assert set() < named <= set(schema["$defs"])


@pytest.mark.parametrize("part", [part for part in PARTS if part != "model"])
def test_every_field_has_a_line_of_help(part: str) -> None:
    shape = job_schema()["properties"][part]
    mapping = next((one for one in shape.get("anyOf", ()) if one["type"] == "object"), shape)
    fields = mapping["properties"]
    assert all(field.get("description") for field in fields.values())
    assert set(fields) - {"gpu"} == set(PARTS[part].model_fields)


def test_what_a_trainer_or_gpu_decides_need_not_be_given() -> None:
    properties = job_schema()["properties"]
    assert "required" not in properties["layout"]
    assert properties["training"]["required"] == ["seq_len", "global_batch_size"]
    required = {name for name, field in TrainingSpec.model_fields.items() if field.is_required()}
    assert required == set(properties["training"]["required"])
    needed = {name for name, field in ClusterRequest.model_fields.items() if field.is_required()}
    assert needed == {"num_gpus"}


def test_a_job_in_yaml_is_read() -> None:
    found = read_pasted("model: llama3-8b\ncluster: {gpu: l4, num_gpus: 8}\n"
                        "training: {seq_len: 8k, global_batch_size: 8}", "job.yaml")  # fmt: skip
    assert (found.kind, found.wrong) == ("job", [])
    assert read_job(found.job).training.seq_len == 8192


def test_a_config_json_becomes_the_model_and_the_rest_is_asked_for() -> None:
    text = json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "vocab_size": 100, "intermediate_size": 128})  # fmt: skip
    found = read_pasted(text, "config.json")
    assert found.kind == "config.json"
    assert [one.field for one in found.wrong] == ["cluster", "training"]
    whole = {**JOB, "model": found.job["model"]}
    assert read_pasted(json.dumps(whole), "job.json").wrong == []


def test_a_layout_alone_is_what_runs_today() -> None:
    found = read_pasted("{dp_shard: 4, tp: 2}", "layout.yaml")
    assert (found.kind, found.job) == ("layout", {"layout": {"dp_shard": 4, "tp": 2}})
    assert set(found.job["layout"]) <= set(Layout.model_fields)


def test_a_trainers_file_is_kept_as_it_is_and_reads_no_other() -> None:
    text = '[training]\nseq_len = 4096\n[job]\nconfig_file = "/etc/hostname"\n'
    found = read_pasted(text, "train.toml")
    assert found.kind == "torchtitan-toml"
    assert found.job == {"current": {"name": "train.toml", "format": found.kind, "text": text}}
    assert "cluster.gpu" in {one.field for one in found.wrong}


@pytest.mark.parametrize("text", ["just words", "- a\n- list", "", "{a: &x 1, b: *x"])
def test_what_is_none_of_these_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        read_pasted(text, "pasted")
