"""Rules of thumb as warnings: where a winner is outside common practice.

Each warning has the number that triggered it and its source.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.plan.explain import BETTER
from planner.rules import violations
from planner.rules.expert_recipes import recipes
from planner.rules.experts import overlapping
from planner.search.fit import fitting
from planner.search.one_size import search_size
from planner.search.size_candidates import OneSize
from planner.search.variations.sensitivity import LOADS
from planner.specs.estimate import Estimate
from planner.specs.job import Job, SearchSpec
from planner.specs.layout import Layout
from planner.specs.plan import MOST_RISK
from planner.specs.plan_comparisons import SensitivityStep
from planner.units import counted, format_seconds, times_as_fast

# Judgement from McCandlish 2018 and the batch sizes of published runs: tokens per step beyond which
# more data parallelism stops paying.
CRITICAL_BATCH_TOKENS = 60e6
SMALL_BATCH_PER_STAGE = 2
WIDE_SHARDING = 512
BUSY_WAIT_SHARE = 0.25
WORTH_A_SWITCH = 1.02  # judgement
FOUR_BITS = ("nvfp4", "mxfp4")


def warnings_for(pricer: Pricer, layout: Layout, estimate: Estimate) -> list[str]:
    """Warnings for a layout: what its estimate assumes, then rules of thumb, most costly first."""
    return [*estimate.warnings, *_warnings(pricer, layout, estimate)]


def _warnings(pricer: Pricer, layout: Layout, estimate: Estimate) -> Iterator[str]:
    cluster, training = pricer.cluster, pricer.training
    domain = cluster.fabric[0].gpus
    if layout.tp > domain:
        yield (
            f"tp {layout.tp} leaves the {domain}-GPU {cluster.fabric[0].name} domain: its "
            "communication is on every layer's path"
        )
    tokens = training.global_batch_size * training.seq_len
    if tokens > CRITICAL_BATCH_TOKENS:
        yield (
            f"{tokens / 1e6:.0f}M tokens a step is past the critical batch of most runs "
            "(McCandlish 2018): more replicas buy little"
        )
    microbatches = layout.num_microbatches(training.global_batch_size)
    if layout.pp > 1 and microbatches < SMALL_BATCH_PER_STAGE * layout.pp:
        few = f"only {counted(microbatches, 'microbatch')} for {layout.pp} pipeline ranks"
        yield f"{few}: the bubble is large; a larger global batch would shrink it"
    ranks = layout.dp_shard * layout.cp
    if layout.zero_stage == 3 and ranks > WIDE_SHARDING and layout.dp_replicate == 1:
        wide = f"FSDP over {counted(ranks, 'rank')} is latency-bound"
        yield f"{wide}: {_instead(pricer, layout)}"
    if estimate.time is not None and estimate.step_seconds:
        exposed = sum(estimate.time.exposed_communication_seconds.values())
        if exposed > BUSY_WAIT_SHARE * estimate.step_seconds:
            yield f"{exposed / estimate.step_seconds:.0%} of the step waits for communication"
    if estimate.oom_probability is not None and estimate.oom_probability > MOST_RISK:
        yield f"out of memory with probability {estimate.oom_probability:.1%}: probe before booking"


def _instead(pricer: Pricer, layout: Layout) -> str:
    """A sentence on HSDP, the usual remedy, in the place of this layout."""
    replicas = -(-layout.dp_shard * layout.cp // WIDE_SHARDING)
    while layout.dp_shard % replicas and replicas < layout.dp_shard:
        replicas += 1
    shards = layout.dp_shard // replicas
    hsdp = layout.model_copy(update={"dp_replicate": replicas, "dp_shard": shards})
    broken = violations(hsdp, pricer.model, pricer.cluster, pricer.training)
    if broken:
        return f"HSDP would help, but {broken[0].field} {broken[0].rule}"
    prices = pricer.price(LayoutBatch.from_layouts([layout, hsdp]))
    change = float(prices.step_seconds[1] / prices.step_seconds[0])
    fits = fitting(pricer, prices.least_device_bytes)[1]
    found = f"HSDP {replicas} x {shards} is {times_as_fast(1.0 / change)} here"
    return found if fits else f"{found}, but does not fit"


def beyond_balance(pricer: Pricer, ranked: Mapping[int, Layout]) -> Iterator[str]:
    """A warning where number 1 fits only while experts are balanced, and number 1 is in `ranked`.

    A router that learns may send the busiest rank twice the mean (marin issue 7668); the fastest
    of the others, by rank, that fits then is named. None for a job that states its load.
    """
    if ranked[1].ep == 1 or pricer.training.moe_imbalance or pricer.training.moe_capacity_factor:
        return
    busiest = max(LOADS)
    training = pricer.training.model_copy(update={"moe_imbalance": busiest})
    learnt = replace(pricer, training=training)
    prices = learnt.price(LayoutBatch.from_layouts(list(ranked.values())))
    fits = dict(zip(ranked, fitting(learnt, prices.least_device_bytes), strict=True))
    if fits[1]:
        return
    seconds = dict(zip(ranked, prices.step_seconds.tolist(), strict=True))
    others = sorted((seconds[rank], rank) for rank in ranked if fits[rank])
    found = (
        f"number {others[0][1]} is the fastest shown that fits then, at "
        f"{format_seconds(others[0][0])} a step"
        if others
        else "no layout shown fits then"
    )
    yield (
        f"number 1 runs out of memory where a router sends one rank {busiest:g} times the mean "
        f"load in every layer; {found}; training.moe_imbalance: {busiest:g} plans for it"
    )


def four_bits(steps: Sequence[SensitivityStep], search: SearchSpec) -> Iterator[str]:
    """A warning where number 1 would be faster in four bits, which are searched by request."""
    if "precision" in {*search.fix, *search.allow}:
        return
    for step in steps:
        gain = step.times_as_fast
        if step.field == "precision" and step.new in FOUR_BITS and gain > WORTH_A_SWITCH:
            fits = "" if step.fits else " and does not fit as it stands"
            yield (
                f"in {step.new} number 1 is {times_as_fast(gain)} on paper{fits}; four bits want a "
                "recipe of their own, so search.allow.precision has to list them"
            )


def overlapped(job: Job, at_size: OneSize) -> Iterator[str]:
    """A warning where overlapping the exchange of experts gains, which the job leaves open."""
    context = at_size.pricer.rules_context
    decided = (job.request["training"].get("overlap") or {}).get("ep") is not None
    able = job.model.is_moe and context.released.overlaps_exchange and not overlapping(context)
    if decided or not able or job.search.objective not in BETTER:
        return
    overlap = job.training.overlap.model_copy(update={"ep": True})
    training = job.training.model_copy(update={"overlap": overlap})
    found = search_size(
        job.model_copy(update={"training": training}),
        context.cluster,
        lambda _: None,
        at_size.pricer.calibration,
        samples=False,
    )
    gain = at_size.best_seconds / found.best_seconds if found.candidates else 1.0
    if gain > WORTH_A_SWITCH:
        off = ", though NVIDIA's recipe leaves it off" if recipes(context) else ""
        yield (
            "with training.overlap.ep: true, which runs the exchange of experts under another "
            f"microbatch's compute, the fastest on paper is {times_as_fast(gain)}{off}: "
            f"{found.candidates[0][2].short()}"
        )
