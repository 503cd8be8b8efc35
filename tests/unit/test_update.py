"""The end of a step by hand: optimizers, clipping, Muon, small reductions, copies to the host."""

from typing import Any

import numpy as np
import pytest

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.data_parallel import sharding, unit_elements
from planner.cost.data_parallel.muon import newton_schulz_flops
from planner.cost.data_parallel.optimizer_step import (
    HOST_STREAM_BYTES_PER_SECOND,
    bytes_per_parameter,
    small_reductions,
    sum_bytes,
    update_seconds,
)
from planner.cost.data_parallel.overlap import exposed_data_parallel
from planner.cost.price import Pricer
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.trainers.registry import TRAINERS
from tests.conftest import job_values
from tests.pricing import collective_of, one_load, priced, silent_shards

GATHERED: dict[str, Any] = {"dp_shard": 16, "precision": "float8-tensorwise", "compile": True}


def case(
    training: dict[str, Any] | None = None, num_gpus: int = 16, **layout: Any
) -> tuple[Pricer, LayoutBatch]:
    given = ("llama3-8b", "h100-sxm-80gb", num_gpus, 8192, 4 * num_gpus)
    job = read_job(job_values(*given, layout=layout or {"dp_shard": 16}, **(training or {})))
    return priced(job)


def optimizer_seconds(training: dict[str, Any] | None = None, **layout: Any) -> float:
    pricer, batch = case(training, **layout)
    return float(pricer.price(batch).parts["optimizer"][0])


UNCLIPPED = {"max_grad_norm": None}


@pytest.mark.parametrize(("training", "layout", "moved"), [
    (UNCLIPPED, {}, 4 + 2 * 4 + 2 * 8),
    ({}, {}, 4 + 2 * 4 + 2 * 8 + 3 * 4),
    (UNCLIPPED, {"master_dtype": "bfloat16"}, 2 + 2 * 2 + 2 * 4),
    (UNCLIPPED | {"optimizer": "sgd"}, {}, 4 + 2 * 4 + 2 * 4),
    (UNCLIPPED | {"optimizer": "adamw-bf16-states"}, {}, 4 + 2 * 4 + 2 * 4),
    (UNCLIPPED | {"trainer": "megatron"}, {"zero_stage": 1}, 4 + 2 * 4 + 2 * 8 + 2),
    ({"trainer": "megatron"}, {"zero_stage": 1, "reduce_dtype": "bfloat16"},
        2 + 2 * 4 + 2 * 8 + 2 + 3 * 2),
])  # fmt: skip
def test_bytes_of_an_update(training: dict[str, Any], layout: dict[str, Any], moved: float) -> None:
    """Gradient read; parameter and states read and written; clipping; Megatron's copies."""
    pricer, batch = case(training, **({"dp_shard": 16} | layout))
    assert bytes_per_parameter(pricer, batch)[0] == moved


def test_optimizers_are_ordered_by_what_they_do() -> None:
    names = ("sgd", "adamw-bf16-states", "adamw", "adafactor", "muon")
    sgd, *others = (optimizer_seconds({"optimizer": name}) for name in names)
    assert sgd <= others[0]
    assert others == sorted(set(others))


def test_clipping_adds_its_passes_and_its_reductions() -> None:
    clipped, free = optimizer_seconds(), optimizer_seconds(UNCLIPPED)
    pricer, batch = case()
    owned = pricer.model.total_parameters() / 16
    passes = 12.0 * owned / pricer.device.memory_rate
    assert clipped - free >= passes
    assert clipped - free == pytest.approx(passes + _reductions(pricer, batch), rel=0.01)


def _reductions(pricer: Pricer, batch: LayoutBatch) -> float:
    return float(small_reductions(pricer, batch)[0])


def test_small_reductions_run_once_an_axis() -> None:
    """The norm over FSDP, TP, PP; delayed scaling's two over FSDP, TP; tensorwise's one."""
    assert _reductions(*case(UNCLIPPED)) == 0.0
    alone, both = _reductions(*case()), _reductions(*case(dp_shard=2, tp=8))
    assert 0.0 < alone < both
    cases = (case(**GATHERED, float8_all_gather=gathers) for gathers in (True, False))
    scaled, plain = (_reductions(*one) for one in cases)
    assert scaled == pytest.approx(2.0 * plain)
    delayed, plain = (
        _reductions(*case({"trainer": "megatron"}, dp_shard=16, precision=precision))
        for precision in ("float8-delayed", "bf16")
    )
    assert delayed == pytest.approx(3.0 * plain)


