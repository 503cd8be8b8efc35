"""The use case: a job in, a ranked and explained plan out.

enumerate -> screen all -> simulate the best -> sample what cannot be enumerated -> choose different ones -> estimate, explain, export.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.advice import warnings_for
from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.estimate import estimate_layouts, simulated_columns
from planner.cost.price import Pricer
from planner.cost.profile import CALIBRATION_ID
from planner.cost.simulation import refine
from planner.errors import InfeasibleError, SpecError
from planner.explain import changed_fields, difference, winner_reasons
from planner.export import export
from planner.ports import Ports
from planner.rules import Context
from planner.search import pareto
from planner.search.neighbours import neighbours
from planner.search.screen import OOM_LIMIT, Screened, screen
from planner.search.space import Space, build_space
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.plan import NearestMiss, ParetoPoint, Plan, RankedLayout, Searched, VersusCurrent
from planner.units import format_bytes
from planner.version import MODEL_VERSION

SIMULATED = 200
SAMPLED_SEEDS = 4
SAMPLED_TRIALS = 32
SHOWN_REASONS = 12

EXPORTS = {
    "torchtitan": "torchtitan",
    "fsdp": "torchtitan",
    "megatron": "megatron",
    "megatron-deepspeed": "megatron",
    "internevo": "megatron",
}

Progress = Callable[[str], None]


@dataclass(slots=True)
class _Sized:
    """The search at one cluster size."""

    pricer: Pricer
    screened: Screened
    num_layouts: int
    rejected: dict[str, int]
    candidates: list[tuple[float, float, Layout]] = field(default_factory=list)
    num_simulated: int = 0
    study: dict[str, object] | None = None


def recommend(job: Job, *, ports: Ports, progress: Progress | None = None) -> Plan:
    """The plan of a job. Raises InfeasibleError when nothing fits, SpecError for a request that cannot be searched."""
    started = time.perf_counter()
    say = progress or (lambda _: None)
    sizes = [_search_size(job, job.cluster.with_num_gpus(count), say) for count in job.cluster.num_gpus_choices]
    fitting = [size for size in sizes if size.candidates]
    if not fitting:
        raise _nothing_fits(job, sizes)
    ranked = _rank(job, fitting)
    say("explaining the winner")
    return _plan(job, ports, sizes, ranked, time.perf_counter() - started)


def _search_size(job: Job, cluster: ClusterSpec, say: Progress) -> _Sized:
    pricer = Pricer.build(job.model, cluster, job.training)
    space, screened = _screen(job, pricer, offload=False)
    rejected = Counter(space.rejected)
    num_layouts = space.num_layouts
    if screened.num_fitting == 0 and "cpu_offload" not in job.search.fix:
        rejected["out of memory"] += screened.out_of_memory
        space, again = _screen(job, pricer, offload=True)
        num_layouts += space.num_layouts
        screened = again if again.num_priced else screened
    say(f"{num_layouts:,} legal layouts on {cluster.num_gpus} GPUs, {screened.num_priced:,} priced, {screened.num_fitting:,} fit")
    rejected["out of memory"] += screened.out_of_memory
    rejected["slower than the best by a proven bound"] += screened.bounded_out
    sized = _Sized(pricer=pricer, screened=screened, num_layouts=num_layouts, rejected={k: v for k, v in rejected.items() if v})
    if screened.num_fitting:
        _simulate(job, sized)
    return sized


def _screen(job: Job, pricer: Pricer, *, offload: bool) -> tuple[Space, Screened]:
    context = Context(model=job.model, cluster=pricer.cluster, training=job.training)
    space = build_space(context, job.search, offload=offload)
    return space, screen(pricer, space, count=job.search.top_k)


def _simulate(job: Job, sized: _Sized) -> None:
    """Simulated step times of the best screened layouts, then of layouts sampled beyond the enumeration."""
    pricer, screened = sized.pricer, sized.screened
    best = screened.batch.take(slice(0, SIMULATED))
    prices = pricer.price(best)
    step = refine(pricer, best, prices).step_seconds
    oom = oom_probability(pricer.profile, pricer.cluster, prices.device_bytes)
    order = [int(row) for row in np.argsort(step, kind="stable") if oom[row] <= OOM_LIMIT]
    sized.candidates = [(float(step[row]), float(prices.device_bytes[row]), best.row(row)) for row in order]
    sized.num_simulated = len(best)
    _sample(job, sized)


def _sample(job: Job, sized: _Sized) -> None:
    free = {"ac", "layers_per_stage"} - set(job.search.fix)
    budgets = "ac" in free and ("ac" not in job.search.allow) and "memory-budget" in " ".join(sized.pricer.rules.ac_kinds)
    splits = "layers_per_stage" in free and any(layout.pp > 1 for _, _, layout in sized.candidates[:SAMPLED_SEEDS])
    if not (budgets or splits):
        return
    from planner.search.study import sample_beyond

    seeds = [layout for _, _, layout in sized.candidates[:SAMPLED_SEEDS]]
    sampled = sample_beyond(
        sized.pricer, seeds, name=job.search.sampler, seed=job.search.seed, num_trials=SAMPLED_TRIALS, budgets=budgets, splits=splits
    )
    for layout in sampled.layouts[:SAMPLED_SEEDS]:
        ((step, _, share),) = simulated_columns(sized.pricer, [layout])
        sized.candidates.append((step, (1.0 + share) * sized.pricer.cluster.usable_memory_bytes, layout))
    sized.candidates.sort(key=lambda item: item[0])
    sized.study = {"sampler": job.search.sampler, "trials": sampled.num_trials, "seed": job.search.seed}
    sized.num_simulated += sampled.num_trials


def _score(job: Job, sized: _Sized, step: float, device: float) -> float:
    """What the objective minimises. Cost and energy per step: the batch is the same, so per step is per token."""
    cluster = sized.pricer.cluster
    if job.search.objective == "memory":
        return device
    if job.search.objective == "cost":
        return step * cluster.num_gpus * cluster.price_per_gpu_hour
    if job.search.objective == "energy":
        return step * cluster.num_gpus * cluster.power_limit_watts
    return step


def _rank(job: Job, sizes: list[_Sized]) -> list[tuple[_Sized, Layout]]:
    """The layouts to show, best first, that differ in something that matters."""
    found = [(sized, step, device, layout) for sized in sizes for step, device, layout in sized.candidates]
    order = np.argsort([_score(job, sized, step, device) for sized, step, device, _ in found], kind="stable")
    batch = LayoutBatch.from_layouts([layout for *_, layout in found])
    step, device = (np.array([entry[i] for entry in found]) for i in (1, 2))
    chosen = pareto.different(batch, step, device, order, job.search.top_k)
    place = np.argsort(order)
    return [(found[row][0], found[row][3]) for row in sorted(chosen, key=lambda row: place[row])]


def _plan(job: Job, ports: Ports, sizes: list[_Sized], ranked: list[tuple[_Sized, Layout]], seconds: float) -> Plan:
    estimates = [estimate_layouts(sized.pricer, [layout])[0] for sized, layout in ranked]
    entries = [_entry(job, rank, sized, layout, estimates[rank - 1]) for rank, (sized, layout) in enumerate(ranked, start=1)]
    winner_size, winner = ranked[0]
    total = Counter[str]()
    for sized in sizes:
        total.update(sized.rejected)
    return Plan(
        id=ports.ids.new_id("plan"),
        job=job.request,
        created_at=ports.clock.now().isoformat(),
        ranked=entries,
        pareto=_pareto(job, winner_size, ranked),
        rejected=dict(total.most_common()),
        nearest_miss=None,
        searched=Searched(
            layouts=sum(s.num_layouts for s in sizes),
            valid=sum(s.num_layouts for s in sizes),
            fitting=sum(s.screened.num_fitting for s in sizes),
            seconds=seconds,
            simulated=sum(s.num_simulated for s in sizes),
            priced=sum(s.screened.num_priced for s in sizes),
            study=winner_size.study,
        ),
        versus_current=_versus_current(job, winner_size, winner, estimates[0]),
        headline=_headline(entries),
        warnings=warnings_for(winner_size.pricer, winner, estimates[0]),
        seed=job.search.seed,
        model_version=MODEL_VERSION,
        calibration_id=CALIBRATION_ID,
    )


def _entry(job: Job, rank: int, sized: _Sized, layout: Layout, estimate: Estimate) -> RankedLayout:
    reasons = _reasons(rank, sized, layout, estimate)
    target = EXPORTS.get(job.training.trainer)
    exported = None if target is None else export(layout, job.model, sized.pricer.cluster, job.training, to=target)
    return RankedLayout(
        rank=rank,
        layout=layout,
        num_gpus=sized.pricer.cluster.num_gpus,
        estimate=estimate,
        source="simulated" if layout.pp > 1 else "screened",
        reasons=reasons,
        export={} if exported is None else {exported.trainer: exported.as_dict()},
    )


def _reasons(rank: int, sized: _Sized, layout: Layout, estimate: Estimate) -> list[str]:
    """The winner's reasons in full, with its neighbours; for the others what costs them most and what they need."""
    found = neighbours(sized.pricer, layout) if rank == 1 else []
    return winner_reasons(sized.pricer, layout, estimate, found)[:SHOWN_REASONS]


