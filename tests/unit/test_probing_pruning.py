"""Out-of-memory pruning: only what must be larger by the memory model, with its reason."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.rules import Context
from planner.search.space.enumerate import build_space
from planner.specs.layout import AC_KINDS
from planner.study import pruning

H100, BF16 = "h100-sxm-80gb", {"precision": "bf16"}
JOBS: dict[str, dict[str, Any]] = {
    "8B": {"model": "llama3.1-8b", "cluster": {"gpu": H100, "num_gpus": 16},
        "training": {"seq_len": 8192, "global_batch_size": 64}, "search": {"fix": BF16}},
    "8x7B": {"model": "mixtral-8x7b", "cluster": {"gpu": H100, "num_gpus": 32},
        "training": {"seq_len": 4096, "global_batch_size": 128},
        "search": {"fix": {**BF16, "cp": 1}}},
    "megatron": {"model": "llama3.1-8b", "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 16},
        "search": {"fix": BF16},
        "training": {"seq_len": 4096, "global_batch_size": 64, "trainer": "megatron"}},
}  # fmt: skip
ROUNDING = 1e-9


def batch_size(name: str) -> int:
    return int(JOBS[name]["training"]["global_batch_size"])


@lru_cache(maxsize=3)
def priced(name: str) -> tuple[LayoutBatch, np.ndarray]:
    """A sample of the job's legal layouts and their predicted device bytes."""
    job = read_job(JOBS[name])
    space = build_space(
        Context(model=job.model, cluster=job.cluster, training=job.training),
        job.search,
        oversized=True,
    )
    rng = np.random.default_rng(0)
    cells = np.sort(rng.choice(len(space.cells), min(400, len(space.cells)), replace=False))
    batch = space.expand(cells)
    batch = batch.take(np.arange(min(len(batch), 20_000)))
    return batch, Pricer.build(job.model, job.cluster, job.training).price(
        batch
    ).peak_allocated_bytes


@pytest.mark.parametrize("name", JOBS)
def test_what_is_ruled_out_needs_more_by_the_memory_model(name: str) -> None:
    batch, memory = priced(name)
    rng = np.random.default_rng(1)
    compared = 0
    for row in rng.choice(len(batch), 300, replace=False):
        above = pruning.at_least(batch, int(row), batch_size(name)).mask
        assert above[row]
        below = memory[above] < memory[row] * (1.0 - ROUNDING)
        wrong = np.flatnonzero(above)[below]
        assert [batch.row(int(other)).short() for other in wrong[:1]] == [], (
            f"{batch.row(int(row)).short()} needs {memory[row]:.4g}"
        )
        compared += int(above.sum()) - 1
    assert compared > 300


@pytest.mark.parametrize("name", JOBS)
def test_at_most_is_the_converse_of_at_least(name: str) -> None:
    batch, _ = priced(name)
    rows = np.random.default_rng(2).choice(len(batch), 40, replace=False)
    for row in rows:
        for other in np.flatnonzero(pruning.at_most(batch, int(row), batch_size(name)).mask)[:20]:
            assert pruning.at_least(batch, int(other), batch_size(name)).mask[row]


BASE = {"dp_replicate": 2, "dp_shard": 4, "tp": 2, "ac": "selective-op"}
BASE |= {"micro_batch_size": 2, "zero_stage": 2}


def variants(**changes: list[object]) -> LayoutBatch:
    """One layout, then one variant for each value of each field."""
    job = read_job({**JOBS["8B"], "layout": BASE})
    layouts = [
        job.layout,
        *(
            job.layout.model_copy(update={name: value})
            for name, values in changes.items()
            for value in values
        ),
    ]
    return LayoutBatch.from_layouts(layouts)


@pytest.mark.parametrize(("name", "more", "less"), [
    ("micro_batch_size", 4, 1),
    ("zero_stage", 0, 3),
    ("sequence_parallel", False, None),
    ("cpu_offload", None, True),
    ("optimizer_offload_fraction", 0.5, None),
    ("activation_offload_layers", None, 4),
    ("optimizer_in_backward", None, True),
    ("ac", "none", "full"),
    ("reduce_dtype", None, "bfloat16"),
    ("master_dtype", None, "bfloat16"),
])  # fmt: skip
def test_each_order(name: str, more: object, less: object) -> None:
    for value, relation in ((more, pruning.at_least), (less, pruning.at_most)):
        if value is not None:
            batch = variants(**{name: [value]})
            order = relation(batch, 0, 64)
            assert order.mask[1]
            assert order.reason(batch, 1) != "it is the same layout"
            opposite = pruning.at_most if relation is pruning.at_least else pruning.at_least
            assert not opposite(batch, 0, 64).mask[1]


