"""Intervals: the posterior through the model, joint draws, memory, what was not seen."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import conformal
from planner.calibration import intervals, student
from planner.calibration.accuracy import Row
from planner.calibration.basis import WIDER, basis, memory_basis, seen, widening
from planner.calibration.classes import PRIOR_UNITS, Misses, class_of, factor_of, interval_score
from planner.calibration.intervals import memory_deviation, oom_probability, spread, time_spread
from planner.calibration.kernel_doubt import attention_sd, unmeasured_gpu_sd
from planner.columns import FloatColumn, LayoutBatch
from planner.cost.machine.knobs import KNOBS, OWN_SHARE, PLACE, Calibration, Knob
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.cost.machine.stacks import STACK
from planner.cost.price import Pricer
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.specs.job import Job
from planner.units import GIB
from tests import pricing
from tests.conftest import job_values
from tests.pricing import pricer_of
from tests.pricing import rows as batch_of

HOPPER, TWO_SIDED_90 = "h100-sxm-80gb", intervals.TWO_SIDED_90


def job_of(gpu: str = HOPPER, trainer: str = "torchtitan", **layout: object) -> Job:
    return read_job(job_values("llama3-8b", gpu, 8, 4096, 64, trainer=trainer, layout=layout))


def pricer(
    gpu: str = HOPPER, calibration: Calibration | None = None, trainer: str = "torchtitan"
) -> Pricer:
    return pricer_of(job_of(gpu, trainer), calibration)


def batch() -> LayoutBatch:
    return batch_of({}, {"ac": "full"}, {"tp": 8}, {"tp": 2, "compile": True})


def test_one_uncertain_knob_spreads_predictions_by_its_derivative() -> None:
    """Loadings are the change of log seconds for a deviation of it, beside stack and unit."""
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
    """The variance of predictions, tr(C M), is that of the directions and the rest."""
    p = pricer()
    trainer, family = p.training.trainer, p.cluster.gpu.family
    covariance = p.calibration.effective_covariance(trainer, family)
    directions, _ = p.calibration.directions(trainer, family)
    carried = np.sum(directions @ p.calibration.sensitivity * directions)
    rest = np.trace(covariance @ p.calibration.sensitivity) - carried
    assert rest > 0.1 * p.calibration.run_sd**2, "it shows"
    own = time_spread(p, batch(), p.price(batch())).own_sd / widening(batch(), p, p.calibration)
    assert own == pytest.approx(np.sqrt(rest + p.calibration.run_sd**2), rel=1e-4)


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
    large, small = (memory_deviation(profile, np.array([n * GIB])) for n in (400, 1.0))
    assert large[0] == pytest.approx(0.03, rel=0.01)
    assert small[0] == pytest.approx(np.hypot(0.03, np.log1p(0.4 * TWO_SIDED_90) / TWO_SIDED_90))
    alone = replace(profile, memory_sd=0.0, memory_extra_sd=0.0)
    tiny = np.array([0.01 * GIB])
    upper = tiny * np.exp(TWO_SIDED_90 * memory_deviation(alone, tiny))
    # what is fixed is added, however little the model holds
    assert upper[0] == pytest.approx(tiny[0] + TWO_SIDED_90 * 0.4 * GIB)


@pytest.mark.parametrize(("extra", "deviation"), [(0.0, 0.03), (0.04, 0.05)])
def test_memory_never_compared_is_doubted(extra: float, deviation: float) -> None:
    sd = {"memory_sd": 0.03, "memory_sd_bytes": 0.0, "memory_extra_sd": extra}
    found = memory_deviation(replace(pricer().profile, **sd), np.array([GIB]))
    assert found[0] == pytest.approx(deviation)


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
    batch = batch_of({"ac": "none", "micro_batch_size": 2})
    cluster = {"gpu": HOPPER, "num_gpus": 8}
    whole = read_cluster({**cluster, "memory_fraction": 1.0})
    for share in (0.95, 1.0):
        p = replace(pricer(), cluster=read_cluster({**cluster, "memory_fraction": share}))
        prices = p.price(batch)
        found = spread(p, batch, prices, prices.step_seconds)
        usable, card = found.oom_probability[0], found.oom_probability_full_card[0]
        assert card == pytest.approx(usable) if share == 1.0 else card < usable
        assert card == oom_probability(p.profile, whole, prices.least_device_bytes)


def test_basis_tells_what_was_measured() -> None:
    measured, ampere = job_of(tp=2), "a100-sxm-80gb"
    calibration = replace(Calibration.prior(), seen=seen([measured]))

    def of(asked: Job) -> dict[str, str]:
        return dict(basis(calibration, asked, LayoutBatch.from_layouts([asked.layout]))[0])

    assert set(of(measured).values()) == {"calibrated"}
    assert of(job_of(ampere, tp=2))["tp"] == "interpolated"
    assert of(job_of(ampere, "megatron", tp=2))["tp"] == "extrapolated"
    assert of(job_of(cp=2))["cp"] == "extrapolated"
    assert memory_basis(calibration, "torchtitan") == "interpolated"
    assert memory_basis(shipped_calibration(), "torchtitan") == "calibrated"


def test_knobs_have_priors_of_their_own_scale() -> None:
    assert len(PLACE) == len(KNOBS)
    for knob in KNOBS:
        assert knob.moved(0.0) == pytest.approx(knob.prior)
        assert knob.moved(0.1) > knob.prior > knob.moved(-0.1)
        assert not knob.share or knob.moved(10.0) < 1.0
    assert 0.0 < OWN_SHARE <= 1.0


def run(
    number: int,
    predicted: float,
    off: float,
    source: str = "one source",
    complete: bool = True,
    *,
    experts: bool = False,
) -> Row:
    """A run that needed e^off times the bytes that were predicted."""
    needed = {"peak_allocated_bytes": predicted * np.exp(off)}
    job = SimpleNamespace(
        labels={"complete": complete, "group": source, "measured": needed}, id=number, layout=None,
        cluster=SimpleNamespace(gpu=SimpleNamespace(name="h100-sxm-80gb", vendor="nvidia")),
        model=SimpleNamespace(is_moe=experts), training=SimpleNamespace(trainer="megatron"),
    )  # fmt: skip
    unsaid = {"peak_reserved_bytes": None, "memory": None}
    return Row(job=job, estimate=SimpleNamespace(peak_allocated_bytes=predicted, **unsaid))  # type: ignore[arg-type]


def of_one_peak(runs: list[Row]) -> float:
    """How far runs predicted at 40 GiB may be off, of the logarithm."""
    relative, fixed = conformal.memory_deviation(runs)
    return float(TWO_SIDED_90 * np.hypot(relative, fixed / (40 * GIB)))


def test_runs_that_agree_leave_the_floor_and_too_few_the_prior() -> None:
    agreeing = [run(number, 40 * GIB, 0.0) for number in range(conformal.LEAST_MEMORY_RUNS)]
    assert conformal.memory_deviation(agreeing) == conformal.MEMORY_FLOOR
    assert conformal.memory_deviation(agreeing[1:]) == conformal.MEMORY_PRIOR


def test_memory_deviates_as_runs_do_that_state_everything() -> None:
    """40 runs off by 6% either way, and 60 by half whose rows leave settings open."""
    stated = [run(number, 40 * GIB, 0.06 if number % 2 else -0.06) for number in range(40)]
    others = [run(number, 40 * GIB, np.log(1.5), complete=False) for number in range(60)]
    assert of_one_peak([*stated, *others]) == pytest.approx(0.06, rel=0.15)


def test_coverage_is_of_places_and_of_one_place_none() -> None:
    many = [run(number, 40 * GIB, 0.01, "many") for number in range(200)]
    few = [run(number, 40 * GIB, 0.08, f"few {number}") for number in range(5)]
    assert conformal.memory_coverage([*few, *many]) == 1.0
    assert conformal.memory_coverage(many) is None


def test_a_class_deviates_as_its_own_peaks_do_beside_those_of_all() -> None:
    """Dense units are off by 1%, experts' by 8%; a class of one unit counts as much as all."""
    dense = [run(number, 40 * GIB, 0.01, f"dense {number}") for number in range(9)]
    for experts in (1, 9):
        off = [run(n, 40 * GIB, 0.08, f"experts {n}", experts=True) for n in range(experts)]
        runs = [*dense, *off]
        relative, fixed = conformal.memory_deviation(runs)
        all_of_them = TWO_SIDED_90 * np.hypot(relative, fixed / (40 * GIB))
        found = conformal.memory_factors(runs)
        for kind, units, miss in (("dense", 9, 0.01), ("experts", experts, 0.08)):
            mean = (units * (miss / all_of_them) ** 2 + 1) / (units + 1)
            assert found[f"memory of megatron on nvidia: {kind}"] == pytest.approx(
                np.sqrt(mean), rel=1e-3
            )
    assert conformal.memory_factors(dense[1:]) == {}


