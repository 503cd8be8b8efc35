"""The Gaussian process on the model's error: against dense algebra, and from few observations."""

import numpy as np
import pytest
from scipy import integrate, stats

from planner.calibration import similarity, student
from planner.calibration.correlated import TIME, CorrelatedErrors
from planner.study import normal
from planner.study.surrogate import JITTER, Observation, condition
from tests.unit.probing_cases import JOB, small

GLOBAL_BATCH = JOB.training.global_batch_size


@pytest.fixture(scope="module")
def prior() -> CorrelatedErrors:
    factor = 0.05 * np.random.default_rng(3).standard_normal((len(small()), 3))
    sd = np.full(len(small()), 0.1)
    return CorrelatedErrors(sd=sd, factor=factor, groups=small().groups, weights=TIME)


def dense(prior: CorrelatedErrors, rows: np.ndarray) -> np.ndarray:
    """The documented covariance, written as it is documented."""
    pairs = ((group.correlation, group.codes[rows]) for group in prior.groups)
    tables = np.stack([correlation[np.ix_(codes, codes)] for correlation, codes in pairs])
    w = prior.weights
    own = w.shift + w.additive * tables.mean(axis=0) + w.joint * tables.prod(axis=0)
    own = own + w.nugget * np.eye(len(rows))
    shared = prior.factor[rows] @ prior.factor[rows].T
    return shared + np.outer(prior.sd[rows], prior.sd[rows]) * own


def test_tails_and_quantiles_agree_with_scipy() -> None:
    z = np.linspace(-12.0, 12.0, 4001)
    assert normal.upper_tail(z) == pytest.approx(stats.norm.sf(z), rel=3e-7, abs=0.0)
    assert normal.density(z) == pytest.approx(stats.norm.pdf(z), rel=1e-12)
    probability = np.array([1e-12, 1e-6, 0.01, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0 - 1e-6])
    exact = stats.norm.isf(probability)
    assert normal.upper_quantile(probability) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize(
    ("gap", "sd"), [(0.0, 0.1), (0.3, 0.1), (-0.2, 0.05), (1.0, 0.2), (0.4, 0.0), (-0.4, 0.0)]
)
def test_expected_excess_is_the_mean_gain(gap: float, sd: float) -> None:
    def gain(z: float) -> float:
        return float(stats.norm.pdf(z) * (sd * z - gap))

    integral = integrate.quad(gain, gap / sd, 40.0, epsabs=0.0)[0] if sd else max(0.0, -gap)
    found = float(normal.expected_excess(np.array(gap), np.array(sd)))
    assert found == pytest.approx(integral, rel=1e-4, abs=1e-300)


def test_expected_excess_keeps_its_order_where_it_is_tiny() -> None:
    gaps = np.linspace(0.5, 3.0, 26)
    values = normal.expected_excess(gaps, np.full(26, 0.1))
    assert np.all(np.diff(values) < 0)
    assert values[-1] > 0


def test_columns_and_blocks_are_the_documented_covariance(prior: CorrelatedErrors) -> None:
    rows = np.arange(0, len(prior.sd), 37)
    expected = dense(prior, rows)
    assert prior.between(rows, rows) == pytest.approx(expected, rel=1e-12)
    for index, row in enumerate(rows[:5]):
        assert prior.column(int(row))[rows] == pytest.approx(expected[index], rel=1e-12)
    assert np.diag(expected) == pytest.approx(prior.variance[rows], rel=1e-12)
    assert np.linalg.eigvalsh(expected).min() > 0.0


def seen(rows: np.ndarray, values: np.ndarray) -> list[Observation]:
    """These values at these rows, each with a variance of 1e-4."""
    pairs = zip(rows.tolist(), values.tolist(), strict=False)
    return [Observation(row=row, value=value, variance=1e-4) for row, value in pairs]


def test_posterior_is_that_of_dense_algebra(prior: CorrelatedErrors) -> None:
    rows = np.arange(0, len(prior.sd), 41)
    values = 0.1 * np.sin(rows[:6])
    posterior = condition(prior, seen(rows, values))
    covariance = posterior.scale**2 * dense(prior, rows)
    inverse = np.linalg.inv(covariance[:6, :6] + 1e-4 * np.eye(6))
    cross = covariance[:, :6]
    assert posterior.mean[rows] == pytest.approx(cross @ inverse @ values, abs=1e-8)
    expected = covariance - cross @ inverse @ cross.T
    assert posterior.covariance(rows) == pytest.approx(expected, abs=1e-8)
    assert posterior.variance[rows] == pytest.approx(np.diag(expected), abs=1e-8)