@pytest.mark.parametrize(("name", "value"), [
    ("tp", 4), ("compile", True), ("precision", "float8-rowwise"), ("ac", "memory-budget-0.5"),
    ("ac", "selective-layer-2"), ("dp_replicate", 4), ("cp", 2),
])  # fmt: skip
def test_what_is_not_comparable_is_left_alone(name: str, value: object) -> None:
    batch = variants(**{name: [value]})
    assert not pruning.at_least(batch, 0, 64).mask[1]
    assert not pruning.at_most(batch, 0, 64).mask[1]


def test_one_microbatch_is_not_compared_with_several() -> None:
    batch = variants(micro_batch_size=[8])
    assert pruning.at_least(batch, 0, 128).mask[1]
    assert not pruning.at_least(batch, 0, 64).mask[1]


def test_a_larger_microbatch_is_not_compared_where_all_are_held_at_once() -> None:
    """GPipe holds all at once, 1F1B on two stages up to two; beside the gradients one less."""
    piped: dict[str, object] = {"pp": 2, "dp_replicate": 1, "pp_schedule": "1F1B"}
    batch = pair(piped, micro_batch_size=4)
    assert pruning.at_least(batch, 0, 64).mask[1]
    assert not pruning.at_least(batch, 0, 32).mask[1]
    assert pruning.at_most(batch, 1, 64).mask[0]
    assert not pruning.at_most(batch, 1, 32).mask[0]
    batch = pair(piped | {"pp_schedule": "GPipe"}, micro_batch_size=4)
    assert pruning.at_least(batch, 0, 64).mask.tolist() == [True, False]
    assert pruning.at_most(batch, 1, 64).mask.tolist() == [False, True]


def test_fewer_shards_of_the_same_ranks_need_more() -> None:
    batch = variants()
    wider = LayoutBatch.concatenate(
        [
            batch,
            LayoutBatch.from_layouts(
                [batch.row(0).model_copy(update={"dp_replicate": 4, "dp_shard": 2})]
            ),
        ]
    )
    order = pruning.at_least(wider, 0, 64)
    assert order.mask[1]
    assert "fewer shards" in order.reason(wider, 1)


def test_every_kind_of_checkpointing_has_its_place_or_is_not_compared() -> None:
    assert set(pruning.KEPT) == set(AC_KINDS) - {"memory-budget", "uniform"}


def test_fewer_recomputed_layers_keep_more() -> None:
    batch = pair({"ac": "block-4"}, ac="block-2")
    assert pruning.at_least(batch, 0, 64).mask.tolist() == [True, True]
    assert pruning.at_most(batch, 0, 64).mask.tolist() == [True, False]
    several = pair({"ac": "uniform-4"}, ac="uniform-2")
    assert pruning.at_least(several, 0, 64).mask.tolist() == [True, False]
    assert pruning.at_most(several, 0, 64).mask.tolist() == [True, False]


def pair(first: dict[str, object], **changes: object) -> LayoutBatch:
    """A layout that differs from BASE, and the same with further changes."""
    base = variants().row(0).model_copy(update=first)
    return LayoutBatch.from_layouts([base, base.model_copy(update=changes)])


@pytest.mark.parametrize(
    ("kind", "less", "more"), [("memory-budget", 0.5, 0.75), ("selective-layer", 2, 4)]
)
def test_more_of_one_kind_of_checkpointing_keeps_more(
    kind: str, less: object, more: object
) -> None:
    batch = pair({"ac": f"{kind}-{less}"}, ac=f"{kind}-{more}")
    assert pruning.at_least(batch, 0, 64).mask.tolist() == [True, True]
    assert pruning.at_most(batch, 0, 64).mask.tolist() == [True, False]
    assert pruning.at_least(batch, 0, 64).reason(batch, 1) == "less is recomputed"


def test_under_a_pipeline_gpipe_needs_more_and_zero_stages_are_not_compared() -> None:
    piped: dict[str, object] = {"pp": 2, "dp_replicate": 1, "pp_schedule": "1F1B"}
    batch = pair(piped, pp_schedule="GPipe")
    order = pruning.at_least(batch, 0, 64)
    assert order.mask.tolist() == [True, True]
    assert order.reason(batch, 1) == "GPipe keeps every microbatch"
    assert pruning.at_most(batch, 0, 64).mask.tolist() == [True, False]
    batch = pair(piped, zero_stage=0)
    assert pruning.at_least(batch, 0, 64).mask.tolist() == [True, False]
    assert pruning.at_most(batch, 0, 64).mask.tolist() == [True, False]


def test_several_differences_are_all_told_and_must_all_need_more() -> None:
    batch = pair({}, micro_batch_size=4, ac="none")
    order = pruning.at_least(batch, 0, 64)
    assert order.mask[1]
    assert order.reason(batch, 1) == (
        "a larger microbatch keeps larger activations; less is recomputed"
    )
    batch = pair({}, micro_batch_size=4, ac="full")
    assert not pruning.at_least(batch, 0, 64).mask[1]
    assert not pruning.at_most(batch, 0, 64).mask[1]
