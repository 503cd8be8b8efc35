"""Memory at the worst moment: ZeRO's table, what switches move, peaks of an emulated rank."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.cost_inputs import units_at
from planner.cost.data_parallel.sharding import unit_shards
from planner.cost.data_parallel.unit_elements import unit_parameters
from planner.cost.memory.peak import PeakMemory, RankShapes, rank_memory, rows
from planner.cost.price import Pricer, Prices
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.specs.training import OPTIMIZER_STATE_BYTES
from planner.trainers.registry import TRAINERS, resolve_layout
from planner.units import GIB, GIGA

PARAMETERS, RANKS = 7.5e9, 64
NOTHING = np.zeros((1, 1))


def shapes(local: float = PARAMETERS, sharded: bool = True, **given: float) -> RankShapes:
    values = {f.name: NOTHING for f in fields(RankShapes)}
    shard = local / (RANKS if sharded else 1)
    whole = {"local": np.full((1, 1), local), "shard": np.full((1, 1), shard)}
    said = {name: np.full((1, 1), value) for name, value in given.items()}
    gathered = {"gathered": whole["local"], "largest_gathered": said.get("largest_local", NOTHING)}
    return RankShapes(**values | whole | gathered | said)


def memory(
    held: RankShapes,
    trainer: str = "megatron",
    microbatches: float = 1.0,
    optimizer: str = "adamw",
    **layout: Any,
) -> PeakMemory:
    """Without workspace."""
    batch = LayoutBatch.from_layouts([resolve_layout(layout, trainer=trainer, num_gpus=RANKS)])
    training = {"seq_len": 128, "global_batch_size": 64, "trainer": trainer, "optimizer": optimizer}
    training = read_training(training)
    return rank_memory(held, batch, np.array([microbatches]), training, TRAINERS[trainer], 0.0)


def states(memory: PeakMemory) -> float:
    return float((memory.parameters + memory.gradients + memory.optimizer)[0, 0])


# ---- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B on 64 ranks, 2 + 2 + 12 bytes, 16-bit gradients."""
    m = memory(shapes(sharded=stage > 0), zero_stage=stage, reduce_dtype="bfloat16")
    assert states(m) / GIGA == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("stage", "bytes_each"), [(0, 18.0), (1, 6 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)]
)
def test_megatron_keeps_gradients_in_fp32(stage: int, bytes_each: float) -> None:
    """Its own default (--accumulate-allreduce-grads-in-fp32 with bf16): 2 + 4 + 12 bytes."""
    held = states(memory(shapes(sharded=stage > 0), zero_stage=stage))
    assert held / PARAMETERS == pytest.approx(bytes_each)


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp_shards_four_fp32_copies(stage: int) -> None:
    """TorchTitan: all in fp32, sharded; ZeRO-2 keeps the bf16 copy until backward."""
    m = memory(shapes(), trainer="torchtitan", zero_stage=stage)
    assert states(m) / PARAMETERS == pytest.approx(16 / 64 if stage == 3 else 12 / 64 + 2.0)


def test_gradients_accumulate_sharded_without_a_pipeline() -> None:
    """FSDP keeps sharded gradients between microbatches; in one they come as activations go."""
    held = shapes(saved_bytes=20 * GIB, in_flight=1.0)
    once, often = (memory(held, trainer="torchtitan", microbatches=m) for m in (1.0, 4.0))
    assert float((often.allocated - once.allocated)[0, 0]) == pytest.approx(PARAMETERS * 4 / 64)
    assert float(once.gradients[0, 0]) == 0.0, "at the worst moment, the loss, there is none yet"


def test_gradients_accumulate_whole_under_a_pipeline() -> None:
    """FSDP2 under PP reduces after the last microbatch: until then gradients stay whole."""
    held = shapes(saved_bytes=20 * GIB, in_flight=1.0)
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        layout = {"pp": 2, "zero_stage": 3, "reduce_dtype": dtype}
        m = memory(held, trainer="torchtitan", microbatches=4.0, **layout)
        assert float(m.gradients[0, 0]) == pytest.approx(PARAMETERS * width)


def test_a_pipeline_keeps_parameters_gathered_unless_resharding_is_asked_for() -> None:
    both = (memory(shapes(), trainer="torchtitan", pp=2, zero_stage=stage) for stage in (2, 3))
    two, three = (one.parameters[0, 0] for one in both)
    assert two - three == pytest.approx(PARAMETERS * 2)


