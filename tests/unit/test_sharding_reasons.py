"""DDP if it fits, then FSDP2, then TP and PP: said only where it is why."""

from typing import Any

import pytest

from planner.estimates import estimate_layouts
from planner.intake.jobs import read_job
from planner.plan.explain import winner_reasons
from planner.plan.sharding_reasons import sharding_reasons
from planner.plan.together import Together
from planner.specs.layout import Layout
from tests.conftest import job_values
from tests.pricing import pricer_of


def read(*values: Any, **more: Any) -> tuple[Together, Layout]:
    job = read_job(job_values(*values, **more))
    return Together(pricer_of(job), [job.layout]), job.layout


def reasons(model: str, num_gpus: int, layout: dict, batch: int = 64, **training: Any) -> list[str]:
    values = (model, "h100-sxm-80gb", num_gpus, 8192, batch)
    return list(sharding_reasons(*read(*values, layout=layout, **training)))


def test_replicas_that_fit_stay_whole() -> None:
    """1.24 billion parameters: fp32 weights, gradients and two moments are 18.4 GiB."""
    (line,) = reasons("llama3.2-1b", 8, {"dp_replicate": 8, "dp_shard": 1, "zero_stage": 0})
    assert float(line.split(" one replica take ")[1].split(" GiB")[0]) >= 18.4
    assert "one replica take" in line
    assert line.endswith("it fits, so DDP replicates it for scale")


def test_shards_without_need_are_not_explained_by_need() -> None:
    assert reasons("llama3.2-1b", 8, {"dp_shard": 8}) == []
    assert reasons("llama3.2-1b", 8, {"tp": 8, "dp_shard": 1, "param_dtype": "float32"}) == []
    assert reasons("llama3.2-1b", 1, {}) == []


def test_a_replica_that_does_not_fit_is_sharded() -> None:
    """8.03 billion parameters x 16 bytes = 119.7 GiB, and 16-bit copies of DDP's compute."""
    (line,) = reasons("llama3-8b", 8, {"dp_shard": 8})
    assert "DDP does not fit and FSDP2 shards all three over 8 GPUs" in line
    assert float(line.split(" one replica take ")[1].split(" GiB")[0]) >= 119.6
    assert line.endswith("over 8 GPUs")
    (line,) = reasons("llama3-8b", 64, {"dp_shard": 8, "dp_replicate": 8})
    assert line.endswith("over 8 GPUs, with 8 replicas for scale")


def test_splits_are_explained_where_fsdp_alone_does_not_fit() -> None:
    (line,) = reasons("llama3.1-405b", 64, {"dp_shard": 1, "tp": 8, "pp": 8, "ac": "full"})
    assert "sharded by FSDP2 alone, over 64 GPUs" in line
    assert line.endswith("so the layers are split by TP 8 inside a node and PP 8")


@pytest.mark.parametrize(("batch", "says"), [(64, False), (16, True)])
def test_splits_are_explained_where_the_batch_is_too_small(batch: int, says: bool) -> None:
    """70B fits on 64 GPUs by FSDP alone, so TP is for speed, unless 64 ranks had no sequence."""
    lines = reasons("llama3-70b", 64, {"dp_shard": 8, "tp": 8, "ac": "full"}, batch)
    words = "a batch of 16 sequences feeds no more than 16 of the 64"
    assert any(words in x for x in lines) == says
    assert not any("alone, over" in x for x in lines)


@pytest.mark.parametrize(("model", "layout", "says"), [
    ("mixtral-8x7b", {"dp_shard": 16, "ep": 8, "pp": 4}, ""),  # 33 GiB, for experts are cut by 8
    ("mixtral-8x7b", {"dp_shard": 16, "ep": 2, "pp": 4}, "part (pp 4 x ep 2) take"),
    ("llama3.1-405b", {"cp": 2, "tp": 8, "pp": 4}, "by ZeRO-1 and CP 2 alone"),
])  # fmt: skip
def test_a_replica_is_cut_as_the_layout_cuts_it(model: str, layout: Any, says: str) -> None:
    lines = reasons(model, 64, {"dp_shard": 1, "ac": "full", **layout}, trainer="megatron")
    assert bool(says) == bool(lines)
    assert says in " ".join(lines)


def test_the_words_are_the_trainers() -> None:
    layout = {"dp_shard": 2, "tp": 8, "pp": 4, "ac": "full"}
    lines = reasons("gpt3-175b", 64, layout, trainer="megatron")
    assert "ZeRO-1 shards the optimizer states over 2 GPUs" in lines[0]
    assert "FSDP2" not in " ".join(lines)


def test_number_one_says_it() -> None:
    together, layout = read("llama3-8b", "h100-sxm-80gb", 8, 8192, 64, layout={"dp_shard": 8})
    (estimate,) = estimate_layouts(together.pricer, [layout], ["job"])
    lines = winner_reasons(together, layout, estimate, [])
    assert sum(line.startswith("fit first: ") for line in lines) == 1
