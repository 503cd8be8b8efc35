"""Calibration recovers what made the data, leaves the rest alone, and knows how sure it is."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.map_fit import fit
from planner.calibration import student
from planner.calibration.fit import Data, fingerprint, linearise, predict
from planner.calibration.linear_model import Linear, Scales, Unknowns
from planner.cost.machine.knobs import DIRECTIONS, KNOBS, OWN_SHARE, PLACE, Calibration, profile_at
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.intake.jobs import read_job
from planner.intake.machines import read_cluster
from planner.rules import violations
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement
from tests.conftest import ROOT, job_values

PUBLIC = ROOT / "benchmarks" / "measured" / "public.jsonl"


def job(num_gpus: int, seq_len: int, trainer: str = "torchtitan", **layout: object) -> Job:
    given = {"compile": trainer == "torchtitan", **layout}
    node = ("llama3-8b", "h100-sxm-80gb", num_gpus)
    return read_job(job_values(*node, seq_len, 64, trainer=trainer, layout=given))


JOBS = [
    job(8, 4096), job(8, 8192), job(8, 8192, ac="full"), job(16, 8192, tp=2), job(16, 4096, tp=8),
    job(8, 2048, micro_batch_size=4),
]  # fmt: skip


def made_with(shift: float, knob: str = "compute") -> Data:
    """Runs of a trainer one of whose knobs is this far from the prior."""
    moved = {"shifts": np.array([shift]), "covariance": np.eye(1)}
    truth = replace(Calibration.prior(), keys=((knob, "torchtitan"),), **moved)
    silent = Data.of(JOBS, [1.0] * len(JOBS))
    return replace(silent, log_seconds=predict(silent, truth))


@pytest.mark.parametrize("shift", [-0.15, 0.15])
def test_a_shift_of_the_truth_is_found(shift: float) -> None:
    data = made_with(shift)
    before = np.abs(predict(data, Calibration.prior()) - data.log_seconds)
    calibration, _ = fit(data)
    after = np.abs(predict(data, calibration) - data.log_seconds)
    assert after.max() < 0.03 < before.max()
    moved = calibration.shift("torchtitan", "hopper")
    assert np.sign(moved[PLACE["compute"]] + moved[PLACE["gemm"]]) == np.sign(shift)


@pytest.mark.slow
def test_a_trainer_never_measured_moves_with_the_others_and_is_less_sure() -> None:
    calibration, _ = fit(made_with(0.15))
    place = PLACE["compute"]
    other, own = (calibration.shift(t, "hopper")[place] for t in ("megatron", "torchtitan"))
    assert 0.0 < other <= own
    known, unknown = (variance(calibration, t) for t in ("torchtitan", "megatron"))
    assert known < unknown < (1 + OWN_SHARE**2) * KNOBS[place].sd ** 2


def variance(calibration: Calibration, trainer: str, knob: str = "compute") -> float:
    """Of this knob for this trainer on Hopper."""
    return float(np.diag(calibration.effective_covariance(trainer, "hopper"))[PLACE[knob]])


def test_no_runs_leave_the_priors() -> None:
    prior = Calibration.prior()
    profile = prior.profile(
        "torchtitan", read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 8}).gpu, experts=False
    )
    knobs = [knob for knob in KNOBS if knob.scope == "trainer"]
    assert all(getattr(profile, knob.name) == pytest.approx(knob.prior) for knob in knobs)
    found = np.diag(prior.effective_covariance("torchtitan", "hopper"))
    variances = [(1 + OWN_SHARE**2) * knob.sd**2 + knob.place_sd**2 for knob in KNOBS]
    assert found == pytest.approx(variances)


@pytest.mark.slow
def test_a_source_with_an_offset_of_its_own_does_not_move_the_knobs_for_all() -> None:
    """Runs alike from one source and from six: six witnesses count for more than one."""
    data, one = made_with(0.15), ("one",) * len(JOBS)
    alone, _ = fit(replace(data, names=replace(data.names, stacks=one, units=one)))
    many, _ = fit(data)
    place = PLACE["compute"]
    assert alone.shift("torchtitan", "hopper")[place] < many.shift("torchtitan", "hopper")[place]


@pytest.mark.slow
def test_a_fit_goes_on_from_a_calibration() -> None:
    first, _ = fit(made_with(0.15))
    second, _ = fit(made_with(0.15), first)
    assert variance(second, "torchtitan") < variance(first, "torchtitan")


@pytest.mark.slow
def test_left_out_runs_are_predicted_by_the_others() -> None:
    data = made_with(0.2)
    _, linear = fit(data)
    scales = Scales(run=0.05, stack=0.1, unit=0.1)
    each = [np.arange(len(JOBS)) == row for row in range(len(JOBS))]
    log_seconds, deviation, _ = linear.left_out(each, scales)
    silent = predict(data, Calibration.prior())
    miss, silent_miss = (np.abs(one - data.log_seconds).max() for one in (log_seconds, silent))
    assert miss < 0.5 * silent_miss
    everything_out, unsure, _ = linear.left_out([np.ones(len(JOBS), dtype=bool)], scales)
    assert everything_out == pytest.approx(silent, abs=0.03)
    assert (unsure > deviation).all()


@pytest.mark.slow
def test_a_fit_ends_where_one_more_round_moves_nothing() -> None:
    """Also where a share saturates, whose shift swings from round to round undamped."""
    data = made_with(0.2, "dp_hidden")
    data = replace(data, log_seconds=data.log_seconds + 0.3 * np.array([1, -1, 1, -1, 1, -1]))
    found, _ = fit(data)
    unknowns = Unknowns.of(data.names, Calibration.prior())
    scales = Scales(run=found.run_sd, stack=found.stack_sd, unit=found.unit_sd)
    again = linearise(data, found, unknowns).solve(scales)
    knobs = unknowns.of_knobs
    sd = np.sqrt(np.diag(again.covariance)[knobs])
    assert np.abs(again.x[knobs] - found.shifts).max() < 0.1 * sd.max()


STACKS, UNITS_EACH, RUNS_EACH = 30, 2, 8


def synthetic(run: float, stack: float, unit: float) -> Linear:
    """Runs whose misses have these scales and that no knob explains."""
    chance = np.random.default_rng(3)
    count = STACKS * UNITS_EACH * RUNS_EACH
    names = np.arange(count) // RUNS_EACH
    misses = stack * chance.standard_normal(STACKS)[names // UNITS_EACH]
    misses += unit * chance.standard_normal(STACKS * UNITS_EACH)[names]
    misses += run * chance.standard_normal(count)
    stacks, units = (tuple(map(str, labels)) for labels in (names // UNITS_EACH, names))
    named = replace(Data.of(JOBS[:1], [1.0]).names, stacks=stacks, units=units)
    unknowns = Unknowns.of(named, replace(Calibration.prior(), place=0.0))
    derivatives = np.zeros((count, len(unknowns.keys)))
    for column, (level, own) in enumerate(unknowns.keys):
        if level in ("stack", "unit"):
            labels = stacks if level == "stack" else units
            derivatives[:, column] = [label == own for label in labels]
    none, gradient = np.zeros(count), np.zeros((count, len(KNOBS)))
    at = np.zeros(len(unknowns.keys))
    given = {"unknowns": unknowns, "at": at, "derivatives": derivatives, "gradient": gradient}
    return Linear(**given, predicted=none, measured=misses, units=units)


@pytest.mark.parametrize(("run", "stack", "unit"), [(0.05, 0.15, 0.1), (0.1, 0.3, 0.1)])
def test_the_scales_of_misses_are_found(run: float, stack: float, unit: float) -> None:
    """A t scale with four degrees of freedom of normal data is about 0.85 of its deviation."""
    found = synthetic(run, stack, unit).solve(Scales(run=0.3, stack=0.3, unit=0.3)).scales
    assert found.run == pytest.approx(0.85 * run, rel=0.15)
    assert found.unit == pytest.approx(0.85 * unit, rel=0.35)
    assert found.stack == pytest.approx(0.85 * stack, rel=0.5)


def test_a_stack_far_from_all_others_moves_a_knob_less() -> None:
    """Its runs differ along one knob; what they say of it counts as little as their offset."""
    linear, given = synthetic(0.05, 0.15, 0.1), Scales(run=0.05, stack=0.15, unit=0.1)
    here, sign = slice(0, UNITS_EACH * RUNS_EACH), np.tile([1.0, -1.0], UNITS_EACH * RUNS_EACH // 2)
    derivatives, measured = linear.derivatives.copy(), linear.measured.copy()
    derivatives[here, 0] = sign
    moved = {}
    for offset in (0.0, 1.5):
        measured[here] = offset + 0.1 * sign
        told = replace(linear, derivatives=derivatives, measured=measured.copy())
        for strange in (True, False):
            moved[offset, strange] = told.solve(given, estimate=False, strange=strange).x[0]
    assert moved[1.5, True] < 0.6 * moved[0.0, True]
    assert moved[1.5, False] == pytest.approx(moved[0.0, False], rel=0.2)


def test_without_a_run_nothing_is_learnt() -> None:
    linear, given = synthetic(0.05, 0.15, 0.1), Scales(run=0.3, stack=0.2, unit=0.1)
    found = linear.solve(given, np.zeros(len(linear.measured), dtype=bool))
    scales = found.scales
    assert (scales.run, scales.stack, scales.unit) == pytest.approx((0.3, 0.2, 0.1))
    assert found.x == pytest.approx(linear.unknowns.mean)
    log_seconds, deviation, _ = linear.left_out([np.ones(len(linear.measured), dtype=bool)], given)
    assert log_seconds == pytest.approx(linear.predicted)
    assert deviation == pytest.approx(np.sqrt(0.3**2 + 0.2**2 + 0.1**2))


@pytest.mark.parametrize("folds", [6, pytest.param(STACKS, marks=pytest.mark.slow)])
def test_intervals_of_left_out_units_hold_what_they_claim(folds: int) -> None:
    linear = synthetic(0.05, 0.15, 0.1)
    fold = np.arange(len(linear.measured)) // (UNITS_EACH * RUNS_EACH) % folds
    scales = Scales(run=0.1, stack=0.1, unit=0.1)
    log_seconds, scale, _ = linear.left_out([fold == one for one in range(folds)], scales)
    inside = np.abs(log_seconds - linear.measured) <= student.TWO_SIDED_90 * scale
    assert 0.85 <= inside.mean() <= 0.97


def test_directions_carry_the_spread_of_predictions() -> None:
    """With as many directions as the sensitivity has ranks nothing is left out; each is one sd."""
    calibration = shipped_calibration()
    directions, rest = calibration.directions("torchtitan", "hopper")
    assert directions.shape == (DIRECTIONS, len(KNOBS))
    carried = np.trace(directions @ calibration.sensitivity @ directions.T)
    covariance = calibration.effective_covariance("torchtitan", "hopper")
    whole = np.trace(covariance @ calibration.sensitivity)
    assert carried + rest == pytest.approx(whole, rel=1e-5)  # the document keeps five digits
    assert rest < 0.1 * whole


@pytest.mark.parametrize("family", ["hopper", "ampere", "blackwell"])
def test_directions_hold_if_eigenvectors_turn(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors decide that differently, and no interval may depend on them."""
    calibration, found = shipped_calibration(), np.linalg.eigh
    directions, _ = calibration.directions("megatron", family)

    def turned(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = found(matrix)
        return values, vectors * (-1.0) ** np.arange(len(values))

    monkeypatch.setattr(np.linalg, "eigh", turned)
    np.testing.assert_allclose(calibration.directions("megatron", family)[0], directions)


def test_a_document_reads_back() -> None:
    mine = replace(shipped_calibration(), own_runs={"torchtitan on h100-sxm-80gb, bf16, dense": 2})
    again = from_document(to_document(mine))
    numbers, exact = ("shifts", "covariance"), ("keys", "own_runs", "seen", "fitted")
    for name in (*numbers, "run_sd", "stack_sd", "unit_sd", "own_run_sd"):
        assert getattr(again, name) == pytest.approx(getattr(mine, name)), name
    for name in exact:
        assert getattr(again, name) == getattr(mine, name), name


def test_the_shipped_calibration_is_a_posterior() -> None:
    """Three published rows contradict themselves or leave the split out, and are not fitted."""
    shipped = shipped_calibration()
    assert np.linalg.eigvalsh(shipped.covariance).min() > 0
    rows = [json.loads(line) for line in PUBLIC.read_text(encoding="utf-8").splitlines()]
    asked = [(read_job(row), row["measured"].get("step_seconds")) for row in rows]
    timed = {
        fingerprint(job, found)
        for job, found in asked
        if found and not violations(job.layout, job.model, job.cluster, job.training)
    }
    assert shipped.fitted == timed
    assert len(timed) > 350
    for knob in KNOBS:
        most = (1 + OWN_SHARE**2) * knob.sd**2 + knob.place_sd**2
        assert variance(shipped, "megatron", knob.name) <= 1.001 * most, knob.name
    assert profile_at("torchtitan", np.zeros(len(KNOBS))).compute == KNOBS[PLACE["compute"]].prior


def test_a_field_that_came_later_changes_no_stored_name() -> None:
    """Names from before optimizer_offload_fraction and activation_offload_layers were fields."""
    names = []
    for share in (1.0, 0.5):
        offloaded = {"cpu_offload": True, "optimizer_offload_fraction": share}
        asked = job(8, 4096, "megatron", tp=2, **offloaded)
        run = Measurement(id="m", created_at="2026-01-01", job=asked, measured=Measured())
        names.append((fingerprint(asked, 1.5), run.key().layout_hash[:16]))
    assert names[0] == ("526cf49760a8", "ba079c11bef2c8b9")
    assert [old != new for old, new in zip(*names, strict=True)] == [True, True]


def test_a_fingerprint_tells_runs_apart() -> None:
    assert fingerprint(JOBS[0], 1.0) == fingerprint(job(8, 4096), 1.0)
    runs = ((JOBS[0], 1.0), (JOBS[0], 1.1), (JOBS[1], 1.0))
    assert len({fingerprint(*run) for run in runs}) == 3


def test_what_differs_from_place_to_place_is_doubted_until_the_place_is_known() -> None:
    """Host time decides a launch-bound layout, and a new cluster's host is less sure."""
    knob, shipped = "launch_seconds", shipped_calibration()
    places = (replace(shipped, place=share) for share in (1.0, 0.0))
    new, known = (variance(one, "megatron", knob) for one in places)
    assert new - known == pytest.approx(KNOBS[PLACE[knob]].place_sd ** 2)
    document = to_document(replace(shipped, place=0.25))
    assert document["place"] == from_document(document).place == 0.25
