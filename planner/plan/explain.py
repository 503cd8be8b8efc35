"""Explains in plain sentences with numbers why one layout is better than another.

Every sentence is read from an estimate or a priced neighbour.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.columns import FloatColumn
from planner.errors import fault
from planner.plan.sharding_reasons import sharding_reasons
from planner.plan.together import Together
from planner.precision import NOTHING, PRECISIONS, TWO_BYTES, Recipe, bf16_tail
from planner.search.variations.neighbours import fastest
from planner.specs.estimate import Estimate
from planner.specs.estimate_parts import PART_WORDS, all_time_parts, bottleneck
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout, changed_fields, in_words, value_in_words
from planner.specs.plan import Plan, RankedLayout
from planner.specs.plan_comparisons import Regret, SensitivityStep
from planner.units import counted, format_bytes, format_risk, format_seconds, times_as_fast
from planner.work.quantised import quantised_model

NOTICEABLE = 0.005
BETTER = {"throughput": "faster", "time": "faster", "cost": "cheaper", "energy": "more frugal"}
BEST = {"throughput": "fastest", "time": "fastest", "cost": "cheapest", "energy": "most frugal"}
REGRET_DRAWS = 4000
WITHOUT_CASTS: Mapping[str, Any] = {
    **dict.fromkeys(("scale", "cast", "eager_scale", "eager_cast", "transposed"), NOTHING),
    **dict.fromkeys(("fused_kernels", "eager_kernels", "padding"), 0.0),
}


def next_bottleneck(estimate: Estimate) -> str:
    """Limit of the step if the largest cost besides compute vanished.

    This is to first order: the other costs do not change. Empty if only compute takes time.
    """
    costs = sorted(all_time_parts(estimate), key=lambda part: -part[1])
    parts = [(name, seconds) for name, seconds in costs if name != "compute" and seconds > 0]
    step = estimate.step_seconds or 1.0
    if not parts:
        return ""
    (first, gone), rest = parts[0], parts[1:]
    left = step - gone
    faster = times_as_fast(step / left) if left > 0 else "nothing left"
    sentence = f"without {PART_WORDS[first]} a step would take {format_seconds(left)} ({faster})"
    if not rest or rest[0][1] < NOTICEABLE * left:
        return f"{sentence}, nearly all of it {PART_WORDS['compute']}"
    key, seconds = rest[0]
    return f"{sentence}; the largest loss would then be {PART_WORDS[key]}, {seconds / left:.0%}"


def regret(
    scores: FloatColumn, covariance: FloatColumn, search: SearchSpec, of: int
) -> Regret | None:
    """How likely another layout is truly better than the first, and by how much.

    Of the layouts that may come first: what decides is what is reported.

    None for one layout, or if the objective has no time in it.
    True score = predicted x exp(deviation), the deviations drawn jointly: common errors cancel.
    scores (K,): expected values of the objective, the winner's first.
    covariance (K, K): of their logs (`search.choice.ranking`).
    of: how many are shown, those included whose speed no run supports.
    """
    if len(scores) < 2 or search.objective not in BETTER:
        return None
    values, vectors = np.linalg.eigh(covariance)
    random = np.random.default_rng(search.seed).standard_normal((REGRET_DRAWS, len(scores)))
    # the symmetric root: which way eigenvectors point, processors decide differently
    root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    truth = np.log(scores) + random @ root
    lost = truth[:, 0] - truth.min(axis=1)
    probability = float((lost > 0).mean())
    sd = float(np.sqrt(covariance[0, 0]))
    joint = float(covariance[0, 1] / (sd * np.sqrt(covariance[1, 1])))
    statement = f"{1.0 - probability:.0%} sure that number 1 is the {BEST[search.objective]} shown"
    if of > len(scores):
        statement += " of those that rest on measured runs"
    if probability > 0.0:
        most = float(np.expm1(np.quantile(lost[lost > 0.0], 0.95)))
        statement += f"; if not, you lose {most:.0%} at most (95%)"
    return Regret(
        probability_other_better=probability,
        expected_share=float(np.expm1(lost).mean()),
        share_95=float(np.expm1(np.quantile(lost, 0.95))),
        time_sd=sd,
        correlation=joint,
        statement=statement,
    )


def memory_sentence(together: Together, layout: Layout, estimate: Estimate) -> str:
    """When and at how much the worst rank's memory peaks, and how much may be used."""
    if estimate.memory is None or estimate.device_bytes is None or estimate.usable_bytes is None:
        return ""
    worst = estimate.memory.worst_stage
    prices, row = together.price(layout)
    phase = prices.memory.phase(worst, row)
    where = f" on pipeline rank {worst}" if len(estimate.memory.stages) > 1 else ""
    return (
        f"memory peaks{where} during {phase} at {format_bytes(estimate.device_bytes)} of "
        f"{format_bytes(estimate.usable_bytes)} usable; "
        f"probability of running out {format_risk(estimate.oom_probability or 0.0)}, with all of "
        f"the card {format_risk(estimate.oom_probability_full_card or 0.0)}"
    )