def test_clipping_queries_and_keys_waits_for_each_layer_once() -> None:
    """An all-reduce over the data-parallel ranks, and five launches, a layer of the stage."""
    plain = {"trainer": "megatron", "trainer_version": "0.19"}
    norm, layers = UNCLIPPED | plain, 32

    def seconds(**layout: Any) -> float:
        clips = _reductions(*case({**norm, "qk_clip": True}, **layout))
        return clips - _reductions(*case(norm, **layout))

    pricer, _ = case(norm)
    host = 5.0 * pricer.profile.launch_seconds
    alone, halved = seconds(dp_shard=16, zero_stage=1), seconds(dp_shard=8, zero_stage=1, pp=2)
    exchange = _reductions(*case(plain, dp_shard=16, zero_stage=1))
    assert alone == pytest.approx(layers * (exchange + host), rel=0.01)
    assert layers * host / 2.0 < halved < alone
    assert seconds(dp_shard=1, tp=16) == pytest.approx(layers * host)


PIPED = {"dp_shard": 8, "pp": 2}
HALVED = PIPED | {"param_dtype": "bfloat16"}
ADDED = [
    ({"dp_shard": 16}, 0),  # FSDP adds shards, which counts for nothing
    (PIPED, 4 + 2 * 4),
    (HALVED, 2 + 2 * 4),
    (HALVED | {"reduce_dtype": "bfloat16"}, 2 + 2 * 2),
    ({"dp_replicate": 16, "zero_stage": 0}, 4 + 2 * 4),
]


@pytest.mark.parametrize(("layout", "moved"), ADDED)
def test_under_a_pipeline_or_replicas_gradients_add_up(layout: Any, moved: float) -> None:
    """A fresh gradient read, the sum read and written."""
    pricer, batch = case(**({"param_dtype": "float32"} | layout))
    assert float(sum_bytes(pricer, batch)[0]) == moved


@pytest.mark.parametrize(("layout", "dense", "expert"), [
    ({"dp_shard": 8, "cp": 2}, 1 / 16, 1 / 16),
    ({"dp_shard": 16, "ep": 8}, 1 / 16, 1 / 2),  # 2 ranks hold the same experts
    ({"dp_replicate": 2, "dp_shard": 8, "ep": 8}, 1 / 8, 1.0),
    ({"dp_replicate": 16, "zero_stage": 0}, 1.0, 1.0),
])  # fmt: skip
def test_experts_are_sharded_over_their_ranks(layout: Any, dense: float, expert: float) -> None:
    pricer, batch = case(**layout)
    given = np.array([[64.0]]), np.array([[16.0]])
    order = pricer.cluster.rank_order
    assert unit_elements.kept_shards(batch, *given, order)[0, 0] == 64.0 * dense + 16.0 * expert


def test_newton_schulz_of_square_matrices_takes_thirty_n() -> None:
    """5 iterations of 4 m^2 n + 2 m^3 on m = n: 30 n FLOP a parameter."""
    pricer, _ = case()
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 512) | {"head_dim": 64}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 8)
    square = pricer.model.model_copy(update=sizes | heads)
    assert newton_schulz_flops(square) == pytest.approx(30.0 * 512)
    assert newton_schulz_flops(pricer.model) > 5.0 * 4.0 * 1024, "at least its narrowest side"


def test_muon_makes_matrices_whole_and_deals_them_out_again() -> None:
    """Momenta to their owner and updates back, two bytes each; what is no matrix takes AdamW."""
    pricer, batch = case({"optimizer": "muon"})
    found = sharding.unit_shards(pricer, batch)
    exchange = found.update_seconds - update_seconds(pricer, batch, found.shard, 0 * found.shard)
    rate = pricer.device.linear_rate[pricer.device.half]
    exchange[0] -= found.shard[0] * newton_schulz_flops(pricer.model) / rate
    once = collective_of(pricer, "all-to-all", 2.0 * found.shard[0], 16.0)[0]
    assert exchange[:, 0] == pytest.approx([2.0 * once, 0.0, 0.0])


WIDE = {"tp": 8, "zero_stage": 1}
MUON = {"trainer": "megatron", "optimizer": "muon"}


def layer_of(mode: str | None = None, **training: Any) -> tuple[float, float]:
    """(parameters, seconds of Newton-Schulz and its communication) of one layer on one rank."""
    mode_of = {"muon_tp_mode": mode} if mode else {}
    pricer, batch = case({**MUON, **mode_of, **training}, **WIDE)
    found = sharding.unit_shards(pricer, batch)
    update = update_seconds(pricer, batch, found.shard, 0 * found.shard)
    assert (found.update_seconds[1:] == update[1:]).all(), "embedding and head have AdamW"
    return float(found.shard[0, 0]), float((found.update_seconds - update)[0, 0])