def _headline(entries: list[RankedLayout]) -> list[str]:
    winner = entries[0]
    if len(entries) == 1:
        return [winner.layout.short()]
    second = entries[1]
    return [winner.layout.short(), *difference(winner.estimate, second.estimate, winner.layout, second.layout)]


def _pareto(job: Job, sized: _Sized, ranked: list[tuple[_Sized, Layout]]) -> list[ParetoPoint]:
    """Throughput against headroom at the winner's size, over everything screened that fits."""
    screened = sized.screened
    fits = np.flatnonzero(screened.oom <= OOM_LIMIT)
    rows = fits[pareto.front(screened.step_seconds[fits], screened.device_bytes[fits])]
    places = {layout: index for index, (_, layout) in enumerate(ranked, start=1)}
    tokens = job.training.global_batch_size * job.training.seq_len / sized.pricer.cluster.num_gpus
    points = []
    for row in rows:
        layout = screened.batch.row(int(row))
        step = float(screened.step_seconds[row])
        headroom = sized.pricer.cluster.usable_memory_bytes - float(screened.device_bytes[row])
        points.append(
            ParetoPoint(
                layout=layout, tokens_per_second_per_gpu=tokens / step, headroom_bytes=headroom, step_seconds=step, rank=places.get(layout)
            )
        )
    return points


