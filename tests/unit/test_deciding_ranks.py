"""A search prices the deciding ranks alone: no other rank may hold more or compute longer."""

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.schedules import SCHEDULES
from planner.trainers.registry import resolve_layout
from tests.conftest import job_values

LAYERS = 126


def pricer(trainer: str) -> Pricer:
    job = read_job(job_values("llama3-405b", "h100-sxm-80gb", 512, 8192, 512, trainer=trainer))
    return Pricer.build(job.model, job.cluster, job.training)


def splits(num_stages: int, seed: int) -> list[tuple[int, ...]]:
    """Even but for the ends, and with the layers left over anywhere."""
    even = np.full(num_stages, LAYERS // num_stages + 1)
    even[0] -= 1
    even[num_stages - (even.sum() - LAYERS) :] -= 1
    anywhere = np.full(num_stages, LAYERS // num_stages)
    more = np.random.default_rng(seed).permutation(num_stages)[: LAYERS - anywhere.sum()]
    anywhere[more] += 1
    return [tuple(sizes.tolist()) for sizes in (even, anywhere)]


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
@pytest.mark.parametrize("name", SCHEDULES.names)
def test_no_rank_needs_more_than_the_deciding_ones(name: str, trainer: str) -> None:
    schedule = SCHEDULES[name]
    shapes = [(16, 1), (8, 1)] if schedule.single_stage else [(16, 2), (8, 2)]
    if not schedule.single_stage and not schedule.v_shaped:
        shapes += [(16, 5), (8, 4)]
    layouts = [
        resolve_layout(
            {
                "pp": pp,
                "virtual_stages": virtual,
                "tp": 8,
                "dp_shard": 64 // pp,
                "pp_schedule": name,
                "layers_per_stage": sizes,
                "ac": ac,
            },
            trainer=trainer,
            num_gpus=512,
        )
        for pp, virtual in shapes
        for seed in range(3)
        for sizes in splits(pp * virtual, seed)
        for ac in ("none", "full", "selective-op")
    ]
    batch, prices = LayoutBatch.from_layouts(layouts), pricer(trainer)
    deciding, every = prices.price(batch), prices.price(batch, every_rank=True)
    for column in ("least_device_bytes", "device_bytes", "step_seconds"):
        few, all_ranks = getattr(deciding, column), getattr(every, column)
        assert all_ranks == pytest.approx(few, rel=1e-12), column
