"""Pricers and batches of layouts, as the tests of the cost model build them."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.data_parallel import sharding
from planner.cost.layer.forward_backward_overlap import PairColumns
from planner.cost.loads import Loads
from planner.cost.machine.knobs import Calibration
from planner.cost.network.collectives import collective_seconds
from planner.cost.pipeline.stage_costs import StageCosts
from planner.cost.price import Pricer, Prices
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.rules.base import Context
from planner.search.space.enumerate import Space, build_space
from planner.specs.cluster import ClusterSpec
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.registry import resolve_layout
from planner.work.blocks import layer_ops
from planner.work.pieces import Code

H100 = "h100-sxm-80gb"


def pricer(model: Any = "llama3-8b", num_gpus: int = 8, gpu: Any = H100, **training: Any) -> Pricer:
    """64 sequences of 4096 tokens, unless said."""
    given = {"seq_len": 4096, "global_batch_size": 64, **training}
    cluster = read_cluster({"gpu": gpu, "num_gpus": num_gpus})
    return Pricer.build(read_model(model), cluster, read_training(given))


def pricer_of(job: Job, calibration: Calibration | None = None) -> Pricer:
    return Pricer.build(job.model, job.cluster, job.training, calibration)


def priced(job: Job, calibration: Calibration | None = None) -> tuple[Pricer, LayoutBatch]:
    """Its pricer, and the layout that it names."""
    return pricer_of(job, calibration), LayoutBatch.from_layouts([job.layout])


def priced_space(job: Job, **kind: Any) -> tuple[Pricer, Space]:
    """Its pricer, and every legal layout that it asks for."""
    found = pricer_of(job)
    return found, build_space(found.rules_context, job.search, **kind)


def step_seconds(job: Job, calibration: Calibration | None = None) -> float:
    found, batch = priced(job, calibration)
    return float(found.price(batch).step_seconds[0])


def with_profile(p: Pricer, **changes: float) -> Pricer:
    """The same under other figures of the trainer's profile."""
    return Pricer.build(p.model, p.cluster, p.training, profile=replace(p.profile, **changes))


def rows(*layouts: dict[str, Any], trainer: str = "torchtitan", num_gpus: int = 8) -> LayoutBatch:
    """Layouts as a trainer completes them."""
    completed = [resolve_layout(one, trainer=trainer, num_gpus=num_gpus) for one in layouts]
    return LayoutBatch.from_layouts(completed)


def layout_of(p: Pricer | Context, **values: Any) -> Layout:
    """As the trainer of a pricer, or of rules, completes it."""
    return resolve_layout(values, trainer=p.training.trainer, num_gpus=p.cluster.num_gpus)


def batch_of(p: Pricer, *layouts: dict[str, Any], **layout: Any) -> LayoutBatch:
    """Layouts, or one, as a pricer's trainer completes them."""
    return LayoutBatch.from_layouts([layout_of(p, **one) for one in layouts or (layout,)])


def check_rows_and_bounds(p: Pricer, batch: LayoutBatch) -> None:
    """A batch is its rows, parts sum to the step, and no bound is above a price."""
    together, bounds = p.price(batch, every_rank=True), p.lower_bounds(batch)
    assert sum(together.parts.values()) == pytest.approx(together.step_seconds, rel=1e-9)
    for at in range(len(batch)):
        row = batch.take(np.array([at]))
        found = p.price(row, every_rank=True)
        assert found.step_seconds[0] == pytest.approx(together.step_seconds[at], rel=1e-12)
        assert found.device_bytes == pytest.approx(together.device_bytes[at], rel=1e-12)
        most = found.step_seconds[0] * (1 + 1e-12)
        seconds, device = p.lower_bounds(row)
        assert (seconds[0], device[0]) == (bounds[0][at], bounds[1][at])
        assert seconds[0] <= most
        assert device[0] <= found.device_bytes[0] * (1 + 1e-12)
        assert p.layout_lower_bounds(row)[0] <= most
        assert p.step_lower_bounds(row)[0][0] <= most


def price(p: Pricer, **layout: Any) -> Prices:
    return p.price(batch_of(p, **layout), every_rank=True)


BANDWIDTH, LATENCY = 100e9, 2e-6


def flat(num_gpus: int, **level: Any) -> ClusterSpec:
    joined = {"gpus": num_gpus, "bandwidth": BANDWIDTH, "latency": LATENCY, "topology": "switch"}
    return cluster_of(num_gpus, joined | level)


def cluster_of(num_gpus: int, *levels: dict[str, Any], gpu: str = H100) -> ClusterSpec:
    """GPUs in nodes of 8 or, where these do not divide them, in one; levels: of the fabric."""
    node = {} if num_gpus % 8 == 0 or num_gpus < 8 else {"gpus_per_node": num_gpus}
    fabric = {"fabric": list(levels)} if levels else {}
    return read_cluster({"gpu": gpu, "num_gpus": num_gpus, **node, **fabric})


def silent_shards(**given: FloatColumn) -> sharding.UnitShards:
    """Shards of one layout with an embedding, a head and one kind of layer; 0 but for `given`."""
    nothing = dict.fromkeys((one.name for one in fields(sharding.UnitShards)), np.zeros((3, 1)))
    return sharding.UnitShards(**nothing | given)


def one_load(batch: LayoutBatch, units: list[float], microbatches: float = 1.0) -> Loads:
    """A rank that holds these units of the one layout."""
    m, at, held = np.full(1, microbatches), np.zeros(1, dtype=np.int64), np.array(units)[:, None]
    return Loads(batch=batch, m=m, units=held, at_unit=at, at_shard=at, spared=0 * m)


def shards_of(p: Pricer, batch: LayoutBatch) -> sharding.UnitShards:
    return sharding.unit_shards(p, batch)


def collective_of(
    p: Pricer, operation: str, payload: FloatColumn | float, ranks: float, stride: float = 1.0
) -> Any:
    """Seconds of a collective in a run, for each payload."""
    sent = np.atleast_1d(np.asarray(payload, dtype=np.float64))
    return collective_seconds(
        operation, sent, np.full(sent.shape, float(ranks)), np.full(sent.shape, float(stride)),
        p.fabric, base_seconds=p.profile.collective_seconds, nvls_gain=p.profile.nvls_gain,
    )  # fmt: skip


STAGE_COLUMNS = (
    "forward_seconds_CS", "input_grad_seconds_CS", "weight_grad_seconds_CS", "send_seconds_CS",
    "saved_bytes_CS",
)  # fmt: skip


def pairs_of(*columns: FloatColumn, slowdown: float) -> PairColumns:
    """Wires of a forward and a backward, of TP alone, and their covers."""
    names = ("forward_tp", "backward_tp", "forward_cover", "backward_cover")
    ep = dict.fromkeys(("forward_ep", "backward_ep"), 0.0 * columns[0])
    return PairColumns(**dict(zip(names, columns, strict=True)), **ep, slowdown=slowdown)


def stage_costs(*columns: np.ndarray) -> StageCosts:
    return StageCosts(**dict(zip(STAGE_COLUMNS, columns, strict=True)))


def named_ops(model: ModelSpec, kind: LayerKind, *code: Code) -> dict[str, Any]:
    return {op.name: op for op in layer_ops(model, kind, True, *code)}
