"""What each pipeline rank holds of every kind: counted by hand from the model's own numbers."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from planner.cost.cost_inputs import CostInputs
from planner.cost.memory.peak import RankShapes
from planner.cost.memory.rank_bytes import rank_shapes
from tests.pricing import batch_of, pricer

SEQ = 2048
TABLE = 128256 * 4096.0
LAYER = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096.0
BOUNDARY = SEQ * 4096 * 2.0


def inputs(trainer: str = "torchtitan", batch: int = 16, **layout: Any) -> CostInputs:
    """32 layers, hidden 4096, vocabulary 128256."""
    p = pricer("llama3-8b", 16, trainer=trainer, seq_len=SEQ, global_batch_size=batch)
    return CostInputs.of(p, batch_of(p, **{"ac": "none", **layout}), every_rank=True)


def on_ranks(found: CostInputs) -> RankShapes:
    """The shapes with columns of loads read on ranks."""
    held = rank_shapes(found)
    columns = {field.name: getattr(held, field.name) for field in fields(held)}
    of_loads = {name: column for name, column in columns.items() if column.ndim == 1}
    return replace(held, **{n: column[found.loads.at_rank] for n, column in of_loads.items()})


def shapes(trainer: str = "torchtitan", **layout: Any) -> RankShapes:
    return on_ranks(inputs(trainer, **layout))


def test_parameters_of_one_rank_without_a_pipeline() -> None:
    held = shapes(tp=2, dp_shard=8)
    expected = {
        "local": (32 * LAYER + 2 * TABLE) / 2, "shard": (32 * LAYER + 2 * TABLE) / 16,
        "head_shard": TABLE / 16, "late_shard": (TABLE + LAYER) / 16,
        "early_shard": (TABLE + 30 * LAYER) / 16,
    }  # fmt: skip
    found = {name: getattr(held, name)[0, 0] for name in expected}
    assert found == pytest.approx(expected, rel=1e-3)
    exact = (held.embedding_local, held.embedding_whole, held.in_flight)
    assert [column[0, 0] for column in exact] == [TABLE / 2, TABLE, 1.0]


def test_a_pipelines_ends_hold_embedding_and_head_and_the_first_rank_most_microbatches() -> None:
    """TorchTitan's split of 32 layers over 4 stages counts the ends: 8, 9, 9, 6 would be uneven;
    the first gives up one layer for the embedding, the last one for the head.
    """
    held = shapes(pp=4, dp_shard=4, micro_batch_size=1)
    layers = np.array([8.0, 9.0, 8.0, 7.0])
    ends = np.array([TABLE, 0.0, 0.0, TABLE])
    assert held.local[:, 0] == pytest.approx(layers * LAYER + ends, rel=1e-3)
    assert held.head_local[:, 0] == pytest.approx([0.0, 0.0, 0.0, TABLE], rel=1e-3)
    assert held.in_flight[:, 0].tolist() == [4.0, 3.0, 2.0, 1.0]
    assert (held.logits_bytes[:3] == 0).all()
    assert held.logits_bytes[3, 0] > SEQ * 128256 * 8.0


def test_under_a_pipeline_the_logits_that_the_loss_frees_are_kept() -> None:
    """TorchTitan's loss frees bfloat16 logits before its backward: 2 bytes each."""
    given = {"tp": 1, "micro_batch_size": 1}
    alone, piped = shapes(dp_shard=16, **given), shapes(pp=2, dp_shard=8, **given)
    freed = SEQ * 128256 * 2.0
    assert piped.logits_bytes[1, 0] - alone.logits_bytes[0, 0] == pytest.approx(freed)
    assert alone.leftover_bytes[0, 0] == pytest.approx(freed)
    assert piped.leftover_bytes[:, 0] == pytest.approx([0.0, freed])


@pytest.mark.parametrize(("schedule", "stages", "waiting"), [
    ("1F1B", 1, 0), ("GPipe", 1, 7), ("Interleaved1F1B", 2, 0), ("LoopedBFS", 2, 7)])  # fmt: skip
def test_losses_wait_where_forwards_come_first(schedule: str, stages: int, waiting: int) -> None:
    """8 microbatches: 7 log-softmaxes in fp32 and logits in bfloat16 besides the one that runs."""
    given = {"pp": 2, "dp_shard": 8, "micro_batch_size": 1, "virtual_stages": stages}
    found = rank_shapes(inputs(batch=64, pp_schedule=schedule, **given)).waiting_loss_bytes
    assert (found[:, 0] / (SEQ * 128256 * 6.0)).tolist() == [0.0, waiting]


def test_torch_allocates_receives_for_every_microbatch_and_megatron_for_those_in_flight() -> None:
    """4 microbatches; the first and last stage receive one kind each, the others two. A stage's
    input is one of these buffers in torch, so that of what a layer saves it counts no second time;
    in Megatron its first layer saved it, and InternEvo keeps its output.
    """
    trainers = ("torchtitan", "megatron", "internevo")
    torch, megatron, internevo = (
        shapes(trainer, pp=4, dp_shard=4, micro_batch_size=1) for trainer in trainers
    )
    assert (torch.received_bytes[:, 0] / BOUNDARY).tolist() == [4.0, 8.0, 8.0, 4.0]
    assert (torch.boundary_bytes[:, 0] / BOUNDARY).tolist() == [0.0, -1.0, -1.0, -1.0]
    assert (megatron.received_bytes == 0).all()
    assert (megatron.boundary_bytes == 0).all()
    assert (internevo.boundary_bytes[:, 0] / BOUNDARY).tolist() == [1.0] * 4


def test_interleaved_stages_receive_for_each_of_them() -> None:
    given = {"pp": 2, "dp_shard": 8, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2}
    held = shapes(**given, micro_batch_size=1)
    assert (held.received_bytes[:, 0] / BOUNDARY).tolist() == [2 * 3.0, 2 * 3.0]


def test_where_weight_gradients_run_later_more_is_held_than_the_microbatches_in_flight() -> None:
    """ZB-1p, 4 microbatches: rank 3 has one from F to I, three from I to W, then none, four."""
    given = {"pp": 4, "dp_shard": 4, "micro_batch_size": 1, "pp_schedule": "ZB-1p"}
    found = inputs("megatron", **given)
    held = on_ranks(found)
    assert held.in_flight[:, 0].tolist() == [4.0, 3.0, 2.0, 1.0]
    assert held.held_bytes[0, 0] == 0.0
    later = found.unit.held_bytes[:, found.at_unit]
    last = np.array([float(found.units[3, kind, 0]) for kind in range(found.units.shape[1])])
    half, whole = float(last @ later[:, 0]), float(held.saved_bytes[3, 0])
    assert held.held_bytes[3, 0] == pytest.approx(max(3 * half, 4 * half - whole))
    assert (shapes("megatron", **given | {"pp_schedule": "1F1B"}).held_bytes == 0).all()


def test_gathers_of_a_layer_are_the_largest_layers() -> None:
    held = shapes(dp_shard=16)
    found = [one[0, 0] for one in (held.largest_gathered, held.head_gathered, held.gathered)]
    assert found == pytest.approx([LAYER, TABLE, 32 * LAYER + 2 * TABLE], rel=1e-3)
