"""Launches, host waits and CUDA graphs: closed forms of one unit, and of whole steps."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from planner.columns import FloatColumn, LayoutBatch, in_order
from planner.cost.cost_inputs import CostInputs
from planner.cost.layer.context import CostContext, OpCost, cost
from planner.cost.layer.host_time import REFILL_LAUNCHES, launches, replays
from planner.cost.layer.trainer_kernels import trainer_code
from planner.cost.layer.unit_costs import host_time
from planner.cost.layer.unit_work import UnitWork, quantities
from planner.cost.memory.rank_bytes import rank_shapes
from planner.cost.memory.reserved import fixed_gradients, private_bytes
from planner.cost.price import Pricer, Prices
from planner.cost.step_seconds import PARTS
from planner.errors import UnsupportedError
from planner.intake.jobs import read_job
from planner.rules import violations
from planner.rules.base import Context
from planner.rules.cuda_graphs import FULL, NONE, PARTIAL, captured
from planner.rules.support import check_supported, obstacles
from planner.specs.estimate import Violation
from planner.work.blocks import layer_ops
from planner.work.feed_forward import ROUTING_SINGLES
from planner.work.ops import Collective, Elementwise, Gemm, Moves, Op
from tests.conftest import job_values, tiers
from tests.pricing import H100, priced, with_profile

LAUNCH = 10e-6
DENSE, MOE = "llama3-8b", "qwen3-30b-a3b"
BLOCKING = "2022-02, CUDA_LAUNCH_BLOCKING=1"
NAMES = (
    "launch_forward_seconds", "launch_input_grad_seconds", "launch_weight_grad_seconds",
    "wait_forward_seconds", "wait_backward_seconds",
)  # fmt: skip


def job_of(
    model: str = "llama3-8b", layout: Any = None, **training: Any
) -> tuple[Pricer, LayoutBatch]:
    given = {"trainer": "megatron", **training}
    return priced(read_job(job_values(model, H100, 16, 4096, 64, layout=layout or {}, **given)))


def eager(**training: Any) -> CostContext:
    """A trainer without fused modules, at one layout, with launches of LAUNCH."""
    p, batch = job_of(trainer="fsdp", **training)
    return with_profile(p, launch_seconds=LAUNCH).context(batch)


OPERATION = Elementwise(
    name="any", dims=("tokens", "hidden"), kernels=1,
    moves=Moves(0.0, 0.0, 0.0, 0.0),
)  # fmt: skip
ROUTED = replace(OPERATION, name="permute", dims=("tokens_routed", "hidden"))


def added(
    context: CostContext, *costs: dict[str, float], ops: tuple[Op, ...] = (), redone: float = 0.0
) -> tuple[float, ...]:
    """What the host adds to operations of these costs, in the order of NAMES."""
    columns = ({name: np.full(1, value) for name, value in given.items()} for given in costs)
    made = [cost(context, **each) for each in columns]
    found = of_operations(context, ops or (OPERATION,) * len(costs), made, redone)
    return tuple(float(found[name][0]) for name in NAMES)


def of_operations(
    context: CostContext, ops: tuple[Op, ...], costs: list[OpCost], redone: float = 0.0
) -> dict[str, FloatColumn]:
    """The host time of a layer of these operations, this share of which the backward repeats."""
    *forward, backward = launches(context, ops, costs, is_layer=True)
    of_all = {
        "again_all": quantities(costs, *forward).swapaxes(0, 1),
        "input_grad_seconds": [c.input_grad for c in costs],
        "weight_grad_seconds": [c.weight_grad for c in costs],
        "exposed_backward": [c.exposed_backward for c in costs],
        "launch_backward_seconds": backward,
        "replay_seconds": [replays(context, is_layer=True)],
    }
    nothing = dict.fromkeys((one.name for one in fields(UnitWork)), np.zeros(1))
    work = UnitWork(**nothing | {name: in_order(columns) for name, columns in of_all.items()})
    return host_time(context.training, work, redone * work.again_all)


@pytest.mark.parametrize("kernel_seconds", [0.0, 4e-6, 10e-6, 50e-6])
def test_launches_cost_what_they_take_longer_than_kernels(kernel_seconds: float) -> None:
    """k launches of 10 us, kernels of s seconds: k max(s, 10 us) in all."""
    k = 7
    forward, *_ = added(eager(), {"forward": k * kernel_seconds, "forward_kernels": float(k)})
    assert k * kernel_seconds + forward == pytest.approx(k * max(kernel_seconds, LAUNCH))


def test_communication_that_nothing_hides_gives_the_host_time_to_run_ahead() -> None:
    context, half = eager(), np.zeros((3, 1))
    half[0] = LAUNCH / 2
    waits = cost(context, exposed_forward=half, forward_kernels=np.ones(1))
    found = of_operations(context, (OPERATION,), [waits])
    assert found["launch_forward_seconds"][0] == pytest.approx(LAUNCH / 2)


def test_a_backward_launches_what_it_computes_again_and_shares_the_rest_by_its_kernels() -> None:
    given = {
        "forward": LAUNCH, "forward_kernels": 4.0, "input_grad": 3 * LAUNCH,
        "weight_grad": LAUNCH, "backward_kernels": 6.0,
    }  # fmt: skip
    forward, input_grad, weight_grad, *_ = added(eager(), given, redone=0.5)
    assert forward == pytest.approx(3 * LAUNCH)
    # 6 + half of 4 launches, beside 4 + half of 1 launch times of kernels
    assert input_grad + weight_grad == pytest.approx((8 - 4.5) * LAUNCH)
    assert input_grad == pytest.approx(3 * weight_grad)


def test_a_wait_costs_the_launches_that_refill_the_queue_once() -> None:
    """They are launches of the unit, so a launch-bound unit has paid them."""
    refill = REFILL_LAUNCHES * LAUNCH
    context = eager()
    behind = added(context, {"forward": 1.0, "forward_kernels": 50.0, "waits": 2.0})
    assert (behind[0], behind[3]) == pytest.approx((0.0, 2 * refill))
    bound = added(context, {"forward": 0.0, "forward_kernels": 50.0, "waits": 2.0})
    assert bound[0] + bound[3] == pytest.approx(50 * LAUNCH)
    assert added(context, {"forward": 1.0, "waits": 1.0}, redone=1.0)[4] == pytest.approx(refill)


def test_where_launches_block_they_add_to_the_kernels() -> None:
    """The device is never behind a queue."""
    given = {"forward": 1.0, "forward_kernels": 50.0, "waits": 1.0}
    blocked = added(eager(trainer_version=BLOCKING), given)
    assert (blocked[0], blocked[3]) == (pytest.approx(50 * LAUNCH), 0.0)
    assert added(eager(), given)[0] == 0.0


def test_where_launches_block_nothing_runs_beside_them() -> None:
    """Two replicas' all-reduce hides under the backward, unless that waits for every kernel."""
    layout = {"dp_replicate": 2, "dp_shard": 1, "tp": 8, "zero_stage": 0}
    off = {"overlap": {"dp": False, "tp": False, "pp": False}}
    free, blocked, never = (
        _price("llama3-8b", layout, trainer="megatron-deepspeed", trainer_version=version, **more)
        for version, more in (("2022-02", {}), (BLOCKING, {}), ("2022-02", off))
    )
    assert blocked.parts["dp"] == never.parts["dp"] > free.parts["dp"]
    assert blocked.parts["tp"] == never.parts["tp"]


