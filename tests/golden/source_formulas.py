"""Formulas of the source documents, evaluated by the planner's own code. Each function returns the
number that a fact states.
"""

import inspect
import itertools
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
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.plan.collective import collective
from planner.schedules import SCHEDULES
from planner.specs.estimate import CommunicationRow
from planner.specs.job import Job
from planner.trainers.registry import TRAINERS, resolve_layout
from planner.work import axes
from planner.work.blocks import layer_ops
from planner.work.ops import Collective
from tests.conftest import job_values
from tests.pricing import BANDWIDTH, H100, LATENCY, cluster_of, flat, priced

SIZE = 1e9


def _priced(job: Mapping[str, Any]) -> tuple[Pricer, Job, Prices]:
    parsed = read_job(dict(job))
    p, batch = priced(parsed)
    return p, parsed, p.price(batch)


def effective_batch(local_batch: int, accumulation: int, dp: int) -> float:
    """Global batch at which a layout of this local batch and DP degree accumulates so often."""
    sizes = range(1, 10_000)
    steps = (accumulation_steps(size, local_batch, dp) for size in sizes)
    return float(next(n for n, found in zip(sizes, steps, strict=True) if found == accumulation))


def accumulation_steps(global_batch: int, local_batch: int, dp: int) -> float:
    values = {"dp_shard": dp, "micro_batch_size": local_batch}
    layout = resolve_layout(values, trainer="torchtitan", num_gpus=dp)
    return float(layout.num_microbatches(global_batch))


def layer_activations(tp: int, sp: bool, ac: str, dropout: float) -> float:
    """Saved bytes of one layer of GPT-3 175B over tokens x hidden size, unfused attention, 16 bit.

    dropout: probability on the two residual branches.
    """
    model = {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96,
        "n_positions": 2048, "vocab_size": 51200, "activation_function": "gelu",
        "resid_pdrop": dropout}  # fmt: skip
    layout = {"tp": tp, "pp": 8, "sequence_parallel": sp, "ac": ac}
    given = {"trainer": "megatron", "attention_kernel": "unfused", "layout": layout}
    _, job, prices = _priced(job_values(model, "a100-sxm-80gb", 64, 2048, 64, **given))
    return float(prices.stage_seconds.costs.saved_bytes[0, 0] / (2048 * job.model.hidden_size))


def wire_over_size(op: str, ranks: int) -> float:
    answer = collective(op, SIZE, flat(ranks), algorithm="ring")
    return answer.wire_bytes_per_rank / SIZE


def collective_over_closed_form(op: str, algorithm: str, ranks: int) -> float:
    """Seconds of `collective` over the document's formula."""
    log, hop = float(np.ceil(np.log2(ranks))), SIZE / BANDWIDTH + LATENCY
    ring = (ranks - 1) * (SIZE / (ranks * BANDWIDTH) + LATENCY)
    forms = {
        ("all-reduce", "ring"): 2 * ring, ("all-gather", "ring"): ring,
        ("reduce-scatter", "ring"): ring, ("all-reduce", "tree"): 2 * log * hop,
        ("p2p", "neighbour"): hop,
    }  # fmt: skip
    group = {"num_ranks": None if op == "p2p" else ranks, "algorithm": algorithm}
    return collective(op, SIZE, flat(ranks), **group).seconds / forms[op, algorithm]


def hierarchical_over_closed_form(inside: int, nodes: int) -> float:
    """Reduce-scatter inside, all-reduce of 1/n across on each member's NIC, all-gather inside."""
    (b1, a1), (b2, a2) = (450e9, 2e-6), (50e9, 4e-6)
    node = {"gpus": inside, "bandwidth": b1, "latency": a1}
    all_nodes = {"gpus": inside * nodes, "bandwidth": b2, "latency": a2}
    cluster = cluster_of(inside * nodes, node, all_nodes)
    within = (inside - 1) * (SIZE / (inside * b1) + a1)
    across = 2 * (nodes - 1) * (SIZE / inside / (nodes * b2) + a2)
    found = collective("all-reduce", SIZE, cluster, algorithm="hierarchical")
    return found.seconds / (2 * within + across)


def bubble_over_ideal(schedule: str, pp: int, microbatches: int) -> float:
    columns = (np.array([value]) for value in (pp, 1, microbatches, 1.0, 1.2, 0.8))
    return float(SCHEDULES[schedule].bubble_seconds(*columns)[0]) / (microbatches * 3.0)


def tensor_parallel_collectives(model: str, tp: int) -> float:
    """Collectives of a dense layer with sequence parallelism; each moves one activation."""
    parsed = read_job(job_values(model, H100, tp, 8192, 1, layout={"tp": tp}))
    batch = LayoutBatch.from_layouts([parsed.layout])
    (kind, _) = parsed.model.distinct_layers()[0]
    ops = (op for op in layer_ops(parsed.model, kind, True) if isinstance(op, Collective))
    sites = (site for op in ops for site in axes.SITES[op.site])
    every = [site for site in sites if site.axis == "tp" and site.applies(batch)[0]]
    return float(sum((one.forward is not None) + (one.backward is not None) for one in every))


def pipeline_bytes(model: str, micro_batch: int, seq_len: int) -> float:
    """Bytes over a stage boundary both ways, a microbatch, over 2 x batch x seq x hidden x 2."""
    layout = {"pp": 8, "micro_batch_size": micro_batch, "dp_shard": 1}
    job = job_values(model, H100, 8, seq_len, 64, layout=layout)
    job["cluster"]["fabric"] = [{"gpus": 8, "bandwidth": 1e9, "latency": 0}]
    pricer, parsed, prices = _priced(job)
    rate = 1e12 / send_seconds(np.array([1e12]), np.array([1.0]), pricer.fabric)[0]
    sent = 2 * prices.stage_seconds.sends.mean_seconds()[0] * rate
    return float(sent / (2 * micro_batch * seq_len * parsed.model.hidden_size * 2))


