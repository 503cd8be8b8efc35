"""Formulas of the source documents, evaluated by the planner's own code. Each function returns the
number that a fact states.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from planner.columns import LayoutBatch
from planner.cost.machine.device import Device
from planner.cost.machine.profile import KERNELS, software_profile
from planner.cost.network.collectives import send_seconds
from planner.cost.price import Pricer, Prices
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.intake.machines import load_gpu, read_cluster
from planner.plan.collective import collective
from planner.schedules import SCHEDULES
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import CommunicationRow
from planner.specs.job import Job
from planner.trainers.registry import TRAINERS, resolve_layout
from planner.work import axes
from planner.work.blocks import layer_ops
from planner.work.ops import Collective
from tests.conftest import job_values

BANDWIDTH, LATENCY, SIZE = 100e9, 2e-6, 1e9


def _priced(job: Mapping[str, Any]) -> tuple[Pricer, Job, Prices]:
    parsed = read_job(dict(job))
    pricer = Pricer.build(parsed.model, parsed.cluster, parsed.training)
    return pricer, parsed, pricer.price(LayoutBatch.from_layouts([parsed.layout]))


def effective_batch(local_batch: int, accumulation: int, dp: int) -> float:
    """Global batch at which a layout of this local batch and DP degree accumulates so often."""
    values = {"dp_shard": dp, "micro_batch_size": local_batch}
    layout = resolve_layout(values, trainer="torchtitan", num_gpus=dp)
    sizes = range(1, 10_000)
    return float(next(size for size in sizes if layout.num_microbatches(size) == accumulation))


def accumulation_steps(global_batch: int, local_batch: int, dp: int) -> float:
    """Microbatches of a step without a pipeline."""
    values = {"dp_shard": dp, "micro_batch_size": local_batch}
    layout = resolve_layout(values, trainer="torchtitan", num_gpus=dp)
    return float(layout.num_microbatches(global_batch))


def layer_activations(tp: int, sp: bool, ac: str, dropout: float) -> float:
    """Saved bytes of one layer of GPT-3 175B over tokens x hidden size, unfused attention, 16 bit.

    dropout: probability on the two residual branches.
    """
    layout = {"tp": tp, "pp": 8, "sequence_parallel": sp, "ac": ac}
    training = {"seq_len": 2048, "global_batch_size": 64, "trainer": "megatron"}
    training["attention_kernel"] = "unfused"
    _, job, prices = _priced({
        "model": {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96,
            "n_positions": 2048, "vocab_size": 51200, "activation_function": "gelu",
            "resid_pdrop": dropout}, "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 64},
        "training": training, "layout": layout,
    })  # fmt: skip
    return float(prices.stage_seconds.saved_bytes[0, 0] / (2048 * job.model.hidden_size))


def _flat(num_gpus: int) -> ClusterSpec:
    level = {"gpus": num_gpus, "bandwidth": BANDWIDTH, "latency": LATENCY, "topology": "switch"}
    return read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": num_gpus, "fabric": [level]})


def wire_over_size(op: str, ranks: int) -> float:
    """Bytes that a rank sends in a ring, over the size of the buffer."""
    answer = collective(op, SIZE, _flat(ranks), algorithm="ring")
    return answer.wire_bytes_per_rank / SIZE


def collective_over_closed_form(op: str, algorithm: str, ranks: int) -> float:
    """Seconds of `collective` over the document's formula."""
    n, log = ranks, float(np.ceil(np.log2(ranks)))
    forms = {
        ("all-reduce", "ring"): 2 * (n - 1) * (SIZE / (n * BANDWIDTH) + LATENCY),
        ("all-gather", "ring"): (n - 1) * (SIZE / (n * BANDWIDTH) + LATENCY),
        ("reduce-scatter", "ring"): (n - 1) * (SIZE / (n * BANDWIDTH) + LATENCY),
        ("all-reduce", "tree"): 2 * log * (SIZE / BANDWIDTH + LATENCY),
        ("p2p", "neighbour"): SIZE / BANDWIDTH + LATENCY,
    }
    ranks_of = None if op == "p2p" else ranks
    return (
        collective(op, SIZE, _flat(ranks), num_ranks=ranks_of, algorithm=algorithm).seconds
        / forms[op, algorithm]
    )