def test_each_mode_of_muon_by_hand() -> None:
    """Llama 3 8B at tp=8 on two owners: queries, keys, values, output, gate with up, and down.

    Emerging-Optimizers 0.4 muon_utils.py: 5 iterations of 4 g^2 n + 2 g^3, g x n the shard, the
    whole matrix, or with g the side that TP leaves whole.
    """
    pricer, _ = case(MUON, **WIDE)
    rate = pricer.device.linear_rate[pricer.device.half]

    def sent(operation: str, payload: float) -> float:
        return float(collective_of(pricer, operation, payload, 8.0)[0])

    def flops(g: float, n: float) -> float:
        return 5.0 * (4.0 * g * g * n + 2.0 * g**3)

    h, kv, gates, ffn = 4096, 1024, 28672, 14336
    whole = ((h, h), (h, kv), (h, kv), (h, h), (h, gates), (ffn, h))
    shards = ((h, 512), (h, 128), (h, 128), (512, h), (h, 3584), (1792, h))
    blockwise = sum(flops(min(x), max(x)) for x in shards)
    assert layer_of("blockwise")[1] == pytest.approx(blockwise / rate / 2, rel=1e-6)
    duplicated = sum(flops(min(x), max(x)) for x in whole) / rate
    duplicated += sum(sent("all-gather", 4.0 * x * y) for x, y in whole)
    assert layer_of("duplicated")[1] == pytest.approx(duplicated / 2, rel=1e-6)
    distributed = sum(flops(h, min(x)) for x in shards) / rate
    distributed += 6 * 5 * sent("all-reduce", 2.0 * h * h)
    assert layer_of("distributed")[1] == pytest.approx(distributed / 2, rel=1e-6)


def test_the_mode_is_the_release_s_unless_the_job_says() -> None:
    assert layer_of() == layer_of("blockwise") == layer_of(trainer_version="0.18")
    assert layer_of(trainer_version="0.20") == layer_of("duplicated")
    bridge = {"trainer": "megatron-bridge", "trainer_version": "0.7"}
    assert layer_of(**bridge)[1] == pytest.approx(layer_of("blockwise", **bridge)[1])


def test_owners_beyond_the_matrices_wait_for_the_largest_one() -> None:
    """Llama 3 8B without TP on 1,024 owners: 117M of 6.98B parameters in layers are one matrix.

    Megatron-LM core 0.18 pads buffers to as much for each owner (layer_wise_optimizer.py).
    """
    owners = {"num_gpus": 1024, "dp_shard": 1024, "zero_stage": 1}
    pricer, batch = case(MUON, **owners)
    found = sharding.unit_shards(pricer, batch)
    layers, largest = 32.0, 4096.0 * 28672.0
    assert layers * found.shard[0, 0] == pytest.approx(largest, rel=1e-3)
    assert layers * found.padding[0, 0] == pytest.approx(1024 * largest - 6.98e9, rel=1e-3)
    older, batch = case({**MUON, "trainer_version": "0.17"}, **owners)
    assert not sharding.unit_shards(older, batch).padding.any()
    calls = sharding.shard_calls(older, batch)
    assert {call.operation for call in calls if call.part == "scatter"} == {"all-reduce"}


@pytest.mark.parametrize(("release", "stage", "hidden"), [
    ("0.16", 1, False), ("0.17", 0, False), ("0.17", 1, True), ("0.19", 0, True),
])  # fmt: skip
def test_early_releases_hide_nothing_of_muon(release: str, stage: int, hidden: bool) -> None:
    """training/arguments.py: "Muon optimizer does not support overlap grad reduce"."""
    jobs = [{**MUON, "trainer_version": release, "overlap": {"dp": dp}} for dp in (True, False)]
    found = [case(job, dp_shard=16, zero_stage=stage) for job in jobs]
    may, switched_off = (pricer.price(batch).step_seconds[0] for pricer, batch in found)
    assert (may < switched_off) == hidden
    assert may <= switched_off


def rank_memory(optimizer: str, dp_shard: int) -> Any:
    given = ("llama3-8b", "h100-sxm-80gb", dp_shard, 8192, dp_shard)
    training = {"trainer": "megatron", "optimizer": optimizer}
    job = read_job(job_values(*given, layout={"zero_stage": 1}, **training))
    return estimate_job(job).memory.stages[0]


