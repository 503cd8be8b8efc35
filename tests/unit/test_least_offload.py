"""The least on the host that makes a layout fit: of the optimizer's states, of activations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.memory.host_activations import host_bytes
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search import one_size
from planner.search.fit import OOM_LIMIT
from planner.search.one_size import search_size
from planner.search.size_candidates import OneSize
from planner.search.space.enumerate import Space
from planner.search.variations import offload
from planner.search.variations.offload import STEPS, least_offloaded, states
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.units import GIB
from tests.conftest import job_values
from tests.pricing import priced_space

TIGHT: dict[str, Any] = job_values("llama2-13b", "a100-sxm-40gb", 8, 4096, 128, trainer="megatron")
TIGHT["cluster"]["memory_fraction"] = 0.93


def job_of(base: dict[str, Any], cluster: dict[str, Any], training: Any, search: Any) -> Job:
    given = {"cluster": cluster, "training": training, "search": {"prefer": "fastest", **search}}
    return read_job({**base, **{key: {**base.get(key, {}), **given[key]} for key in given}})


def best_of(job: Job) -> OneSize:
    return search_size(job, job.cluster, lambda line: None, samples=False)


def searched(cluster: dict[str, Any] | None = None, **search: Any) -> OneSize:
    return best_of(job_of(TIGHT, cluster or {}, {}, search))


def layouts_of(found: OneSize) -> list[Layout]:
    return [layout for _, _, layout in found.candidates]


def offloaded() -> tuple[Pricer, Space]:
    """Every layout of the job with CPU offload."""
    return priced_space(read_job(TIGHT), offload=True)


def every_amount(
    pricer: Pricer, batch: LayoutBatch, dial: Callable[..., LayoutBatch], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """(step seconds, whether it fits) with 0 to most on the host, (most + 1, N)."""
    seconds, fits = [], []
    for amount in range(most + 1):
        prices = pricer.price(dial(batch, np.full(len(batch), amount)))
        risk = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        seconds.append(prices.step_seconds)
        fits.append(risk <= OOM_LIMIT)
    return np.array(seconds), np.array(fits)


def test_bisection_finds_what_trying_every_share_finds() -> None:
    pricer, space = offloaded()
    batch = space.expand(slice(None))
    batch = batch.take(np.arange(0, len(batch), 7))
    seconds, fits = every_amount(pricer, batch, offload.with_share, STEPS)
    assert (np.diff(seconds, axis=0) >= -1e-9 * seconds[1:]).all()
    assert (fits[1:] >= fits[:-1]).all()
    first = np.argmax(fits, axis=0)
    for limit in (np.inf, float(np.median(seconds[0]))):
        least = seconds[first, np.arange(len(batch))]
        wanted = np.flatnonzero(fits[STEPS] & (first > 0) & (least < limit))
        assert len(set(first[wanted])) > 3
        found, their_seconds = least_offloaded(pricer, batch, states(pricer), limit)
        assert their_seconds.tolist() == least[wanted].tolist()
        assert found.optimizer_offload_fraction == pytest.approx(first[wanted] / STEPS)
        assert found.cpu_offload.all()


def test_the_best_of_the_space_are_those_of_all_its_layouts() -> None:
    pricer, space = offloaded()
    _, seconds = least_offloaded(pricer, space.expand(slice(None)), states(pricer), np.inf)
    best = offload.best_offloaded(pricer, space, states(pricer), np.inf, 20)
    assert pricer.price(best).step_seconds == pytest.approx(np.sort(seconds)[:20])
    near = float(np.sort(seconds)[4])
    assert len(offload.best_offloaded(pricer, space, states(pricer), near, 20)) < 20


def test_a_share_wins_where_all_is_more_than_needed() -> None:
    found = searched()
    layout = layouts_of(found)[0]
    assert layout.cpu_offload
    assert layout.optimizer_offload_fraction < 1.0
    whole = searched(fix={"optimizer_offload_fraction": 1.0})
    assert whole.best_seconds > 1.01 * found.best_seconds
    assert {one.optimizer_offload_fraction for one in layouts_of(whole)} == {1.0}


@pytest.mark.slow
def test_no_fixed_share_is_better() -> None:
    free = searched().best_seconds
    for twentieths in range(1, STEPS + 1):
        share = twentieths / STEPS
        fixed = searched(fix={"cpu_offload": True, "optimizer_offload_fraction": share})
        assert fixed.best_seconds > 0.998 * free, share


def test_where_the_host_cannot_hold_all_a_share_is_found() -> None:
    """13B x 16 bytes are 194 GiB; without offload nothing fits on 4 devices of 40 GB."""
    four = {"num_gpus": 4, "gpus_per_node": 4}
    assert not searched(four, fix={"cpu_offload": False}).candidates
    roomy, narrow = (searched({**four, "host_memory": size}) for size in ("1 TiB", "180 GiB"))
    assert layouts_of(roomy)[0].optimizer_offload_fraction >= 0.5
    assert max(one.optimizer_offload_fraction for one in layouts_of(narrow)) <= 0.9


LONG: dict[str, Any] = job_values("llama3-8b", "a100-sxm-40gb", 8, 32768, 16, trainer="megatron")


def long(version: str = "0.16", host: dict[str, Any] | None = None, **search: Any) -> OneSize:
    return best_of(job_of(LONG, host or {}, {"trainer_version": version}, search))


def test_activations_leave_where_the_release_can_be_told() -> None:
    best = long()
    layout = layouts_of(best)[0]
    assert layout.activation_offload_layers > 0
    assert (layout.pp, layout.ac) == (1, "none")
    kept = long(fix={"activation_offload_layers": 0})
    assert kept.best_seconds > 1.01 * best.best_seconds
    assert not any(one.activation_offload_layers for one in layouts_of(long("0.14")))


def test_activations_stay_where_the_host_cannot_hold_them() -> None:
    found = long(host={"host_memory": "64 GiB"}, prefer="simplest")
    batch = LayoutBatch.from_layouts(layouts_of(found))
    assert (8 * host_bytes(found.pricer, batch) <= 64 * GIB).all()
    assert layouts_of(long())[0] not in layouts_of(found)


def test_the_fewest_layers_are_those_of_trying_every_number() -> None:
    job = job_of(LONG, {}, {"trainer_version": "0.16"}, {})
    pricer, space = priced_space(job, oversized=True)
    batch, dial = space.expand(slice(None)), offload.activations(pricer)
    batch = batch.take(dial.takes(batch))
    seconds, fits = every_amount(pricer, batch, offload.with_layers, 31)
    assert (np.diff(seconds, axis=0) >= 0.0).all()
    first = np.argmax(fits, axis=0)
    wanted = np.flatnonzero(fits[31] & (first > 0))
    assert len(set(first[wanted])) > 3
    found, their_seconds = least_offloaded(pricer, batch, dial, np.inf)
    assert found.activation_offload_layers.tolist() == first[wanted].tolist()
    assert their_seconds.tolist() == seconds[first[wanted], wanted].tolist()


def test_where_all_fits_or_the_user_says_so_no_share_is_tried() -> None:
    roomy = searched({"gpu": "h200-sxm-141gb", "num_gpus": 16})
    assert not layouts_of(roomy)[0].cpu_offload
    assert not any(one.cpu_offload for one in layouts_of(searched(fix={"cpu_offload": False})))


# 13B parameters and their states fill 4 A100 so far that layers must be recomputed; states that
# are on the host leave room not to.
FULL = job_values("llama2-13b", "a100-sxm-80gb", 4, 4096, 64, trainer="megatron-deepspeed")


def nearly_full(**search: Any) -> OneSize:
    return best_of(job_of(FULL, {}, {}, search))


def test_states_on_the_host_win_where_the_device_is_nearly_full() -> None:
    on_device, on_host = (nearly_full(fix={"cpu_offload": value}) for value in (False, True))
    assert on_device.candidates
    assert on_host.best_seconds < 0.9 * on_device.best_seconds
    found = nearly_full()
    assert found.best_seconds == pytest.approx(on_host.best_seconds, rel=0.002)
    assert {layout.cpu_offload for layout in layouts_of(found)} == {False, True}


def test_a_space_too_large_is_searched_on_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_size, "MOST_OFFLOADED", 0)
    assert not any(layout.cpu_offload for layout in layouts_of(nearly_full()))


def test_the_smallest_layouts_are_not_sought_on_the_host() -> None:
    """Who asks for least memory wants room on the device, not the device's states elsewhere."""
    assert not any(x.cpu_offload for x in layouts_of(nearly_full(objective="memory")))
