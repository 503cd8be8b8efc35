"""Data-parallel communication under compute: FSDP's prefetch played out, and its limits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.data_parallel.overlap import (
    ExposedSeconds,
    HostCopies,
    UnitColumns,
    exposed_data_parallel,
)
from planner.cost.network.collectives import collective_seconds
from planner.cost.price import Pricer
from planner.intake.jobs import read_job, read_training
from planner.trainers.registry import TRAINERS, resolve_layout
from tests.conftest import job_values

LAYERS = 12


def columns(
    forward: float, backward: float, gather: float, scatter: float, replicate: float = 0.0
) -> UnitColumns:
    """One kind of layer, embedding and head, all with the same times."""
    given = {
        "forward": forward, "backward": backward, "gather": gather, "scatter": scatter,
        "replicate": replicate, "gather_copy": 0.0, "scatter_copy": 0.0,
    }  # fmt: skip
    return UnitColumns(**{name: np.full((3, 1), value) for name, value in given.items()})


def exposed(
    seconds: UnitColumns,
    microbatches: float = 1.0,
    trainer: str = "torchtitan",
    overlap: bool = True,
    dp_hidden: float = 1.0,
    **layout: Any,
) -> ExposedSeconds:
    batch = LayoutBatch.from_layouts([resolve_layout(layout, trainer=trainer, num_gpus=64)])
    training = read_training(
        {"seq_len": 128, "global_batch_size": 64, "trainer": trainer, "overlap": {"dp": overlap}}
    )
    units = np.array([[[float(LAYERS)], [1.0], [1.0]]])
    return exposed_data_parallel(
        units, seconds, batch, np.array([microbatches]), training, TRAINERS[trainer], dp_hidden
    )


def played_forward(num_units: int, forward: float, gather: float) -> float:
    """Two streams: unit i computes after its gather; the next gather starts with that compute."""
    gathered, free = gather, 0.0
    for _ in range(num_units):
        start = max(free, gathered)
        gathered = max(start, gathered) + gather
        free = start + forward
    return free - num_units * forward


def played_backward(num_units: int, backward: float, gather: float, scatter: float) -> float:
    """Gathers and scatters in one queue; the last unit's parameters are there."""
    network, free, gathered = 0.0, 0.0, 0.0
    for unit in range(num_units):
        start = max(free, gathered)
        if unit < num_units - 1:
            network = gathered = max(network, start) + gather
        free = start + backward
        network = max(network, free) + scatter
    return max(free, network) - num_units * backward


@pytest.mark.parametrize("gather", [0.2, 0.9, 1.0, 1.7, 4.0])
def test_forward_waits_are_the_prefetch_played_out(gather: float) -> None:
    ours = exposed(columns(1.0, 100.0, gather, 0.0), dp_shard=64, zero_stage=2).fsdp[0, 0]
    played = played_forward(LAYERS + 2, 1.0, gather) + max(0.0, gather - 1.0)
    assert ours == pytest.approx(played, rel=1e-12)


@pytest.mark.parametrize(("gather", "scatter"), [(0.2, 0.3), (0.6, 0.4), (1.0, 1.5), (3.0, 2.0)])
def test_backward_waits_are_the_queue_played_out(gather: float, scatter: float) -> None:
    """Whatever runs at the ends is at most one unit's communication."""
    both = exposed(columns(1.0, 2.0, gather, scatter), dp_shard=64, zero_stage=3).fsdp[0, 0]
    forward = exposed(columns(1.0, 2.0, gather, 0.0), dp_shard=64, zero_stage=2).fsdp[0, 0]
    assert both - forward == pytest.approx(
        played_backward(LAYERS + 2, 2.0, gather, scatter), abs=gather + scatter
    )


def test_what_compute_hides_leaves_the_first_gather_and_the_last_scatter() -> None:
    found = exposed(columns(1.0, 2.0, 0.1, 0.2), dp_shard=64, zero_stage=3)
    assert found.fsdp[0, 0] == pytest.approx(0.1 + 0.2)
    # norm and head stay gathered
    assert found.hidden[0, 0] == pytest.approx((LAYERS + 2) * (0.1 + 0.1 + 0.2) - 0.1 - 0.3)
    assert found.dp[0, 0] == 0.0


