"""The seconds of a step, part by part, against the columns that they are made of."""

from typing import Any

import numpy as np
import pytest

from planner.cost.cost_inputs import CostInputs
from planner.cost.layer.forward_backward_overlap import pair_columns, relief
from planner.cost.layer.op_costs import _attention_cost
from planner.cost.network.sends import transport_of
from planner.cost.price import Pricer
from planner.cost.stage_seconds import StageSeconds
from planner.cost.step_seconds import PARTS, step_seconds
from planner.schedules import SCHEDULES
from planner.work.ops import Attention, Tensor
from tests import pricing
from tests.pricing import batch_of

COUNTS = np.array([32.0, 1.0, 1.0])  # layers, embedding, head


def pricer(trainer: str = "torchtitan", model: str = "llama3-8b", **training: Any) -> Pricer:
    return pricing.pricer(model, 16, trainer=trainer, **{"global_batch_size": 32, **training})


def inputs(p: Pricer, **layout: Any) -> CostInputs:
    return CostInputs.of(p, batch_of(p, **layout), every_rank=True)


def step(found: CostInputs) -> tuple[float, dict[str, float], StageSeconds]:
    seconds, parts, stages = step_seconds(found)
    return float(seconds[0]), {name: float(parts[name][0]) for name in PARTS}, stages


def unit(found: CostInputs, *names: str) -> np.ndarray[Any, Any]:
    return sum(np.asarray(getattr(found.unit, one)[..., found.at_unit[0]]) for one in names)


WORK = ("forward_seconds", "input_grad_seconds", "weight_grad_seconds")


def test_without_a_pipeline_parts_are_the_units_of_all_microbatches() -> None:
    """2 microbatches of 32 layers, embedding and head, which is gathered once."""
    found = inputs(pricer(), dp_shard=4, tp=4, ac="full", micro_batch_size=4)
    _, parts, _ = step(found)
    shards, at = found.shards, found.at_shard[0]
    columns = (shards.gather_copy_seconds, shards.scatter_copy_seconds, shards.sum_seconds)
    out, into, sums = (column[:, at] for column in columns)
    exposed = unit(found, "exposed_forward", "exposed_backward")[0]
    assert parts["recompute"] == pytest.approx(2 * COUNTS @ unit(found, "recompute_seconds"))
    assert parts["tp"] == pytest.approx(2 * COUNTS @ exposed)
    assert parts["compute"] == pytest.approx(2 * COUNTS @ unit(found, *WORK) + COUNTS @ sums)
    copies = 2 * (COUNTS @ into + np.array([64.0, 2.0, 1.0]) @ out)
    assert parts["copies"] == pytest.approx(copies)
    assert parts["bubble"] == parts["pp"] == parts["cp"] == parts["ep"] == 0.0
    assert parts["other"] == found.job.profile.fixed_step_seconds


def test_gradients_are_added_up_between_microbatches() -> None:
    """4 microbatches, 3 sums; InternEvo adds with a kernel of its own."""
    found = inputs(pricer("internevo"), dp_shard=4, tp=4, micro_batch_size=2)
    sums = float(COUNTS @ found.shards.sum_seconds[:, found.at_shard[0]])
    assert sums > 0.0
    by_hand = 4 * COUNTS @ unit(found, *WORK) + 3 * sums
    assert step(found)[1]["compute"] == pytest.approx(by_hand)


def of_mean_rank(found: CostInputs, stages: StageSeconds) -> list[float]:
    columns = (stages.forward, stages.input_grad, stages.weight_grad)
    return [float((found.mean_units * column).sum()) for column in columns]


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_the_bubble_is_the_schedules_of_a_mean_rank(name: str) -> None:
    found = inputs(pricer(), dp_shard=4, pp=4, pp_schedule=name, micro_batch_size=1)
    _, parts, stages = step(found)
    assert parts["bubble"] == pytest.approx(3 * sum(of_mean_rank(found, stages)))
    exposed = transport_of(found.job.training, name).exposed
    hops = SCHEDULES[name].sends_on_critical_path(4, 1, 8, exposed)
    assert parts["pp"] == pytest.approx(float(hops) * float(stages.sends.mean_seconds()[0]))


