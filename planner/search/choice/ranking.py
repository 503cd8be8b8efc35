"""The layouts to show, best first.

`preference` decides which one comes first; the others follow by what the objective minimises, as
the table shows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration.basis import rests_on, unmeasured_mechanisms
from planner.calibration.correlated import CorrelatedErrors
from planner.calibration.intervals import TimeSpread
from planner.calibration.mechanisms import Mechanism, used_by
from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.search.choice import pareto
from planner.search.choice.preference import FAR_BEHIND, difference_sd, eligible, prefer
from planner.search.size_candidates import OneSize, PlanCandidate
from planner.specs.gpu import MAX_GPUS
from planner.specs.job import Job
from planner.specs.plan_comparisons import BestMeasured, FastestOnPaper
from planner.units import RARE, SAME_SPEED, format_risk

NOTICEABLE = 0.01  # what gains less over number 1 gets no line of its own
WORSE = {
    "cost": ("dearer", "cheaper"),
    "energy": ("hungrier", "more frugal"),
    "memory": ("larger", "smaller"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The layouts to show, and two to compare them with.

    choices: to show, best first.
    fastest: the lowest score of all that fit, shown or not.
    proven: the best of those that do without unmeasured mechanisms, always shown; None if the
        first choice is such a layout, or if nothing fits without them.
    """

    choices: list[PlanCandidate]
    fastest: PlanCandidate
    proven: PlanCandidate | None


def rank(job: Job, sizes: list[OneSize]) -> Ranking:
    """The choices of all sizes that really differ: the preferred one, then the fastest on paper.

    The winner is the best of the preferred ones of every size. Sets `OneSize.first`.
    """
    for at_size in sizes:
        at_size.first = _preferred(job, at_size, np.ones(len(at_size.candidates), dtype=np.bool_))
    found = [
        PlanCandidate(at_size, row) for at_size in sizes for row in range(len(at_size.candidates))
    ]
    chosen = _best([PlanCandidate(at_size, at_size.first) for at_size in sizes])
    fastest, proven = _best(found), _proven(job, chosen)
    ahead = [chosen]
    if not is_twin(chosen, fastest):
        ahead.append(fastest)
    if proven is not None:
        ahead.append(proven)
    shown = _shown(job, found, list(dict.fromkeys(ahead)), proven)
    return Ranking(choices=shown, fastest=fastest, proven=proven)


def after_probes(ranked: list[PlanCandidate]) -> Ranking:
    """The ranking that measurements made, best first."""
    proven = None
    if rests_on_unmeasured(ranked[0]):
        proven = next((one for one in ranked if not rests_on_unmeasured(one)), None)
    return Ranking(choices=ranked, fastest=ranked[0], proven=proven)


def _shown(
    job: Job, found: list[PlanCandidate], ahead: list[PlanCandidate], proven: PlanCandidate | None
) -> list[PlanCandidate]:
    """The first choices as given, then others that differ from them and from each other.

    As many as were asked for, the best by expected score, and the proven one beside them. Behind
    the first, which is preferred, they are in the order of what the objective minimises.
    """
    expected, score, step = (
        np.array([getattr(choice, name) for choice in found])
        for name in ("expected", "score", "step_seconds")
    )
    device = np.array([choice.at_size.candidates[choice.row][1] for choice in found])
    first = [found.index(choice) for choice in ahead]
    behind_first = best_first(expected, step)
    if ahead[0].supported:  # others have the fastest on paper to stand for them
        supported = np.array([found[row].supported for row in behind_first])
        behind_first = behind_first[np.argsort(~supported, kind="stable")]
    order = [*first, *(row for row in behind_first if row not in first)]
    # A layout of another size is not a near copy: near copies must be equal in the column of sizes.
    batch = LayoutBatch.from_layouts([choice.layout for choice in found])
    num_gpus = np.array([choice.at_size.pricer.cluster.num_gpus for choice in found])
    apart = replace(batch, pp=batch.pp + MAX_GPUS * num_gpus)
    rows = pareto.different(apart, step, device, np.array(order), job.search.top_k, score)
    behind = [found[row] for row in order if row in set(rows.tolist()) and row not in first]
    others = sorted({*ahead[1:], *behind}, key=lambda choice: (choice.score, choice.step_seconds))
    most = job.search.top_k - 1
    shown = set(behind[: max(most - len(ahead[1:]), 0)]) | {*ahead[1 : 1 + most]}
    return [ahead[0], *(one for one in others if one in shown or one is proven)]


