"""Time of the host, by hand: launches, waits, sums of gradients, broadcasts, norms."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.data_parallel import sharding
from planner.cost.layer.trainer_kernels import composite_norm
from planner.cost.network.collectives import collective_seconds
from planner.cost.price import Pricer
from planner.intake.jobs import read_job, read_training
from planner.trainers.registry import TRAINERS
from planner.work.blocks import layer_ops
from planner.work.expert_path import PATHS
from planner.work.feed_forward import ROUTING_SINGLES
from planner.work.ops import Elementwise
from planner.work.pieces import COMPOSITE_NORM, ONE_KERNEL_NORM, Code

TINY: dict[str, Any] = {
    "name": "tiny", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True, "mlp": "swiglu",
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **TINY,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 128,
    "n_shared_experts": 0,
}
MICROBATCHES = 4


def priced(
    model: dict[str, Any], trainer: str, layout: dict[str, Any] | None = None, **profile: float
) -> float:
    job = read_job(
        {
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1},
            "training": {"seq_len": 128, "global_batch_size": MICROBATCHES, "trainer": trainer},
            "layout": {"dp_shard": 1, **(layout or {})},
        }
    )
    pricer = Pricer.build(job.model, job.cluster, job.training)
    slower = replace(pricer.profile, **profile)
    moved = Pricer.build(job.model, job.cluster, job.training, profile=slower)
    return float(moved.price(LayoutBatch.from_layouts([job.layout])).step_seconds[0])


def by_launch(model: dict[str, Any], trainer: str, layout: dict[str, Any] | None = None) -> float:
    """Seconds of a launch-bound step that one more second a single launch adds."""
    low, high = (
        priced(model, trainer, layout, launch_seconds=seconds, fused_launch_seconds=1e-3)
        for seconds in (1e-4, 2e-4)
    )
    return (high - low) / 1e-4


def test_routers_and_permutations_launch_one_by_one_among_fused_modules() -> None:
    moved = sum(PATHS["fused"][place].singles for place in ("gather", "scatter"))
    # one cuBLAS call for each of 4 experts, where one launch is counted: 3 matrices, 3 products
    calls = 3 * 3 * (EXPERTS["n_routed_experts"] - 1) / 2
    each_way = ROUTING_SINGLES + moved + calls
    # forward and backward; the launches that refill the queue after a wait are among them
    expected = EXPERTS["num_hidden_layers"] * MICROBATCHES * 2 * each_way
    added = by_launch(EXPERTS, "megatron") - by_launch(TINY, "megatron")
    assert added == pytest.approx(expected, rel=1e-6)
    assert by_launch(TINY, "megatron") == pytest.approx(0.0, abs=1e-6)


def test_compiled_operations_are_kernels_and_no_modules() -> None:
    assert priced(TINY, "torchtitan", {"compile": True}, fused_launch_seconds=1.0) == priced(
        TINY, "torchtitan", {"compile": True}
    )
    assert priced(TINY, "megatron", fused_launch_seconds=1.0) > 100 * priced(TINY, "megatron")
    assert 0 < by_launch(TINY, "torchtitan", {"compile": True}) < by_launch(TINY, "torchtitan")


@pytest.mark.parametrize(("trainer", "layout", "num_bytes"), [
    ("megatron", {"dp_shard": 8}, 0.0),
    ("megatron-deepspeed", {"dp_shard": 8}, 2.0 + 2 * 4.0),
    ("internevo", {"dp_shard": 8}, 2.0 + 2 * 2.0),
    ("torchtitan", {"dp_shard": 8}, 0.0),
    ("torchtitan", {"dp_shard": 4, "pp": 2}, 2.0 + 2 * 4.0),
    ("torchtitan", {"dp_shard": 4, "pp": 2, "reduce_dtype": "bfloat16"}, 2.0 + 2 * 2.0),
    ("torchtitan", {"dp_replicate": 8, "dp_shard": 1, "zero_stage": 0}, 2.0 + 2 * 4.0),
])  # fmt: skip
def test_a_sum_of_gradients_reads_the_new_and_rewrites_the_old(
    trainer: str, layout: dict[str, Any], num_bytes: float
) -> None:
    pricer, batch = on_nodes(trainer, 8, **layout)
    assert pricer.optimizer_step.sum_bytes(batch)[0] == num_bytes
    shards = sharding.unit_shards(
        batch, pricer.optimizer_step, pricer.fabric, pricer.profile, pricer.cluster.rank_order
    )
    moved = pricer.device.moved_seconds(shards.local[:, 0] * num_bytes)
    assert shards.sum_seconds[:, 0] == pytest.approx(moved)


def on_nodes(trainer: str, num_gpus: int, **layout: Any) -> tuple[Pricer, LayoutBatch]:
    job = read_job(
        {
            "model": "llama3-8b",
            "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": num_gpus},
            "training": {"seq_len": 2048, "global_batch_size": 8 * num_gpus, "trainer": trainer},
            "layout": layout,
        }
    )
    batch = LayoutBatch.from_layouts([job.layout])
    return Pricer.build(job.model, job.cluster, job.training), batch


def test_replicas_reduce_the_shards_that_their_ranks_hold() -> None:
    """HSDP of 2 x 8 GPUs: gradients in fp32, each rank's eighth between the two nodes."""
    pricer, batch = on_nodes("torchtitan", 16, dp_replicate=2, dp_shard=8)
    shards = sharding.unit_shards(
        batch, pricer.optimizer_step, pricer.fabric, pricer.profile, pricer.cluster.rank_order
    )
    expected = [
        collective_seconds(
            "all-reduce",
            4.0 * local / 8.0,
            np.full(1, 2.0),
            np.full(1, 8.0),
            pricer.fabric,
            base_seconds=pricer.profile.collective_seconds,
            nvls_gain=pricer.profile.nvls_gain,
        )[0]
        for local in shards.local
    ]
    assert shards.replicate_seconds[:, 0] == pytest.approx(expected)
    assert shards.shard[:, 0] == pytest.approx(shards.local[:, 0] / 8.0)