def forward_flops_over_2nt(model: str, seq_len: int) -> float:
    """Counted forward FLOPs of one step over 2 x parameters x tokens."""
    _, parsed, prices = _priced(job_values(model, H100, 1, seq_len, 1, layout={}))
    counts = np.array([count for _, count in parsed.model.distinct_layers()] + [1.0, 1.0])
    counted = float(counts @ prices.stage_seconds.costs.forward_flops[:, 0])
    return counted / (2.0 * parsed.model.total_parameters() * seq_len)


def causal_attention_share(seq_len: int) -> float:
    """Counted forward FLOPs of attention over the full square's: the growth with the sequence."""
    once, twice = (forward_flops_over_2nt("llama3-8b", n * seq_len) for n in (1, 2))
    model = read_model("llama3-8b")
    per_token = (twice - once) * 2.0 * model.total_parameters()
    heads = model.num_hidden_layers * model.num_attention_heads
    return per_token / (2.0 * heads * 2 * model.head_dim * seq_len)


def nvlink_both_directions(gpu: str) -> float:
    """Bytes a second, both directions, of the innermost level that the GPU is sold with."""
    return 2 * read_cluster({"gpu": gpu, "num_gpus": 8}).fabric[0].bandwidth_bytes_per_second


def inter_node(gpu: str) -> float:
    """Bytes a second and GPU between nodes, one way."""
    return read_cluster({"gpu": gpu, "num_gpus": 16}).fabric[1].bandwidth_bytes_per_second


def grouped_over_loop(experts: int, tokens: int, hidden: int, width: int) -> float:
    """How much faster one grouped GEMM is than a loop of launches, tokens an expert, forward."""
    profile = software_profile(TRAINERS["torchtitan"])
    machine = read_cluster({"gpu": H100, "num_gpus": 8})
    device = Device.build(machine, KERNELS["hopper"], profile)
    sizes, bf16 = np.array([[tokens], [width], [hidden]], dtype=np.float64), np.zeros(1, np.int64)
    grouped, alone = (
        device.gemm_seconds(*sizes, np.array([float(count)]), bf16)[0] for count in (experts, 1)
    )
    return float(experts * max(alone, profile.launch_seconds) / grouped)


def axes_in_order(axes: list[str]) -> float:
    """1 where these axes, from the inside out, stand so in the default order of ranks."""
    order = [axis for axis in read_cluster("h100-64").rank_order if axis in axes]
    return float(order == axes)


def default_zero_stage(pp: int) -> float:
    """TorchTitan's own choice on 16 GPUs: 3 reshards after forward, 2 does not."""
    return float(resolve_layout({"pp": pp}, trainer="torchtitan", num_gpus=16).zero_stage)


def float8_speedup_of(unit: str) -> float:
    """Forward seconds in bf16 over those in float8, of a layer or of the head of Llama 3 70B."""
    seconds = []
    for precision in ("bf16", "float8-tensorwise"):
        layout = {"tp": 8, "dp_shard": 8, "precision": precision, "compile": True}
        job = job_values("llama3-70b", H100, 64, 8192, 64, layout=layout) | {"cluster": "h100-64"}
        forward = _priced(job)[2].stage_seconds.forward[:, 0]
        seconds.append(float(forward[{"layer": 0, "head": -1}[unit]]))
    return seconds[0] / seconds[1]


def _rows(job: Mapping[str, Any], dimension: str) -> list[CommunicationRow]:
    found = estimate_job(read_job(dict(job)))
    assert found.valid, found.violations
    return [one for one in found.communication if one.dimension == dimension]


def volume_over_parameters(job: Mapping[str, Any], dimension: str) -> float:
    """Elements that a rank sends in a step of one microbatch, over the model's parameters.

    Parameters are gathered in 2 bytes, gradients reduced in 4; (n - 1) / n of a buffer is sent.
    """
    model = read_job(dict(job)).model
    sent = 0.0
    for one in _rows(job, dimension):
        width = 2.0 if one.operation == "all-gather" else 4.0
        sent += one.volume_bytes / width * one.group_size / (one.group_size - 1.0)
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
    often = ((one.per_step // model.num_hidden_layers, one) for one in _rows(job, "tp"))
    return sum(count * one.message_bytes / activation for count, one in often)


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
    parts = ("message_bytes", "volume_bytes", "seconds", "algorithm", "level")
    whole = [one for one in found.communication if all(getattr(one, part) for part in parts)]
    return float(len({one.dimension for one in whole}))


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
    return float(sum(collective(name, SIZE, flat(8)).seconds > 0 for name in names))


def algorithms_offered(collectives: list[str], algorithms: list[str]) -> float:
    """Pairs of a collective and an algorithm with a closed form, on the fabric that it needs."""
    pairs = 0
    for algorithm, name in itertools.product(algorithms, collectives):
        grid = algorithm in ("mesh", "torus")
        given = {"topology": algorithm, "shape": [4, 4]} if grid else {}
        machine = flat(16, **given)
        with suppress(SpecError):  # it does not do this collective
            pairs += collective(name, SIZE, machine, algorithm=algorithm).seconds > 0
    return float(pairs)


FORMULAS: Mapping[str, Callable[..., float]] = {
    name: one
    for name, one in dict(globals()).items()
    if inspect.isfunction(one) and one.__module__ == __name__ and not name.startswith("_")
}
