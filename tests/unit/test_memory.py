"""Memory at the worst moment: ZeRO's table, what switches move, peaks of an emulated rank."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from planner.cost.cost_inputs import units_at
from planner.cost.data_parallel.unit_elements import unit_parameters
from planner.cost.memory.peak import PeakMemory, RankShapes, rank_memory
from planner.intake.jobs import read_training
from planner.specs.training import OPTIMIZER_STATE_BYTES
from planner.trainers.registry import TRAINERS
from planner.units import GIB, GIGA
from tests import pricing
from tests.pricing import batch_of, price, shards_of
from tests.pricing import rows as layouts_of

PARAMETERS, RANKS = 7.5e9, 64


def shapes(local: float = PARAMETERS, sharded: bool = True, **given: float) -> RankShapes:
    shard = local / (RANKS if sharded else 1)
    whole = {"local": local, "shard": shard, "gathered": local}
    values = dict.fromkeys((f.name for f in fields(RankShapes)), 0.0) | whole
    values |= {"largest_gathered": given.get("largest_local", 0.0), **given}
    return RankShapes(**{name: np.full((1, 1), value) for name, value in values.items()})


def memory(
    held: RankShapes, trainer: str = "megatron", microbatches: float = 1.0, training: Any = None,
    **layout: Any,
) -> PeakMemory:  # fmt: skip
    """Without workspace."""
    given = {"seq_len": 128, "global_batch_size": 64, "trainer": trainer, **(training or {})}
    batch = layouts_of(layout, trainer=trainer, num_gpus=RANKS)
    counts, rules = np.array([microbatches]), TRAINERS[trainer]
    return rank_memory(held, batch, counts, read_training(given), rules, 0.0)


titan = partial(memory, trainer="torchtitan")
ONE = np.ones((1, 1))


def states(memory: PeakMemory) -> float:
    return float(
        (memory.parts()["parameters"] + memory.parts()["gradients"] + memory.optimizer)[0, 0]
    )


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B on 64 ranks, 2 + 2 + 12 bytes, 16-bit gradients."""
    m = memory(shapes(sharded=stage > 0), zero_stage=stage, reduce_dtype="bfloat16")
    assert states(m) / GIGA == pytest.approx(gigabytes, abs=0.05)


BF16 = {"reduce_dtype": "bfloat16"}
PURE = {**BF16, "master_dtype": "bfloat16"}


@pytest.mark.parametrize(("trainer", "stage", "dtypes", "bytes_each"), [
    # Megatron's own default (--accumulate-allreduce-grads-in-fp32 with bf16): 2 + 4 + 12 bytes
    ("megatron", 0, {}, 18),
    ("megatron", 1, {}, 6 + 12 / 64),
    ("megatron", 2, {}, 2 + 16 / 64),
    ("megatron", 3, {}, 18 / 64),
    # parameters, gradients, two moments; parameters are their own masters
    ("megatron", 0, PURE, 8),
    ("megatron", 1, PURE, 4 + 4 / 64),
    ("fsdp", 3, PURE, 8 / 64),
    ("torchtitan", 3, {"master_dtype": "bfloat16"}, 8 / 64),
    # all in fp32, sharded; ZeRO-2 keeps the bf16 copy until backward
    ("torchtitan", 3, {}, 16 / 64),
    ("torchtitan", 2, {}, 12 / 64 + 2.0),
    ("torchtitan", 3, {"cpu_offload": True}, 0.0),
    # DeepSpeed adds bf16 gradients to those in fp32: 2 + 2 + 4 bytes and a share of 12
    ("megatron-deepspeed", 1, {}, 8 + 12 / 64),
    ("megatron-deepspeed", 1, BF16, 4 + 12 / 64),
])  # fmt: skip
def test_bytes_of_states_a_parameter(
    trainer: str, stage: int, dtypes: dict[str, Any], bytes_each: float
) -> None:
    held = states(memory(shapes(sharded=stage > 0), trainer, zero_stage=stage, **dtypes))
    assert held / PARAMETERS == pytest.approx(bytes_each)