def test_pairs_of_other_ranks_shorten_the_bubble() -> None:
    """DualPipeV, 8 microbatches, 2 ranks: 12 pairs on the longest chain, 11 of either rank."""
    degrees = {"dp_shard": 4, "tp": 2, "ep": 4, "pp": 2}
    given = {"pp_schedule": "DualPipeV", "virtual_stages": 2, "micro_batch_size": 1, "ac": "none"}
    found = inputs(pricer(model="mixtral-8x7b"), **degrees, **given)
    _, parts, stages = step(found)
    idle = float(SCHEDULES["DualPipeV"].bubble_seconds(2, 2, 8, *of_mean_rank(found, stages)))
    pair = pair_columns(found.unit, found.at_unit, found.job.profile)
    saved = [float(relief(pair, rank, np.array([2])).saved[0]) for rank in found.units]
    assert 0.0 < max(saved) < idle
    assert parts["bubble"] in [pytest.approx(idle - one) for one in saved]


def test_a_rank_that_holds_the_head_sets_the_pace() -> None:
    """Megatron's even split of 32 layers over 2 ranks leaves the head on top of the last 16."""
    found = inputs(pricer("megatron"), dp_shard=8, pp=2, micro_batch_size=1)
    _, _, stages = step(found)
    per_unit = stages.forward + stages.input_grad + stages.weight_grad
    ranks = np.einsum("rkn,kn->rn", found.units, per_unit)[:, 0]
    assert ranks[1] > ranks[0]
    assert stages.busy[0] == pytest.approx(4 * ranks[1])


def test_a_split_backward_recomputes_once_more_for_the_weights() -> None:
    """ZBV under full recomputation: W does the forward of its share again."""
    given = {"dp_shard": 8, "pp": 2, "ac": "full", "micro_batch_size": 1}
    found = inputs(pricer(), **given, pp_schedule="ZBVZeroBubble", virtual_stages=2)
    again = unit(found, "redone_seconds")
    once = unit(found, "recompute_seconds")
    _, parts, _ = step(found)
    share = float(SCHEDULES["ZBVZeroBubble"].split_share(2, 2, 4))
    ranks = found.units[:, :, 0] @ (once + share * again)
    assert parts["recompute"] in [pytest.approx(4 * rank) for rank in ranks]


def test_an_optimizer_in_the_backward_pass_delays_the_passes_that_it_runs_in() -> None:
    given = {"dp_shard": 16, "micro_batch_size": 1}
    before, after = (
        step(inputs(pricer(max_grad_norm=None), **given, optimizer_in_backward=way))
        for way in (False, True)
    )
    profile = pricer().profile
    backward = (after[2].input_grad + after[2].weight_grad)[:, 0] @ COUNTS
    added = after[1]["optimizer"] - before[1]["optimizer"]
    assert added == pytest.approx(profile.early_step_share * 2 * float(backward))


@pytest.mark.parametrize(("method", "pieces"), [("allgather", 4), ("alltoall", 4), ("ulysses", 1)])
def test_attention_under_context_parallelism_runs_in_pieces(method: str, pieces: int) -> None:
    """A causal mask of 4096 tokens attends to 2048 on average; the kernel's length is twice that,
    and under a ring that of one of four pieces. Merging four pieces moves 4 fp32 passes of the
    output each.
    """
    p = pricer("fsdp")
    batch = batch_of(p, cp=4, dp_shard=4, cp_method=method, micro_batch_size=1)
    heads = 32.0 if pieces > 1 else 8.0
    tokens = 1024.0 if pieces > 1 else 4096.0
    none = Tensor("none", ())
    op = Attention(name="attention", window=0, saves=(), output=none, statistics=none)
    found = _attention_cost(p.context(batch), op, p.model)
    flops = np.array([2.0 * tokens * 2048.0 * heads * 256.0])
    length = np.array([4096.0 / pieces])
    merged = 16.0 * tokens * heads * 128.0 * (4.0 if pieces > 1 else 0.0)
    for ours, factor, backward in ((found.forward, 1.0, False), (found.input_grad, 2.5, True)):
        alone = p.device.attention_seconds(factor * flops, length, backward=backward)
        assert ours == pytest.approx(alone + p.device.moved_seconds(np.array([merged])))