def test_the_shipped_deviation_of_memory_is_that_of_the_class() -> None:
    ships = shipped_calibration()
    for name, model, kind in (("megatron", "llama3-8b", "dense"), ("fsdp", "llama3-8b", "dense"),
                              ("megatron", "mixtral-8x7b", "experts")):  # fmt: skip
        factor = ships.interval_factors.get(f"memory of {name} on nvidia: {kind}", 1.0)
        found = pricing.pricer(model, trainer=name).profile
        assert found.memory_sd == pytest.approx(factor * ships.memory_sd)
        assert found.memory_sd_bytes == pytest.approx(factor * ships.memory_sd_bytes)


PEAKS = np.linspace(4.0, 80.0, 40)


def off_by(deviations: np.ndarray, source: str = "one source", times: int = 1) -> list[Row]:
    """Runs at the PEAKS in GiB, above them by 1.645 of these deviations. {}: the run's number."""
    off = np.tile([PEAKS * GIB, TWO_SIDED_90 * deviations], times).T
    return [run(number, *one, source.format(number)) for number, one in enumerate(off)]


BYTES, SHARES = 1.0 / PEAKS, np.full(len(PEAKS), 0.1)  # a GiB of each, or 10% of each


def test_errors_of_equal_bytes_are_a_fixed_part_and_of_equal_shares_a_relative_one() -> None:
    relative, fixed = conformal.memory_deviation(off_by(BYTES))
    assert (relative, fixed) == (conformal.MEMORY_FLOOR[0], pytest.approx(GIB, rel=0.1))
    relative, fixed = conformal.memory_deviation(off_by(SHARES))
    assert (relative, fixed) == (pytest.approx(0.1, rel=0.1), conformal.MEMORY_FLOOR[1])


