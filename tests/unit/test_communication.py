"""What a layout communicates: five layouts by hand; the rows are what the price sums up; what hides
under most of the compute is said.
"""

from typing import Any

import pytest

from planner import estimate
from planner.calibration.basis import WIDER
from planner.cost.communication import communication, tables
from planner.cost.refine import refine
from planner.cost.step_seconds import both_passes, data_parallel
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.plan.collective import collective
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from tests.conftest import job_values
from tests.pricing import H100, priced

LAYER_8B = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096  # 218,112,000
TABLE_8B = 128256 * 4096
INNER, OUTER = "intra-node", "inter-node"


def job(model: str, num_gpus: int, batch: int, layout: dict[str, Any], **more: Any) -> Job:
    return read_job(job_values(model, H100, num_gpus, 8192, batch, layout=layout, **more))


# dimension, operation, ranks, level; how often a step, bytes of a message, share that a rank sends
Rows = set[tuple[str, str, int, str, float, float, float]]


def fsdp_8b() -> tuple[Any, Rows]:
    """8 microbatches; 32 layers are gathered twice, the head stays; gradients are in fp32.

    A ring of 8 sends 7/8 of the buffer.
    """
    layer, table, head = LAYER_8B, TABLE_8B, TABLE_8B + 4096
    return job("llama3-8b", 8, 64, {}), {
        ("fsdp", "all-gather", 8, INNER, 8 * 2 * 32, 2.0 * layer, 7 / 8),
        ("fsdp", "reduce-scatter", 8, INNER, 8 * 32, 4.0 * layer, 7 / 8),
        ("fsdp", "all-gather", 8, INNER, 8 * 2, 2.0 * table, 7 / 8),
        ("fsdp", "reduce-scatter", 8, INNER, 8, 4.0 * table, 7 / 8),
        ("fsdp", "all-gather", 8, INNER, 8, 2.0 * head, 7 / 8),
        ("fsdp", "reduce-scatter", 8, INNER, 8, 4.0 * head, 7 / 8),
    }


def hsdp_8b() -> tuple[Any, Rows]:
    """FSDP of 8 in each node, and every shard of 1/8 is reduced between 2 nodes: 2 x 1/2 of it."""
    layer, table, head = LAYER_8B, TABLE_8B, TABLE_8B + 4096
    return job("llama3-8b", 16, 128, {"dp_replicate": 2, "dp_shard": 8}), fsdp_8b()[1] | {
        ("dp", "all-reduce", 2, OUTER, 8 * 32, layer / 2, 1.0),
        ("dp", "all-reduce", 2, OUTER, 8, table / 2, 1.0),
        ("dp", "all-reduce", 2, OUTER, 8, head / 2, 1.0),
    }


def pipeline_13b() -> tuple[Any, Rows]:
    """Megatron, 40 layers of 5120 x 13824 on TP 2 x PP 4 x DP 2, 16 microbatches, no recomputation.

    The last of 4 ranks is the busiest: 10 layers and the head, which no stage follows; the one
    before it is in the same node. A layer gathers and scatters twice in each direction, the head
    gathers forward and scatters backward. A rank saves its share of their linears' inputs, which
    are gathered again for the weight gradients.
    """
    layer = (4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120) / 2
    head = (32000 * 5120 + 5120) / 2
    activation = 4096 * 5120 * 2.0
    values = {"tp": 2, "pp": 4, "ac": "none"}
    config = job("llama2-13b", 16, 32, values, trainer="megatron", seq_len=4096)
    return config, {
        ("tp", "all-gather", 2, INNER, 16 * (10 * (4 + 2) + 1 + 1), activation, 1 / 2),
        ("tp", "reduce-scatter", 2, INNER, 16 * (10 * 4 + 1), activation, 1 / 2),
        ("pp", "send", 4, INNER, 16, activation / 2, 1.0),
        ("fsdp", "all-gather", 2, INNER, 10, 2.0 * layer, 1 / 2),
        ("fsdp", "reduce-scatter", 2, INNER, 10, 4.0 * layer, 1 / 2),
        ("fsdp", "all-gather", 2, INNER, 1, 2.0 * head, 1 / 2),
        ("fsdp", "reduce-scatter", 2, INNER, 1, 4.0 * head, 1 / 2),
    }


def ring_8b() -> tuple[Any, Rows]:
    """Context parallelism of 4: keys and values of 2048 tokens go round, gradients twice as far.

    Full checkpointing runs the forward's again. FSDP shards over 2 x 4 ranks.
    """
    layout = {"dp_shard": 2, "cp": 4, "cp_method": "alltoall", "ac": "full"}
    keys = 2048 * 2 * 8 * 128 * 2.0
    sent = ("cp", "send", 4, INNER, 8 * 32 * 3 * (1 + 1 + 2), keys, 1.0)
    return job("llama3-8b", 8, 16, layout), fsdp_8b()[1] | {sent}


