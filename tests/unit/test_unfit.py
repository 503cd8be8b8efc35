"""Words for a job without a plan: wrong values, the rule, the nearest miss, what would fit."""

from typing import Any

import pytest

from planner.columns import LayoutBatch
from planner.errors import InfeasibleError, SpecError
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.rules import violations
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.plan import Plan
from tests.conftest import fixed_now, job_values
from tests.pricing import pricer_of

SMALL = {"gpu": "l4", "num_gpus": 8, "host_memory": "64 GiB"}


def job_of(**changes: Any) -> Job:
    values: dict[str, Any] = job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 32)
    training = {**values["training"], **changes.pop("training", {})}
    return read_job({**values, **changes, "training": training})


def plan_of(**changes: Any) -> Plan:
    return recommend(job_of(**changes), now=fixed_now)


@pytest.mark.parametrize(("search", "field", "words"), [
    ({"fix": {"tp": 16}}, "search.fix.tp", "16 does not divide 8 GPUs; choose degrees whose prod"),
    ({"fix": {"precision": "fp8"}}, "search.fix.precision", "did you mean float8-"),
    ({"fix": {"pp_schedule": "ZB-1p"}}, "search.fix.pp_schedule", "use GPipe, 1F1B"),
    ({"fix": {"cp_method": "ulysses"}}, "search.fix.cp_method", "use allgather or alltoall"),
    ({"fix": {"precision": "nvfp4"}}, "search.fix.precision", "use bf16"),
    ({"fix": {"virtual_stages": 100}}, "search.fix.virtual_stages",
        "set virtual_stages to at most"),
    ({"fix": {"ep": 2}}, "search.fix.ep", "llama3-8b has no experts"),
    ({"fix": {"layers_per_stage": [1, 2]}}, "search.fix.layers_per_stage", "make it sum to 32"),
    ({"fix": {"optimizer_in_backward": True}}, "search.fix.optimizer_in_backward",
        "max_grad_norm to null"),
    ({"allow": {"tp": [3, 5]}}, "search.allow.tp", "choose degrees whose product divides 8"),
    ({"fix": {"async_tp": True, "compile": False}}, "search.fix.async_tp", "set compile to true"),
    ({"fix": {"async_tp": True, "tp": 1}}, "search.fix.async_tp", "tp to 2 or more"),
    ({"fix": {"dp_shard": 4, "tp": 4}}, "search.fix.tp",
        "tp 4 x dp_shard 4 = 16 does not divide 8 GPUs"),
    ({"fix": {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1}}, "search.fix.dp_shard",
        "set dp_shard to 4"),
])  # fmt: skip
def test_a_value_that_can_never_be_is_a_wrong_request(search: dict, field: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(search=search)
    assert field in {fault.field for fault in caught.value.faults}
    assert words in str(caught.value)


def test_what_can_be_is_searched_and_only_what_cannot_is_left_out() -> None:
    plan = plan_of(search={"allow": {"tp": [3, 4]}, "top_k": 1})
    assert plan.ranked
    told = " ".join(plan.warnings)
    assert ("search.allow.tp 3 is left out" in told, told.count("is left out")) == (True, 1)


def test_a_value_wrong_at_one_size_is_right_at_another() -> None:
    sizes = {"gpu": "h100-sxm-80gb", "num_gpus": [8, 16]}
    plan = plan_of(cluster=sizes, search={"fix": {"dp_shard": 16}, "top_k": 1})
    assert {entry.num_gpus for entry in plan.ranked} == {16}


@pytest.mark.parametrize(("training", "rule", "remedy", "field"), [
    ({"seq_len": 8191}, "seq_len 8191 is not divisible by 2 x cp = 2", "try seq_len 8192", "cp"),
    ({"trainer": "fsdp", "global_batch_size": 4}, "8 data-parallel ranks do not divide",
     "try num_gpus 1, 2 or 4, or global_batch_size 8", "dp_shard"),
])  # fmt: skip
def test_the_rule_that_leaves_nothing_is_told_with_its_own_remedy(
    training: dict[str, Any], rule: str, remedy: str, field: str
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(training=training)
    assert rule in str(caught.value)
    assert (caught.value.remedy, caught.value.as_dict()["field"]) == (remedy, f"layout.{field}")


@pytest.mark.parametrize(("changes", "words"), [
    ({"search": {"fix": {"cpu_offload": True, "zero_stage": 0}}}, "no legal layout: "),  # two rules
    ({"model": "llama3.2-1b", "cluster": {"gpu": "rtx-4090", "num_gpus": 1},
      "training": {"seq_len": 2048}}, "the smallest needs 22.5 GiB of 22.5 GiB, too close to be"),
])  # fmt: skip
def test_nothing_is_left(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        plan_of(**changes)


def miss_of(**changes: Any) -> dict[str, Any]:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(**changes)
    miss: Any = caught.value.nearest_miss
    sentences = "; or ".join(change["sentence"] for change in miss["changes"])
    assert caught.value.remedy == miss["remedy"] == sentences
    return dict(miss)


def changes_of(**changes: Any) -> list[tuple[str, Any]]:
    return [(one["field"], one["value"]) for one in miss_of(**changes)["changes"]]


def test_the_nearest_miss_is_legal_and_priced() -> None:
    miss = miss_of(model="llama3-70b", cluster=SMALL)
    assert miss["device_bytes"] > miss["usable_bytes"] > 0
    assert miss["missing_bytes"] == pytest.approx(miss["device_bytes"] - miss["usable_bytes"])
    layout = Layout.model_validate(miss["layout"])
    job = job_of(model="llama3-70b", cluster=SMALL)
    assert violations(layout, job.model, job.cluster, job.training) == []
    price = pricer_of(job).price(LayoutBatch.from_layouts([layout]))
    assert price.device_bytes[0] == pytest.approx(miss["device_bytes"])


@pytest.mark.slow
def test_changes_do_fit_and_smaller_ones_do_not() -> None:
    """The number of GPUs named is used, and half of it in whole nodes; so is the GPU."""
    changes = changes_of(model="llama3-70b", cluster=SMALL)
    count = min(value for field, value in changes if field == "cluster.num_gpus")

    def first(**cluster: Any) -> Any:
        return plan_of(model="llama3-70b", cluster=SMALL | cluster, search={"top_k": 1}).ranked[0]

    assert first(num_gpus=count).estimate.fits
    with pytest.raises(InfeasibleError):
        first(num_gpus=count // 16 * 8)
    for kind in [value for field, value in changes if field == "cluster.gpu"]:
        assert first(gpu=kind).estimate.fits


def test_gpus_with_and_without_offload_are_both_told() -> None:
    changes = miss_of(model="kimi-k2", training={"global_batch_size": 64})["changes"]
    counts = [
        (change["value"], change["layout"]["cpu_offload"])
        for change in changes
        if change["field"] == "cluster.num_gpus"
    ]
    assert [offloaded for _, offloaded in counts] == [True, False]
    assert counts[0][0] < counts[1][0]


def test_a_gpu_that_computes_in_bf16_is_not_replaced_by_one_that_does_not() -> None:
    """The V100 of 32 GB, which holds a little more than an RTX 5090, has no bf16."""
    training = {"trainer": "fsdp", "global_batch_size": 32}
    job = {"model": "llama3.2-1b", "cluster": {"gpu": "rtx-5090", "num_gpus": 1}}
    changes = {one["field"]: one["value"] for one in miss_of(**job, training=training)["changes"]}
    assert changes["cluster.gpu"] == "a100-sxm-40gb"


def test_a_fixed_field_that_stands_in_the_way_is_named_first() -> None:
    field, value = changes_of(search={"fix": {"dp_replicate": 8}})[0]
    assert (field, value != 8) == ("search.fix.dp_replicate", True)


def test_sizes_that_are_no_doubling_are_found() -> None:
    """56 GPUs do not hold it, 64 do, 112 is the first doubling."""
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 56}
    changes = changes_of(model="kimi-k2", cluster=cluster, training={"global_batch_size": 64})
    assert changes[0] == ("cluster.num_gpus", 64)