def test_offload_leaves_no_state_on_the_device() -> None:
    m = memory(shapes(), trainer="torchtitan", cpu_offload=True)
    assert states(m) == 0.0
    megatron = memory(shapes(), cpu_offload=True)
    assert float(megatron.optimizer[0, 0]) == 0.0
    assert float((megatron.parameters + megatron.gradients)[0, 0]) == PARAMETERS * 6


@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_a_share_of_offload_leaves_the_other_states_on_the_device(share: float) -> None:
    """Masters and two moments in fp32, less the share; parameters and gradients stay."""
    m = memory(shapes(), cpu_offload=True, optimizer_offload_fraction=share)
    kept = (1.0 - share) * 12 * PARAMETERS / RANKS
    assert float(m.optimizer[0, 0]) == pytest.approx(kept)
    assert float(m.allocated[0, 0]) == pytest.approx(PARAMETERS * 6 + kept)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [("adamw", 8.0), ("adamw-bf16-states", 4.0), ("sgd", 4.0), ("adafactor", 0.1), ("muon", 4.0)],
)
def test_optimizer_states(optimizer: str, bytes_each: float) -> None:
    """Two fp32 moments; two bf16; one momentum; rows, columns; one momentum."""
    assert OPTIMIZER_STATE_BYTES[optimizer] == bytes_each
    m = memory(shapes(), trainer="torchtitan", optimizer=optimizer)
    assert float(m.optimizer[0, 0]) == pytest.approx(PARAMETERS / 64 * bytes_each)


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_muon_leaves_embedding_and_head_to_adamw(trainer: str) -> None:
    """Their second moment is 4 bytes more (Megatron-LM core/optimizer/muon.py)."""
    plain, more = (
        memory(shapes(vocabulary_shard=count), trainer=trainer, optimizer="muon")
        for count in (0.0, 1e6)
    )
    assert float((more.optimizer - plain.optimizer)[0, 0]) == pytest.approx(4e6)


def test_buffers_of_owners_are_padded() -> None:
    """Parameters in 16 bits and gradients in fp32 (Megatron-LM core 0.18 param_layout.py)."""
    plain, more = (states(memory(shapes(padding=count), zero_stage=1)) for count in (0.0, 1e6))
    assert more - plain == pytest.approx(6e6)


def test_bf16_masters_halve_states_and_moments() -> None:
    both = (memory(shapes(), trainer="torchtitan", master_dtype=t) for t in ("float32", "bfloat16"))
    full, half = both
    assert states(half) == pytest.approx(states(full) / 2)