def test_gradients_accumulate_sharded_without_a_pipeline() -> None:
    """FSDP keeps sharded gradients between microbatches; in one they come as activations go: at the
    worst moment, the loss, there is none yet."""
    held = shapes(saved_bytes=20 * GIB, in_flight=1.0)
    once, often = (titan(held, microbatches=m) for m in (1.0, 4.0))
    assert often.allocated - once.allocated == pytest.approx(PARAMETERS * 4 / 64)
    assert once.parts()["gradients"] == 0.0


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_gradients_accumulate_whole_under_a_pipeline(dtype: str, width: int) -> None:
    """FSDP2 under PP reduces after the last microbatch: until then gradients stay whole."""
    held = shapes(saved_bytes=20 * GIB, in_flight=1.0)
    m = titan(held, microbatches=4.0, pp=2, zero_stage=3, reduce_dtype=dtype)
    assert m.parts()["gradients"] == pytest.approx(PARAMETERS * width)


def test_a_pipeline_keeps_parameters_gathered_unless_resharding_is_asked_for() -> None:
    two, three = (titan(shapes(), pp=2, zero_stage=stage).parts()["parameters"] for stage in (2, 3))
    assert two - three == pytest.approx(PARAMETERS * 2)


@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_a_share_of_offload_leaves_the_other_states_on_the_device(share: float) -> None:
    """Masters and two moments in fp32, less the share; parameters and gradients stay."""
    m = memory(shapes(), cpu_offload=True, optimizer_offload_fraction=share)
    kept = (1.0 - share) * 12 * PARAMETERS / RANKS
    assert m.optimizer == pytest.approx(kept)
    assert m.allocated == pytest.approx(PARAMETERS * 6 + kept)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [("adamw", 8.0), ("adamw-bf16-states", 4.0), ("sgd", 4.0), ("adafactor", 0.1), ("muon", 4.0)],
)
def test_optimizer_states(optimizer: str, bytes_each: float) -> None:
    """Two fp32 moments; two bf16; one momentum; rows, columns; one momentum."""
    assert OPTIMIZER_STATE_BYTES[optimizer] == bytes_each
    held = titan(shapes(), training={"optimizer": optimizer}).optimizer
    assert held == pytest.approx(PARAMETERS / 64 * bytes_each)


MUON, TITAN = {"optimizer": "muon"}, {"trainer": "torchtitan"}


@pytest.mark.parametrize(("field", "part", "given", "training", "times"), [
    # Muon leaves embedding and head to AdamW: a second moment (Megatron-LM core/optimizer/muon.py)
    ("vocabulary_shard", "optimizer", TITAN, MUON, 4),
    ("vocabulary_shard", "optimizer", {}, MUON, 4),
    # buffers of owners are padded: parameters in 16 bits, gradients in fp32 (param_layout.py)
    ("padding", "parameters", {"zero_stage": 1}, {}, 2),
    ("padding", "gradients", {"zero_stage": 1}, {}, 4),
    ("padding", "optimizer", {"zero_stage": 1}, {}, 0),
    # Transformer Engine caches fp8 weights
    ("copies_bytes", "parameters", {}, {}, 1),
    # and keeps an empty gradient of every shape, 2 bytes an element of a layer's weights; forks of
    # 2022 and 2023 ran their own products
    ("distinct", "gradients", {}, {}, 2),
    ("distinct", "gradients", {}, {"trainer_version": "NeMo 25.11"}, 2),
    ("distinct", "gradients", {}, {"trainer_version": "Megatron-Core main 2026-08"}, 2),
    ("distinct", "gradients", {}, {"trainer_version": "2022"}, 0),
])  # fmt: skip
def test_what_an_element_or_byte_more_adds(
    field: str, part: str, given: dict[str, Any], training: dict[str, str], times: int
) -> None:
    none, more = (
        memory(shapes(**{field: count}), training=training, **given).parts()[part]
        for count in (0.0, 1e9)
    )
    assert more - none == pytest.approx(times * 1e9)


def test_optimizer_in_backward_keeps_one_layers_gradients() -> None:
    """Of shards there are 16 or 12 bytes, and one layer's fp32 reduction."""
    layer, held = 1e6, shapes(largest_local=1e6)
    for early, width in ((False, 16), (True, 12)):
        found = titan(held, optimizer_in_backward=early).allocated
        assert found == pytest.approx(PARAMETERS * width / 64 + layer * 4)