def test_muon_has_the_momentum_of_sgd_and_adamw_at_both_ends() -> None:
    """A second moment of embedding and head more, 4 bytes; padding beyond 60 owners."""
    muon, sgd = (rank_memory(name, 16) for name in ("muon", "sgd"))
    ends = 2.0 * 128256 * 4096
    assert muon.optimizer_bytes - sgd.optimizer_bytes == pytest.approx(4 * ends / 16, rel=1e-3)
    assert muon.gradients_bytes == sgd.gradients_bytes
    muon, sgd = (rank_memory(name, 256) for name in ("muon", "sgd"))
    padding = 256 * 4096.0 * 28672 - 6.98e9
    assert muon.gradients_bytes - sgd.gradients_bytes == pytest.approx(4 * padding, rel=1e-3)


def test_weights_that_are_quantised_once_a_step_are_quantised_in_the_update() -> None:
    """TE keeps quantised weights from the first microbatch; torchao quantises every time."""
    te = {"trainer": "megatron"}
    scaled = optimizer_seconds(te, dp_shard=16, precision="float8-delayed")
    assert scaled > optimizer_seconds(te, dp_shard=16)
    names = ("float8-rowwise", "bf16")
    ao, plain = (optimizer_seconds(dp_shard=16, precision=x, compile=True) for x in names)
    assert ao == plain


def test_an_update_on_the_host_streams_through_its_memory_and_nothing_hides_it() -> None:
    pricer, batch = case(cpu_offload=True, dp_shard=16)
    per_parameter = bytes_per_parameter(pricer, batch)[0]
    moved = pricer.model.total_parameters() / 16 * per_parameter
    assert pricer.price(batch).parts["optimizer"][0] >= moved / HOST_STREAM_BYTES_PER_SECOND
    assert optimizer_seconds(cpu_offload=True, dp_shard=16) > 10.0 * optimizer_seconds(dp_shard=16)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 1.0])
def test_the_device_updates_what_is_not_on_the_host_at_the_same_time(share: float) -> None:
    layout = {"cpu_offload": True, "dp_shard": 16, "optimizer_offload_fraction": share}
    pricer, batch = case({"trainer": "megatron"}, **layout)
    owned = np.full((3, 1), 1e9)
    moved = 1e9 * float(bytes_per_parameter(pricer, batch)[0])
    copies = share * 8e9 / pricer.cluster.pcie_bandwidth_bytes_per_second
    host = share * moved / HOST_STREAM_BYTES_PER_SECOND
    device = (1.0 - share) * moved / pricer.device.memory_rate
    assert (host > device) == (share > 0.01)
    seconds = update_seconds(pricer, batch, owned, 0 * owned)[1, 0]
    assert seconds == pytest.approx(copies + max(host, device))


def column(*seconds: float) -> FloatColumn:
    return np.array(seconds)[:, None]


def waits(upload: float = 0.0) -> float:
    """Seconds that a rank waits for this copy of its layer and a scatter of 1 s."""
    pricer, batch = case(dp_shard=16, zero_stage=2)
    compute = column(10.0, 0.0, 0.0)
    copies = {"upload_seconds": column(upload, 0, 0), "scatter_seconds": column(1.0, 0.0, 0.0)}
    job = (pricer.training, TRAINERS["torchtitan"], 1.0)
    load, shards = one_load(batch, [1.0, 1.0, 1.0]), silent_shards(**copies)
    found = exposed_data_parallel(load, (compute, compute), shards, *job)
    return float((found.fsdp + found.dp)[0])


def test_uploads_hide_under_the_forward_before_them() -> None:
    """The first of a step waits in full; a unit's upload and gather run under the unit before."""
    none, hidden, longer = waits(), waits(upload=6.0), waits(upload=30.0)
    assert hidden - none == pytest.approx(6.0)
    assert longer - none == pytest.approx(30.0 + (30.0 - 10.0))


def test_without_overlap_every_copy_is_waited_for() -> None:
    overlapped = case()[0].price(case(cpu_offload=True, dp_shard=16)[1]).parts["fsdp"][0]
    pricer, batch = case({"overlap": {"dp": False}}, cpu_offload=True, dp_shard=16)
    bare = pricer.price(batch).parts["fsdp"][0]
    cluster, parameters = pricer.cluster, pricer.model.total_parameters()
    copied = 2.0 * 4.0 * parameters / 16 / cluster.pcie_bandwidth_bytes_per_second
    assert bare > overlapped
    assert bare > copied