def experts_8x7b() -> tuple[Any, Rows]:
    """Mixtral 8x7B, EP 8 over 8 of 16 GPUs: two copies of 8192 tokens to their experts and back.

    Experts are sharded over the 2 ranks that have the same ones, the rest over all 16.
    """
    layout = {"ep": 8, "ac": "none"}
    config = job("mixtral-8x7b", 16, 16, layout, moe_imbalance=1.0)
    dense = 2 * 4096**2 + 2 * 4096 * 1024 + 2 * 4096 + 8 * 4096
    experts = 8 * 3 * 4096 * 14336 / 8
    table = 32000 * 4096
    copies = 2 * 8192 * 4096 * 2.0
    rows: Rows = {
        ("ep", "all-to-all", 8, INNER, 32 * 4, copies, 7 / 8),
        ("ep", "all-to-all", 8, INNER, 32, 8.0 * 8, 7 / 8),
    }
    for size, ranks, often, head in (
        (dense, 16, 32, False), (experts, 2, 32, False), (table, 16, 1, False),
        (table + 4096, 16, 1, True),
    ):  # fmt: skip
        share = (ranks - 1) / ranks
        gathers = often if head else 2 * often
        rows |= {
            ("fsdp", "all-gather", ranks, OUTER, gathers, 2.0 * size, share),
            ("fsdp", "reduce-scatter", ranks, OUTER, often, 4.0 * size, share),
        }
    return config, rows


@pytest.mark.parametrize("case", [fsdp_8b, hsdp_8b, pipeline_13b, ring_8b, experts_8x7b])
def test_five_layouts_by_hand(case: Any) -> None:
    asked, stated = case()
    answer = estimate_job(asked)
    assert answer.valid, answer.violations
    found = {
        (one.dimension, one.operation, one.group_size, one.level, one.per_step, one.message_bytes,
         one.volume_bytes / one.per_step / one.message_bytes)
        for one in answer.communication
    }  # fmt: skip
    assert len(found) == len(answer.communication)
    assert sorted(found, key=str) == [
        tuple(pytest.approx(value) if isinstance(value, float) else value for value in row)
        for row in sorted(stated, key=str)
    ]


def test_a_rows_algorithm_is_that_of_the_command() -> None:
    asked, _ = hsdp_8b()
    for one in estimate_job(asked).communication:
        stride = 8 if one.dimension == "dp" else 1
        group = {"num_ranks": one.group_size, "stride": stride}
        answer = collective(one.operation, one.message_bytes, asked.cluster, **group)
        assert one.algorithm == answer.algorithm
        # the trainer adds its own time around a collective, and the links reach less beside compute
        assert answer.seconds < one.seconds / one.per_step < 2 * answer.seconds