def hierarchical_over_closed_form(inside: int, nodes: int) -> float:
    """Reduce-scatter inside, all-reduce of 1/n across on each member's NIC, all-gather inside."""
    (b1, a1), (b2, a2) = (450e9, 2e-6), (50e9, 4e-6)
    levels = [
        {"gpus": inside, "bandwidth": b1, "latency": a1},
        {"gpus": inside * nodes, "bandwidth": b2, "latency": a2},
    ]
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": inside * nodes, "fabric": levels})
    within = (inside - 1) * (SIZE / (inside * b1) + a1)
    across = 2 * (nodes - 1) * (SIZE / inside / (nodes * b2) + a2)
    found = collective("all-reduce", SIZE, cluster, algorithm="hierarchical")
    return found.seconds / (2 * within + across)


def bubble_over_ideal(schedule: str, pp: int, microbatches: int) -> float:
    """Idle seconds over m (forward + backward), equal stages, free sends."""
    columns = (
        np.array([pp]),
        np.array([1]),
        np.array([microbatches]),
        np.array([1.0]),
        np.array([1.2]),
        np.array([0.8]),
    )
    return float(SCHEDULES[schedule].bubble_seconds(*columns)[0]) / (microbatches * 3.0)


def tensor_parallel_collectives(model: str, tp: int) -> float:
    """Collectives of a dense layer with sequence parallelism; each moves one activation."""
    job = job_values(model, "h100-sxm-80gb", tp, 8192, 1)
    parsed = read_job({**job, "layout": {"tp": tp}})
    batch = LayoutBatch.from_layouts([parsed.layout])
    (kind, _) = parsed.model.distinct_layers()[0]
    count = 0
    for op in layer_ops(parsed.model, kind, True):
        sites = axes.SITES[op.site] if isinstance(op, Collective) else ()
        for site in sites:
            if site.axis == "tp" and site.applies(batch)[0]:
                count += (site.forward is not None) + (site.backward is not None)
    return float(count)


def pipeline_bytes(model: str, micro_batch: int, seq_len: int) -> float:
    """Bytes over a stage boundary both ways, a microbatch, over 2 x batch x seq x hidden x 2."""
    fabric = [{"gpus": 8, "bandwidth": 1e9, "latency": 0}]
    job = {"model": model, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8, "fabric": fabric}}
    training = {"seq_len": seq_len, "global_batch_size": 64}
    pricer, parsed, prices = _priced(
        {
            **job,
            "training": training,
            "layout": {"pp": 8, "micro_batch_size": micro_batch, "dp_shard": 1},
        }
    )
    rate = 1e12 / send_seconds(np.array([1e12]), np.array([1.0]), pricer.fabric)[0]
    return float(
        2
        * prices.stage_seconds.sends.mean_seconds()[0]
        * rate
        / (2 * micro_batch * seq_len * parsed.model.hidden_size * 2)
    )


def forward_flops_over_2nt(model: str, seq_len: int) -> float:
    """Counted forward FLOPs of one step over 2 x parameters x tokens."""
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 1}
    training = {"seq_len": seq_len, "global_batch_size": 1}
    job = {"model": model, "cluster": cluster, "training": training, "layout": {}}
    _, parsed, prices = _priced(job)
    counts = np.array([count for _, count in parsed.model.distinct_layers()] + [1.0, 1.0])
    return float(counts @ prices.stage_seconds.forward_flops[:, 0]) / (
        2.0 * parsed.model.total_parameters() * seq_len
    )


