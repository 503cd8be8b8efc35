"""The least on the host that makes a layout fit: of the optimizer's states, of activations."""

from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.memory.host_activations import host_bytes
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.rules import Context
from planner.search.fit import OOM_LIMIT
from planner.search.one_size import search_size
from planner.search.size_candidates import OneSize
from planner.search.space.enumerate import build_space
from planner.search.variations.offload import (
    STATES,
    STEPS,
    activations,
    best_offloaded,
    least_offloaded,
    with_layers,
    with_share,
)
from planner.specs.job import SearchSpec
from planner.units import GIB
from tests.conftest import job_values

TIGHT: dict[str, Any] = job_values("llama2-13b", "a100-sxm-40gb", 8, 4096, 128, trainer="megatron")


def searched(cluster: dict[str, Any] | None = None, **search: Any) -> OneSize:
    machine = {**TIGHT["cluster"], **(cluster or {})}
    job = read_job({**TIGHT, "cluster": machine, "search": {"prefer": "fastest", **search}})
    return search_size(job, job.cluster, lambda line: None, samples=False)


def offloaded() -> tuple[Pricer, LayoutBatch]:
    """Every layout of the job with CPU offload."""
    job = read_job(TIGHT)
    pricer = Pricer.build(job.model, job.cluster, job.training)
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    space = build_space(context, SearchSpec(), offload=True)
    return pricer, space.expand(slice(None))


def every_share(pricer: Pricer, batch: LayoutBatch) -> tuple[np.ndarray, np.ndarray]:
    """(step seconds, whether it fits) at 0 to STEPS steps on the host, (STEPS + 1, N)."""
    seconds, fits = [], []
    for twentieths in range(STEPS + 1):
        prices = pricer.price(with_share(batch, np.full(len(batch), twentieths)))
        risk = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        seconds.append(prices.step_seconds)
        fits.append(risk <= OOM_LIMIT)
    return np.array(seconds), np.array(fits)


def test_bisection_finds_what_trying_every_share_finds() -> None:
    pricer, batch = offloaded()
    batch = batch.take(np.arange(0, len(batch), 7))
    seconds, fits = every_share(pricer, batch)
    assert (np.diff(seconds, axis=0) >= -1e-9 * seconds[1:]).all()
    assert (fits[1:] >= fits[:-1]).all()
    for limit in (np.inf, float(np.median(seconds[0]))):
        first = np.argmax(fits, axis=0)
        least = seconds[first, np.arange(len(batch))]
        wanted = np.flatnonzero(fits[STEPS] & (first > 0) & (least < limit))
        assert len(set(first[wanted])) > 3
        found, their_seconds = least_offloaded(pricer, batch, STATES, limit)
        assert their_seconds.tolist() == least[wanted].tolist()
        assert found.optimizer_offload_fraction == pytest.approx(first[wanted] / STEPS)
        assert found.cpu_offload.all()


def test_the_best_of_the_space_are_those_of_all_its_layouts() -> None:
    pricer, batch = offloaded()
    context = Context(model=pricer.model, cluster=pricer.cluster, training=pricer.training)
    space = build_space(context, SearchSpec(), offload=True)
    _, seconds = least_offloaded(pricer, batch, STATES, np.inf)
    best = best_offloaded(pricer, space, STATES, np.inf, 20)
    assert pricer.price(best).step_seconds == pytest.approx(np.sort(seconds)[:20])
    near = float(np.sort(seconds)[4])
    assert len(best_offloaded(pricer, space, STATES, near, 20)) < 20


def test_a_share_wins_where_all_is_more_than_needed() -> None:
    found = searched()
    layout = found.candidates[0][2]
    assert layout.cpu_offload
    assert layout.optimizer_offload_fraction < 1.0
    whole = searched(fix={"optimizer_offload_fraction": 1.0})
    assert whole.best_seconds > 1.01 * found.best_seconds
    assert all(x.optimizer_offload_fraction == 1.0 for _, _, x in whole.candidates)


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
    assert roomy.candidates[0][2].optimizer_offload_fraction >= 0.5
    shares = [x.optimizer_offload_fraction for _, _, x in narrow.candidates]
    assert shares
    assert max(shares) <= 0.9


LONG: dict[str, Any] = job_values("llama3-8b", "a100-sxm-40gb", 8, 32768, 16, trainer="megatron")


def long(version: str, **search: Any) -> OneSize:
    training = {**LONG["training"], "trainer_version": version}
    job = read_job({**LONG, "training": training, "search": {"prefer": "fastest", **search}})
    return search_size(job, job.cluster, lambda line: None, samples=False)


def test_activations_leave_where_the_release_can_be_told() -> None:
    best = long("0.16")
    layout = best.candidates[0][2]
    assert layout.activation_offload_layers > 0
    assert (layout.pp, layout.ac) == (1, "none")
    kept = long("0.16", fix={"activation_offload_layers": 0})
    assert kept.best_seconds > 1.01 * best.best_seconds
    assert not any(x.activation_offload_layers for _, _, x in long("0.14").candidates)


def test_activations_stay_where_the_host_cannot_hold_them() -> None:
    cluster = {**LONG["cluster"], "host_memory": "64 GiB"}
    training = {**LONG["training"], "trainer_version": "0.16"}
    job = read_job({**LONG, "cluster": cluster, "training": training})
    found = search_size(job, job.cluster, lambda line: None, samples=False)
    batch = LayoutBatch.from_layouts([layout for _, _, layout in found.candidates])
    assert (8 * host_bytes(found.pricer, batch) <= 64 * GIB).all()
    assert long("0.16").candidates[0][2] not in [layout for _, _, layout in found.candidates]


def test_the_fewest_layers_are_those_of_trying_every_number() -> None:
    training = {**LONG["training"], "trainer_version": "0.16"}
    job = read_job({**LONG, "training": training})
    pricer = Pricer.build(job.model, job.cluster, job.training)
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    batch = build_space(context, SearchSpec(), oversized=True).expand(slice(None))
    dial = activations(pricer)
    batch = batch.take(dial.takes(batch))
    seconds, fits = [], []
    for layers in range(32):
        prices = pricer.price(with_layers(batch, np.full(len(batch), layers)))
        risk = oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes)
        seconds.append(prices.step_seconds)
        fits.append(risk <= OOM_LIMIT)
    assert (np.diff(seconds, axis=0) >= 0.0).all()
    first = np.argmax(fits, axis=0)
    wanted = np.flatnonzero(fits[31] & (first > 0))
    assert len(set(first[wanted])) > 3
    found, their_seconds = least_offloaded(pricer, batch, dial, np.inf)
    assert found.activation_offload_layers.tolist() == first[wanted].tolist()
    assert their_seconds.tolist() == np.array(seconds)[first[wanted], wanted].tolist()


def test_where_all_fits_or_the_user_says_so_no_share_is_tried() -> None:
    roomy = searched({"gpu": "h200-sxm-141gb", "num_gpus": 16})
    assert not roomy.candidates[0][2].cpu_offload
    off = searched(fix={"cpu_offload": False})
    assert not any(x.cpu_offload for _, _, x in off.candidates)