def test_the_worst_moment_is_the_worst_of_all() -> None:
    """Logits at the loss, a recomputed layer with its weights, all gradients at the update."""
    base = shapes(saved_bytes=10 * GIB, in_flight=1.0)
    at_loss = titan(replace(base, logits_bytes=40 * GIB * ONE))
    at_layer = titan(replace(base, last_layer_bytes=30 * GIB * ONE))
    at_update = titan(shapes(local=1e11))
    assert (at_loss.parts()["logits"] > 0).all()
    assert at_loss.allocated == pytest.approx(PARAMETERS * 12 / 64 + 50 * GIB)
    assert [at_layer.parts()[name] for name in ("activations", "logits")] == [40 * GIB, 0]
    assert at_update.allocated == pytest.approx(1e11 * 16 / 64)
    for m in (at_loss, at_layer, at_update):
        parts = m.parts()
        assert parts.pop("allocated") == pytest.approx(sum(parts.values()))


pricer = partial(pricing.pricer, seq_len=8192, global_batch_size=16)


# FSDPMemTracker on one emulated rank of 8: Llama 3 8B, local batch 2, sequence 8192, eager, RMSNorm
# composite (it ran on a CPU) and keys and values repeated (FINDINGS, "Emulated rank").
# tests/torch_memory runs the same for hundreds of smaller cases.
@pytest.mark.parametrize(
    ("ac", "gib"), [("selective-op", 68.35), ("full", 41.29), ("none", 147.35)]
)
def test_emulated_rank_of_llama3_8b(ac: str, gib: float) -> None:
    p = pricer(torch_version="2.7.0", trainer_version="0.2.1")
    allocated = price(p, micro_batch_size=2, ac=ac).peak_allocated_bytes[0]
    assert allocated / GIB == pytest.approx(gib, rel=0.03)


def test_emulated_rank_of_llama3_70b() -> None:
    """FSDP 8 x TP 8, full recomputation, batch 2; the program kept logits whole on TP ranks."""
    p = pricer("llama3-70b", num_gpus=64, vocab_parallel_loss=False)
    allocated = price(p, tp=8, micro_batch_size=2, ac="full").peak_allocated_bytes
    assert allocated / GIB == pytest.approx(39.17, rel=0.03)


def test_states_of_a_whole_model_are_its_published_parameters() -> None:
    p = pricer()
    m, each = price(p, ac="full").memory, p.model.total_parameters() / 8
    assert m.parts()["parameters"] == pytest.approx(each * 4, rel=1e-9)
    assert m.optimizer == pytest.approx(each * 8, rel=1e-9)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_expert_parallelism_divides_experts_without_changing_the_sum(name: str) -> None:
    """EP over ranks that FSDP would shard over anyway: the same share a rank."""
    alone, spread = (price(pricer(name), ep=ep).memory.parts()["parameters"] for ep in (1, 8))
    assert alone == pytest.approx(spread, rel=1e-9)


def test_pipeline_ranks_hold_the_model_once() -> None:
    p = pricer()
    held = price(p, pp=4, dp_shard=2).memory.optimizer
    assert held.shape == (4, 1)
    assert held.sum() == pytest.approx(p.model.total_parameters() * 8 / 2, rel=1e-9)


def test_a_tied_head_is_copied_to_the_last_stage() -> None:
    p = pricer("llama3.2-1b")
    model = p.model
    assert model.tie_word_embeddings
    alone = price(pricer("llama3.2-1b", num_gpus=1), ac="full").memory.optimizer.sum() / 2
    split = price(p, pp=2, dp_shard=4).memory.optimizer.sum() / 2 * 4
    assert split - alone == pytest.approx(model.vocab_size * model.hidden_size * 4, rel=1e-6)


@pytest.mark.parametrize(("tp", "parallel", "width"), [
    (1, True, 12.0), (8, True, 16.0 / 8), (8, False, 12.0)
])  # fmt: skip
def test_logits_are_local_under_a_vocabulary_parallel_loss(
    tp: int, parallel: bool, width: float
) -> None:
    """12 bytes a logit eager; under TP local and 16 (DTensor), or whole where told so."""
    logits = price(pricer(vocab_parallel_loss=parallel), ac="full", tp=tp).memory.parts()["logits"]
    assert logits == width * 8192 * 128256