def _preferred(job: Job, at_size: OneSize, among: BoolColumn) -> int:
    """Row of the candidate to put first. among: mask of the allowed ones, (N,)."""
    step = np.array([step for step, *_ in at_size.candidates])
    rated = at_size.rated
    if not job.search.simplest_first:
        return int(best_first(np.where(among, rated.expected, np.inf), step)[0])
    scores = np.where(among, rated.scores, np.inf)
    expected = eligible(rated.weighed, scores, rated.expected, rated.oom)
    size = job.training.global_batch_size
    return prefer(rated.batch, rated.weighed, expected, size, rated.spread)


def _proven(job: Job, chosen: PlanCandidate) -> PlanCandidate | None:
    """The best layout without unmeasured mechanisms.

    None if the chosen one is such a layout, or if no such layout comes near it.
    """
    proven = chosen.at_size.rated.weighed.proven
    if proven[chosen.row] or not proven.any():
        return None
    found = PlanCandidate(chosen.at_size, _preferred(job, chosen.at_size, proven))
    return found if found.score <= FAR_BEHIND * chosen.score else None


def _best(choices: list[PlanCandidate]) -> PlanCandidate:
    """The lowest score; of ties the faster step."""
    scores, steps = (
        np.array([getattr(choice, name) for choice in choices])
        for name in ("score", "step_seconds")
    )
    return choices[int(best_first(scores, steps)[0])]


def is_twin(first: PlanCandidate, fastest: PlanCandidate) -> bool:
    """Whether the fastest gains nothing over the first that anybody would notice."""
    return first.score / fastest.score < 1.0 + NOTICEABLE


def deviations(choices: list[PlanCandidate]) -> TimeSpread:
    """The uncertainty of each choice's step time among the others, and what the choices share.

    The directions are the same at every size.
    """
    return TimeSpread.joined(
        [one.at_size.rated.spread.take(np.array([one.row])) for one in choices]
    )


def covariance(job: Job, choices: list[PlanCandidate]) -> FloatColumn:
    """Covariance of the logs of the choices' step times, (K, K).

    Errors are correlated as far as the layouts are similar.
    """
    spread = deviations(choices)
    batch = LayoutBatch.from_layouts([choice.layout for choice in choices])
    errors = CorrelatedErrors.of(batch, spread, job.training.global_batch_size)
    rows = np.arange(len(batch))
    return errors.between(rows, rows)


def best_first(scores: FloatColumn, step_seconds: FloatColumn) -> IntColumn:
    """Order by score; of tied scores the faster step wins.

    Scores within a millionth are ties (such as runs that wait for the same upload).
    """
    return np.lexsort((step_seconds, np.round(np.log(scores), 6)))


def fastest_on_paper(job: Job, ranking: Ranking) -> FastestOnPaper | None:
    """Gain of the layout with the lowest score over the first, and its needs.

    None if both are the same layout.
    """
    first, fastest = ranking.choices[0], ranking.fastest
    if not job.search.simplest_first or is_twin(first, fastest):
        return None
    num_gpus = fastest.at_size.pricer.cluster.num_gpus
    adds = _only_in(fastest, first)
    step = fastest.step_seconds
    tokens = job.training.global_batch_size * job.training.seq_len / num_gpus / step
    found = FastestOnPaper(
        rank=_rank(ranking, fastest),
        layout=fastest.layout,
        num_gpus=num_gpus,
        step_seconds=step,
        tokens_per_second_per_gpu=tokens,
        oom_probability=fastest.oom,
        times_as_fast=first.score / fastest.score,
        difference_sd=_difference_sd(job, first, fastest),
        adds=[one.words for one in adds],
        unmeasured=[one.words for one in adds if one in _lacking(fastest)],
        statement="",
    )
    priced = bool((first.at_size.rated.runs.bill.cost > 0).all())
    gain = _gain(job.search.objective, first.score, fastest.score, priced=priced)
    lags = "" if fastest.supported else "; it does not lead, as no run supports that speed"
    return found.model_copy(update={"statement": _statement(found, gain) + lags})


def best_measured(ranking: Ranking) -> BestMeasured | None:
    """The best layout that does without the unmeasured mechanisms of the first choice."""
    first, proven = ranking.choices[0], ranking.proven
    if proven is None:
        return None
    return BestMeasured(
        rank=_rank(ranking, proven) or 1,
        layout=proven.layout,
        num_gpus=proven.at_size.pricer.cluster.num_gpus,
        step_seconds=proven.step_seconds,
        times_as_long=proven.score / first.score,
    )