def precision_sentences(together: Together, layout: Layout, estimate: Estimate) -> list[str]:
    """Sentences on the parts low precision leaves in 16 bits, and its costs besides products.

    Empty for 16-bit layouts.
    """
    recipe = together.pricer.recipes[PRECISIONS.names.index(layout.precision)]
    step = estimate.step_seconds or 1.0
    return list(_precision(together, layout, recipe, step)) if recipe.low else []


def _precision(together: Together, layout: Layout, recipe: Recipe, step: float) -> Iterator[str]:
    pricer = together.pricer
    shares = quantised_model(pricer.model, pricer.recipes).shares.items()
    code = PRECISIONS.names.index(layout.precision)
    high = [name for name, share in shares if share[code] == 0]
    tail, layers = bf16_tail(recipe, pricer.model.num_hidden_layers), pricer.model.num_hidden_layers
    if high or tail:
        kept = [*high, *([f"the last {tail} of {layers} layers"] if tail else [])]
        yield f"{recipe.name} leaves {', '.join(kept)} in 16 bits, as {pricer.rules.name} does"
    own = _seconds(together, layout)
    seconds = own - _seconds(together, layout, **WITHOUT_CASTS)
    if seconds > NOTICEABLE * step:
        yield (
            f"scaling and casting for {recipe.name} takes {format_seconds(seconds)} a step "
            f"({seconds / step:.1%})"
        )
    if layout.tp > 1 and recipe.tp_wire_bytes >= TWO_BYTES:
        seconds = own - _seconds(together, layout, tp_wire_bytes=1.0)
        if seconds > NOTICEABLE * step:
            yield (
                f"TP all-gathers stay in 16 bits under {recipe.name}: in 8 bits a step would take "
                f"{format_seconds(seconds)} less"
            )


def _seconds(together: Together, layout: Layout, **changes: Any) -> float:
    """Screened step of a layout of low precision if all such recipes had these changes."""
    pricer, key = together.pricer, ("recipes", *changes)
    low = [recipe.low for recipe in pricer.recipes]
    recipes = tuple(replace(known, **changes) if known.low else known for known in pricer.recipes)
    recast = pricer.variant(key, lambda: replace(pricer, recipes=recipes)) if changes else pricer
    prices, row = together.price(
        layout, key, concerns=lambda one: low[PRECISIONS.names.index(one.precision)], pricer=recast
    )
    return float(prices.step_seconds[row])


def _change(step: SensitivityStep, usable_bytes: float) -> str:
    change = _instead(step.field, step.old, step.new)
    effect, device = times_as_fast(step.times_as_fast), step.device_bytes or 0.0
    if not step.fits:
        need = f"{format_bytes(device)} of {format_bytes(usable_bytes)}"
        refusal = "that is too close to be safe" if device <= usable_bytes else "does not fit"
        return f"{change} would need {need}: {effect}, but {refusal}"
    return f"{change}: {effect}, {format_bytes(device)}"


def _instead(field: str, old: object, new: object) -> str:
    """A change in words: "tp 4 instead of 8", "without async TP"."""
    words = in_words(field, new)
    return words if isinstance(new, bool) else f"{words} instead of {value_in_words(field, old)}"


def winner_reasons(
    together: Together, layout: Layout, estimate: Estimate, found: Sequence[SensitivityStep]
) -> list[str]:
    """Why the winner won; `together` holds its layout and the others that are told of.

    Bottleneck, memory, why it shards or splits, faster layouts that do not fit, closest
    alternatives.
    """
    usable = together.pricer.cluster.usable_memory_bytes
    refused = [n for n in found if not n.fits and n.times_as_fast > 1.0]
    fastest_first = sorted(refused, key=lambda n: -n.times_as_fast)
    tempting = {n.field: n for n in reversed(fastest_first)}
    closest = [
        best
        for name in dict.fromkeys(n.field for n in found)
        if (best := fastest(found, name)) is not None and _noticeable(best, estimate)
    ]
    return [
        bottleneck(estimate),
        memory_sentence(together, layout, estimate),
        *sharding_reasons(together, layout),
        *precision_sentences(together, layout, estimate),
        *(
            _change(n, usable)
            for changes in (tempting.values(), closest)
            for n in sorted(changes, key=lambda n: -n.times_as_fast)
        ),
    ]


def _noticeable(step: SensitivityStep, estimate: Estimate) -> bool:
    """Whether a change moves time or memory enough to be worth a sentence."""
    memory = abs((step.device_bytes or 0.0) / (estimate.device_bytes or 1.0) - 1.0)
    return abs((step.step_ratio or 1.0) - 1.0) > NOTICEABLE or memory > 2 * NOTICEABLE