def test_pure_bf16_states_take_8_bytes() -> None:
    """Parameters, gradients, two moments; parameters are their own masters."""
    narrow = {"master_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    whole, split = shapes(sharded=False), shapes()
    assert states(memory(whole, zero_stage=0, **narrow)) == 8 * PARAMETERS
    assert states(memory(split, zero_stage=1, **narrow)) == (4 + 4 / 64) * PARAMETERS
    assert states(memory(split, trainer="fsdp", **narrow)) == 8 / 64 * PARAMETERS


def test_optimizer_in_backward_keeps_one_layers_gradients() -> None:
    layer, held = 1e6, shapes(largest_local=1e6)
    flags = (False, True)
    later, early = (memory(held, trainer="torchtitan", optimizer_in_backward=on) for on in flags)
    assert float(later.allocated[0, 0]) == pytest.approx(PARAMETERS * 16 / 64 + layer * 4), (
        "shards, and one layer's fp32 reduction"
    )
    assert float(early.allocated[0, 0]) == pytest.approx(PARAMETERS * 12 / 64 + layer * 4)


def test_transformer_engine_caches_fp8_weights() -> None:
    copies = (shapes(copies_bytes=count * PARAMETERS) for count in (0, 1))
    plain, cached = (memory(held).parameters[0, 0] for held in copies)
    assert cached - plain == PARAMETERS


# ---- moments -------------------------------------------------------------------------------------


def test_the_worst_moment_is_the_worst_of_all() -> None:
    """Logits at the loss, a recomputed layer with its weights, all gradients at the update."""
    base = shapes(saved_bytes=10 * GIB, in_flight=1.0)
    at_loss = memory(replace(base, logits_bytes=np.full((1, 1), 40 * GIB)), trainer="torchtitan")
    late = replace(base, last_layer_bytes=np.full((1, 1), 30 * GIB))
    at_layer = memory(late, trainer="torchtitan")
    at_update = memory(shapes(local=1e11), trainer="torchtitan")
    assert (at_loss.logits > 0).all()
    assert float(at_loss.allocated[0, 0]) == pytest.approx(PARAMETERS * 12 / 64 + 50 * GIB)
    assert float(at_layer.activations[0, 0]) == 40 * GIB
    assert (at_layer.logits == 0).all()
    assert float(at_update.allocated[0, 0]) == pytest.approx(1e11 * 16 / 64)
    for m in (at_loss, at_layer, at_update):
        parts = rows(m)
        assert sum(
            parts[name] for name in parts if name not in ("allocated", "cached")
        ) == pytest.approx(m.allocated)


def test_activations_are_those_of_all_microbatches_in_flight() -> None:
    held = shapes(saved_bytes=GIB, boundary_bytes=GIB / 8)
    held = replace(held, in_flight=np.full((1, 1), 4.0))
    m = memory(held, trainer="torchtitan", pp=4, microbatches=8.0)
    assert float(m.activations[0, 0]) == 4 * GIB * 9 / 8


# ---- whole models --------------------------------------------------------------------------------


def pricer(model: Any = "llama3-8b", num_gpus: int = 8, **training: Any) -> Pricer:
    values = {"seq_len": 8192, "global_batch_size": 16, **training}
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": num_gpus})
    return Pricer.build(read_model(model), cluster, read_training(values))


def price(p: Pricer, **layout: Any) -> Prices:
    trainer = p.training.trainer
    resolved = resolve_layout(layout, trainer=trainer, num_gpus=p.cluster.num_gpus)
    batch = LayoutBatch.from_layouts([resolved])
    return p.price(batch, every_rank=True)


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
    assert price(p, tp=8, micro_batch_size=2, ac="full").peak_allocated_bytes[
        0
    ] / GIB == pytest.approx(39.17, rel=0.03)


def test_states_of_a_whole_model_are_its_published_parameters() -> None:
    p = pricer()
    m = price(p, ac="full").memory
    assert float(m.parameters[0, 0]) == pytest.approx(p.model.total_parameters() * 4 / 8, rel=1e-9)
    assert float(m.optimizer[0, 0]) == pytest.approx(p.model.total_parameters() * 8 / 8, rel=1e-9)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_expert_parallelism_divides_experts_without_changing_the_sum(name: str) -> None:
    """EP over ranks that FSDP would shard over anyway: the same share a rank."""
    p = pricer(name)
    alone, spread = (price(p, ep=ep).memory.parameters[0, 0] for ep in (1, 8))
    assert alone == pytest.approx(spread, rel=1e-9)


def test_pipeline_ranks_hold_the_model_once() -> None:
    p = pricer("llama3-8b", num_gpus=8)
    m = price(p, pp=4, dp_shard=2).memory
    assert m.optimizer.shape == (4, 1)
    assert float(m.optimizer.sum()) == pytest.approx(p.model.total_parameters() * 8 / 2, rel=1e-9)


def test_a_tied_head_is_copied_to_the_last_stage() -> None:
    p = pricer("llama3.2-1b")
    model = p.model
    assert model.tie_word_embeddings
    alone = price(pricer("llama3.2-1b", num_gpus=1), ac="full").memory.optimizer.sum() * 4 / 8
    split = price(p, pp=2, dp_shard=4).memory.optimizer.sum() * 4 / 8 * 4
    assert float(split - alone) == pytest.approx(model.vocab_size * model.hidden_size * 4, rel=1e-6)


def test_logits_are_local_under_a_vocabulary_parallel_loss() -> None:
    """12 bytes a logit eager; under TP local and 16 (DTensor), or whole where told so."""
    p = pricer(num_gpus=8)
    tokens, vocab = 8192, p.model.vocab_size
    assert float(price(p, ac="full").memory.logits[0, 0]) == 12.0 * tokens * vocab
    assert float(price(p, ac="full", tp=8).memory.logits[0, 0]) == 16.0 * tokens * vocab / 8
    whole = pricer(num_gpus=8, vocab_parallel_loss=False)
    assert float(price(whole, ac="full", tp=8).memory.logits[0, 0]) == 12.0 * tokens * vocab


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
    saved = prices.stage_seconds.saved_bytes[0, 0]
    layers = [8, 9, 8, 7]
    received = 2.0 * 2048 * 4096
    by_hand = [
        n * (count * saved - received) for n, count in zip([4, 3, 2, 1], layers, strict=True)
    ]
    assert sum(layers) == 32
    backward = prices.memory.activations[1:3, 0] - by_hand[1:3]
    assert backward[0] == pytest.approx(backward[1], rel=1e-6)
    assert 0 < backward[0] < saved
    more = (gpipe.memory.activations - prices.memory.activations)[1, 0] / (9 * saved - received)
    assert 4 < more < 5 + 1e-6


def test_a_torch_pipeline_receives_every_microbatch_in_a_buffer_of_its_own() -> None:
    """2 x 8 buffers of a middle stage, 8 at the ends; the first stage's tokens are nothing."""
    p = pricer("llama3-8b", num_gpus=4, seq_len=2048, global_batch_size=8)
    one = 2.0 * 2048 * 4096
    buffers = price(p, pp=4, ac="none", micro_batch_size=1).memory.buffers[:, 0]
    assert list(buffers[:3]) == [8 * one, 16 * one, 16 * one]


def test_a_table_split_by_tp_has_a_gradient_as_large_as_the_whole_table() -> None:
    """DTensor sums a rank's tokens' rows of the whole table; in a pipeline it waits in fp32."""
    held = shapes(embedding_local=1e9, saved_bytes=GIB, in_flight=1.0)
    plain, split = (
        memory(
            replace(held, embedding_whole=np.full((1, 1), times * 1e9)),
            trainer="torchtitan",
            pp=2,
            microbatches=4.0,
        )
        for times in (1.0, 8.0)
    )
    assert float((split.gradients - plain.gradients)[0, 0]) == pytest.approx(7e9 * 4)
    assert float((split.buffers - plain.buffers)[0, 0]) == pytest.approx(7e9 * 2)


def test_reserved_and_device_lie_above_allocated() -> None:
    p = pricer()
    prices = price(p, ac="selective-op", micro_batch_size=2)
    assert prices.peak_allocated_bytes < prices.peak_reserved_bytes < prices.device_bytes
    outside = p.cluster.gpu.context_bytes + p.profile.communicator_bytes
    assert float(prices.device_bytes[0] - prices.peak_reserved_bytes[0]) == pytest.approx(outside)


def test_streams_do_not_share_what_they_freed() -> None:
    """At the loss no gradient exists, but the allocator holds their shards' and two gathers'."""
    held = shapes(saved_bytes=30 * GIB, in_flight=1.0, largest_gathered=1e9, head_gathered=5e8)
    m = memory(held, trainer="torchtitan")
    assert float(m.gradients[0, 0]) == 0.0
    assert float(m.cached[0, 0]) == pytest.approx(PARAMETERS * 4 / 64 + 2 * 1e9 * 2)
    early = memory(held, trainer="torchtitan", optimizer_in_backward=True)
    assert float(early.cached[0, 0]) == pytest.approx(2 * 1e9 * 2)
    assert float(memory(held).cached[0, 0]) == 0.0, "Megatron's buffers stay"


def test_what_is_too_small_for_logits_stays_cached() -> None:
    """2 bytes a logit (freed before the loss's backward) and what the last forward freed."""
    base = shapes(saved_bytes=GIB, in_flight=1.0, logits_bytes=12 * GIB, working_bytes=3 * GIB)
    without, found = (
        memory(replace(base, leftover_bytes=np.full((1, 1), b)), trainer="torchtitan").cached
        for b in (0.0, 2 * GIB)
    )
    assert float((found - without)[0, 0]) == pytest.approx(5 * GIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_what_fixed_segments_keep_of_a_loss_and_a_table(expandable: bool) -> None:
    """An fp32 copy of the logits, 4 of their 6 bytes, and a 16-bit gradient of the table."""
    held, logits, table = shapes(), 6 * GIB, 1e9
    columns = {"logits_bytes": logits, "embedding_local": table}
    held = replace(held, **{name: np.full((1, 1), value) for name, value in columns.items()})
    batch = LayoutBatch.from_layouts([resolve_layout({}, trainer="megatron", num_gpus=RANKS)])
    spec = read_training(
        {
            "seq_len": 128,
            "global_batch_size": 64,
            "trainer": "megatron",
            "expandable_segments": expandable,
        }
    )
    m = rank_memory(held, batch, np.array([1.0]), spec, TRAINERS["megatron"], 0.0)
    assert float(m.cached[0, 0]) == (0.0 if expandable else 4 * GIB + 2 * table)


def test_a_compiled_loss_needs_8_bytes_a_logit_since_it_is_compiled() -> None:
    """torchtitan left the loss alone until February 2025."""
    for version, width in (("2024-12-23", 12.0), ("2025-06-01", 8.0), ("0.2.2", 4.0)):
        logits = price(pricer(trainer_version=version), ac="full", compile=True).memory.logits[0, 0]
        assert float(logits) == width * 8192 * 128256, version


@pytest.mark.parametrize(("training", "width"), [
    ({}, 4.0),
    ({"chunked_loss": True}, 0.5),
    ({"trainer_version": "0.3.0"}, 0.5),
    ({"trainer_version": "2026-06"}, 0.5),
    ({"trainer_version": "0.3.0", "chunked_loss": False}, 4.0),
])  # fmt: skip
def test_a_chunked_loss_has_the_logits_of_one_chunk(training: dict[str, Any], width: float) -> None:
    costs = units_at(
        pricer(**training),
        LayoutBatch.from_layouts(
            [resolve_layout({"compile": True}, trainer="torchtitan", num_gpus=8)]
        ),
    ).costs
    assert float(costs.logits_bytes[0]) == width * 8192 * 128256
    assert float(costs.chunks_bytes[0]) == (4.0 * 8192 * 4096 if width == 0.5 else 0.0)


def test_deepspeed_adds_bf16_gradients_to_those_in_fp32() -> None:
    """2 + 2 + 4 bytes and a share of 12; Megatron's products add to the fp32 ones."""
    held = shapes()
    assert states(
        memory(held, trainer="megatron-deepspeed", zero_stage=1)
    ) / PARAMETERS == pytest.approx(8 + 12 / 64)
    narrow = memory(held, trainer="megatron-deepspeed", zero_stage=1, reduce_dtype="bfloat16")
    assert states(narrow) / PARAMETERS == pytest.approx(4 + 12 / 64)
    assert states(memory(held, zero_stage=1)) / PARAMETERS == pytest.approx(6 + 12 / 64)


def test_transformer_engine_keeps_an_empty_gradient_of_every_shape() -> None:
    """2 bytes an element of one layer's weights; forks of 2022 and 2023 ran their own products."""
    held = shapes(distinct=1e9)
    training = {"seq_len": 128, "global_batch_size": 64, "trainer": "megatron"}
    batch = LayoutBatch.from_layouts([resolve_layout({}, trainer="megatron", num_gpus=RANKS)])
    newer = (None, "NeMo 25.11", "Megatron-Core main 2026-08")
    for version, kept in (*((one, 2e9) for one in newer), ("2022", 0.0)):
        spec = read_training({**training, "trainer_version": version})
        m = rank_memory(held, batch, np.array([1.0]), spec, TRAINERS["megatron"], 0.0)
        assert float(m.gradients[0, 0]) - 4 * PARAMETERS == pytest.approx(kept), version


def test_a_layout_fits_if_it_does_once_the_cache_is_flushed() -> None:
    """Out of memory is what no flush prevents: reserved memory at the limit is no coin toss."""
    p = pricer()
    prices = price(p, ac="selective-op", micro_batch_size=2)
    assert float(prices.device_bytes[0]) == pytest.approx(p.cluster.usable_memory_bytes)
    assert prices.peak_allocated_bytes < prices.least_device_bytes < prices.device_bytes


def test_near_the_limit_the_allocator_gives_cached_blocks_back() -> None:
    """Reserved exceeds allocated by less on a device nearly full, and never below the floor."""
    p = pricer()
    cases = ("full", "selective-op")
    both = [price(p, ac=ac, micro_batch_size=2) for ac in cases]
    excess = [float(one.peak_reserved_bytes[0] / one.peak_allocated_bytes[0]) for one in both]
    assert excess[0] > excess[1] > 1.0


def test_experts_of_an_ep_group_are_reduced_apart_from_their_layer() -> None:
    """fully_shard of its own around them: the larger of two reductions is there at once."""
    p = pricer("mixtral-8x7b")
    for ep in (1, 8):
        layout = resolve_layout({"ep": ep}, trainer="torchtitan", num_gpus=8)
        batch = LayoutBatch.from_layouts([layout])
        shards = unit_shards(batch, p.optimizer_step, p.fabric, p.profile, p.cluster.rank_order)
        dense, expert = (column[0, 0] for column in unit_parameters(p.model, batch))
        assert shards.local[0, 0] == dense + expert
        assert shards.together[0, 0] == (max(dense, expert) if ep > 1 else dense + expert)


@pytest.mark.parametrize("replicas", [2, 32])
def test_replicas_hold_gradients_twice(replicas: int) -> None:
    """DDP's buckets stand beside the gradients (torch's gradient_as_bucket_view is off)."""
    one, several = (
        memory(
            shapes(sharded=False),
            trainer="torchtitan",
            zero_stage=0,
            dp_replicate=count,
            dp_shard=1,
            tp=RANKS // count,
        )
        for count in (1, replicas)
    )
    added = (several.gradients - one.gradients)[0, 0]
    assert added == pytest.approx(4.0 * PARAMETERS)
