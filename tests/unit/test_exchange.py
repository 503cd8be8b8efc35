"""The exchange of experts: DeepEP against published timings, bytes and hiding by hand."""

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.layer.exchange import DEEPEP, DISPATCHERS, kernel_seconds, reached
from planner.cost.memory.dispatch_buffers import dispatch_buffer_bytes
from planner.cost.network.collectives import collective_seconds
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.trainers.registry import resolve_layout
from tests.conftest import job_values

ROOT = Path(__file__).parents[2]
GPUS = {
    "H100-SXM-80GB": "h100-sxm-80gb", "H200-SXM-141GB": "h200-sxm-141gb",
    "B200-SXM-180GB": "b200-sxm-180gb",
}  # fmt: skip
SHAPE = re.compile(r"(\d+) tokens a rank, hidden (\d+), top-(\d+), (\d+) experts")


def timings(gpu: str, ranks: int) -> list[tuple[list[int], float]]:
    """Combine in 16 bits: (tokens, hidden, top-k, experts) and seconds."""
    found = []
    with (ROOT / "benchmarks" / "measured" / "micro.csv").open() as file:
        for row in csv.DictReader(file):
            shape = SHAPE.match(row["shape_message"])
            combine = row["what"] == "DeepEP normal combine time"
            if combine and shape and row["gpu"] == gpu and int(row["ranks"]) == ranks:
                found.append(([int(text) for text in shape.groups()], float(row["value"])))
    return found


def pricer(model: Any, gpu: str, num_gpus: int, **training: Any) -> Pricer:
    job = read_job(job_values(model, gpu, num_gpus, 4096, 1024, **training))
    return Pricer.build(job.model, job.cluster, job.training)


def one(p: Pricer, **values: Any) -> LayoutBatch:
    layout = resolve_layout(values, trainer=p.training.trainer, num_gpus=p.cluster.num_gpus)
    return LayoutBatch.from_layouts([layout])


@pytest.mark.parametrize(
    ("gpu", "ranks", "error"),
    [
        ("H100-SXM-80GB", 8, 0.06), ("H200-SXM-141GB", 8, 0.06), ("B200-SXM-180GB", 8, 0.10),
        ("H100-SXM-80GB", 16, 0.15), ("H100-SXM-80GB", 32, 0.10),
    ],
)  # fmt: skip
def test_deepep_s_timings(gpu: str, ranks: int, error: float) -> None:
    found, errors = timings(gpu, ranks), []
    kernels = DISPATCHERS[DEEPEP]("hopper" if gpu.startswith("H") else "blackwell")
    for (tokens, hidden, top_k, _), measured in found:
        p = pricer("qwen3-30b-a3b", GPUS[gpu], ranks)
        seconds = kernel_seconds(
            np.array([2.0 * tokens * hidden]),
            (top_k, 0),
            kernels,
            (np.array([float(ranks)]), np.array([1.0])),
            p.fabric.gpus[0],
            (450e9 if gpu.startswith("H") else 900e9, 50e9),
        )
        errors.append(float(np.log(seconds[0] / measured)))
    assert len(errors) >= 18
    assert np.mean(np.abs(errors)) < error


def test_places_that_a_token_reaches() -> None:
    draws = np.random.default_rng(0).integers(0, 8, size=(200_000, 6))
    distinct = np.mean([len(set(row)) for row in draws[:20_000]])
    assert reached(np.array([8.0]), 6)[0] == pytest.approx(distinct, rel=0.01)
    assert reached(np.array([1.0]), 6)[0] == 1.0


def exposed(p: Pricer, **values: Any) -> float:
    return float(p.price(one(p, **values)).parts["ep"][0])


def test_alltoall_sends_every_copy_and_deepep_one_a_node() -> None:
    """Across nodes DeepEP sends at most one copy to each, alltoall top-k of them."""
    p = pricer("qwen3-30b-a3b", "h100-sxm-80gb", 64, trainer="megatron", trainer_version="0.14")
    assert exposed(p, ep=32, moe_dispatcher="deepep") < 0.6 * exposed(p, ep=32)


def test_allgather_gathers_and_reduces_the_tokens_of_all() -> None:
    p = pricer(
        "qwen3-30b-a3b", "h100-sxm-80gb", 64, trainer="megatron", trainer_version="0.14",
        moe_imbalance=1.0,
    )  # fmt: skip
    buffer, degree = np.array([32 * 4096 * 2048 * 2.0]), np.array([32.0])
    both = sum(
        collective_seconds(
            operation, buffer, degree, np.array([1.0]), p.fabric,
            base_seconds=p.profile.collective_seconds, nvls_gain=p.profile.nvls_gain,
        )[0]
        for operation in ("all-gather", "reduce-scatter")
    )  # fmt: skip
    microbatches, layers, directions = 1024 / 64, 48, 2
    by_hand = pytest.approx(microbatches * layers * directions * both)
    assert exposed(p, ep=32, moe_dispatcher="allgather") == by_hand


def test_nothing_hides_the_exchange_unless_the_run_says_so() -> None:
    job = {"trainer": "megatron", "trainer_version": "0.14"}
    plain = pricer("qwen3-30b-a3b", "h100-sxm-80gb", 16, **job)
    told = pricer("qwen3-30b-a3b", "h100-sxm-80gb", 16, **job, overlap={"ep": True})
    share = told.profile.ep_hidden
    assert 0 < share < 1
    whole = exposed(plain, ep=8)
    hidden = whole - exposed(told, ep=8)
    counts = hidden / share / whole  # all but the exchange of counts
    assert 0.9 < counts <= 1.0
    assert exposed(told, ep=8, ac="full") == pytest.approx(exposed(plain, ep=8, ac="full"))


def test_shared_experts_cover_torchtitan_s_combine_alone() -> None:
    shared = {"n_shared_experts": 1, "shared_expert_intermediate_size": 768}
    shared["base"] = "qwen3-30b-a3b"
    for trainer, covers in (("torchtitan", True), ("megatron", False)):
        without, with_one = (
            exposed(pricer(model, "h100-sxm-80gb", 8, trainer=trainer), ep=8)
            for model in ("qwen3-30b-a3b", shared)
        )
        assert (with_one < without) == covers


def test_buffers_of_deepep_by_hand() -> None:
    p = pricer("deepseek-v3", "h100-sxm-80gb", 32)
    rows = [
        dispatch_buffer_bytes(one(p, ep=ep, moe_dispatcher=name), p.model, p.cluster, p.training)[0]
        for ep, name in ((8, "deepep"), (32, "deepep"), (32, "alltoall"))
    ]
    nvlink = 10 * 8 * 256 * 7168 * 2
    assert rows == [nvlink, nvlink + 10 * 4 * 2 * 128 * 7168 * 2, 0.0]