def _versus_current(job: Job, sized: _Sized, winner: Layout, estimate: Estimate) -> VersusCurrent | None:
    if job.layout is None:
        return None
    pricer = Pricer.build(job.model, job.cluster, job.training)
    current = estimate_layouts(pricer, [job.layout])[0]
    speedup = current.step_seconds / estimate.step_seconds if current.step_seconds and estimate.step_seconds else None
    return VersusCurrent(
        layout=job.layout,
        estimate=current,
        speedup=speedup,
        changed=changed_fields(job.layout, winner),
        reasons=difference(current, estimate, job.layout, winner),
    )


def _nothing_fits(job: Job, sizes: list[_Sized]) -> InfeasibleError:
    """The nearest miss and the smallest change that would make it fit."""
    rejected = Counter[str]()
    for sized in sizes:
        rejected.update(sized.rejected)
    priced = [sized for sized in sizes if len(sized.screened.batch)]
    if not priced:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in rejected.most_common(3))
        return InfeasibleError(
            f"no legal layout: {reasons}", remedy="loosen search.fix or change the number of GPUs or the batch", rejected=dict(rejected)
        )
    sized = min(priced, key=lambda s: float(s.screened.device_bytes.min() / s.pricer.cluster.usable_memory_bytes))
    row = int(np.argmin(sized.screened.device_bytes))
    layout, device = sized.screened.batch.row(row), float(sized.screened.device_bytes[row])
    usable = float(sized.pricer.cluster.usable_memory_bytes)
    remedy = _smallest_change(job, sized.pricer, device)
    miss = NearestMiss(layout=layout, device_bytes=device, usable_bytes=usable, missing_bytes=device - usable, remedy=remedy)
    message = f"none of {sized.num_layouts:,} legal layouts fits: the smallest needs {format_bytes(device)} of {format_bytes(usable)}"
    return InfeasibleError(message, remedy=remedy, nearest_miss=miss.model_dump(mode="json"), rejected=dict(rejected))


def _smallest_change(job: Job, pricer: Pricer, device: float) -> str:
    """The fewest GPUs of this kind that would fit, by searching twice, four, ... times as many; else the memory it would take."""
    larger = f"a GPU with {format_bytes(device / pricer.cluster.memory_fraction)} of memory"
    for factor in (2, 4, 8, 16):
        try:
            cluster = pricer.cluster.with_num_gpus(pricer.cluster.num_gpus * factor)
        except SpecError:
            break
        space = build_space(Context(model=job.model, cluster=cluster, training=job.training), job.search)
        if screen(Pricer.build(job.model, cluster, job.training), space, count=1).num_fitting:
            return f"use {cluster.num_gpus} GPUs of this kind, where it fits, or {larger}"
    return f"use {larger}, a shorter seq_len or a smaller model: up to {factor} times as many GPUs do not fit either"