def causal_attention_share(seq_len: int) -> float:
    """Counted forward FLOPs of attention over the full square's: the growth with the sequence."""
    total = {}
    for length in (seq_len, 2 * seq_len):
        total[length] = forward_flops_over_2nt("llama3-8b", length)
    model = read_job(
        {
            "model": "llama3-8b",
            "cluster": "h100-8",
            "training": {"seq_len": seq_len, "global_batch_size": 8},
        }
    ).model
    per_token = (total[2 * seq_len] - total[seq_len]) * 2.0 * model.total_parameters()
    heads = model.num_hidden_layers * model.num_attention_heads
    square = 2.0 * heads * 2 * model.head_dim * seq_len
    return per_token / square


def nvlink_both_directions(gpu: str) -> float:
    """Bytes a second, both directions, of the innermost level that the GPU is sold with."""
    return 2 * read_cluster({"gpu": gpu, "num_gpus": 8}).fabric[0].bandwidth_bytes_per_second


def inter_node(gpu: str) -> float:
    """Bytes a second and GPU between nodes, one way."""
    return read_cluster({"gpu": gpu, "num_gpus": 16}).fabric[1].bandwidth_bytes_per_second


def grouped_over_loop(experts: int, tokens: int, hidden: int, width: int) -> float:
    """How much faster one grouped GEMM is than a loop of launches, tokens an expert, forward."""
    gpu = load_gpu("h100-sxm-80gb")
    device = Device.build(
        read_cluster({"gpu": gpu.name, "num_gpus": 8}),
        KERNELS["hopper"],
        software_profile(TRAINERS["torchtitan"]),
    )
    rows, cols, depth, bf16 = (
        np.array([float(tokens)]),
        np.array([float(width)]),
        np.array([float(hidden)]),
        np.zeros(1, dtype=np.int64),
    )
    grouped = device.gemm_seconds(rows, cols, depth, np.array([float(experts)]), bf16)[0]
    alone = device.gemm_seconds(rows, cols, depth, np.ones(1), bf16)[0]
    launch = software_profile(TRAINERS["torchtitan"]).launch_seconds
    return float(experts * max(alone, launch) / grouped)


def axes_in_order(axes: list[str]) -> float:
    """1 where these axes, from the inside out, stand so in the default order of ranks."""
    order = [axis for axis in read_cluster("h100-64").rank_order if axis in axes]
    return float(order == axes)


def default_zero_stage(pp: int) -> float:
    """TorchTitan's own choice on 16 GPUs: 3 reshards after forward, 2 does not."""
    return float(resolve_layout({"pp": pp}, trainer="torchtitan", num_gpus=16).zero_stage)


def float8_speedup_of(unit: str) -> float:
    """Forward seconds in bf16 over those in float8, of a layer or of the head of Llama 3 70B."""
    seconds = {}
    for precision in ("bf16", "float8-tensorwise"):
        layout = {"tp": 8, "dp_shard": 8, "precision": precision, "compile": True}
        job = {
            "model": "llama3-70b",
            "cluster": "h100-64",
            "training": {"seq_len": 8192, "global_batch_size": 64},
            "layout": layout,
        }
        _, _, prices = _priced(job)
        seconds[precision] = float(prices.stage_seconds.forward[{"layer": 0, "head": -1}[unit], 0])
    return seconds["bf16"] / seconds["float8-tensorwise"]


def _rows(job: Mapping[str, Any], dimension: str) -> list[CommunicationRow]:
    found = estimate_job(read_job(dict(job)))
    assert found.valid, found.violations
    return [one for one in found.communication if one.dimension == dimension]


def volume_over_parameters(job: Mapping[str, Any], dimension: str) -> float:
    """Elements that a rank sends in a step of one microbatch, over the model's parameters.

    Parameters are gathered in 2 bytes, gradients reduced in 4; (n - 1) / n of a buffer is sent.
    """
    model = read_job(dict(job)).model
    sent = sum(
        one.volume_bytes
        / (2.0 if one.operation == "all-gather" else 4.0)
        * one.group_size
        / (one.group_size - 1.0)
        for one in _rows(job, dimension)
    )
    return sent / model.total_parameters()