def test_scale_is_that_of_a_t_given_some_of_its_values(prior: CorrelatedErrors) -> None:
    rows, values = np.arange(0, len(prior.sd), 53)[:5], np.array([0.2, -0.1, 0.15, 0.3])
    posterior = condition(prior, seen(rows, values))
    exact = dense(prior, rows) + np.diag([1e-4 + JITTER] * 4 + [0.0])
    gain = np.linalg.solve(exact[:4, :4], exact[:4, 4])
    sd = posterior.scale * np.sqrt(exact[4, 4] - gain @ exact[:4, 4])
    joint = stats.multivariate_t(shape=exact, df=student.DEGREES)
    at = joint.logpdf([[*values, gain @ values + off * sd] for off in (0.0, 1.0)])
    assert np.diff(at) == pytest.approx(np.diff(stats.t(student.DEGREES + 4).logpdf([0.0, 1.0])))
    assert condition(prior, []).scale == 1.0


def test_repeats_are_averaged_by_their_variance(prior: CorrelatedErrors) -> None:
    runs = [Observation(row=5, value=v, variance=n) for v, n in ((0.10, 1e-4), (0.13, 2e-4))]
    joint = 1.0 / (1.0 / 1e-4 + 1.0 / 2e-4)
    twice = condition(prior, runs)
    once = condition(prior, [Observation(row=5, value=0.11, variance=joint)])
    assert twice.mean[5] == pytest.approx(once.mean[5], abs=2e-4)
    assert twice.variance[5] == pytest.approx(once.variance[5], rel=0.2)


def test_a_direction_moves_all_that_load_on_it(prior: CorrelatedErrors) -> None:
    loading = (1.0, 0.0, 0.0)
    posterior = condition(prior, [Observation(row=None, value=1.0, variance=1e-6, loading=loading)])
    moved = posterior.scale**2 * prior.factor[:, 0] / (posterior.scale**2 + 1e-6)
    assert posterior.mean == pytest.approx(moved, abs=1e-8)
    (effect,), (variance,) = posterior.along_each([loading])
    assert variance == pytest.approx(1e-6, rel=0.2)
    assert np.abs(effect).max() < 1e-6
    (before,), (unit,) = condition(prior, []).along_each([loading])
    assert unit == pytest.approx(1.0)
    assert before == pytest.approx(prior.factor[:, 0])


def test_a_row_and_a_direction_agree_on_their_covariance(prior: CorrelatedErrors) -> None:
    row = Observation(row=7, value=0.1, variance=1e-4)
    way = Observation(row=None, value=0.2, variance=1e-4, loading=(0.3, -0.2, 0.9))
    forwards, backwards = condition(prior, [row, way]), condition(prior, [way, row])
    assert forwards.mean == pytest.approx(backwards.mean, abs=1e-9)
    rows = np.array([3, 7])
    assert forwards.covariance(rows) == pytest.approx(backwards.covariance(rows), abs=1e-9)


def test_groups_are_correlations(prior: CorrelatedErrors) -> None:
    for group in prior.groups:
        table = group.correlation
        assert np.diag(table) == pytest.approx(1.0)
        assert table == pytest.approx(table.T)
        assert table.min() >= 0.0
        assert np.linalg.eigvalsh(table).min() > -1e-9


def test_fields_that_never_differ_make_no_group() -> None:
    batch = small().batch
    rows = np.flatnonzero((batch.tp == 1) & (batch.pp == 1))
    names = {group.name for group in similarity.groups(batch.take(rows), GLOBAL_BATCH)}
    assert names.isdisjoint({"tp", "pp", "bubble"})
    assert "checkpointing" in names


def test_twins_are_more_alike_than_strangers() -> None:
    one, none = np.ones(len(small())), np.zeros((len(small()), 0))
    x = small().batch
    flat = (x.pp == 1) & (x.tp == 1) & x.compile
    row = int(np.flatnonzero(flat)[0])
    column = CorrelatedErrors(sd=one, factor=none, groups=small().groups, weights=TIME).column(row)
    same_size = x.micro_batch_size == x.micro_batch_size[row]
    near = flat & (x.ac_kind == x.ac_kind[row]) & same_size
    far = (x.pp > 2) & (x.ac_kind != x.ac_kind[row])
    assert near.sum() > 1
    assert far.any()
    assert column[near].min() > column[far].max()
