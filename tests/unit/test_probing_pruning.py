"""Out-of-memory pruning: only what must be larger by the memory model, with its reason."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search.space.enumerate import build_space
from planner.specs.layout import AC_KINDS
from planner.study import pruning
from tests.conftest import job_values

H100, BF16 = "h100-sxm-80gb", {"fix": {"precision": "bf16"}}
NO_CP, SMALL = {"fix": {"precision": "bf16", "cp": 1}}, "llama3.1-8b"
JOBS: dict[str, dict[str, Any]] = {
    "8B": job_values(SMALL, H100, 16, 8192, 64, search=BF16),
    "8x7B": job_values("mixtral-8x7b", H100, 32, 4096, 128, search=NO_CP),
    "megatron": job_values(SMALL, "a100-sxm-80gb", 16, 4096, 64, search=BF16, trainer="megatron"),
}
ROUNDING = 1e-9
PIPED: dict[str, object] = {"pp": 2, "dp_replicate": 1, "pp_schedule": "1F1B"}


@lru_cache(maxsize=3)
def priced(name: str) -> tuple[LayoutBatch, np.ndarray, int]:
    """A sample of the job's legal layouts, their predicted device bytes, and its batch size."""
    job = read_job(JOBS[name])
    pricer = Pricer.build(job.model, job.cluster, job.training)
    space = build_space(pricer.rules_context, job.search, oversized=True)
    rng = np.random.default_rng(0)
    cells = np.sort(rng.choice(len(space.cells), min(400, len(space.cells)), replace=False))
    batch = space.expand(cells)
    batch = batch.take(np.arange(min(len(batch), 20_000)))
    return batch, pricer.price(batch).peak_allocated_bytes, job.training.global_batch_size


@pytest.mark.parametrize("name", JOBS)
def test_what_is_ruled_out_needs_more_by_the_memory_model(name: str) -> None:
    batch, memory, batch_size = priced(name)
    compared = 0
    for row in np.random.default_rng(1).choice(len(batch), 300, replace=False).tolist():
        above = pruning.at_least(batch, row, batch_size).mask
        assert above[row]
        wrong = np.flatnonzero(above & (memory < memory[row] * (1.0 - ROUNDING)))
        needs = f"{batch.row(row).short()} needs {memory[row]:.4g}"
        assert [batch.row(other).short() for other in wrong[:1].tolist()] == [], needs
        compared += int(above.sum()) - 1
    assert compared > 300


@pytest.mark.parametrize("name", JOBS)
def test_at_most_is_the_converse_of_at_least(name: str) -> None:
    batch, _, batch_size = priced(name)
    for row in np.random.default_rng(2).choice(len(batch), 40, replace=False).tolist():
        for other in np.flatnonzero(pruning.at_most(batch, row, batch_size).mask)[:20]:
            assert pruning.at_least(batch, int(other), batch_size).mask[row]


BASE = {"dp_replicate": 2, "dp_shard": 4, "tp": 2, "ac": "selective-op"}
BASE |= {"micro_batch_size": 2, "zero_stage": 2}


def pair(first: dict[str, object], **changes: object) -> LayoutBatch:
    """A layout that differs from BASE, and the same with further changes."""
    base = read_job({**JOBS["8B"], "layout": BASE}).layout.model_copy(update=first)
    return LayoutBatch.from_layouts([base, base.model_copy(update=changes)])


def relations(batch: LayoutBatch, batch_size: int = 64) -> tuple[bool, bool]:
    """Whether the second of a pair needs at least, and at most, what the first does."""
    relate = (pruning.at_least, pruning.at_most)
    least, most = (bool(order(batch, 0, batch_size).mask[1]) for order in relate)
    return least, most


LARGER, SMALLER, NEITHER = (True, False), (False, True), (False, False)


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
    orders = ((more, pruning.at_least, LARGER), (less, pruning.at_most, SMALLER))
    for value, relation, found in orders:
        if value is not None:
            batch = pair({}, **{name: value})
            assert relations(batch) == found
            assert relation(batch, 0, 64).reason(batch, 1) != "it is the same layout"


@pytest.mark.parametrize(("name", "value"), [
    ("tp", 4), ("compile", True), ("precision", "float8-rowwise"), ("ac", "memory-budget-0.5"),
    ("ac", "selective-layer-2"), ("dp_replicate", 4), ("cp", 2),
])  # fmt: skip
def test_what_is_not_comparable_is_left_alone(name: str, value: object) -> None:
    assert relations(pair({}, **{name: value})) == NEITHER


def test_one_microbatch_is_not_compared_with_several() -> None:
    batch = pair({}, micro_batch_size=8)
    assert (relations(batch, 128), relations(batch, 64)) == (LARGER, NEITHER)


def test_a_larger_microbatch_is_not_compared_where_all_are_held_at_once() -> None:
    """GPipe holds all at once, 1F1B on two stages up to two; beside the gradients one less."""
    batch = pair(PIPED, micro_batch_size=4)
    for batch_size, compared in ((64, True), (32, False)):
        assert pruning.at_least(batch, 0, batch_size).mask[1] == compared
        assert pruning.at_most(batch, 1, batch_size).mask[0] == compared
    batch = pair(PIPED | {"pp_schedule": "GPipe"}, micro_batch_size=4)
    assert pruning.at_least(batch, 0, 64).mask.tolist() == [True, False]
    assert pruning.at_most(batch, 1, 64).mask.tolist() == [False, True]


def test_fewer_shards_of_the_same_ranks_need_more() -> None:
    batch = pair({}, dp_replicate=4, dp_shard=2)
    order = pruning.at_least(batch, 0, 64)
    assert order.mask[1]
    assert "fewer shards" in order.reason(batch, 1)


def test_every_kind_of_checkpointing_has_its_place_or_is_not_compared() -> None:
    assert set(pruning.KEPT) == set(AC_KINDS) - {"memory-budget", "uniform"}


def test_fewer_recomputed_layers_keep_more() -> None:
    assert relations(pair({"ac": "block-4"}, ac="block-2")) == LARGER
    assert relations(pair({"ac": "uniform-4"}, ac="uniform-2")) == NEITHER


@pytest.mark.parametrize(
    ("kind", "less", "more"), [("memory-budget", 0.5, 0.75), ("selective-layer", 2, 4)]
)
def test_more_of_one_kind_of_checkpointing_keeps_more(
    kind: str, less: object, more: object
) -> None:
    batch = pair({"ac": f"{kind}-{less}"}, ac=f"{kind}-{more}")
    assert relations(batch) == LARGER
    assert pruning.at_least(batch, 0, 64).reason(batch, 1) == "less is recomputed"


def test_under_a_pipeline_gpipe_needs_more_and_zero_stages_are_not_compared() -> None:
    batch = pair(PIPED, pp_schedule="GPipe")
    assert relations(batch) == LARGER
    assert pruning.at_least(batch, 0, 64).reason(batch, 1) == "GPipe keeps every microbatch"
    assert relations(pair(PIPED, zero_stage=0)) == NEITHER


def test_several_differences_are_all_told_and_must_all_need_more() -> None:
    batch = pair({}, micro_batch_size=4, ac="none")
    assert relations(batch) == LARGER
    words = "a larger microbatch keeps larger activations; less is recomputed"
    assert pruning.at_least(batch, 0, 64).reason(batch, 1) == words
    assert relations(pair({}, micro_batch_size=4, ac="full")) == NEITHER