def synchronisations_a_block(job: Mapping[str, Any], dimension: str) -> float:
    """Collectives of a microbatch over the model's layers, those of whole layers alone."""
    rows = _rows(job, dimension)
    layers = read_job(dict(job)).model.num_hidden_layers
    return sum(one.per_step for one in rows if one.per_step >= layers) / layers


def activations_a_block(job: Mapping[str, Any]) -> float:
    """Bytes that tensor parallelism sends for a layer, over one activation; all of a buffer."""
    parsed = read_job(dict(job))
    training, model = parsed.training, parsed.model
    activation = training.seq_len * model.hidden_size * 2.0
    return sum(
        one.per_step // model.num_hidden_layers * one.message_bytes / activation
        for one in _rows(job, "tp")
    )


def boundary_bytes(job: Mapping[str, Any]) -> float:
    """Bytes over a stage boundary, both ways, of the whole batch, over 2 batch seq hidden 2.

    The rank that is priced sends one way over each of its boundaries.
    """
    parsed = read_job(dict(job))
    rows, training = _rows(job, "pp"), parsed.training
    one_way = max(one.per_step * one.message_bytes for one in rows)
    stated = 2 * training.global_batch_size * training.seq_len * parsed.model.hidden_size * 2
    assert all(one.operation == "send" for one in rows)
    return 2 * one_way / stated


def dimensions_reported(job: Mapping[str, Any]) -> float:
    """Dimensions with collective, message, volume, algorithm and time; the memory a card beside."""
    found = estimate_job(read_job(dict(job)))
    assert found.device_bytes, found.violations
    whole = {
        one.dimension
        for one in found.communication
        if one.message_bytes and one.volume_bytes and one.seconds and one.algorithm and one.level
    }
    return float(len(whole))


def utilisation(job: Mapping[str, Any], lost: list[str]) -> float:
    """What is left of a step without these parts: bubble, or communication of a dimension."""
    found = estimate_job(read_job(dict(job)))
    assert found.time is not None, found.violations
    exposed = found.time.exposed_communication_seconds
    gone = sum(found.time.bubble_seconds if one == "bubble" else exposed[one] for one in lost)
    return 1.0 - gone / (found.step_seconds or 1.0)


def border_operation(site: str, operation: str) -> float:
    """1 where this collective runs forward at this border of sequence parallelism."""
    (sequence, _) = axes.SITES[site]
    return float(sequence.forward == operation)


def collectives_offered(names: list[str]) -> float:
    """How many of these the `collective` command answers for."""
    return float(sum(collective(name, SIZE, _flat(8)).seconds > 0 for name in names))


def algorithms_offered(collectives: list[str], algorithms: list[str]) -> float:
    """Pairs of a collective and an algorithm with a closed form, on the fabric that it needs."""
    pairs = 0
    for algorithm in algorithms:
        grid = algorithm if algorithm in ("mesh", "torus") else "switch"
        level = {"gpus": 16, "bandwidth": BANDWIDTH, "latency": LATENCY, "topology": grid}
        fabric = [{**level, **({"shape": [4, 4]} if grid != "switch" else {})}]
        machine = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 16, "fabric": fabric,
                                "gpus_per_node": 16})  # fmt: skip
        for name in collectives:
            with suppress(SpecError):  # it does not do this collective
                pairs += collective(name, SIZE, machine, algorithm=algorithm).seconds > 0
    return float(pairs)


FORMULAS: Mapping[str, Callable[..., float]] = {
    f.__name__: f
    for f in (
        effective_batch, accumulation_steps, layer_activations, wire_over_size,
        collective_over_closed_form, hierarchical_over_closed_form,
        bubble_over_ideal, tensor_parallel_collectives, pipeline_bytes, forward_flops_over_2nt,
        causal_attention_share,
        nvlink_both_directions, inter_node, grouped_over_loop, axes_in_order, default_zero_stage,
        float8_speedup_of,
        volume_over_parameters, synchronisations_a_block, activations_a_block, boundary_bytes,
        dimensions_reported, utilisation, border_operation, collectives_offered,
        algorithms_offered,
    )
}  # fmt: skip
