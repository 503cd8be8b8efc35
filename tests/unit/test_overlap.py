"""Data-parallel communication under compute: FSDP's prefetch played out, and its limits; and what
an overlapped forward and backward hide of each other's.
"""

from typing import Any

import numpy as np
import pytest

from planner.columns import FloatColumn
from planner.cost.data_parallel.overlap import ExposedSeconds, exposed_data_parallel
from planner.cost.layer.forward_backward_overlap import PairColumns, relief
from planner.cost.price import Pricer
from planner.intake.jobs import read_training
from planner.trainers.registry import TRAINERS
from tests.pricing import batch_of, collective_of, one_load, pricer, rows, silent_shards

LAYERS = 12
UNITS = LAYERS + 2  # embedding and head


Columns = dict[str, FloatColumn]


def columns(
    forward: float, backward: float, gather: float, scatter: float, replicate: float = 0.0
) -> Columns:
    """One kind of layer, embedding and head, all with the same times."""
    given = {
        "forward": forward, "backward": backward, "gather_seconds": gather,
        "scatter_seconds": scatter, "replicate_seconds": replicate,
    }  # fmt: skip
    return {name: np.full((3, 1), value) for name, value in given.items()}


def exposed(
    seconds: Columns, microbatches: float = 1.0, trainer: str = "torchtitan",
    overlap: bool = True, dp_hidden: float = 1.0, **layout: Any,
) -> ExposedSeconds:  # fmt: skip
    given = {"trainer": trainer, "overlap": {"dp": overlap}}
    training = read_training({"seq_len": 128, "global_batch_size": 64, **given})
    batch = rows(layout, trainer=trainer, num_gpus=64)
    load = one_load(batch, [float(LAYERS), 1.0, 1.0], microbatches)
    shards = silent_shards(**{k: v for k, v in seconds.items() if k.endswith("_seconds")})
    passes = seconds["forward"], seconds["backward"]
    return exposed_data_parallel(load, passes, shards, training, TRAINERS[trainer], dp_hidden)


def played_forward(forward: float, gather: float) -> float:
    """Two streams: unit i computes after its gather; the next gather starts with that compute."""
    gathered, free = gather, 0.0
    for _ in range(UNITS):
        start = max(free, gathered)
        gathered = max(start, gathered) + gather
        free = start + forward
    return free - UNITS * forward


def played_backward(backward: float, gather: float, scatter: float) -> float:
    """Gathers and scatters in one queue; the last unit's parameters are there."""
    network, free, gathered = 0.0, 0.0, 0.0
    for unit in range(UNITS):
        start = max(free, gathered)
        if unit < UNITS - 1:
            network = gathered = max(network, start) + gather
        free = start + backward
        network = max(network, free) + scatter
    return max(free, network) - UNITS * backward


@pytest.mark.parametrize("gather", [0.2, 0.9, 1.0, 1.7, 4.0])
def test_forward_waits_are_the_prefetch_played_out(gather: float) -> None:
    ours = exposed(columns(1.0, 100.0, gather, 0.0), dp_shard=64, zero_stage=2).fsdp
    played = played_forward(1.0, gather) + max(0.0, gather - 1.0)
    assert ours == pytest.approx(played, rel=1e-12)


@pytest.mark.parametrize(("gather", "scatter"), [(0.2, 0.3), (0.6, 0.4), (1.0, 1.5), (3.0, 2.0)])
def test_backward_waits_are_the_queue_played_out(gather: float, scatter: float) -> None:
    """Whatever runs at the ends is at most one unit's communication."""
    both = exposed(columns(1.0, 2.0, gather, scatter), dp_shard=64, zero_stage=3).fsdp
    forward = exposed(columns(1.0, 2.0, gather, 0.0), dp_shard=64, zero_stage=2).fsdp
    played = played_backward(2.0, gather, scatter)
    assert both - forward == pytest.approx(played, abs=gather + scatter)


def test_what_compute_hides_leaves_the_first_gather_and_the_last_scatter() -> None:
    """Norm and head stay gathered."""
    found = exposed(columns(1.0, 2.0, 0.1, 0.2), dp_shard=64, zero_stage=3)
    assert found.fsdp == pytest.approx(0.1 + 0.2)
    assert found.hidden == pytest.approx(UNITS * (0.1 + 0.1 + 0.2) - 0.1 - 0.3)
    assert found.dp == 0.0


@pytest.mark.parametrize(("pp", "head"), [(1, 0.0), (4, 0.1)])
def test_only_reshard_always_gathers_the_head_again(pp: int, head: float) -> None:
    found = exposed(columns(1.0, 2.0, 0.1, 0.2), 4.0, dp_shard=16, pp=pp, zero_stage=3)
    gathers = 4.0 * (UNITS * 0.1 + (UNITS - 1) * 0.1 + head)
    scatters = UNITS * 0.2 * (4.0 if pp == 1 else 1.0)
    assert found.fsdp + found.hidden == pytest.approx(gathers + scatters)


