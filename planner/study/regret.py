"""Expected regret: how far the winner so far is expected to be from the best candidate.

It decides whether more measuring can pay. Letters: M rows, D draws.
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn
from planner.units import times

DRAWS = 1024
TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRegret:
    """Shares of the step time that the winner loses against the best candidate.

    expected_share: mean.
    share_95: exceeded in 5 of 100 cases.
    probability_other_better: probability that some candidate is truly faster.
    """

    expected_share: float
    share_95: float
    probability_other_better: float

    def statement(self, tolerance: float) -> str:
        verdict = "below" if self.expected_share <= tolerance else "above"
        return (
            f"expected regret {self.expected_share:.2%}, {verdict} the tolerance of "
            f"{tolerance:.2%}; with probability "
            f"{self.probability_other_better:.0%} another layout is truly faster, more than "
            f"{times(1.0 + self.share_95)} as fast in 5 of 100 cases"
        )


def expected_regret(
    log_seconds: FloatColumn,
    covariance: FloatColumn,
    fits: FloatColumn,
    winner: int,
    *,
    seed: int = 0,
) -> ExpectedRegret:
    """Mean over draws of (seconds of the winner) / (least seconds among what fits) - 1, at least 0.

    log_seconds (M,), covariance (M, M): joint posterior of log step seconds, the winner among them.
    fits (M,): probability that each fits, independent; the winner is assumed to fit.

    Draws are antithetic, so that seeds matter little.
    """
    rng = np.random.default_rng(seed)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    half = rng.standard_normal((DRAWS // 2, len(log_seconds)))
    drawn = log_seconds + np.concatenate([half, -half]) @ root.T
    runs = rng.random(drawn.shape) < fits
    runs[:, winner] = True
    least = np.where(runs, drawn, np.inf).min(axis=1)
    share = np.expm1(drawn[:, winner] - least)
    return ExpectedRegret(
        expected_share=float(share.mean()),
        share_95=float(np.quantile(share, 0.95)),
        probability_other_better=float((share > 0).mean()),
    )
