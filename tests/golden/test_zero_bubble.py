"""Zero Bubble Pipeline Parallelism (Qi et al. 2023, arXiv 2401.10241), tables 3 and 4: order by
throughput, memory, bubbles.

Rows zb-*: GPT 1.5B and 6.2B on 8 A100, 24, 32 and 64 microbatches, schedules 1F1B, Interleaved1F1B
(1F1B-I), ZB-1p and ZB-2p.
"""

import itertools
from collections import defaultdict
from functools import cache

import numpy as np
import pytest

from planner.calibration.accuracy import Row
from planner.calibration.sweeps import rank_correlation
from tests.golden.rows import ids, row, step_error

Group = tuple[str, int, int]
GROUPS: list[Group] = list(itertools.product(("gpt-1.5B", "gpt-6.2B"), (8,), (24, 32, 64)))


@cache
def groups() -> dict[Group, dict[str, Row]]:
    found: dict[Group, dict[str, Row]] = defaultdict(dict)
    for row_id in ids("zb"):
        one = row(row_id)
        count = one.job.layout.num_microbatches(one.job.training.global_batch_size)
        group = one.job.model.name, one.job.cluster.num_gpus, count
        found[group][one.job.layout.pp_schedule] = one
    return dict(found)


def test_all_groups_are_there() -> None:
    assert groups().keys() == set(GROUPS)
    names = {"1F1B", "Interleaved1F1B", "ZB-1p", "ZB-2p"}
    assert all(set(members) == names for members in groups().values())


@pytest.mark.parametrize("group", GROUPS)
def test_schedules_come_in_the_measured_order(group: Group) -> None:
    members = groups()[group]
    ours = {name: one.estimate.step_seconds for name, one in members.items()}
    theirs = {name: one.measured_seconds for name, one in members.items()}
    pairs = itertools.combinations(members, 2)
    swapped = [(a, b) for a, b in pairs if (ours[a] - ours[b]) * (theirs[a] - theirs[b]) < 0]
    assert not swapped
    # 1; 0.95 where two measurements tie
    assert rank_correlation(*(np.array([*side.values()]) for side in (ours, theirs))) >= 0.94
    assert min(ours, key=ours.__getitem__) == min(theirs, key=theirs.__getitem__) == "ZB-2p"


def test_steps_are_within_seven_percent() -> None:
    errors = np.array([step_error(row_id) for row_id in ids("zb")])
    assert len(errors) == 24
    assert np.abs(errors).max() < 0.07
    assert np.abs(errors).mean() < 0.03


@pytest.mark.parametrize("group", GROUPS)
def test_memory_comes_in_the_papers_order(group: Group) -> None:
    """Printed gigabytes of the fullest worker; ZB-1p may hold what 1F1B holds, ZB-2p twice the
    activations.

    The paper does not say whether they were allocated or reserved: allocated.
    """
    members = groups()[group]
    ours = {name: one.estimate.peak_allocated_bytes / 1e9 for name, one in members.items()}
    printed = {name: one.job.labels["measured"] for name, one in members.items()}
    theirs = {name: float(one["peak_gigabytes_as_printed"]) for name, one in printed.items()}
    assert ours["ZB-1p"] == pytest.approx(ours["1F1B"], rel=0.10)
    assert ours["1F1B"] <= ours["ZB-1p"] < ours["Interleaved1F1B"] < ours["ZB-2p"]
    orders = [sorted(side, key=lambda name: (side[name], name)) for side in (ours, theirs)]
    assert orders[0] == orders[1]
    assert ours == pytest.approx(theirs, rel=0.10)


@pytest.mark.parametrize("group", GROUPS)
def test_predicted_bubbles_fall_in_the_papers_order(group: Group) -> None:
    found = {name: one.estimate for name, one in groups()[group].items()}
    shares = {name: e.time.bubble_seconds / e.step_seconds for name, e in found.items()}
    assert shares["ZB-2p"] < shares["Interleaved1F1B"] < shares["1F1B"]
    assert shares["ZB-2p"] < shares["ZB-1p"] < shares["1F1B"]


@pytest.mark.parametrize("model", ["gpt-1.5B", "gpt-6.2B"])
def test_interleaving_pays_for_its_sends(model: str) -> None:
    """Sends that Megatron of 2023 did not overlap cost 1F1B-I most, more with each microbatch."""
    times = (
        {name: one.estimate.time for name, one in groups()[model, 8, count].items()}
        for count in (24, 64)
    )
    few, many = (
        {name: time.exposed_communication_seconds["pp"] for name, time in of.items()}
        for of in times
    )
    for waits in (few, many):
        assert waits["Interleaved1F1B"] > 2 * waits["1F1B"] > 2 * waits["ZB-1p"]
    assert many["Interleaved1F1B"] > 2 * few["Interleaved1F1B"]
    assert many["ZB-1p"] == pytest.approx(few["ZB-1p"], rel=0.05)