def test_without_overlap_everything_waits() -> None:
    found = exposed(columns(1.0, 2.0, 0.1, 0.2), overlap=False, dp_shard=64, zero_stage=3)
    assert found.fsdp[0] >= UNITS * (0.1 + 0.1 + 0.2) - 0.1


def test_under_a_pipeline_gathers_come_once_a_step_and_reductions_at_its_end() -> None:
    """ZeRO-2 under PP: the same waits for 4 and for 32 microbatches; ZeRO-3 pays for each."""
    seconds, given = columns(1.0, 2.0, 1.5, 0.2), {"dp_shard": 16, "pp": 4}
    once, each = (
        [exposed(seconds, m, **given, zero_stage=stage).fsdp[0] for m in (4.0, 32.0)]
        for stage in (2, 3)
    )
    assert once[0] == pytest.approx(once[1])
    assert each[1] > 4 * each[0] > 4 * once[0]


def test_replicas_are_reduced_after_the_shards_and_counted_apart() -> None:
    layout = {"dp_replicate": 2, "dp_shard": 32, "zero_stage": 3}
    found = exposed(columns(1.0, 2.0, 0.1, 0.2, replicate=5.0), **layout)
    assert found.dp == pytest.approx(UNITS * (5.0 - 2.0))


@pytest.mark.parametrize("m", [1.0, 16.0])
def test_a_distributed_optimizer_waits_for_what_one_backward_does_not_hide(m: float) -> None:
    """One reduction under the last backward, one gather under the first forward, whatever m."""
    layout = {"trainer": "megatron", "dp_shard": 64, "zero_stage": 1}
    found = exposed(columns(1.0, 2.0, 1.5, 2.5), m, **layout)
    assert found.fsdp == pytest.approx(UNITS * (2.5 - 2.0) + UNITS * (1.5 - 1.0))


def test_the_share_that_compute_hides_and_the_parts_of_what_it_does_not() -> None:
    """A unit's gradients take 1.5 + 0.5 s, of which half of 2 s of backward hides 1 s."""
    layout = {"trainer": "megatron", "dp_replicate": 2, "dp_shard": 32, "zero_stage": 1}
    found = exposed(columns(2.0, 2.0, 0.0, 1.5, replicate=0.5), dp_hidden=0.5, **layout)
    parts = [part[0] / UNITS for part in (found.dp, found.fsdp, found.hidden)]
    assert parts == pytest.approx([0.25, 0.75, 1.0])


@pytest.mark.parametrize("m", [1.0, 2.0])
def test_a_step_begins_with_layer_or_head_and_ends_with_layer_or_embedding(m: float) -> None:
    """The root gathers norm and head before the first layer; the embedding's gradient is last."""
    gathers, scatters = (np.array(ends)[:, None] for ends in ((1.0, 7.0, 3.0), (1.0, 4.0, 9.0)))
    ends = {"gather_seconds": gathers, "scatter_seconds": scatters}
    seconds = columns(100.0, 100.0, 0.0, 0.0) | ends
    assert exposed(seconds, m, dp_shard=64, zero_stage=3).fsdp == pytest.approx(m * (3.0 + 4.0))


def offloaded(compute: float, microbatches: float = 1.0, **layout: Any) -> float:
    """Seconds that FSDP waits: a gather of 0.1 s after an upload of 0.3, a scatter of 0.2 before a
    download of 0.4, and 0.05 to add a gradient on the host.
    """
    copies = {"upload_seconds": 0.3, "download_seconds": 0.4, "accumulate_seconds": 0.05}
    host = {name: np.full((3, 1), value) for name, value in copies.items()}
    seconds = columns(100.0, compute, 0.1, 0.2) | host
    given = {"dp_shard": 64, "zero_stage": 3, "cpu_offload": True, **layout}
    return float(exposed(seconds, microbatches, **given).fsdp[0])


ENDS = (0.1 + 0.3) + (0.2 + 0.4)


@pytest.mark.parametrize(("compute", "microbatches", "layout", "waits"), [
    # an upload before the first gather, a download after the last scatter
    (100.0, 1, {}, ENDS),
    # network 0.3 s, upload and gather 0.4 s, scatter and download 0.6 s: the longest is hidden
    (0.5, 1, {}, ENDS + UNITS * 0.1),
    (0.0, 1, {}, ENDS + UNITS * 0.6),
    # 0.6 s a unit were hidden, and adding takes 0.05 s; the first microbatch adds nothing
    (100.0, 3, {}, 3 * ENDS + 2 * UNITS * 0.65),
    (100.0, 1, {"optimizer_in_backward": True}, ENDS + UNITS * 0.6),
    # under a pipeline all gradients come down once at the end
    (100.0, 8, {"dp_shard": 16, "pp": 4, "zero_stage": 2}, (0.1 + 0.3) + UNITS * (0.2 + 0.4)),
])  # fmt: skip
def test_shards_on_the_host_wait_for_what_compute_does_not_hide(
    compute: float, microbatches: int, layout: dict[str, Any], waits: float
) -> None:
    assert offloaded(compute, microbatches, **layout) == pytest.approx(waits)


