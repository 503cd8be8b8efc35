"""The log marginal likelihood of published sweeps under the surrogate's weights and lengths.

It is computed on their left-out errors.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from replay_strategies import Truth

from planner.calibration import similarity as likeness
from planner.calibration.correlated import TIME, CorrelatedErrors, Weights

RUN_SD = 0.01
WEIGHTS = {
    "as shipped": TIME,
    "mostly additive": Weights(shift=0.2, additive=0.6, joint=0.19, nugget=0.01),
    "mostly joint": Weights(shift=0.2, additive=0.2, joint=0.59, nugget=0.01),
    "mostly shift": Weights(shift=0.6, additive=0.2, joint=0.19, nugget=0.01),
    "many nuggets": Weights(shift=0.3, additive=0.3, joint=0.3, nugget=0.1),
    "alike but for nuggets": Weights(shift=0.9, additive=0.0, joint=0.0, nugget=0.1),
}


def print_likelihood(truths: Sequence[Truth]) -> None:
    """Prints one line per choice, likeliest first, with the share of each source."""
    found = []
    for (name, weights), stretch, scale in product(
        WEIGHTS.items(), (0.5, 1.0, 2.0), (0.7, 1.0, 1.4)
    ):
        sources: dict[str, float] = {}
        for truth in truths:
            source = truth.name.partition(" ")[0]
            sources[source] = sources.get(source, 0.0) + log_likelihood(
                truth, weights, stretch, scale
            )
        shares = "  ".join(f"{source} {value:.1f}" for source, value in sources.items())
        found.append((sum(sources.values()), name, stretch, scale, shares))
    between, within = deviations(truths)
    print(
        f"{len(truths)} sweeps, errors in logs: {between:.1%} between sweeps, {within:.1%} within "
        "(standard deviations without bias)"
    )
    print("log likelihood, weights, factor on lengths, factor on the prior's deviation, by source")
    for value, name, stretch, scale, shares in sorted(found, reverse=True):
        print(f"{value:8.1f}  {name:22s} {stretch:4.1f} {scale:4.1f}   {shares}")


def deviations(truths: Sequence[Truth]) -> tuple[float, float]:
    """Standard deviations of log errors between sweeps and within them.

    One-way analysis of variance, around zero between sweeps.
    """
    errors = []
    for truth in truths:
        ran = np.isfinite(truth.log_seconds)
        errors.append((truth.log_seconds - truth.candidates.prior.log_seconds)[ran])
    within = sum(float(((each - each.mean()) ** 2).sum()) for each in errors) / sum(
        len(each) - 1 for each in errors
    )
    between = float(np.mean([each.mean() ** 2 - within / len(each) for each in errors]))
    return max(between, 0.0) ** 0.5, within**0.5


def log_likelihood(truth: Truth, weights: Weights, stretch: float, scale: float) -> float:
    """Of the errors on the layouts that ran, under the surrogate's prior and run-to-run noise."""
    candidates = truth.candidates
    ran = np.flatnonzero(np.isfinite(truth.log_seconds))
    groups = likeness.groups(candidates.batch, candidates.size.global_batch_size, stretch=stretch)
    field = CorrelatedErrors(
        sd=scale * candidates.prior.sd,
        factor=candidates.prior.factor,
        groups=groups,
        weights=weights,
    )
    covariance = field.between(ran, ran) + RUN_SD**2 * np.eye(len(ran))
    error = (truth.log_seconds - candidates.prior.log_seconds)[ran]
    _, log_determinant = np.linalg.slogdet(2.0 * np.pi * covariance)
    return float(-0.5 * (error @ np.linalg.solve(covariance, error) + log_determinant))