def test_every_place_counts_once_in_the_stretch_and_in_the_fit() -> None:
    """Of eleven places ten have to be inside: the one that misses by 0.9 is the last of them."""
    few = [run(n, 40 * GIB, 0.1 * n, f"place {n}") for n in range(10, 0, -1)]
    many = [run(n, 40 * GIB, 0.01, "many") for n in range(90)]
    assert of_one_peak([*few, *many]) == pytest.approx(0.9, rel=0.01)
    many = off_by(BYTES, "many", times=20)
    relative, fixed = conformal.memory_deviation([*off_by(SHARES, "place {}"), *many])
    assert (relative, fixed) == (pytest.approx(0.1, rel=0.1), conformal.MEMORY_FLOOR[1])


DENSE, EXPERTS = "dense, Hopper and Ampere", "experts, Blackwell"


def misses(log_seconds: FloatColumn, units: list[str], classes: list[str] | None = None) -> Misses:
    scales, alike = np.full(len(log_seconds), 0.1), [DENSE] * len(log_seconds)
    names = {"units": np.array(units), "classes": np.array(classes or alike)}
    return Misses(log_seconds=log_seconds, scales=scales, **names)


def test_the_score_is_the_width_and_twenty_times_what_lies_outside() -> None:
    """Gneiting and Raftery 2007, equation 43, at alpha = 0.1."""
    misses = np.array([0.0, 0.1, -0.1, 0.25, -0.3])
    assert interval_score(misses, np.full(5, 0.2)) == pytest.approx([0.4, 0.4, 0.4, 1.4, 2.4])