def _rank(ranking: Ranking, choice: PlanCandidate) -> int | None:
    return next((i for i, one in enumerate(ranking.choices, 1) if one == choice), None)


def rests_on_nothing(job: Job, ranking: Ranking) -> str | None:
    """The unmeasured mechanisms of the first choice, and the best choice without them.

    None if runs behind the calibration used all that it uses.
    """
    first = ranking.choices[0]
    rests = rests_on_unmeasured(first)
    if not rests:
        return None
    sentence = f"uses {enumerated([one.words for one in rests])}, {_nobody(first, rests)}"
    other = best_measured(ranking)
    if other is None or ranking.proven is None:
        return f"{sentence}; nothing that fits and comes near it does without: probe before booking"
    left = [one.words for one in rests_on_unmeasured(ranking.proven)]
    best = f"best that rests on {enumerated(left)} alone" if left else "best fully measured"
    worse, better = WORSE.get(job.search.objective, ("slower", "faster"))
    change = other.times_as_long - 1.0
    if job.search.objective not in WORSE:  # of throughput: twice as long is 50% slower
        change = 1.0 - 1.0 / other.times_as_long
    gap = f"{abs(change):.1%} {worse if change >= 0 else better}"
    return f"{sentence}; {best}: rank {other.rank}, {gap if abs(change) >= RARE else 'no ' + worse}"


def rests_on_unmeasured(choice: PlanCandidate) -> tuple[Mechanism, ...]:
    pricer = choice.at_size.pricer
    return rests_on(choice.layout, pricer, pricer.calibration)


def _nobody(choice: PlanCandidate, rests: Sequence[Mechanism]) -> str:
    """Subject of the sentence: nobody at all, or nobody whose runs would show these mechanisms."""
    pricer = choice.at_size.pricer
    seen, family = pricer.calibration.seen, pricer.cluster.gpu.family
    names = {one.name for one in rests}
    if names & {name for trainer, _, name in seen if trainer == pricer.rules.code_name}:
        return f"which no run on {family} GPUs behind this calibration used"
    if names & {name for *_, name in seen}:
        return (
            f"which no run of {pricer.rules.name} and none on {family} GPUs behind this "
            "calibration used"
        )
    return "which none of the runs behind this calibration used"


def _only_in(choice: PlanCandidate, other: PlanCandidate) -> list[Mechanism]:
    """Mechanisms with points, or unmeasured, that the first uses and the second does not."""
    first, second = (used_by(one.layout, one.at_size.pricer) for one in (choice, other))
    lacking = _lacking(choice)
    return [one for one in first if one not in second and (one.points or one in lacking)]


def _lacking(choice: PlanCandidate) -> tuple[Mechanism, ...]:
    pricer = choice.at_size.pricer
    return unmeasured_mechanisms(pricer.calibration, pricer)


def _difference_sd(job: Job, first: PlanCandidate, second: PlanCandidate) -> float:
    pair = LayoutBatch.from_layouts([first.layout, second.layout])
    errors = CorrelatedErrors.of(pair, deviations([first, second]), job.training.global_batch_size)
    return float(difference_sd(errors, 0)[1])


def _gain(objective: str, first: float, fastest: float, *, priced: bool) -> str:
    """Words for a lower score; priced: the score of `cost` is in dollars, not in GPU-hours."""
    if math.log(first / fastest) < SAME_SPEED:
        return f"The same within {SAME_SPEED:.1%}"
    less = 1.0 - fastest / first
    if objective == "cost":
        pair = (f"${one:,.0f}" if priced else f"{one:,.0f} GPU-hours" for one in (fastest, first))
        return f"{less:.1%} cheaper ({' against '.join(pair)})"
    if objective == "energy":
        return f"{less:.1%} less energy"
    return f"{first / fastest:.2f} times as fast"


def _statement(found: FastestOnPaper, gain: str) -> str:
    unmeasured = found.unmeasured
    measured = [words for words in found.adds if words not in unmeasured]
    adds = f"; it adds {enumerated(measured or found.adds)}" if found.adds else ""
    if unmeasured and measured:
        adds += f", and what no run behind the calibration used: {enumerated(unmeasured)}"
    elif unmeasured:
        adds += ", which no run behind the calibration used"
    risk = format_risk(found.oom_probability)
    return (
        f"{gain} on paper ({found.tokens_per_second_per_gpu:,.0f} tokens/s/GPU), out of memory "
        f"with probability {risk}{adds}. The difference of two such predictions is right to within "
        f"{found.difference_sd:.1%} in two cases of three"
    )


def enumerated(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