LAYOUTS = {
    "hidden TP": ("llama3-70b", 64, {"tp": 8}, {"trainer": "megatron"}),
    "blocks": ("llama3-70b", 64, {"tp": 4, "pp": 4, "ac": "block-3"}, {"trainer": "megatron"}),
    "layers": ("llama3-8b", 16, {"tp": 2, "ac": "selective-layer-2"}, {}),
    "selective": ("llama3-8b", 16, {"tp": 4, "ac": "selective-op"}, {}),
    "budget": ("llama3-8b", 16, {"tp": 4, "ac": "memory-budget-0.4", "compile": True}, {}),
    "uniform": ("llama3-8b", 16, {"tp": 4, "ac": "uniform-4"}, {"trainer": "megatron"}),
    "no SP": ("llama3-8b", 8, {"tp": 8, "sequence_parallel": False}, {"trainer": "megatron"}),
    "float8": ("llama3-8b", 8, {"precision": "float8-tensorwise", "float8_all_gather": True,
                                "compile": True}, {}),
    "zero bubble": ("llama3-8b", 16, {"pp": 4, "pp_schedule": "ZBVZeroBubble", "ac": "none",
                                      "virtual_stages": 2}, {}),
    "DDP": ("llama3-8b", 8, {"dp_replicate": 8, "dp_shard": 1, "zero_stage": 0}, {}),
    "Ulysses": ("llama3-8b", 16, {"cp": 4, "cp_method": "ulysses"}, {"trainer": "megatron"}),
    "DeepEP": ("deepseek-v3", 256, {"tp": 1, "pp": 8, "ep": 32, "moe_dispatcher": "deepep",
                                    "ac": "full"}, {"trainer": "megatron"}),
    "gathered tokens": ("mixtral-8x7b", 16, {"ep": 8, "moe_dispatcher": "allgather"},
                        {"trainer": "megatron"}),
    "owners": ("llama2-7b", 32, {"zero_stage": 1}, {"trainer": "internevo"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_what_the_price_sums_up(name: str) -> None:
    model, num_gpus, layout, more = LAYOUTS[name]
    asked = job(model, num_gpus, 256, layout, **more)
    pricer, batch = priced(asked)
    prices = pricer.price(batch)
    (table,) = tables(pricer, prices)
    alone, waits = table.sums()
    factor = prices.own_factor[0]
    for axis in ("tp", "cp", "ep"):
        assert factor * waits[axis] == pytest.approx(prices.parts[axis][0], rel=1e-9, abs=1e-12)
        assert alone[axis] >= waits[axis] * (1 - 1e-9)
    load = prices.stage_seconds.load[0]
    inputs = prices.stage_seconds.inputs
    exposed = data_parallel(inputs, both_passes(inputs))
    waited = exposed.fsdp[load] + exposed.dp[load]
    assert waits["fsdp"] + waits["dp"] == pytest.approx(waited, rel=1e-9, abs=1e-12)
    if exposed.hidden[load] > 0 and not layout.get("float8_all_gather"):
        # what runs at all is waited for or hidden, but for an offloader's copies
        wire = waited + exposed.hidden[load]
        assert alone["fsdp"] + alone["dp"] == pytest.approx(wire, rel=1e-9)
    rows = communication(pricer, prices, refine(pricer, batch, prices))[0]
    assert rows
    for axis, seconds in estimate_job(asked).time.exposed_communication_seconds.items():
        found = sum(one.exposed_seconds for one in rows if one.dimension == axis)
        assert found == pytest.approx(seconds, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("oversubscription", "slowed"), [(4, False), (64, True)])
def test_an_oversubscribed_spine_slows_flat_fsdp_or_the_answer_says_why_not(
    oversubscription: int, slowed: bool
) -> None:
    """A ring leaves a leaf of 256 GPUs on one node's 8 links: up to 32 times, that is as fast."""

    def answer(spine: int, layout: dict[str, Any]) -> Any:
        fabric = [
            {"name": "nvlink", "gpus": 8},
            {"name": "leaf", "gpus": 256, "bandwidth": "400 Gb/s"},
            {"name": "spine", "bandwidth": "400 Gb/s", "oversubscription": spine},
        ]
        values = job_values("llama3-70b", H100, 1024, 8192, 2048, layout=layout)
        values["cluster"]["fabric"] = fabric
        return estimate_job(read_job(values))

    flat = {"micro_batch_size": 2, "ac": "full"}
    found, even = answer(oversubscription, flat), answer(1, flat)
    said = f"oversubscribed {oversubscription} times and does not slow FSDP over 1,024 GPUs"
    assert (found.step_seconds > 1.01 * even.step_seconds) == slowed
    assert any(said in text for text in found.warnings) != slowed
    assert not any("oversubscribed" in text for text in even.warnings)
    # replicas 256 apart all cross the spine at once, and nobody says that it is nothing
    hybrid = {**flat, "dp_replicate": 4, "dp_shard": 256}
    found, even = answer(oversubscription, hybrid), answer(1, hybrid)
    assert found.step_seconds > even.step_seconds
    assert not any("oversubscribed" in text for text in found.warnings)


def at_bandwidth(bandwidth: str) -> Estimate:
    """70B by flat FSDP on 64 H100, one sequence a rank."""
    job = job_values("llama3-70b", H100, 64, 8192, 64)
    job["cluster"]["fabric"] = [{"name": "nvlink"}, {"name": "ib", "bandwidth": bandwidth}]
    return estimate(**job, layout={"dp_shard": 64, "ac": "full", "compile": True})


def test_most_of_the_compute_hides_what_no_published_run_hides() -> None:
    slow, fast = at_bandwidth("100 Gb/s"), at_bandwidth("400 Gb/s")
    (said,) = [text for text in slow.warnings if "hide under compute" in text]
    assert "of communication are taken to hide" in said
    assert not any("hide under compute" in text for text in fast.warnings)
    wide, narrow = (one.time_sd for one in (slow, fast))
    assert wide == pytest.approx(WIDER * narrow, rel=0.35)
    assert wide > 1.3 * narrow


@pytest.mark.parametrize(("tp", "cards"), [(2, 4), (8, 1)])
def test_a_group_crosses_as_many_cards_of_a_node_as_it_has_ranks_there(tp: int, cards: int) -> None:
    """405B on 512 H100, one microbatch: two gathers in 8 bits and one scatter in fp32 a step.

    With TP 2 they take 2.0 + 4.0 s at the full 4 x 50 GB/s of a group in a node (its other 4 cards
    serve the other group). One card alone, as with TP 8, would take four times as long for as much.
    Collectives reach three quarters of those rates and more.
    """
    layout = {"dp_shard": 512 // tp, "tp": tp, "micro_batch_size": tp, "ac": "full"}
    layout |= {"precision": "float8-tensorwise", "float8_all_gather": True, "compile": True}
    found = estimate(**job_values("llama3.1-405b", H100, 512, 8192, 512, layout=layout))
    local = (405.8e9 - 2 * 128256 * 16384) / tp  # what layers hold
    crossing = local * (2 * 1.0 + 4.0) * 63 / 64
    least = crossing / (cards * 50e9)
    layers = [one for one in found.communication if one.dimension == "fsdp" and one.per_step > 2]
    assert least < sum(one.seconds for one in layers) < least / 0.75
    assert not any("hide under compute" in text for text in found.warnings) or cards == 1