def test_microbatches_in_flight() -> None:
    """8 microbatches on 4 ranks; activations of a middle rank are those in flight times one
    microbatch's, without its input, which is a receive buffer. GPipe holds 8 until the first
    backward, which is less than 8 beside gradients.

    TorchTitan's split of 32 layers: embedding and head count as one each.
    """
    p = pricer("llama3-8b", num_gpus=4, seq_len=2048, global_batch_size=8)
    prices, gpipe = (
        price(p, pp=4, pp_schedule=schedule, ac="none", micro_batch_size=1)
        for schedule in ("1F1B", "GPipe")
    )
    saved, received = prices.stage_seconds.costs.saved_bytes[0, 0], 2.0 * 2048 * 4096
    by_hand = [3 * (9 * saved - received), 2 * (8 * saved - received)]
    backward = prices.memory.parts()["activations"][1:3, 0] - by_hand
    assert backward[0] == pytest.approx(backward[1], rel=1e-6)
    assert 0 < backward[0] < saved
    more = (gpipe.memory.parts()["activations"] - prices.memory.parts()["activations"])[1, 0] / (
        9 * saved - received
    )
    assert 4 < more < 5 + 1e-6


def test_a_torch_pipeline_receives_every_microbatch_in_a_buffer_of_its_own() -> None:
    """2 x 8 buffers of a middle stage, 8 at the ends; the first stage's tokens are nothing."""
    p = pricer("llama3-8b", num_gpus=4, seq_len=2048, global_batch_size=8)
    one = 2.0 * 2048 * 4096
    buffers = price(p, pp=4, ac="none", micro_batch_size=1).memory.parts()["buffers"][:, 0]
    assert list(buffers[:3]) == [8 * one, 16 * one, 16 * one]


@pytest.mark.parametrize(("trainer", "outputs"), [("megatron", 0), ("internevo", 1)])
def test_a_microbatch_in_flight_holds_the_inputs_of_its_layers(trainer: str, outputs: int) -> None:
    """Recomputed whole, a stage of 8 layers saves 8 inputs; Megatron-LM frees what it has sent."""
    p = pricer("llama3-8b", num_gpus=4, seq_len=2048, global_batch_size=8, trainer=trainer)
    held = price(p, pp=4, ac="full", micro_batch_size=1).memory.parts()["activations"][:, 0]
    assert held[1] - held[2] == (8 + outputs) * 2.0 * 2048 * 4096


def test_a_table_split_by_tp_has_a_gradient_as_large_as_the_whole_table() -> None:
    """DTensor sums a rank's tokens' rows of the whole table; in a pipeline it waits in fp32."""
    held = shapes(embedding_local=1e9, saved_bytes=GIB, in_flight=1.0)
    both = (replace(held, embedding_whole=times * 1e9 * ONE) for times in (1.0, 8.0))
    plain, split = (titan(one, pp=2, microbatches=4.0) for one in both)
    assert split.parts()["gradients"] - plain.parts()["gradients"] == pytest.approx(7e9 * 4)
    assert split.parts()["buffers"] - plain.parts()["buffers"] == pytest.approx(7e9 * 2)


def test_a_layout_fits_if_it_does_once_the_cache_is_flushed() -> None:
    """Out of memory is what no flush prevents: reserved memory at the limit is no coin toss."""
    p = pricer()
    prices = price(p, ac="selective-op", micro_batch_size=2)
    assert prices.device_bytes == pytest.approx(p.cluster.usable_memory_bytes)
    assert prices.peak_allocated_bytes < prices.least_device_bytes < prices.device_bytes
    assert prices.peak_allocated_bytes < prices.peak_reserved_bytes
    outside = p.cluster.gpu.context_bytes + p.profile.communicator_bytes
    assert prices.device_bytes - prices.peak_reserved_bytes == pytest.approx(outside)


def test_streams_do_not_share_what_they_freed() -> None:
    """At the loss no gradient exists, but the allocator holds their shards' and two gathers'.
    Megatron's buffers stay."""
    held = shapes(saved_bytes=30 * GIB, in_flight=1.0, largest_gathered=1e9, head_gathered=5e8)
    plain, early = titan(held), titan(held, optimizer_in_backward=True)
    assert plain.parts()["gradients"] == 0.0
    assert plain.cached == pytest.approx(PARAMETERS * 4 / 64 + 2 * 1e9 * 2)
    assert early.cached == pytest.approx(2 * 1e9 * 2)
    assert memory(held).cached == 0.0