def test_owners_broadcast_and_reduce_one_after_the_other() -> None:
    degree = 64
    pricer, batch = on_nodes("internevo", degree, dp_shard=degree)
    assert TRAINERS["internevo"].whole_owners
    shards = sharding.unit_shards(
        batch, pricer.optimizer_step, pricer.fabric, pricer.profile, pricer.cluster.rank_order
    )
    counts = np.array([*(count for _, count in pricer.model.distinct_layers()), 1, 1])
    whole = 2.0 * (counts * shards.local[:, 0]).sum()
    profile = pricer.profile
    one = collective_seconds(
        "broadcast",
        np.array([whole / degree]),
        np.array([float(degree)]),
        np.ones(1),
        pricer.fabric,
        base_seconds=profile.collective_seconds,
        nvls_gain=profile.nvls_gain,
    )[0]
    assert (counts * shards.gather_seconds[:, 0]).sum() == pytest.approx(degree * one, rel=1e-6)
    # bf16 gradients
    assert (counts * shards.scatter_seconds[:, 0]).sum() == pytest.approx(degree * one, rel=1e-6)


def test_owners_cost_more_the_more_of_them_there_are() -> None:
    steps = []
    for degree in (128, 512, 1024):
        pricer, batch = on_nodes("internevo", degree, dp_shard=degree)
        steps.append(float(pricer.price(batch).step_seconds[0]))
    assert steps[0] < steps[1] < steps[2]
    pricer, batch = on_nodes("internevo", 1024, dp_replicate=128, dp_shard=8)
    assert float(pricer.price(batch).step_seconds[0]) < steps[2]


@pytest.mark.parametrize(("trainer", "versions", "chain"), [
    ("torchtitan", {}, False),
    ("torchtitan", {"torch_version": "2.7.1"}, True),
    ("torchtitan", {"torch_version": "2.8.0"}, False),
    ("torchtitan", {"trainer_version": "9dec370 / torch (2024-12-23)"}, True),
    ("torchtitan", {"trainer_version": "torchtitan 2024-05"}, False),
    ("torchtitan", {"trainer_version": "torchtitan 2025-11"}, False),
    ("torchtitan", {"trainer_version": "torchtitan 2024-12", "torch_version": "2.8.0"}, False),
    ("megatron", {"torch_version": "2.4.0"}, False),
])  # fmt: skip
def test_when_a_norm_is_several_kernels(
    trainer: str, versions: dict[str, str], chain: bool
) -> None:
    training = {"seq_len": 2048, "global_batch_size": 8, "trainer": trainer, **versions}
    training = read_training(training)
    assert composite_norm(training, TRAINERS[trainer]) == chain


@pytest.mark.parametrize(("norm", "chain", "expected"), [
    ("rmsnorm", True, COMPOSITE_NORM),
    ("rmsnorm", False, ONE_KERNEL_NORM),
    ("layernorm", True, ONE_KERNEL_NORM),
])  # fmt: skip
def test_an_eager_norm_moves_what_its_kernels_move(
    norm: str, chain: bool, expected: tuple[int, float, float]
) -> None:
    pricer, _ = on_nodes("torchtitan", 8, dp_shard=8)
    model = pricer.model.model_copy(update={"norm": norm})
    kind = model.distinct_layers()[0][0]
    norms = [
        op
        for op in layer_ops(model, kind, True, Code(composite_norm=chain))
        if isinstance(op, Elementwise) and "norm" in op.name
    ]
    assert len(norms) == 2
    assert {(op.kernels, op.forward_moves, op.backward_moves) for op in norms} == {expected}
