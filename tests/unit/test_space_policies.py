"""What the search leaves out as unwise, one layout at a time in plain numbers.

The brute-force twin of the space reads the same masks, so that it cannot see a fault in them.
"""

import itertools

import pytest
from space_twin import context

from planner.columns import LayoutBatch
from planner.search.space.keeps import KEEPS
from planner.trainers.registry import resolve_layout

SEQ, GLOBAL_BATCH, NUM_GPUS = 16384, 64, 64
JOB = context("llama3-8b", num_gpus=NUM_GPUS, seq_len=SEQ, global_batch_size=GLOBAL_BATCH)


def kept(micro: int, pp: int, dp: int, tp: int, cp: int) -> bool:
    layout = resolve_layout(
        {"micro_batch_size": micro, "pp": pp, "dp_shard": dp, "tp": tp, "cp": cp},
        trainer="torchtitan",
        num_gpus=NUM_GPUS,
    )
    mask = KEEPS["micro_batch_size"].mask(LayoutBatch.from_layouts([layout]), JOB)
    return bool(mask[0])


def wanted(micro: int, pp: int, dp: int, tp: int, cp: int) -> bool:
    """1 always; else inputs of 32 layers that fit, a microbatch for every rank, 262,144 tokens."""
    memory = JOB.cluster.gpu.memory_bytes
    inputs = 2 * micro * SEQ * 4096 * 32 / (cp * tp * pp)
    microbatches = GLOBAL_BATCH // (micro * dp)
    enough = pp == 1 or microbatches >= pp
    return micro == 1 or (inputs <= memory and enough and micro * SEQ / cp <= 2**18)


@pytest.mark.parametrize(("micro", "stays"), [(1, True), (2, True), (4, True), (8, False)])
def test_a_pipeline_of_four_wants_four_microbatches(micro: int, stays: bool) -> None:
    """Local batch 16: 16, 8, 4 and 2 microbatches."""
    assert kept(micro, pp=4, dp=4, tp=4, cp=1) is stays


def test_microbatches_that_pay_are_these() -> None:
    sizes = itertools.product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8), (1, 4), (1, 2))
    checked = [size for size in sizes if size[0] * size[2] <= GLOBAL_BATCH]
    assert {size for size in checked if kept(*size)} == {size for size in checked if wanted(*size)}
    assert 0 < sum(wanted(*size) for size in checked) < len(checked)