@pytest.mark.parametrize(("pp", "head"), [(1, 0.0), (4, 0.1)])
def test_only_reshard_always_gathers_the_head_again(pp: int, head: float) -> None:
    found = exposed(columns(1.0, 2.0, 0.1, 0.2), 4.0, dp_shard=16, pp=pp, zero_stage=3)
    gathers = 4.0 * ((LAYERS + 2) * 0.1 + (LAYERS + 1) * 0.1 + head)
    scatters = (LAYERS + 2) * 0.2 * (4.0 if pp == 1 else 1.0)
    assert (found.fsdp + found.hidden)[0, 0] == pytest.approx(gathers + scatters)


def test_without_overlap_everything_waits() -> None:
    units = LAYERS + 2
    assert (
        exposed(columns(1.0, 2.0, 0.1, 0.2), dp_shard=64, zero_stage=3, overlap=False).fsdp[0, 0]
        >= units * (0.1 + 0.1 + 0.2) - 0.1
    )


def test_under_a_pipeline_gathers_come_once_a_step_and_reductions_at_its_end() -> None:
    """ZeRO-2 under PP: the same waits for 4 and for 32 microbatches; ZeRO-3 pays for each."""
    given = {"dp_shard": 16, "pp": 4}
    once, each = (
        [
            exposed(columns(1.0, 2.0, 1.5, 0.2), m, **given, zero_stage=z).fsdp[0, 0]
            for m in (4.0, 32.0)
        ]
        for z in (2, 3)
    )
    assert once[0] == pytest.approx(once[1])
    assert each[1] > 4 * each[0] > 4 * once[0]


def test_replicas_are_reduced_after_the_shards_and_counted_apart() -> None:
    layout = {"dp_replicate": 2, "dp_shard": 32, "zero_stage": 3}
    found = exposed(columns(1.0, 2.0, 0.1, 0.2, replicate=5.0), **layout)
    assert found.dp[0, 0] == pytest.approx((LAYERS + 2) * (5.0 - 2.0))


def test_a_distributed_optimizer_waits_for_what_one_backward_does_not_hide() -> None:
    """One reduction under the last backward, one gather under the first forward, whatever m."""
    units = LAYERS + 2
    for m in (1.0, 16.0):
        layout = {"trainer": "megatron", "dp_shard": 64, "zero_stage": 1}
        found = exposed(columns(1.0, 2.0, 1.5, 2.5), m, **layout)
        assert found.fsdp[0, 0] == pytest.approx(units * (2.5 - 2.0) + units * (1.5 - 1.0))


def test_the_share_that_compute_hides_and_the_parts_of_what_it_does_not() -> None:
    """A unit's gradients take 1.5 + 0.5 s, of which half of 2 s of backward hides 1 s."""
    found = exposed(
        columns(2.0, 2.0, 0.0, 1.5, replicate=0.5),
        trainer="megatron",
        dp_hidden=0.5,
        dp_replicate=2,
        dp_shard=32,
        zero_stage=1,
    )
    units = LAYERS + 2
    assert found.dp[0, 0] == pytest.approx(units * 0.25)
    assert found.fsdp[0, 0] == pytest.approx(units * 0.75)
    assert found.hidden[0, 0] == pytest.approx(units * 1.0)


def test_a_step_begins_with_a_layer_or_the_head_and_ends_with_a_layer_or_the_embedding() -> None:
    """The root gathers norm and head before the first layer; the embedding's gradient is last."""
    seconds = replace(
        columns(100.0, 100.0, 0.0, 0.0),
        gather=np.array([[1.0], [7.0], [3.0]]),
        scatter=np.array([[1.0], [4.0], [9.0]]),
    )
    for m in (1.0, 2.0):
        found = exposed(seconds, m, dp_shard=64, zero_stage=3)
        assert found.fsdp[0, 0] == pytest.approx(m * (3.0 + 4.0))


def offloaded(compute: float, microbatches: float = 1.0, **layout: Any) -> float:
    """Seconds that FSDP waits: a gather of 0.1 s after an upload of 0.3, a scatter of 0.2 before a
    download of 0.4, and 0.05 to add a gradient on the host.
    """
    copies = HostCopies(
        upload=np.full((3, 1), 0.3), download=np.full((3, 1), 0.4), accumulate=np.full((3, 1), 0.05)
    )
    seconds = replace(columns(100.0, compute, 0.1, 0.2), host=copies)
    given = {"dp_shard": 64, "zero_stage": 3, "cpu_offload": True, **layout}
    return float(exposed(seconds, microbatches, **given).fsdp[0, 0])


ENDS = (0.1 + 0.3) + (0.2 + 0.4)


def test_shards_on_the_host_are_uploaded_before_a_gather_and_downloaded_after_a_scatter() -> None:
    assert offloaded(100.0) == pytest.approx(ENDS)