@pytest.mark.parametrize("true", [0.4, 1.0, 1.6])
def test_the_factor_is_that_of_the_scale_that_runs_were_drawn_with(true: float) -> None:
    drawn = true * 0.1 * np.random.default_rng(0).standard_t(student.DEGREES, 6000)
    found = misses(drawn, [str(row // 100) for row in range(6000)]).factors()[DENSE]
    assert found == pytest.approx(true, rel=0.1)
    inside = np.abs(drawn) <= student.TWO_SIDED_90 * found * 0.1
    assert inside.mean() == pytest.approx(0.9, abs=0.02)


def test_few_units_tell_little_and_many_runs_of_one_unit_no_more() -> None:
    exact = np.zeros(40)
    one = misses(exact, ["a"] * 40).factors()[DENSE]
    four = misses(exact, ["a", "b", "c", "d"] * 10).factors()[DENSE]
    assert one == pytest.approx(0.2 ** (1.0 / (1.0 + PRIOR_UNITS)), abs=1e-3)
    assert four == pytest.approx(0.2 ** (4.0 / (4.0 + PRIOR_UNITS)), abs=1e-3)


def test_a_fold_does_not_tell_its_own_factor_and_keeps_none_that_does_not_help() -> None:
    units = [str(row // 5) for row in range(60)]
    out = np.arange(60) < 30
    folds = [out, ~out]
    alike = misses(np.full(60, 0.02), units)
    assert (alike.factors_elsewhere(folds) < 0.5).all()
    # the two folds would tell each other the wrong factor
    unlike = misses(np.repeat([0.01, 0.6], 30), units)
    assert unlike.take(~out).factors()[DENSE] > 1.2
    assert (unlike.factors_elsewhere(folds) == 1.0).all()
    apart = misses(np.full(60, 0.02), units, [DENSE] * 30 + [EXPERTS] * 30)
    assert (apart.factors_elsewhere(folds) == 1.0).all()


def test_classes_are_of_a_kind_of_model_on_a_generation_of_gpus() -> None:
    dense, experts = read_model("llama3.1-8b"), read_model("qwen3-30b-a3b")
    assert class_of(dense, "ampere") == class_of(dense, "hopper") == DENSE
    assert class_of(experts, "blackwell") == EXPERTS
    assert class_of(dense, "cdna3") == class_of(dense, "new") == "dense, other GPUs"
    named = replace(shipped_calibration(), interval_factors={DENSE: 0.5})
    assert factor_of(named, dense, "hopper") == 0.5
    assert factor_of(named, experts, "hopper") == 1.0
    assert factor_of(replace(named, own_runs={"unit": 1}), dense, "hopper") == 1.0
    hybrid = read_model("nemotron-h-56b")
    mixers = {("megatron", "hopper", name) for name in hybrid.mixers}
    assert factor_of(named, hybrid, "hopper") == 1.0
    assert factor_of(replace(named, seen=frozenset(mixers)), hybrid, "hopper") == 0.5


def test_an_estimate_is_as_wide_as_its_class_says() -> None:
    asked = read_job(job_values("llama3.1-8b", "h100-sxm-80gb", 8, 8192, 64, layout={}))
    shipped, widths = shipped_calibration(), []
    for factor in (1.0, 0.5):
        calibration = replace(shipped, interval_factors={DENSE: factor})
        assert from_document(to_document(calibration)).interval_factors == {DENSE: factor}
        widths.append(np.ptp(np.log(estimate_job(asked, calibration).interval.step_seconds)))
    assert widths[1] == pytest.approx(0.5 * widths[0])