def difference(
    ours: Estimate, theirs: Estimate, our_layout: Layout, their_layout: Layout
) -> list[str]:
    """Gains and losses of the second layout against the first.

    Lists the fields that differ, then the costs that moved most.
    """
    if ours.step_seconds is None or theirs.step_seconds is None:
        pairs = ((our_layout, ours), (their_layout, theirs))
        return [
            f"{layout.short()} cannot run: "
            + "; ".join(f"{v.field} {v.rule}" for v in e.violations)
            for layout, e in pairs
            if not e.valid
        ]
    lines = []
    fields = changed_fields(our_layout, their_layout)
    if fields:
        words = [_instead(name, getattr(our_layout, name), new) for name, new in fields.items()]
        lines.append(f"differs: {', '.join(words)}")
    lines.append(_speed(ours.step_seconds, theirs.step_seconds))
    first, second = (dict(all_time_parts(one)) for one in (ours, theirs))
    moved = sorted(PART_WORDS, key=lambda key: -abs(second.get(key, 0.0) - first.get(key, 0.0)))
    for key in moved[:3]:
        delta = second.get(key, 0.0) - first.get(key, 0.0)
        if abs(delta) > NOTICEABLE * ours.step_seconds:
            lines.append(
                f"{PART_WORDS[key]} {'+' if delta > 0 else '-'}{format_seconds(abs(delta))}"
            )
    if ours.device_bytes is not None and theirs.device_bytes is not None:
        delta_bytes = theirs.device_bytes - ours.device_bytes
        lines.append(f"memory {'+' if delta_bytes >= 0 else '-'}{format_bytes(abs(delta_bytes))}")
    return lines


def explain(plan: Plan, rank: int, versus: int | None) -> list[str]:
    """Why the layout of this rank was chosen, or what it loses against rank `versus`.

    For number 1 it adds the effect of one step in each field. Raises SpecError for an unknown rank.
    """
    chosen = ranked_as(plan, rank, "rank")
    lines = [f"#{rank} {chosen.layout.short()}"]
    if versus is None:
        steps = [step_sentence(step) for step in plan.sensitivity] if rank == 1 else []
        paper = plan.fastest_on_paper if rank == 1 else None
        rests = plan.rests_on if rank == 1 else None
        if rests is None and chosen.unmeasured:
            rests = f"no run behind the calibration used {', '.join(chosen.unmeasured)}"
        instead = [f"fastest on paper: {paper.layout.short()}: {paper.statement}"] if paper else []
        return [
            *lines,
            *([rests] if rests else []),
            *instead,
            *chosen.reasons,
            *(["one step in each field:", *steps] if steps else []),
        ]
    other = ranked_as(plan, versus, "versus")
    return [*lines, f"against #{versus} {other.layout.short()}", *_against(other, chosen)]


def _against(other: RankedLayout, chosen: RankedLayout) -> list[str]:
    """`difference` of two ranked layouts, by what was measured where it was.

    Steps of different numbers of GPUs say nothing of which is better: speed and price do.
    """
    lines = difference(other.estimate, chosen.estimate, other.layout, chosen.layout)
    first, second = other.shown, chosen.shown
    if first.step_seconds is None or second.step_seconds is None:
        return lines
    paper = _speed(other.estimate.step_seconds or 0.0, chosen.estimate.step_seconds or 0.0)
    speed = _speed(first.step_seconds, second.step_seconds)
    if paper != speed:
        speed += f"; {paper}, as predicted"
    if other.num_gpus != chosen.num_gpus:
        ratio = (second.tokens_per_second or 0.0) / (first.tokens_per_second or 1.0)
        speed = f"{counted(chosen.num_gpus, 'GPU')} against {counted(other.num_gpus, 'GPU')}: "
        speed += f"{times_as_fast(ratio)} in all"
        if first.cost and second.cost:
            speed += f", ${second.cost:,.0f} against ${first.cost:,.0f} for the run"
    return [speed if line == paper else line for line in lines]


def _speed(ours: float, theirs: float) -> str:
    return (
        f"{times_as_fast(ours / theirs)}: {format_seconds(theirs)} against "
        f"{format_seconds(ours)} a step"
    )


def step_sentence(step: SensitivityStep) -> str:
    """One step as a sentence: "tp 2 instead of 1: 0.88 times as fast, 40.0 GiB"."""
    change = _instead(step.field, step.old, step.new)
    if step.refused is not None or step.device_bytes is None:
        return f"{change}: refused, {step.refused}"
    fits = "" if step.fits else ", does not fit"
    return f"{change}: {times_as_fast(step.times_as_fast)}, {format_bytes(step.device_bytes)}{fits}"


def ranked_as(plan: Plan, rank: int, field: str = "rank") -> RankedLayout:
    """The layout of this rank; raises SpecError naming the field where the plan has none."""
    for entry in plan.ranked:
        if entry.rank == rank:
            return entry
    raise fault(field, rank, f"the plan ranks 1 to {len(plan.ranked)}", "choose one of them")
