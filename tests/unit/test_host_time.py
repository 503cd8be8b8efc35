"""Time of the host, by hand: launches, waits, sums of gradients, broadcasts, norms."""

from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.data_parallel.optimizer_step import sum_bytes
from planner.cost.layer.trainer_kernels import composite_norm
from planner.cost.price import Pricer
from planner.intake.jobs import read_training
from planner.intake.models import read_model
from planner.trainers.registry import TRAINERS
from planner.work.blocks import layer_ops
from planner.work.expert_path import PATHS
from planner.work.feed_forward import ROUTING_SINGLES
from planner.work.ops import Elementwise
from planner.work.pieces import COMPOSITE_NORM, ONE_KERNEL_NORM, Code
from tests.pricing import batch_of, collective_of, pricer, shards_of, with_profile

TINY: dict[str, Any] = {
    "name": "tiny", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True, "mlp": "swiglu",
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **TINY, "n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 128,
    "n_shared_experts": 0,
}  # fmt: skip
MICROBATCHES = 4


def seconds(model: dict[str, Any], trainer: str, layout: Any = None, **profile: float) -> float:
    p = pricer(model, 1, seq_len=128, global_batch_size=MICROBATCHES, trainer=trainer)
    batch = batch_of(p, dp_shard=1, **(layout or {}))
    return float(with_profile(p, **profile).price(batch).step_seconds[0])


def by_launch(model: dict[str, Any], trainer: str, layout: Any = None) -> float:
    """Seconds of a launch-bound step that one more second a single launch adds."""
    low, high = (
        seconds(model, trainer, layout, launch_seconds=each, fused_launch_seconds=1e-3)
        for each in (1e-4, 2e-4)
    )
    return (high - low) / 1e-4


def test_routers_and_permutations_launch_one_by_one_among_fused_modules() -> None:
    moved = sum(PATHS["fused"][place][2] for place in ("gather", "scatter"))
    # one cuBLAS call for each of 4 experts, where one launch is counted: 3 matrices, 3 products
    calls = 3 * 3 * (EXPERTS["n_routed_experts"] - 1) / 2
    each_way = ROUTING_SINGLES + moved + calls
    # forward and backward; the launches that refill the queue after a wait are among them
    expected = EXPERTS["num_hidden_layers"] * MICROBATCHES * 2 * each_way
    added = by_launch(EXPERTS, "megatron") - by_launch(TINY, "megatron")
    assert added == pytest.approx(expected, rel=1e-6)
    assert by_launch(TINY, "megatron") == pytest.approx(0.0, abs=1e-6)


def test_compiled_operations_are_kernels_and_no_modules() -> None:
    compiled = (TINY, "torchtitan", {"compile": True})
    slow = {"fused_launch_seconds": 1.0}
    assert seconds(*compiled, **slow) == seconds(*compiled)
    assert seconds(TINY, "megatron", **slow) > 100 * seconds(TINY, "megatron")
    assert 0 < by_launch(*compiled) < by_launch(TINY, "torchtitan")


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
    assert sum_bytes(pricer, batch)[0] == num_bytes
    shards = shards_of(pricer, batch)
    moved = pricer.device.moved_seconds(shards.local[:, 0] * num_bytes)
    assert shards.sum_seconds[:, 0] == pytest.approx(moved)


def on_nodes(trainer: str, num_gpus: int, **layout: Any) -> tuple[Pricer, LayoutBatch]:
    batch = {"seq_len": 2048, "global_batch_size": 8 * num_gpus}
    p = pricer("llama3-8b", num_gpus, "a100-sxm-80gb", trainer=trainer, **batch)
    return p, batch_of(p, **layout)


def test_replicas_reduce_the_shards_that_their_ranks_hold() -> None:
    """HSDP of 2 x 8 GPUs: gradients in fp32, each rank's eighth between the two nodes."""
    p, batch = on_nodes("torchtitan", 16, dp_replicate=2, dp_shard=8)
    shards = shards_of(p, batch)
    expected = collective_of(p, "all-reduce", 4.0 * shards.local[:, 0] / 8.0, 2, 8)
    assert shards.replicate_seconds[:, 0] == pytest.approx(expected)
    assert shards.shard[:, 0] == pytest.approx(shards.local[:, 0] / 8.0)


def test_owners_broadcast_and_reduce_one_after_the_other() -> None:
    """In 16 bits, gradients too."""
    degree = 64
    p, batch = on_nodes("internevo", degree, dp_shard=degree)
    assert TRAINERS["internevo"].whole_owners
    shards = shards_of(p, batch)
    counts = np.array([*(count for _, count in p.model.distinct_layers()), 1, 1])
    whole = 2.0 * counts @ shards.local[:, 0]
    one = collective_of(p, "broadcast", whole / degree, degree)[0]
    for seconds in (shards.gather_seconds, shards.scatter_seconds):
        assert counts @ seconds[:, 0] == pytest.approx(degree * one, rel=1e-6)


def test_owners_cost_more_the_more_of_them_there_are() -> None:
    owners = [(degree, {"dp_shard": degree}) for degree in (128, 512, 1024)]
    cases = [*owners, (1024, {"dp_replicate": 128, "dp_shard": 8})]
    runs = (on_nodes("internevo", num_gpus, **layout) for num_gpus, layout in cases)
    *steps, few = (float(p.price(batch).step_seconds[0]) for p, batch in runs)
    assert steps[0] < steps[1] < steps[2] > few


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
def test_when_a_norm_has_many_kernels(trainer: str, versions: dict[str, str], chain: bool) -> None:
    given = {"seq_len": 2048, "global_batch_size": 8, "trainer": trainer, **versions}
    assert composite_norm(read_training(given), TRAINERS[trainer]) == chain


@pytest.mark.parametrize(("norm", "chain", "expected"), [
    ("rmsnorm", True, COMPOSITE_NORM),
    ("rmsnorm", False, ONE_KERNEL_NORM),
    ("layernorm", True, ONE_KERNEL_NORM),
])  # fmt: skip
def test_an_eager_norm_moves_what_its_kernels_move(
    norm: str, chain: bool, expected: tuple[int, float, float]
) -> None:
    model = read_model("llama3-8b").model_copy(update={"norm": norm})
    kind = model.distinct_layers()[0][0]
    ops = layer_ops(model, kind, True, Code(composite_norm=chain))
    norms = [op for op in ops if isinstance(op, Elementwise) and "norm" in op.name]
    assert len(norms) == 2
    assert {(op.kernels, *op.moves[:2]) for op in norms} == {expected}
