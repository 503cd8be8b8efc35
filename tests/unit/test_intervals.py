"""Intervals: the posterior through the model, joint draws, memory, what was not seen."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from planner.calibration.accuracy import Row
from planner.calibration.basis import WIDER, basis, memory_basis, seen, widening
from planner.calibration.conformal import MEMORY_PRIOR, memory_coverage
from planner.calibration.conformal import memory_deviation as fitted_deviation
from planner.calibration.correlated import CorrelatedErrors
from planner.calibration.intervals import (
    TWO_SIDED_90,
    memory_deviation,
    oom_probability,
    spread,
    time_spread,
)
from planner.calibration.kernel_doubt import attention_sd, unmeasured_gpu_sd
from planner.columns import LayoutBatch
from planner.cost.machine.knobs import KNOBS, OWN_SHARE, PLACE, Calibration, Knob
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.machine.stacks import STACK
from planner.cost.price import Pricer
from planner.intake.jobs import read_job, read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.specs.job import Job
from planner.trainers.registry import resolve_layout
from planner.units import GIB


def pricer(gpu: str = "h100-sxm-80gb", calibration: Calibration | None = None) -> Pricer:
    training = read_training({"seq_len": 4096, "global_batch_size": 64})
    cluster = read_cluster({"gpu": gpu, "num_gpus": 8})
    return Pricer.build(read_model("llama3-8b"), cluster, training, calibration)


def batch() -> LayoutBatch:
    given: list[dict[str, object]] = [{}, {"ac": "full"}, {"tp": 8}, {"tp": 2, "compile": True}]
    return LayoutBatch.from_layouts(
        [resolve_layout(values, trainer="torchtitan", num_gpus=8) for values in given]
    )


def test_one_uncertain_knob_spreads_predictions_by_its_derivative() -> None:
    """Only `compute` uncertain: the loadings are the change of log seconds for one deviation of it,
    and the offsets of stack and unit.
    """
    keys = tuple((knob.name, scope) for knob in KNOBS for scope in ("", _own(knob)))
    covariance = np.diag([0.01 if key == ("compute", "") else 0.0 for key in keys])
    calibration = replace(
        Calibration.prior(), keys=keys, shifts=np.zeros(len(keys)), covariance=covariance, place=0.0
    )
    p = pricer(calibration=calibration)
    found = time_spread(p, batch(), p.price(batch()))
    slower = replace(p.profile, compute=p.profile.compute * np.exp(-0.1))
    slow = Pricer.build(p.model, p.cluster, p.training, calibration, profile=slower)
    moved = slow.price(batch()).step_seconds
    expected = np.log(moved / p.price(batch()).step_seconds)
    offsets = calibration.stack_sd**2 + calibration.unit_sd**2
    by_kernel = attention_sd(p, batch()) ** 2 + unmeasured_gpu_sd(calibration, p.cluster.gpu) ** 2
    by_knob = np.sqrt((found.loadings**2).sum(axis=0) - offsets - by_kernel)
    assert by_knob == pytest.approx(expected, rel=0.15)
    assert found.own_sd == pytest.approx(WIDER * calibration.run_sd)


def test_an_offset_and_a_knob_are_doubted_together() -> None:
    """A run leaves their sum known: where the knob is 1 more, the offset is 0.6 less."""
    keys = tuple((knob.name, scope) for knob in KNOBS for scope in ("", _own(knob)))
    place, count = keys.index(("compute", "")), len(keys)
    covariance = np.diag([0.05 if key == ("compute", "") else 0.01 for key in (*keys, None)])
    covariance[count, count], covariance[place, count] = 0.04, -0.03
    covariance[count, place] = -0.03
    covariance[place + 1, place + 1] = 0.0  # the family's own share of the same knob
    calibration = replace(
        Calibration.prior(), keys=(*keys, (STACK, "mine")), shifts=np.zeros(count + 1),
        covariance=covariance, place=0.0, unit_sd=0.1,
    )  # fmt: skip
    found = calibration.offsets("torchtitan", "hopper", "mine", ["one"])
    at = [knob.name for knob in KNOBS].index("compute")
    assert found.slopes[0, at] == pytest.approx(-0.03 / 0.05)
    assert found.covariance[0, 0] == pytest.approx(0.04 + 0.1**2 - 0.03**2 / 0.05)


def _own(knob: Knob) -> str:
    return "torchtitan" if knob.scope == "trainer" else "hopper"


def test_what_the_directions_leave_out_is_each_layouts_own() -> None:
    """The variance of predictions under a calibration, tr(C M), is that of its directions and the
    rest.
    """
    p = pricer()
    trainer, family = p.training.trainer, p.cluster.gpu.family
    covariance = p.calibration.effective_covariance(trainer, family)
    directions, _ = p.calibration.directions(trainer, family)
    carried = np.sum(directions @ p.calibration.sensitivity * directions)
    rest = np.trace(covariance @ p.calibration.sensitivity) - carried
    assert rest > 0.1 * p.calibration.run_sd**2, "it shows"
    own = time_spread(p, batch(), p.price(batch())).own_sd / widening(batch(), p, p.calibration)
    assert own == pytest.approx(np.sqrt(rest + p.calibration.run_sd**2), rel=1e-4)


def test_errors_of_layouts_share_what_the_posterior_moves_and_are_as_alike_as_they_are() -> None:
    p = pricer()
    found = time_spread(p, batch(), p.price(batch()))
    errors = CorrelatedErrors.of(batch(), found, p.training.global_batch_size)
    together = errors.between(np.arange(len(batch())), np.arange(len(batch())))
    shared = found.loadings.T @ found.loadings
    assert np.sqrt(np.diag(together)) == pytest.approx(found.sd)
    assert (together >= shared - 1e-12).all(), "own errors are never against each other"
    assert (together - shared <= found.own_sd[:, None] * found.own_sd[None, :] * (1 + 1e-9)).all()
    assert found.take([2, 0]).sd == pytest.approx(found.sd[[2, 0]])


def test_a_gpu_never_measured_is_less_sure() -> None:
    widths = []
    for gpu in ("h100-sxm-80gb", "mi300x-192gb"):
        p = pricer(gpu)
        low, high = spread(p, batch(), p.price(batch()), p.price(batch()).step_seconds).step_seconds
        widths.append(np.log(high / low))
    by_kernels = [0, 1, 3]  # with TP 8 the host sets the pace, whatever the GPU
    assert (widths[1] > widths[0])[by_kernels].all()


def test_memory_deviates_by_a_share_and_by_a_fixed_part() -> None:
    profile = replace(pricer().profile, memory_sd=0.03, memory_sd_bytes=0.4 * GIB)
    large, small = (
        memory_deviation(profile, np.array([400 * GIB])),
        memory_deviation(profile, np.array([1.0 * GIB])),
    )
    assert large[0] == pytest.approx(0.03, rel=0.01)
    assert small[0] == pytest.approx(np.hypot(0.03, np.log1p(0.4 * TWO_SIDED_90) / TWO_SIDED_90))
    alone = replace(profile, memory_sd=0.0, memory_extra_sd=0.0)
    tiny = np.array([0.01 * GIB])
    upper = tiny * np.exp(TWO_SIDED_90 * memory_deviation(alone, tiny))
    assert upper[0] == pytest.approx(tiny[0] + TWO_SIDED_90 * 0.4 * GIB), (
        "what is fixed is added, however little the model holds"
    )


def test_a_trainer_whose_memory_was_never_compared_is_doubted() -> None:
    known, doubted = (
        replace(pricer().profile, memory_sd=0.03, memory_sd_bytes=0.0, memory_extra_sd=rates_sd)
        for rates_sd in (0.0, 0.04)
    )
    assert memory_deviation(known, np.array([GIB]))[0] == pytest.approx(0.03)
    assert memory_deviation(doubted, np.array([GIB]))[0] == pytest.approx(0.05)


def run(number: int, factor: float, complete: bool = True, source: str = "") -> Row:
    """A run predicted at 40 GiB that needed `factor` times that."""
    job = SimpleNamespace(
        labels={"complete": complete, "group": source,
            "measured": {"peak_allocated_bytes": 40 * GIB * factor}}, id=number, layout=None,
        cluster=SimpleNamespace(gpu=SimpleNamespace(name="h100-sxm-80gb")),
        model=SimpleNamespace(is_moe=False),
    )  # fmt: skip
    estimate = SimpleNamespace(peak_allocated_bytes=40 * GIB, peak_reserved_bytes=None, memory=None)
    return Row.build(job, estimate)  # type: ignore[arg-type]


def test_a_place_with_many_runs_says_no_more_of_memory_than_one_with_few() -> None:
    """200 runs of one place within 1%; one run each of five places off by 8%."""
    many = [run(number, np.exp(0.01), source="many") for number in range(200)]
    few = [run(number, np.exp(0.08), source=f"few {number}") for number in range(5)]
    relative, fixed = fitted_deviation([*many, *few])
    assert np.hypot(relative, fixed / (40 * GIB)) * TWO_SIDED_90 == pytest.approx(0.08, rel=0.15)
    assert memory_coverage([*many, *few]) == 1.0
    assert memory_coverage(many) is None


def test_memory_deviates_as_runs_do_that_state_everything() -> None:
    """40 runs off by 6% either way, and 60 by half whose rows leave settings open."""
    stated = [run(number, np.exp(0.06 if number % 2 else -0.06), True) for number in range(40)]
    others = (run(number, 1.5, False) for number in range(60))
    relative, fixed = fitted_deviation([*stated, *others])
    assert np.hypot(relative, fixed / (40 * GIB)) * TWO_SIDED_90 == pytest.approx(0.06, rel=0.15)
    assert fitted_deviation(stated[:5]) == MEMORY_PRIOR


def test_probability_of_running_out_is_half_where_the_prediction_meets_the_limit() -> None:
    p = pricer()
    limit = float(p.cluster.usable_memory_bytes)
    found = oom_probability(p.profile, p.cluster, limit * np.array([0.5, 0.9, 1.0, 1.1]))
    assert found[2] == pytest.approx(0.5, abs=1e-6)
    assert (np.diff(found) > 0).all()
    deviation = memory_deviation(p.profile, np.array([limit * 0.9]))
    at_five_percent = limit * np.exp(-TWO_SIDED_90 * deviation)
    found = oom_probability(p.profile, p.cluster, at_five_percent)
    assert found[0] == pytest.approx(0.05, abs=0.005)


def test_all_of_the_card_is_less_of_a_risk_than_the_share_that_a_plan_may_use() -> None:
    layout = resolve_layout({"ac": "none", "micro_batch_size": 2}, trainer="torchtitan", num_gpus=8)
    batch = LayoutBatch.from_layouts([layout])
    whole = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 8, "memory_fraction": 1.0})
    for share in (0.95, 1.0):
        cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 8, "memory_fraction": share}
        p = replace(pricer(), cluster=read_cluster(cluster))
        prices = p.price(batch)
        found = spread(p, batch, prices, prices.step_seconds)
        usable, card = found.oom_probability[0], found.oom_probability_full_card[0]
        assert card == pytest.approx(usable) if share == 1.0 else card < usable
        assert card == oom_probability(p.profile, whole, prices.least_device_bytes)


def test_basis_tells_what_was_measured() -> None:
    def job(trainer: str, gpu: str, **layout: object) -> Job:
        training = {"seq_len": 4096, "global_batch_size": 64, "trainer": trainer}
        return read_job(
            {
                "model": "llama3-8b",
                "cluster": {"gpu": gpu, "num_gpus": 8},
                "training": training,
                "layout": layout,
            }
        )

    measured = job("torchtitan", "h100-sxm-80gb", tp=2)
    calibration = replace(Calibration.prior(), seen=seen([measured]))

    def of(asked: Job) -> dict[str, str]:
        return dict(basis(calibration, asked, LayoutBatch.from_layouts([asked.layout]))[0])

    assert set(of(measured).values()) == {"calibrated"}
    assert of(job("torchtitan", "a100-sxm-80gb", tp=2))["tp"] == "interpolated"
    assert of(job("megatron", "a100-sxm-80gb", tp=2))["tp"] == "extrapolated"
    assert of(job("torchtitan", "h100-sxm-80gb", cp=2))["cp"] == "extrapolated"
    assert memory_basis(calibration, "torchtitan") == "interpolated"
    assert memory_basis(shipped_calibration(), "torchtitan") == "calibrated"


def test_knobs_have_priors_of_their_own_scale() -> None:
    assert len(PLACE) == len(KNOBS)
    for knob in KNOBS:
        assert knob.moved(0.0) == pytest.approx(knob.prior)
        assert knob.moved(0.1) > knob.prior > knob.moved(-0.1)
        assert not knob.share or knob.moved(10.0) < 1.0
    assert 0.0 < OWN_SHARE <= 1.0


def test_steps_on_moved_machines_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands beside a layout; of two splits each has its own."""
    given = {"dp_shard": 2, "pp": 4, "micro_batch_size": 1}
    splits = ([8, 8, 8, 8], [9, 8, 8, 7], None)
    first, second, third = (
        LayoutBatch.from_layouts(
            [
                resolve_layout(
                    given | ({} if one is None else {"layers_per_stage": one}),
                    trainer="megatron",
                    num_gpus=8,
                )
            ]
        )
        for one in splits
    )
    training = read_training({"seq_len": 4096, "global_batch_size": 64, "trainer": "megatron"})
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 8})
    here = Pricer.build(read_model("llama3-8b"), cluster, training)
    whole = LayoutBatch.concatenate([second, first, third])
    together = time_spread(here, whole, here.price(whole)).loadings
    monkeypatch.setattr(Pricer, "step_seconds_on", lambda *_: pytest.fail("they are known already"))
    for place, one in enumerate((second, first, third)):
        alone = time_spread(here, one, here.price(one)).loadings
        np.testing.assert_allclose(alone[:, 0], together[:, place], rtol=1e-9)
