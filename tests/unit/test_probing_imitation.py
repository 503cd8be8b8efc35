"""Imitations as a rung: priced as they will run, on the fewest GPUs that hold the layout, and only
where there is a smaller one.
"""

import math
from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import ADDED_SD, ONE_NODE_SD, OTHER_SIZE_SD, proxy_run_sd
from planner.cost.price import Pricer
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.intake.machines import read_cluster
from planner.rules import Context
from planner.search.space.enumerate import build_space
from planner.specs.job import Job
from planner.study.candidates import Candidates, enumerate_candidates
from planner.study.proxy_runs import MOST_OPTIONS, ProxyRuns
from probes.proxy_runs import RUN_NOISE, ProxyPlan, extrapolate, plan_proxy_runs
from tests.unit.test_campaign import as_predicted, job

# model, GPUs, layout, devices of the pool
CASES = [
    ("llama3-8b", 64, {"dp_shard": 64, "ac": "full"}, 64),
    ("llama3-8b", 512, {"dp_replicate": 64, "dp_shard": 8, "ac": "full"}, 512),
    ("llama3-70b", 256, {"dp_shard": 32, "tp": 8, "ac": "full"}, 256),
    ("llama3-70b", 256, {"dp_shard": 64, "tp": 4, "ac": "full"}, 8),
    ("llama3-70b", 512, {"dp_shard": 16, "tp": 8, "pp": 4, "ac": "full"}, 512),
    ("mixtral-8x7b", 128, {"dp_shard": 128, "ep": 8, "ac": "full"}, 128),
]


def imitations(values: dict[str, Any], devices: int) -> tuple[ProxyRuns, Candidates, int]:
    """Of a job's own layout among the candidates, and its row."""
    parsed = read_job(values)
    assert parsed.layout is not None
    pricer = Pricer.build(parsed.model, parsed.cluster, parsed.training)
    fixed = {
        name: getattr(parsed.layout, name)
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "ac")
    }
    search = read_job(
        {**{k: v for k, v in values.items() if k != "layout"}, "search": {"fix": fixed}}
    ).search
    space = build_space(
        Context(model=parsed.model, cluster=parsed.cluster, training=parsed.training), search
    )
    candidates = enumerate_candidates(pricer, space, include=[parsed.layout])
    row = candidates.find(parsed.layout)
    assert row is not None
    return ProxyRuns(pricer, candidates, devices), candidates, row


def as_it_runs(values: dict[str, Any], num_gpus: int) -> ProxyPlan:
    found = plan_proxy_runs(read_job(values), num_gpus)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "num_gpus", "layout", "devices"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_it_is_priced_as_it_will_run_and_tells_about_what_it_claims(
    model: str, num_gpus: int, layout: dict[str, Any], devices: int
) -> None:
    values = job(model, num_gpus, layout)
    found, _, row = imitations(values, devices)
    ways = found.options(row)
    assert 1 <= len(ways) <= MOST_OPTIONS
    assert max(way.num_gpus for way in ways) <= devices
    for way in (ways[0], ways[-1]):
        real = as_it_runs(values, way.num_gpus)
        assert {one.cluster.num_gpus for one in real.runs} == {way.num_gpus}
        assert len(real.runs) == way.runs
        whole_depth = way.runs == 1
        predicted = [estimate_job(one).step_seconds or 0.0 for one in real.runs]
        assert way.step_seconds == pytest.approx(
            np.mean(predicted), rel=0.02 if whole_depth else 0.7
        ), "depths are chosen later"
        runs = [measured_as_predicted(one) for one in real.runs]
        claimed = (extrapolate(real, runs, ["small"] * len(runs)).model_extra or {})[
            "relative_error"
        ]["step_seconds"]
        assert math.hypot(way.sd, RUN_NOISE) == pytest.approx(
            claimed, rel=0.3 if whole_depth else 0.8
        )


def measured_as_predicted(one: Job) -> Any:
    from probes.protocol import Environment, ProbeResult, ProbeTask

    task = ProbeTask(id="small", job=one.request)
    result = ProbeResult(
        task=task,
        outcome=as_predicted()(task),
        environment=Environment(python="3"),
        started_at="",
        wall_seconds=1.0,
        gpu_seconds=1.0,
    )
    return result.measurement().measured


def test_more_gpus_cost_more_and_leave_less_to_the_model() -> None:
    found, candidates, row = imitations(
        job("llama3-70b", 256, {"dp_shard": 32, "tp": 8, "ac": "full"}), 256
    )
    ways = found.options(row)
    assert len(ways) > 1, "on the fewest GPUs most of the communication is missing"
    assert [way.num_gpus for way in ways] == sorted(way.num_gpus for way in ways)
    assert [way.sd for way in ways] == sorted((way.sd for way in ways), reverse=True)
    whole = float(np.exp(candidates.prior.log_seconds[row]))
    for way in ways:
        added = ADDED_SD * abs(whole - way.step_seconds) / whole
        assert way.sd == pytest.approx(math.hypot(added, OTHER_SIZE_SD)), (
            "these are on several nodes"
        )


def test_one_node_stands_less_well_for_many() -> None:
    one, two = (read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": count}) for count in (8, 16))
    assert proxy_run_sd(two, one, 0.0) == pytest.approx(math.hypot(OTHER_SIZE_SD, ONE_NODE_SD))
    assert (
        proxy_run_sd(one, one, 0.0) == proxy_run_sd(two, two, 0.0) == pytest.approx(OTHER_SIZE_SD)
    )
    assert proxy_run_sd(two, one, 0.2) > proxy_run_sd(two, one, 0.1)


def test_the_fewest_are_those_on_which_the_whole_depth_fits() -> None:
    """TorchTitan 0.3 shards in any layout: 0.2 would compute in fp32 on 8, without FSDP."""
    values = job("llama3-70b", 256, {"dp_shard": 32, "tp": 8, "ac": "full"})
    values["training"] |= {"trainer_version": "0.3.0"}
    found, _, row = imitations(values, 256)
    fewest = found.options(row)[0].num_gpus
    assert fewest > 8, "one replica is on 8"
    assert len(as_it_runs(values, fewest).runs) == 1
    assert len(as_it_runs(values, 8).runs) == 2


def test_without_data_parallelism_there_is_no_smaller_layout() -> None:
    found, candidates, row = imitations(
        job("llama3-70b", 32, {"tp": 8, "pp": 4, "ac": "full"}, batch=8), 32
    )
    assert candidates.batch.dp_shard[row] == 1
    assert found.options(row) == ()
    assert found.fidelity().least_gpus[row] == np.inf


def test_model_parallelism_wider_than_the_pool_cannot_be_imitated() -> None:
    found, _, row = imitations(job("llama3-70b", 64, {"dp_shard": 8, "tp": 8, "ac": "full"}), 4)
    assert found.options(row) == ()
    assert found.fidelity().least_gpus[row] == np.inf


def test_fewer_replicas_come_smallest_first_and_keep_the_rest() -> None:
    layout = read_job(
        job("llama3-8b", 144, {"dp_replicate": 4, "dp_shard": 6, "tp": 2, "pp": 3, "ac": "full"})
    ).layout
    smaller = layout.fewer_replicas()
    sizes = [(one.dp_replicate, one.dp_shard) for one in smaller]
    assert sizes[:5] == [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2)]
    assert [a * b for a, b in sizes] == sorted(a * b for a, b in sizes)
    assert (4, 6) not in sizes
    assert len(set(sizes)) == 3 * 4 - 1
    same = {"dp_replicate": 4, "dp_shard": 6}
    assert all(one.model_copy(update=same) == layout for one in smaller)
