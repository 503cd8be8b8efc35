"""What jobs with experts leave out comes from NVIDIA's recipes, and how their experts are priced.

Source of the expected values: see `planner.trainers.recipes`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.estimates import estimate_job
from planner.export import export
from planner.export.commands import read_flags
from planner.intake.jobs import read_job
from planner.rules import Context
from planner.rules.cuda_graphs import by_layout, captured
from planner.rules.experts import overlaps_exchange
from planner.specs.job import Job
from planner.specs.training import CUDA_GRAPHS
from planner.trainers.recipes import MODELS, RECIPES, expert_recipe
from tests.conftest import job_values
from tests.golden.rows import published
from tests.pricing import step_seconds

GB200, B200, H100 = "gb200-nvl72-186gb", "b200-sxm-180gb", "h100-sxm-80gb"


def job(
    gpu: str = GB200, release: str | None = "NeMo 26.06", layout: Any = None, **training: Any
) -> Job:
    asked = {"trainer": "megatron-bridge", "trainer_version": release, **training}
    layout = {"ep": 8, "micro_batch_size": 4, "precision": "mxfp8", **(layout or {})}
    return read_job(job_values("qwen3-30b-a3b", gpu, 8, 4096, 512, layout=layout, **asked))


def taken(found: Job) -> tuple[str, str | None, bool]:
    overlaps = found.training.overlap.ep or False
    return found.layout.moe_dispatcher, found.training.cuda_graphs, overlaps


@pytest.mark.parametrize(("trainer", "changes", "graphs"), [
    ("megatron-bridge", {}, "full"),  # the newest release's recipe
    ("megatron-bridge", {"precision": "bf16"}, "partial"),
    ("megatron-bridge", {"ac": "modules-moe"}, "full"),  # no recomputed experts are overlapped
    ("megatron-bridge", {"pp": 2, "ep": 4}, "full"),  # nor is one stage a rank
    ("megatron-bridge", {"moe_dispatcher": "alltoall"}, "none"),
    ("megatron-bridge", {"precision": "bf16", "ac": "full"}, "none"),  # which excludes them
    ("megatron-bridge", {"precision": "bf16", "ac": "modules-moe"}, "partial"),  # of attention
    ("megatron", {}, "none"),  # who writes Megatron-LM's flags asks for them
])  # fmt: skip
def test_a_plan_captures_what_the_recipe_does(trainer: str, changes: dict, graphs: str) -> None:
    """And so is it priced and exported, though the job names none; likewise what it overlaps."""
    layout = {"moe_dispatcher": "hybridep", "zero_stage": 1, **changes}
    asked = job(release=None, trainer=trainer, layout=layout)
    assert asked.training.cuda_graphs is None
    context = Context(model=asked.model, cluster=asked.cluster, training=asked.training)
    batch = LayoutBatch.from_layouts([asked.layout])
    assert CUDA_GRAPHS[int(captured(batch, context)[0])] == graphs
    assert by_layout(context) == (trainer == "megatron-bridge")
    overlaps = graphs == "full" and changes == {}
    off = job(release=None, trainer=trainer, layout=layout, overlap={"ep": False}).training
    for asking, expected in ((context, overlaps), (replace(context, training=off), False)):
        assert overlaps_exchange(batch, asking).tolist() == [expected]
    said: Any = {"cuda_graphs": graphs, "overlap": {"ep": overlaps}}
    named = job(release=None, trainer=trainer, layout=layout, **said)
    assert estimate_job(asked).step_seconds == estimate_job(named).step_seconds
    made = export(asked.layout, asked.model, asked.cluster, asked.training, to="megatron")
    flags = read_flags(made.arguments)
    wanted = {"full": ["full_iteration"], "partial": ["transformer_engine"]}.get(graphs)
    assert flags.get("--cuda-graph-impl") == wanted
    assert ("--overlap-moe-expert-parallel-comm" in flags) == overlaps
    told = [one for one in estimate_job(asked).warnings if " unless training." in one]
    assert len(told) == (graphs != "none") + overlaps


OWN = ("alltoall", None, False)


@pytest.mark.parametrize(("gpu", "release", "layout", "training", "expected"), [
    (GB200, "NeMo 26.06", {}, {}, ("hybridep", "full", True)),
    (GB200, "NeMo 26.06", {"precision": "bf16"}, {}, ("hybridep", "partial", False)),
    (GB200, "NeMo 25.11", {}, {}, ("hybridep", "partial", False)),
    (GB200, "0.2", {}, {}, ("hybridep", "partial", False)),
    (GB200, "0.5", {}, {}, ("hybridep", "full", True)),
    (GB200, None, {}, {}, OWN),  # somebody's own flags
    (B200, "NeMo 26.02", {}, {}, ("alltoall", "partial", False)),
    (B200, "NeMo 26.04.01", {}, {}, ("hybridep", "partial", False)),
    # the model of these jobs with 288 GB: its own recipe before the node's
    ("b300-sxm-288gb", "NeMo 26.02", {}, {}, ("hybridep", "partial", False)),
    ("b300-sxm-288gb", "NeMo 26.06", {}, {}, ("hybridep", "full", True)),
    ("gb300-nvl72-288gb", "NeMo 26.06", {}, {}, ("hybridep", "full", True)),
    (H100, "NeMo 26.02", {"precision": "float8-tensorwise"}, {}, ("deepep", "none", True)),
    (H100, "NeMo 26.06", {"precision": "float8-tensorwise"}, {}, ("hybridep", "none", False)),
    (GB200, "NeMo 25.04", {}, {}, OWN),  # before the first recipe
    # the same under Megatron of a NeMo release, and not under its own
    (GB200, "NeMo 26.06", {}, {"trainer": "megatron"}, ("hybridep", "full", True)),
    (GB200, "core_v0.18.0", {}, {"trainer": "megatron"}, OWN),
    # who names a dispatcher has a configuration of his own
    (GB200, "NeMo 26.06", {"moe_dispatcher": "alltoall"}, {}, OWN),
    (GB200, "NeMo 26.06", {"ep": 1}, {}, OWN),
    # the exchange overlaps only in an interleaved pipeline; graphs of layers exclude ac full
    (GB200, "NeMo 26.06", {"pp": 2, "ep": 4}, {}, ("hybridep", "full", False)),
    (GB200, "NeMo 26.04", {"ac": "full"}, {}, ("hybridep", None, False)),
    # what is written stands
    (GB200, "NeMo 26.06", {}, {"cuda_graphs": "partial", "overlap": {"ep": False}},
        ("hybridep", "partial", False)),
])  # fmt: skip
def test_recipes_differ_by_release_machine_and_format(
    gpu: str, release: str | None, layout: Any, training: Any, expected: tuple[str, Any, bool]
) -> None:
    assert taken(job(gpu, release, layout, **training)) == expected


@pytest.mark.parametrize(("model", "gpu", "release", "asked", "graphs", "capacity"), [
    ("qwen3-30b-a3b", GB200, "NeMo 25.09", {}, "partial", 1.0),
    ("deepseek-v3", GB200, "NeMo 25.09", {}, "none", 1.0),
    ("deepseek-v3", H100, "NeMo 25.09", {}, "none", None),
    ("mixtral-8x7b", H100, "NeMo 24.09", {}, "none", 1.0),
    ("mixtral-8x7b", B200, "NeMo 26.02", {}, None, None),  # no recipe is left
    ({"base": "mixtral-8x22b", "intermediate_size": 32768}, H100, "NeMo 25.04", {}, None, None),
    ("qwen3-30b-a3b", GB200, "NeMo 25.09", {"moe_capacity_factor": None}, None, None),
    ("qwen3-30b-a3b", GB200, "NeMo 25.09", {"moe_capacity_factor": 1.5}, "partial", 1.5),
])  # fmt: skip
def test_recipes_dropped_tokens_until_25_09(
    model: Any, gpu: str, release: str, asked: Any, graphs: str | None, capacity: float | None
) -> None:
    given = {"trainer": "megatron", "trainer_version": release, **asked}
    layout = {"ep": 8, "precision": "bf16"}
    found = read_job(job_values(model, gpu, 8, 4096, 512, layout=layout, **given))
    assert (found.training.cuda_graphs, found.training.moe_capacity_factor) == (graphs, capacity)
    taken = "moe_capacity_factor 1" in " ".join(estimate_job(found).warnings)
    assert taken == (capacity == 1.0)
    context = Context(model=found.model, cluster=found.cluster, training=found.training)
    kept = captured(LayoutBatch.from_layouts([found.layout]), context)[0]
    assert CUDA_GRAPHS[int(kept)] == (graphs or "none")


@pytest.mark.parametrize(("given", "words", "without"), [
    ({"cuda_graphs": "partial", "overlap": {"ep": False}},
        "moe_dispatcher hybridep are those of NVIDIA's recipe", "cuda_graphs"),
    ({}, "moe_dispatcher hybridep, cuda_graphs full, overlap.ep true are those", "partial"),
    ({}, "since NeMo 26.06", "partial"),
    ({"layout": {"moe_dispatcher": "alltoall"}}, "", "recipe"),
    ({"release": "NeMo 26.04", "layout": {"ac": "full"}}, "", "cuda_graphs"),
])  # fmt: skip
def test_the_answer_says_what_was_taken(given: Any, words: str, without: str) -> None:
    warnings = " ".join(estimate_job(job(**given)).warnings)
    assert (words in warnings, without in warnings) == (True, False)


def test_every_row_of_the_table_is_of_a_model_and_counts_for_some_job() -> None:
    assert {row[0] for row in RECIPES} == set(MODELS.values())
    assert len({row[:4] for row in RECIPES}) == len(RECIPES)
    found = expert_recipe(job().model, job().cluster, job().training, "mxfp8")
    assert found.since == "2026-06"
    given = {"trainer": "megatron", "layout": {"ep": 8}}
    for patch, dispatcher in (("", "hybridep"), (".01", "deepep")):
        release = {"trainer_version": f"NeMo 26.04{patch}", **given}
        asked = read_job(job_values("deepseek-v3", B200, 256, 4096, 4096, **release))
        found = expert_recipe(asked.model, asked.cluster, asked.training, "mxfp8")
        assert found.dispatcher == dispatcher


def test_experts_in_one_kernel_save_the_passes_between_their_products() -> None:
    """At least those over the first products' outputs: 3 forward and 5 backward, in 16 bits."""
    fused = job()
    apart = job(trainer_version="NeMo 26.04", cuda_graphs="full", overlap={"ep": True})
    tokens, layers = 512 * 4096 / 8, 48
    least = layers * tokens * 8 * 768 * 2 * 8 / 8e12
    assert step_seconds(apart) - step_seconds(fused) > least
    alike = [job(release=one, layout={"precision": "bf16"}) for one in ("NeMo 26.04", "NeMo 26.06")]
    assert step_seconds(alike[0]) == step_seconds(alike[1])


@pytest.mark.parametrize(("releases", "gpus", "least", "worst", "mean"), [
    # the exchange overlaps and experts are one kernel: +34 to +71% without either
    (("NeMo 26.06", "NeMo 26.08"), (GB200,), 9, 0.17, 0.13),
    # tokens are dropped, and graphs hold experts: up to +185% without
    (("NeMo 25.09",), (GB200, B200, H100), 13, 0.35, 0.17),
])  # fmt: skip
def test_recipes_are_near_what_their_publisher_measured(
    releases: Any, gpus: Any, least: int, worst: float, mean: float
) -> None:
    errors = [
        found.step_seconds / row["measured"]["step_seconds"] - 1
        for row in published().values()
        if row["cluster"]["gpu"] in gpus
        and row["training"].get("trainer_version", "").startswith(releases)
        and (row["model"].get("base") or row["model"].get("name", "")).startswith(("qwen", "deep"))
        and (found := estimate_job(read_job(row))).step_seconds
    ]
    assert len(errors) >= least
    assert np.abs(errors).max() < worst
    assert np.abs(errors).mean() < mean