def test_what_is_too_small_for_logits_stays_cached() -> None:
    """2 bytes a logit (freed before the loss's backward) and what the last forward freed."""
    base = shapes(saved_bytes=GIB, in_flight=1.0, logits_bytes=12 * GIB, working_bytes=3 * GIB)
    without, found = (titan(replace(base, leftover_bytes=b * ONE)).cached for b in (0.0, 2 * GIB))
    assert found - without == pytest.approx(5 * GIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_what_fixed_segments_keep_of_a_loss_and_a_table(expandable: bool) -> None:
    """An fp32 copy of the logits, 4 of their 6 bytes, and a 16-bit gradient of the table."""
    held = shapes(logits_bytes=6 * GIB, embedding_local=1e9)
    m = memory(held, training={"expandable_segments": expandable})
    assert m.cached == (0.0 if expandable else 4 * GIB + 2 * 1e9)


@pytest.mark.parametrize(("training", "compiled", "width"), [
    ({"trainer_version": "2024-12-23"}, True, 12.0),
    ({"trainer_version": "2025-03-31"}, True, 12.0),  # compiled since April 2025
    ({"trainer_version": "2025-04-02"}, True, 4.0),
    ({}, True, 4.0),
    ({}, False, 12.0),
    ({"fused_cross_entropy": True}, False, 4.0),
    ({"fused_cross_entropy": False}, True, 12.0),
    ({"model": "deepseek-v2-lite"}, True, 8.0),
])  # fmt: skip
def test_a_compiled_loss_has_no_fp32_copy_of_the_logits(
    training: dict[str, Any], compiled: bool, width: float
) -> None:
    p = pricer(**training)
    found = price(p, ac="full", compile=compiled).memory.parts()["logits"][0, 0]
    assert float(found) == width * 8192 * p.model.vocab_size


@pytest.mark.parametrize(("training", "width"), [
    ({}, 4.0),
    ({"chunked_loss": True}, 0.5),
    ({"trainer_version": "0.3.0"}, 0.5),
    ({"trainer_version": "2026-06"}, 0.5),
    ({"trainer_version": "0.3.0", "chunked_loss": False}, 4.0),
])  # fmt: skip
def test_a_chunked_loss_has_the_logits_of_one_chunk(training: dict[str, Any], width: float) -> None:
    p = pricer(**training)
    costs = units_at(p, batch_of(p, compile=True))
    assert costs.logits_bytes[0] == width * 8192 * 128256
    assert costs.chunks_bytes[0] == (4.0 * 8192 * 4096 if width == 0.5 else 0.0)


def test_near_the_limit_the_allocator_gives_cached_blocks_back() -> None:
    """Reserved exceeds allocated by less on a device nearly full, and never below the floor."""
    both = [price(pricer(), ac=ac, micro_batch_size=2) for ac in ("full", "selective-op")]
    excess = [float(one.peak_reserved_bytes[0] / one.peak_allocated_bytes[0]) for one in both]
    assert excess[0] > excess[1] > 1.0


@pytest.mark.parametrize("ep", [1, 8])
def test_experts_of_an_ep_group_are_reduced_apart_from_their_layer(ep: int) -> None:
    """fully_shard of its own around them: the larger of two reductions is there at once."""
    p = pricer("mixtral-8x7b")
    batch = batch_of(p, ep=ep)
    shards = shards_of(p, batch)
    dense, expert = (column[0, 0] for column in unit_parameters(p.model, batch))
    assert shards.local[0, 0] == dense + expert
    assert shards.together[0, 0] == (max(dense, expert) if ep > 1 else dense + expert)


@pytest.mark.parametrize("replicas", [2, 32])
def test_replicas_hold_gradients_twice(replicas: int) -> None:
    """DDP's buckets stand beside the gradients (torch's gradient_as_bucket_view is off)."""
    held, ways = shapes(sharded=False), ((1, RANKS), (replicas, RANKS // replicas))
    layouts = ({"zero_stage": 0, "dp_replicate": n, "dp_shard": 1, "tp": tp} for n, tp in ways)
    one, several = (titan(held, **layout) for layout in layouts)
    assert several.parts()["gradients"] - one.parts()["gradients"] == pytest.approx(
        4.0 * PARAMETERS
    )
