"""Out-of-memory pruning: only what must be larger by the memory model, with its reason."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.intake.jobs import read_job
from planner.specs.layout import AC_KINDS
from planner.study import pruning
from tests.conftest import job_values
from tests.pricing import priced_space

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
    pricer, space = priced_space(job, oversized=True)
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
LESS = "less is recomputed"
# What a layout has beside BASE, what changes, whether it then needs more, and words of the reason.
PAIRS: list[tuple[dict[str, object], dict[str, object], tuple[bool, bool], str]] = [
    ({}, {"micro_batch_size": 4}, LARGER, ""),
    ({}, {"micro_batch_size": 1}, SMALLER, ""),
    ({}, {"zero_stage": 0}, LARGER, ""),
    ({}, {"zero_stage": 3}, SMALLER, ""),
    (PIPED, {"zero_stage": 0}, NEITHER, ""),
    ({}, {"sequence_parallel": False}, LARGER, ""),
    ({}, {"cpu_offload": True}, SMALLER, ""),
    ({}, {"optimizer_offload_fraction": 0.5}, LARGER, ""),
    ({}, {"activation_offload_layers": 4}, SMALLER, ""),
    ({}, {"optimizer_in_backward": True}, SMALLER, ""),
    ({}, {"reduce_dtype": "bfloat16"}, SMALLER, ""),
    ({}, {"master_dtype": "bfloat16"}, SMALLER, ""),
    ({}, {"dp_replicate": 4, "dp_shard": 2}, LARGER, "fewer shards"),
    (PIPED, {"pp_schedule": "GPipe"}, LARGER, "GPipe keeps every microbatch"),
    ({}, {"ac": "none"}, LARGER, LESS),
    ({}, {"ac": "full"}, SMALLER, ""),
    ({"ac": "block-4"}, {"ac": "block-2"}, LARGER, ""),
    ({"ac": "memory-budget-0.5"}, {"ac": "memory-budget-0.75"}, LARGER, LESS),
    ({"ac": "selective-layer-2"}, {"ac": "selective-layer-4"}, LARGER, LESS),
    ({"ac": "uniform-4"}, {"ac": "uniform-2"}, NEITHER, ""),
    ({}, {"ac": "memory-budget-0.5"}, NEITHER, ""),
    ({}, {"ac": "selective-layer-2"}, NEITHER, ""),
    ({}, {"tp": 4}, NEITHER, ""),
    ({}, {"compile": True}, NEITHER, ""),
    ({}, {"precision": "float8-rowwise"}, NEITHER, ""),
    ({}, {"dp_replicate": 4}, NEITHER, ""),
    ({}, {"cp": 2}, NEITHER, ""),
    # several differences are all told, and must all need more
    ({}, {"micro_batch_size": 4, "ac": "none"}, LARGER, f"larger activations; {LESS}"),
    ({}, {"micro_batch_size": 4, "ac": "full"}, NEITHER, ""),
]


@pytest.mark.parametrize(("first", "changes", "found", "words"), PAIRS, ids=str)
def test_what_needs_more_is_told_with_its_reason_and_the_rest_is_left_alone(
    first: dict[str, object], changes: dict[str, object], found: tuple[bool, bool], words: str
) -> None:
    batch = pair(first, **changes)
    assert relations(batch) == found
    if found != NEITHER:
        relation = pruning.at_least if found == LARGER else pruning.at_most
        reason = relation(batch, 0, 64).reason(batch, 1)
        assert words in reason != "it is the same layout"


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


def test_every_kind_of_checkpointing_has_its_place_or_is_not_compared() -> None:
    assert set(pruning.KEPT) == set(AC_KINDS) - {"memory-budget", "uniform"}
