"""The loads of ranks: each distinct one once, and every rank finds its own again."""

from collections.abc import Sequence
from typing import Any

from planner.columns import LayoutBatch
from planner.cost.cost_inputs import CostInputs
from planner.cost.loads import BESIDE
from planner.cost.pipeline.stages import rank_units
from planner.cost.price import Pricer
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.trainers.registry import resolve_layout

NUM_GPUS = 16
GIVEN: tuple[dict[str, Any], ...] = (
    {"dp_shard": 16},
    {"dp_shard": 16, "optimizer_in_backward": True},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 1},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 1, "pp_schedule": "GPipe"},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 2, "pp_schedule": "GPipe"},
    {"dp_shard": 8, "pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "tp": 1},
    {"dp_shard": 4, "pp": 4, "micro_batch_size": 1, "zero_stage": 3},
)


def priced(
    given: Sequence[dict[str, Any]] = GIVEN, trainer: str = "torchtitan"
) -> tuple[Pricer, LayoutBatch, CostInputs]:
    training = read_training({"seq_len": 2048, "global_batch_size": 64, "trainer": trainer})
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": NUM_GPUS})
    pricer = Pricer.build(read_model("llama3-8b"), cluster, training)
    layouts = [resolve_layout(x, trainer=trainer, num_gpus=NUM_GPUS) for x in given]
    batch = LayoutBatch.from_layouts(layouts)
    return pricer, batch, CostInputs.of(pricer, batch, every_rank=True)


def test_every_rank_finds_the_units_microbatches_and_fields_that_it_has() -> None:
    pricer, batch, found = priced()
    loads, at = found.loads.of_ranks, found.loads.at_rank
    for row in range(len(batch)):
        ranks = int(batch.pp[row])
        expected = rank_units(batch, row, pricer.model, pricer.rules)
        assert (found.units[:ranks, :, row] == expected).all()
        assert (found.mean_units[:, row] == expected.mean(axis=0)).all()
        assert found.rank[:ranks, row].tolist() == list(range(ranks))
    assert (loads.m[at] == found.m).all()
    assert (loads.at_unit[at] == found.at_unit).all()
    assert (loads.at_shard[at] == found.at_shard).all()
    for name in BESIDE:
        assert (getattr(loads.batch, name)[at] == getattr(batch, name)).all()


def test_ranks_that_run_the_same_share_a_load_whatever_the_schedule() -> None:
    _, _, found = priced()
    at = found.loads.at_rank
    assert (at[:, 2] == at[:, 3]).all()
    for other in (4, 6):
        assert (at[:, 3] != at[:, other]).all()
    assert at[0, 0] != at[0, 1]
    pipes = found.loads.pipelines.at
    assert pipes[2] != pipes[3] != pipes[4]
    assert pipes[2] == pipes[6]


def test_under_block_n_other_ranks_layers_tell_equal_ranks_apart() -> None:
    """7 of 8 layers are recomputed on both first ranks; the second split's last has no other."""
    given = {"dp_shard": 4, "pp": 4, "micro_batch_size": 1, "ac": "block-7"}
    splits = ([8, 8, 8, 8], [8, 10, 8, 6])
    layouts = [{**given, "layers_per_stage": split} for split in splits]
    _, _, found = priced(layouts, "megatron")
    assert (found.units[0, :, 0] == found.units[0, :, 1]).all()
    first, second = found.loads.at_rank[0]
    assert found.loads.of_ranks.spared[[first, second]].tolist() == [1.0, 0.0]