def test_a_backward_hides_the_longest_of_network_uploads_and_downloads() -> None:
    """Network 0.3 s, upload and gather 0.4 s, scatter and download 0.6 s."""
    assert offloaded(0.5) == pytest.approx(ENDS + (LAYERS + 2) * 0.1)
    assert offloaded(0.0) == pytest.approx(ENDS + (LAYERS + 2) * 0.6)


def test_the_host_waits_for_gradients_that_it_adds_to_earlier_ones_or_consumes() -> None:
    """0.6 s a unit were hidden, and adding takes 0.05 s; the first microbatch adds nothing."""
    units = LAYERS + 2
    assert offloaded(100.0, 3.0) == pytest.approx(3 * ENDS + 2 * units * 0.65)
    consumed = offloaded(100.0, optimizer_in_backward=True)
    assert consumed == pytest.approx(ENDS + units * 0.6)


def test_under_a_pipeline_all_gradients_come_down_once_at_the_end() -> None:
    waited = offloaded(100.0, 8.0, dp_shard=16, pp=4, zero_stage=2)
    assert waited == pytest.approx((0.1 + 0.3) + (LAYERS + 2) * (0.2 + 0.4))


TOKENS, CP = 131072, 8


def context(method: str, cp: int = CP) -> tuple[Pricer, float]:
    """(pricer, exposed seconds of context parallelism for one sequence without recomputation)."""
    job = read_job(job_values("llama3-8b", "h100-sxm-80gb", CP, TOKENS, 1, trainer="fsdp"))
    pricer = Pricer.build(job.model, job.cluster, job.training)
    values = {"cp": cp, "cp_method": method, "ac": "none"}
    layout = resolve_layout(values, trainer="fsdp", num_gpus=CP)
    return pricer, float(pricer.price(LayoutBatch.from_layouts([layout])).parts["cp"][0])


def seconds_of(pricer: Pricer, operation: str, payload_bytes: float) -> float:
    group = np.array([float(CP)]), np.array([1.0])
    profile = pricer.device.profile
    found = collective_seconds(
        operation,
        np.array([payload_bytes]),
        *group,
        pricer.fabric,
        base_seconds=profile.collective_seconds,
        nvls_gain=profile.nvls_gain,
    )
    return float(found[0])


def test_keys_and_values_of_all_tokens_are_gathered_or_passed_round() -> None:
    """2 x tokens x KV width x 2 bytes, (n - 1) / n of it received; backward the other way."""
    pricer, gathered = context("allgather")
    model = pricer.model
    whole = 2.0 * 2.0 * TOKENS * model.num_key_value_heads * model.head_dim
    each = [seconds_of(pricer, operation, whole) for operation in ("all-gather", "reduce-scatter")]
    assert gathered == pytest.approx(model.num_hidden_layers * sum(each), rel=1e-9)
    _, rotated = context("alltoall")
    each = [seconds_of(pricer, operation, whole) for operation in ("rotate", "rotate-gradients")]
    assert rotated == pytest.approx(
        model.num_hidden_layers * (1.0 - pricer.profile.cp_hidden) * sum(each), rel=1e-9
    )


def test_ulysses_exchanges_its_own_tokens_of_queries_keys_values_and_outputs() -> None:
    """Each rank sends its tokens' heads to be computed, and back: Jacobs et al. 2023."""
    pricer, exchanged = context("ulysses")
    model = pricer.model
    own = [
        2.0 * 2.0 * TOKENS / CP * heads * model.head_dim
        for heads in (model.num_key_value_heads, model.num_attention_heads)
    ]
    each = sum(seconds_of(pricer, "all-to-all", payload) for payload in own)
    assert exchanged == pytest.approx(2.0 * model.num_hidden_layers * each, rel=1e-9)
    assert exchanged < context("allgather")[1]


def test_one_rank_passes_nothing_on() -> None:
    assert context("allgather", cp=1)[1] == 0.0


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
    copied = replace(seconds, gather_copy=np.full((3, 1), out), scatter_copy=np.full((3, 1), into))
    with_copies, without = (exposed(s, microbatches, **layout) for s in (copied, seconds))
    head_gathers = min(gathers, 1.0)
    forward = out * ((LAYERS + 1) * gathers + head_gathers)
    expected = microbatches * (forward + into * (LAYERS + 2) * reductions)
    assert with_copies.copies[0, 0] == pytest.approx(expected, rel=1e-12)
    assert without.copies[0, 0] == 0.0
    for field in ("fsdp", "dp", "hidden"):
        assert getattr(with_copies, field) == pytest.approx(getattr(without, field))
