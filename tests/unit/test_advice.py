"""Rules of thumb: each warning comes where its number says so, and not beside it."""

from typing import Any

import pytest

from planner.estimates import estimate_layouts
from planner.intake.jobs import read_job
from planner.plan.advice import beyond_balance, four_bits, overlapped, warnings_for
from planner.search.one_size import search_size
from planner.search.variations.sensitivity import sensitivity
from planner.specs.job import SearchSpec
from tests.conftest import job_values
from tests.pricing import layout_of, pricer_of

FABRIC = [{"name": "nvlink", "gpus": 8}, {"name": "network", "bandwidth": "5 GB/s"}]


def warned(words: str, layout: dict, cluster: dict | None = None, **training: Any) -> bool:
    model, given = training.pop("model", "llama3-8b"), {"trainer": "megatron", **training}
    values = job_values(model, "h100-sxm-80gb", 64, 8192, 256, **given)
    pricer = pricer_of(read_job({**values, "cluster": values["cluster"] | (cluster or {})}))
    chosen = layout_of(pricer, **layout)
    (estimate,) = estimate_layouts(pricer, [chosen])
    return any(words in line for line in warnings_for(pricer, chosen, estimate))


@pytest.mark.parametrize(("words", "over", "under"), [
    ("leaves the 8-GPU intra-node domain", {"layout": {"tp": 16}}, {"layout": {"tp": 8}}),
    ("only 4 microbatches for 4 pipeline ranks", {"layout": {"pp": 4, "micro_batch_size": 4}},
        {"layout": {"pp": 4}}),
    ("past the critical batch", {"layout": {"tp": 8}, "global_batch_size": 8192},
        {"layout": {"tp": 8}, "global_batch_size": 4096}),
    ("FSDP over 1,024 ranks is latency-bound: HSDP", {"layout": {"dp_shard": 1024},
        "cluster": {"num_gpus": 1024}, "global_batch_size": 1024, "trainer": "torchtitan"},
        {"layout": {"dp_shard": 256, "dp_replicate": 4}, "cluster": {"num_gpus": 1024},
        "global_batch_size": 1024, "trainer": "torchtitan"}),
    ("of the step waits for communication", {"layout": {"tp": 16}, "cluster": {"fabric": FABRIC}},
        {"layout": {"tp": 1}}),
    ("out of memory with probability", {"layout": {"dp_shard": 1, "dp_replicate": 64, "zero_stage":
        0}}, {"layout": {"dp_shard": 64, "ac": "full"}}),
])  # fmt: skip
def test_a_warning_comes_with_its_number_and_not_without(
    words: str, over: dict[str, Any], under: dict[str, Any]
) -> None:
    assert warned(words, **over)
    assert not warned(words.split(" with ")[0] if "out of memory" in words else words, **under)


def unbalanced(layouts: dict[int, dict[str, Any]], **training: Any) -> list[str]:
    job = read_job(job_values("mixtral-8x7b", "h100-sxm-80gb", 64, 4096, 512, **training))
    pricer = pricer_of(job)
    ranked = {rank: layout_of(pricer, **layout) for rank, layout in layouts.items()}
    return list(beyond_balance(pricer, ranked))


def test_what_fits_while_experts_are_balanced_alone_names_what_fits_beside_it() -> None:
    tight, roomy, slow = {"ep": 8, "pp": 4}, {"ep": 8, "ac": "full"}, {"ep": 4, "ac": "full"}
    (warning,) = unbalanced({1: tight, 2: slow, 5: roomy}, trainer="megatron")
    assert "2 times the mean load in every layer; number 5 is the fastest shown" in warning
    (warning,) = unbalanced({1: tight}, trainer="megatron")
    assert "no layout shown fits then" in warning
    assert not unbalanced({1: roomy, 2: tight}, trainer="megatron")
    assert not unbalanced({1: {"ep": 1, "dp_shard": 64}, 2: roomy}, trainer="megatron")
    assert not unbalanced({1: tight, 2: roomy}, trainer="megatron", moe_imbalance=1.0)


def test_a_format_of_four_bits_is_named_where_it_gains_and_nobody_asked() -> None:
    job = read_job(job_values("llama3-70b", "b200-sxm-180gb", 64, 8192, 256, trainer="megatron"))
    pricer = pricer_of(job)
    steps = sensitivity(pricer, layout_of(pricer, tp=4, precision="mxfp8"))
    (sentence,) = four_bits(steps, SearchSpec())
    assert "in nvfp4 number 1 is 1." in sentence
    assert not [*four_bits(steps, SearchSpec(fix={"precision": "mxfp8"}))]
    assert not [*four_bits([one for one in steps if one.new != "nvfp4"], SearchSpec())]


@pytest.mark.parametrize(("given", "gains"), [
    ({}, True), ({"overlap": {"ep": False}}, False), ({"trainer_version": "0.13"}, False),
])  # fmt: skip
def test_an_overlapped_exchange_is_named_where_nobody_decided(given: Any, gains: bool) -> None:
    values = job_values(
        "qwen3-30b-a3b", "h100-sxm-80gb", 16, 4096, 256, trainer="megatron", **given
    )
    few = {"pp": 1, "tp": 1, "precision": "bf16", "micro_batch_size": 1, "ep": 16}
    job = read_job({**values, "search": {"fix": few}})
    found = search_size(job, job.cluster, lambda _: None, samples=False)
    assert [" times as fast: " in one for one in overlapped(job, found)] == [True] * gains