@pytest.mark.parametrize("graphs", [NONE, PARTIAL, FULL])
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_graphs_of_layers_leave_out_what_routing_sizes(graphs: int, capacity: Any) -> None:
    """With a capacity nothing waits, and the graphs hold the experts too."""
    context = replace(eager(moe_capacity_factor=capacity), graphs=np.array([graphs]))
    known, routed = {"forward_kernels": 20.0, "waits": 1.0}, {"forward_kernels": 30.0}
    forward, _, _, wait, _ = added(context, known, routed, ops=(OPERATION, ROUTED))
    # one replay takes the place of 20 launches
    launched = {NONE: 50.0, PARTIAL: 1.0 if capacity else 31.0, FULL: 0.0}[graphs] * LAUNCH
    assert forward + wait == pytest.approx(launched)
    waits = 0.0 if capacity or graphs == FULL else REFILL_LAUNCHES * LAUNCH
    assert wait == pytest.approx(waits)


def test_before_0_16_graphs_of_layers_end_at_the_router() -> None:
    """The router, its 40 kernels and its module stay among the launches; 0.16 captures them."""
    slow = {"launch_seconds": 1.0, "fused_launch_seconds": 0.0}
    model, given = "qwen3-30b-a3b", {"cuda_graphs": "partial"}
    old, new = (
        _price(model, {"ep": 8}, slow, trainer_version=version, **given).parts
        for version in ("0.15", "0.16")
    )
    more = sum(float(old[name][0] - new[name][0]) for name in ("launches", "waits"))
    layers = job_of(model)[0].model.num_hidden_layers
    assert more / layers / (64 // 16) == pytest.approx(2 * ROUTING_SINGLES, rel=1e-3)
    partial, none = (
        np.subtract(*(
            _price(model, {"ep": 8, "ac": f"modules-{name}"}, slow, trainer_version="0.16",
                   cuda_graphs=graphs).parts["launches"][0]
            for name in ("moe", "moe_act")
        ))
        for graphs in ("partial", "none")
    )  # fmt: skip
    again = float(partial - none) / layers / (64 // 16)
    assert again == pytest.approx(2 * ROUTING_SINGLES, rel=1e-3), "moe_router is no scope then"


def _price(model: str, layout: Any, profile: Any = None, **training: Any) -> Prices:
    p, batch = job_of(model, layout, **training)
    return with_profile(p, **(profile or {})).price(batch)


@pytest.mark.parametrize(("model", "layout"), [
    ("llama3-8b", {"tp": 4}),
    ("qwen3-30b-a3b", {"ep": 8, "moe_dispatcher": "hybridep"}),
])  # fmt: skip
def test_graphs_of_a_step_remove_launches_and_waits_alone(model: str, layout: Any) -> None:
    slow, given = {"launch_seconds": 1e-3}, {"trainer_version": "0.18"}
    none, full = (
        _price(model, layout, slow, cuda_graphs=graphs, **given).parts
        for graphs in ("none", "full")
    )
    left = {name: float(none[name][0] - full[name][0]) for name in PARTS}
    assert none["launches"][0] + none["waits"][0] > 0.0
    assert full["launches"][0] == full["waits"][0] == 0.0
    assert left.pop("launches") + left.pop("waits") > 0.0
    assert left.pop("other") == pytest.approx(-slow["launch_seconds"])  # the step's own replay
    assert left.pop("straggler") >= 0.0  # a share of the rank's work
    assert left.pop("fsdp") <= 0.0  # less time to hide gradients and parameters under
    assert [*left.values()] == pytest.approx([0.0] * len(left), abs=1e-9)


@tiers(
    6,
    60,
    launch=st.floats(1e-6, 1e-3),
    more=st.floats(1.0, 10.0),
    module=st.floats(1e-6, 1e-3),
    graphs=st.sampled_from(["none", "partial", "full"]),
    layout=st.sampled_from([{"ep": 8}, {"ep": 4, "pp": 2}, {"ep": 8, "micro_batch_size": 4}]),
)
def test_slower_launches_are_never_faster_and_graphs_never_slower(
    launch: float, more: float, module: float, graphs: str, layout: Any
) -> None:
    def seconds(captures: str, factor: float) -> float:
        slow = {"launch_seconds": launch, "fused_launch_seconds": max(launch, module)}
        profile = {name: factor * value for name, value in slow.items()}
        given = {"cuda_graphs": captures, "trainer_version": "0.18"}
        found = _price("qwen3-30b-a3b", layout, profile, **given)
        assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
        return float(found.step_seconds[0])

    assert seconds(graphs, more) >= seconds(graphs, 1.0) * (1 - 1e-9)
    none, partial, full = (seconds(name, 1.0) for name in ("none", "partial", "full"))
    assert none * (1 + 1e-9) >= partial
    assert partial + launch >= full  # the step's own replay


@pytest.mark.parametrize(("version", "model", "layout", "graphs"), [
    ("0.2.2", "llama3-8b", {}, NONE),
    ("0.3.0", "llama3-8b", {}, FULL),
    ("0.3.0", "llama3-8b", {"pp": 2}, NONE),
    ("0.3.0", "llama3-8b", {"cpu_offload": True}, NONE),
    ("0.3.0", "qwen3-30b-a3b", {"ep": 1}, FULL),
    ("0.3.0", "qwen3-30b-a3b", {"ep": 8}, NONE),
    # its buffers would hold the worst case of routing
    ("0.3.0", "qwen3-30b-a3b", {"ep": 8, "moe_dispatcher": "hybridep"}, NONE),
])  # fmt: skip
def test_what_torchtitan_captures(version: str, model: str, layout: Any, graphs: int) -> None:
    p, batch = job_of(model, layout, trainer="torchtitan", trainer_version=version)
    assert p.context(batch).graphs.tolist() == [graphs]
    many = LayoutBatch.from_layouts([batch.row(0)] * 3)
    assert captured(many, p.rules_context).tolist() == [graphs] * 3


def test_layouts_that_differ_only_in_what_they_capture_have_prices_of_their_own() -> None:
    p, one = job_of(layout={"cpu_offload": False}, trainer="torchtitan", trainer_version="0.3")
    first = one.row(0)
    two = LayoutBatch.from_layouts([first, first.model_copy(update={"cpu_offload": True})])
    launches = with_profile(p, launch_seconds=1e-2).price(two).parts["launches"]
    assert launches[0] == 0.0 < launches[1]


def refused(model: str, layout: Any, **training: Any) -> list[Violation]:
    pricer, batch = job_of(model, layout, **training)
    context: Context = pricer.rules_context
    found = violations(batch.row(0), context.model, context.cluster, context.training)
    return [*obstacles(context), *found]


@pytest.mark.parametrize(("graphs", "version", "model", "layout", "field", "words"), [
    ("full", "0.16", MOE, {"ep": 8}, "training.cuda_graphs", "reads how many rows"),
    ("full", "0.12", DENSE, {}, "training.cuda_graphs", "no CUDA graphs of this kind"),
    ("partial", "0.15", DENSE, {"ac": "selective-attention"}, "ac", "activation recomputation"),
    # TorchTitan
    ("full", "0.2.2", DENSE, {}, "training.cuda_graphs", "no CUDA graphs of this kind"),
    ("full", "0.16", DENSE, {"ac": "full"}, "", ""),  # is allowed
])  # fmt: skip
def test_what_graphs_exclude_is_one_error(
    graphs: str, version: str, model: str, layout: Any, field: str, words: str
) -> None:
    trainer = "torchtitan" if version == "0.2.2" else "megatron"
    given = {"trainer": trainer, "trainer_version": version}
    found = refused(model, layout, cuda_graphs=graphs, **given)
    assert [one.field for one in found] == field.split()
    assert all(words in one.rule for one in found)
    assert not refused(model, layout, cuda_graphs="none", **given)


def test_a_job_that_no_layout_can_capture_says_what_its_trainer_could() -> None:
    pricer, _ = job_of("qwen3-30b-a3b", cuda_graphs="full", trainer_version="0.16")
    with pytest.raises(UnsupportedError) as error:
        check_supported([pricer.rules_context])
    remedy = "partial or none; or set training.trainer_version to 0.19; or use --trainer torchtitan"
    assert remedy in error.value.remedy


@pytest.mark.parametrize(("graphs", "version", "layout", "dispatcher"), [
    ("full", "0.18", {"ep": 8}, "hybridep"),
    ("full", "0.18", {"ep": 1}, "alltoall"),
    ("full", "0.18", {"ep": 8, "moe_dispatcher": "alltoall"}, "alltoall"),
    ("partial", "0.18", {"ep": 8}, "alltoall"),
    ("full", "0.14", {"ep": 8}, "alltoall"),
])  # fmt: skip
def test_a_captured_step_dispatches_without_the_host(
    graphs: str, version: str, layout: Any, dispatcher: str
) -> None:
    """Or with each expert filled to its capacity, by the dispatchers that pad."""
    _, batch = job_of("qwen3-30b-a3b", layout, cuda_graphs=graphs, trainer_version=version)
    dropping = {"moe_capacity_factor": 1.0, "trainer_version": version}
    assert not refused("qwen3-30b-a3b", layout, cuda_graphs=graphs, **dropping)
    assert batch.row(0).moe_dispatcher == dispatcher
    found = refused("qwen3-30b-a3b", layout, cuda_graphs=graphs, trainer_version=version)
    waits = graphs == "full" and dispatcher == "alltoall"  # for counts of one rank as well
    if version == "0.18":
        assert [one.field for one in found] == ["moe_dispatcher"] * waits


def test_what_routing_sizes_is_the_experts_path() -> None:
    """Of a layer's operations, all between permutation and return, without shared experts."""
    job = job_of("qwen3-30b-a3b")[0]
    kind = next(kind for kind, _ in job.model.distinct_layers() if kind.moe)
    ops = layer_ops(job.model, kind, True, trainer_code(job.training, job.rules))
    context = replace(eager(), graphs=np.array([PARTIAL]))
    made: OpCost = cost(context, forward_kernels=np.full(1, 1000.0))
    waits = [of_operations(context, (op,), [made])["launch_forward_seconds"][0] for op in ops]
    stays = [op for op, seconds in zip(ops, waits, strict=True) if seconds > 10 * LAUNCH]
    names = {op.name for op in stays}
    assert names.isdisjoint({"router", "routing"})
    assert {"dispatch", "combine"} < names
    places = [place for place, op in enumerate(ops) if op.name in names]
    assert places == list(range(places[0], places[-1] + 1))
    assert {type(op) for op in stays} == {Elementwise, Collective, Gemm}
    assert all("expert" in op.name for op in stays if isinstance(op, Gemm))


@pytest.mark.parametrize("graphs", ["partial", "full"])
def test_graphs_hold_a_pool_of_their_own(graphs: str) -> None:
    """A layer's backward, and input, output and the gradients of both."""
    layout = {"tp": 4, "micro_batch_size": 2}
    p, batch = job_of(DENSE, layout, trainer_version="0.16")
    shapes = rank_shapes(CostInputs.of(p, batch, every_rank=False))
    pool = float(np.max(shapes.last_layer_bytes)) + 4 * 2.0 * 2 * 4096 * 4096 / 4  # stream over TP
    assert pool > 2.0**27
    given = ({"cuda_graphs": x, "trainer_version": "0.16"} for x in ("none", graphs))
    none, some = (_price(DENSE, layout, **one) for one in given)
    more = {"peak_reserved_bytes": pool, "peak_allocated_bytes": 0.0, "least_device_bytes": pool}
    found = {name: getattr(some, name)[0] - getattr(none, name)[0] for name in more}
    assert found == pytest.approx(more)


def test_what_graphs_hold_by_kind() -> None:
    graphs, one = np.array([NONE, PARTIAL, FULL]), np.ones(3)
    assert private_bytes(graphs, 3.0 * one, 10.0 * one).tolist() == [0.0, 43.0, 43.0]
    assert fixed_gradients(graphs, 5.0 * one).tolist() == [0.0, 0.0, 5.0]


def test_torchtitans_gradients_stay_under_graphs_of_a_step() -> None:
    """At the loss all of their shards are there, 4 bytes an element."""
    layout = {"dp_shard": 16, "ac": "full", "micro_batch_size": 4}
    job: dict[str, Any] = {"trainer": "torchtitan", "trainer_version": "0.3.0"}
    both = ("none", "full")
    none, full = (_price("llama3-8b", layout, cuda_graphs=graphs, **job) for graphs in both)
    first = [next(iter(found.memory.phases())).gradients for found in (none, full)]
    shard = job_of("llama3-8b", layout, **job)[0].model.total_parameters() / 16
    assert np.max(first[0]) == 0.0
    assert np.max(first[1]) == pytest.approx(4.0 * shard, rel=1e-3)
    assert 0.0 <= full.peak_allocated_bytes[0] - none.peak_allocated_bytes[0] <= 4.1 * shard