TOKENS, CP = 131072, 8


def context(method: str, cp: int = CP) -> tuple[Pricer, float]:
    """(pricer, exposed seconds of context parallelism for one sequence without recomputation)."""
    p = pricer("llama3-8b", CP, trainer="fsdp", seq_len=TOKENS, global_batch_size=1)
    batch = batch_of(p, cp=cp, cp_method=method, ac="none")
    return p, float(p.price(batch).parts["cp"][0])


@pytest.mark.parametrize(("method", "operations"), [
    ("allgather", ("all-gather", "reduce-scatter")), ("alltoall", ("rotate", "rotate-gradients")),
])  # fmt: skip
def test_keys_and_values_of_all_tokens_are_gathered_or_passed_round(
    method: str, operations: tuple[str, ...]
) -> None:
    """2 x tokens x KV width x 2 bytes, (n - 1) / n of it received; backward the other way."""
    p, found = context(method)
    whole = 2.0 * 2.0 * TOKENS * p.model.num_key_value_heads * p.model.head_dim
    each = sum(collective_of(p, operation, whole, CP)[0] for operation in operations)
    seen = 1.0 - p.profile.cp_hidden if method == "alltoall" else 1.0
    assert found == pytest.approx(p.model.num_hidden_layers * seen * each, rel=1e-9)


def test_ulysses_exchanges_its_own_tokens_of_queries_keys_values_and_outputs() -> None:
    """Each rank sends its tokens' heads to be computed, and back: Jacobs et al. 2023."""
    p, exchanged = context("ulysses")
    heads = np.array([p.model.num_key_value_heads, p.model.num_attention_heads])
    own = 2.0 * 2.0 * TOKENS / CP * heads * p.model.head_dim
    each = collective_of(p, "all-to-all", own, CP).sum()
    assert exchanged == pytest.approx(2.0 * p.model.num_hidden_layers * each, rel=1e-9)
    assert exchanged < context("allgather")[1]


@pytest.mark.parametrize(("layout", "gathers", "reductions"), [
    ({"dp_shard": 64, "zero_stage": 3}, 2.0, 1.0),
    ({"dp_shard": 64, "zero_stage": 2}, 1.0, 1.0),
    ({"dp_shard": 16, "pp": 4, "zero_stage": 2}, 0.25, 0.25),
])  # fmt: skip
def test_copies_of_buffers_are_paid_for_every_gather_and_reduction(
    layout: dict[str, Any], gathers: float, reductions: float
) -> None:
    """The head is gathered once a microbatch; a pipeline gathers and reduces once a step."""
    microbatches, out, into = 4.0, 0.3, 0.7
    seconds = columns(100.0, 100.0, 0.1, 0.2)
    copies = {"gather_copy_seconds": out, "scatter_copy_seconds": into}
    copied = seconds | {name: np.full((3, 1), value) for name, value in copies.items()}
    with_copies, without = (exposed(s, microbatches, **layout) for s in (copied, seconds))
    forward = out * ((UNITS - 1) * gathers + min(gathers, 1.0))
    expected = microbatches * (forward + into * UNITS * reductions)
    assert with_copies.copies == pytest.approx(expected, rel=1e-12)
    assert without.copies == 0.0
    for field in ("fsdp", "dp", "hidden"):
        assert getattr(with_copies, field) == pytest.approx(getattr(without, field))


def pair(**changes: float) -> PairColumns:
    seconds = {
        "forward_tp": 1.0, "forward_ep": 3.0, "backward_tp": 0.5, "backward_ep": 1.5,
        "forward_cover": 10.0, "backward_cover": 20.0,
    } | changes  # fmt: skip
    columns = {name: np.full((3, 1), value) for name, value in seconds.items()}
    return PairColumns(slowdown=0.25, **columns)


def saved(pairs: PairColumns, virtual_stages: int = 1) -> tuple[float, float, float]:
    units = np.array([[2.0], [1.0], [1.0]])
    found = relief(pairs, units, np.array([virtual_stages]))
    return float(found.tp[0]), float(found.ep[0]), float(found.saved[0])


def test_all_of_it_hides_under_enough_compute() -> None:
    assert saved(pair()) == pytest.approx((4 * 1.5, 4 * 4.5, 0.75 * 4 * 6.0))


def test_no_more_hides_than_the_partner_computes() -> None:
    """The forward's 4 s under 2 s of backward: half. The backward's 2 s under 0.5 s: a quarter."""
    tp, ep, seconds = saved(pair(forward_cover=0.5, backward_cover=2.0))
    assert (tp, ep) == pytest.approx((4 * (0.5 + 0.125), 4 * (1.5 + 0.375)))
    assert seconds == pytest.approx(0.75 * (tp + ep))


def test_a_pair_is_of_one_stage() -> None:
    assert saved(pair(), virtual_stages=2) == pytest.approx((3.0, 9.0, 0.75 * 12.0))
