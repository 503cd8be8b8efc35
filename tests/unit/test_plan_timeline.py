"""`simulate` and `estimate` have one definition of a pipeline's bubble, of one list of actions."""

import numpy as np
import pytest

from planner.cost.pipeline.simulate import StageCosts, compiled, replay
from planner.intake.jobs import read_job
from planner.plan.timeline import timeline
from planner.schedules import SCHEDULES, Schedule
from tests.conftest import job_values

ALL = pytest.mark.parametrize("entry", SCHEDULES.values(), ids=lambda entry: entry.name)
PP, M = 8, 32


def job_of(entry: Schedule) -> dict[str, object]:
    virtual = 1 if entry.single_stage else 2
    layout = {"pp": PP, "dp_shard": 2, "pp_schedule": entry.name, "virtual_stages": virtual}
    model = "opt-6.7b" if entry.fork else "llama3-8b"
    megatron = {"trainer": "megatron", "trainer_version": "zero-bubble"}
    training = {} if "torch" in entry.runtimes else megatron
    layout |= {"micro_batch_size": 1, "ac": "none"}
    return job_values(model, "h200-sxm-141gb", 2 * PP, 2048, 2 * M, layout=layout, **training)


@ALL
def test_the_busiest_ranks_idle_share_is_the_estimates_bubble(entry: Schedule) -> None:
    """Idle seconds of the busiest rank are bubble and waits for sends."""
    played = timeline(read_job(job_of(entry)))
    time = played.estimate.time
    waits = time.bubble_seconds + time.exposed_communication_seconds["pp"]
    assert min(played.bubble_share) * played.pipeline_seconds == pytest.approx(waits, rel=1e-6)
    assert played.pipeline_seconds <= (played.estimate.step_seconds or 0.0)
    assert (played.makespan_seconds > played.pipeline_seconds) == (not entry.synchronous_end)


def equal_stages(pp: int, virtual: int, f: float, i: float, w: float) -> StageCosts:
    """Stages that all compute equally long; a rank takes f, i and w for a microbatch."""
    share = np.ones((1, pp * virtual)) / virtual
    return StageCosts(
        forward_seconds_CS=f * share,
        input_grad_seconds_CS=i * share,
        weight_grad_seconds_CS=w * share,
        send_seconds_CS=0.0 * share,
        saved_bytes_CS=share,
    )


@ALL
def test_equal_stages_idle_as_the_closed_form_says(entry: Schedule) -> None:
    v = 1 if entry.single_stage else 2
    f, i, w = 1.0, 1.2, 0.8
    played = replay(compiled(entry, PP, v, M), equal_stages(PP, v, f, i, w), num_microbatches=M)
    idle = played.bubble_seconds_CR(entry.synchronous_end)
    assert idle.max() == pytest.approx(float(entry.bubble_seconds(PP, v, M, f, i, w)), abs=1e-9)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.5)])
def test_zero_bubble_closed_forms(pp: int, f: float, i: float, w: float) -> None:
    """Qi et al. (arXiv 2401.10241), table 1: 1F1B (p - 1)(F + B + W), ZB-H1 (p - 1)(F + B - W),
    ZB-H2 (p - 1)(F + B - 2 W); theirs is B what ours is I.
    """
    for name, weight_grads in (("1F1B", 1.0), ("ZB-1p", -1.0), ("ZB-2p", -2.0)):
        entry = SCHEDULES[name]
        costs = equal_stages(pp, 1, f, i, w)
        played = replay(compiled(entry, pp, 1, M), costs, num_microbatches=M)
        idle = float(played.bubble_seconds_CR(entry.synchronous_end).max())
        assert idle == pytest.approx((pp - 1) * (f + i + weight_grads * w), abs=1e-9)
