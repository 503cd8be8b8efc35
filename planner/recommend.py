"""The use case: a job in, a ranked and explained plan out.

enumerate -> screen all -> simulate the best -> sample what cannot be enumerated -> choose different ones -> estimate, explain, export.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from planner.advice import warnings_for
from planner.calibration.intervals import oom_probability
from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.cost.estimate import estimate_layouts, simulated_columns
from planner.cost.price import Pricer
from planner.cost.profile import CALIBRATION_ID
from planner.cost.run import RunColumns, busy_seconds, run_columns, run_estimate
from planner.cost.simulation import first_groups, refine
from planner.errors import InfeasibleError, SpecError
from planner.explain import changed_fields, difference, next_bottleneck, regret, winner_reasons
from planner.export import export
from planner.export.base import Export
from planner.ports import Ports
from planner.rules import Context
from planner.search import pareto
from planner.search.budgets import best_budgets
from planner.search.neighbours import Neighbour, neighbours
from planner.search.screen import OOM_LIMIT, Screened, screen
from planner.search.space import Space, build_space
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.gpu import MAX_GPUS
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.plan import NearestMiss, ParetoPoint, Plan, RankedLayout, Searched, SizeOption, VersusCurrent
from planner.units import format_bytes, format_seconds
from planner.version import MODEL_VERSION

SIMULATED = 300
SIMULATED_GROUPS = 10  # distinct (schedule, pp, stages, microbatches) among them: each is played out once for all its layouts
BUDGETS_SIMULATED = 40
SPARE = 3  # times top_k that are looked at when some cannot be exported
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
    """The search at one cluster size.

    candidates: (step seconds, device bytes, layout), fastest first; runs and scores (what the objective minimises) are their columns.
    """

    pricer: Pricer
    screened: Screened
    num_layouts: int
    rejected: dict[str, int]
    candidates: list[tuple[float, float, Layout]] = field(default_factory=list)
    num_simulated: int = 0
    study: dict[str, object] | None = None
    runs: RunColumns | None = None
    scores: FloatColumn = field(default_factory=lambda: np.zeros(0))


class _Choice(NamedTuple):
    """A candidate of one size."""

    sized: _Sized
    row: int

    @property
    def layout(self) -> Layout:
        return self.sized.candidates[self.row][2]

    @property
    def score(self) -> float:
        return float(self.sized.scores[self.row])


def recommend(job: Job, *, ports: Ports, progress: Progress | None = None) -> Plan:
    """The plan of a job. Raises InfeasibleError when nothing fits, SpecError for a request that cannot be searched."""
    started = ports.clock.now()
    say = progress or (lambda _: None)
    sizes = [_search_size(job, job.cluster.with_num_gpus(count), say) for count in job.cluster.num_gpus_choices]
    fitting = [size for size in sizes if size.candidates]
    if not fitting:
        raise _nothing_fits(job, sizes)
    for sized in fitting:
        _rate(job, sized, several=len(sizes) > 1)
    ranked = _rank(job, fitting)
    say("explaining the winner")
    return _plan(job, ports, sizes, ranked, (ports.clock.now() - started).total_seconds())


def _search_size(job: Job, cluster: ClusterSpec, say: Progress) -> _Sized:
    """The search at one size: on the device; if nothing fits with CPU offload; if still nothing, what came closest."""
    pricer = Pricer.build(job.model, cluster, job.training)
    passes: list[dict[str, bool]] = (
        [{}, {"offload": True}, {"oversized": True}] if "cpu_offload" not in job.search.fix else [{}, {"oversized": True}]
    )
    rejected: Counter[str] = Counter()
    num_layouts = 0
    best: Screened | None = None
    for number, options in enumerate(passes):
        space, screened = _screen(job, pricer, **options)
        if number == 0 or screened.num_fitting:
            rejected = Counter(space.rejected)
        num_layouts = max(num_layouts, space.num_layouts)
        best = screened if best is None or len(screened.batch) else best
        if screened.num_fitting:
            break
    assert best is not None
    say(f"{num_layouts:,} legal layouts on {cluster.num_gpus} GPUs, {best.num_priced:,} priced, {best.num_fitting:,} fit")
    rejected["out of memory"] += best.out_of_memory
    rejected["slower than the best by a proven bound"] += best.bounded_out
    sized = _Sized(pricer=pricer, screened=best, num_layouts=num_layouts, rejected={k: v for k, v in rejected.items() if v})
    if best.num_fitting:
        _simulate(job, sized, space)
    return sized


def _screen(job: Job, pricer: Pricer, *, offload: bool = False, oversized: bool = False) -> tuple[Space, Screened]:
    context = Context(model=job.model, cluster=pricer.cluster, training=job.training)
    space = build_space(context, job.search, offload=offload, oversized=oversized)
    return space, screen(pricer, space, count=job.search.top_k, smallest=job.search.objective == "memory")


def _simulate(job: Job, sized: _Sized, space: Space) -> None:
    """Simulated step times of the best screened layouts, with and without memory budgets, then of layouts sampled beyond."""
    pricer, screened = sized.pricer, sized.screened
    best = screened.batch.take(first_groups(pricer, screened.batch, SIMULATED, SIMULATED_GROUPS))
    if job.search.objective != "memory" and _free_budgets(job, pricer):
        worth = float(screened.step_seconds[min(job.search.top_k, len(screened.step_seconds)) - 1])
        best = LayoutBatch.concatenate([best, best_budgets(pricer, space, screened.may_fit, worth, BUDGETS_SIMULATED)])
    prices = pricer.price(best)
    step = refine(pricer, best, prices).step_seconds
    oom = oom_probability(pricer.profile, pricer.cluster, prices.device_bytes)
    order = [int(row) for row in np.argsort(step, kind="stable") if oom[row] <= OOM_LIMIT]
    sized.candidates = [(float(step[row]), float(prices.device_bytes[row]), best.row(row)) for row in order]
    sized.num_simulated = len(best)
    _sample(job, sized)


def _free_budgets(job: Job, pricer: Pricer) -> bool:
    """Whether memory budgets may be tried: the trainer has them and the user left activation checkpointing open."""
    return "memory-budget" in pricer.rules.ac_kinds and "ac" not in job.search.fix and "ac" not in job.search.allow


def _sample(job: Job, sized: _Sized) -> None:
    free = {"ac", "layers_per_stage"} - set(job.search.fix)
    budgets = _free_budgets(job, sized.pricer)
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


def _rate(job: Job, sized: _Sized, *, several: bool) -> None:
    """Whole runs of all candidates, and what the objective minimises."""
    batch = LayoutBatch.from_layouts([layout for *_, layout in sized.candidates])
    step, device = (np.array([candidate[i] for candidate in sized.candidates]) for i in (0, 1))
    sized.runs = run_columns(sized.pricer, batch, step, busy_seconds(sized.pricer.price(batch)))
    sized.scores = _score(job.search.objective, sized.runs, device, several=several)


def _score(objective: str, runs: RunColumns, device_bytes: FloatColumn, *, several: bool) -> FloatColumn:
    """What the objective minimises, (N,).

    throughput: step time; between several sizes seconds a token of the whole job after goodput.  time: of the whole run.
    cost: USD of the whole run (GPU-hours where the GPUs are free).  energy: joules a token.  memory: device bytes.
    """
    if objective == "memory":
        return device_bytes
    if objective == "cost":
        return runs.bill.cost if np.all(runs.bill.cost > 0) else runs.bill.gpu_hours
    if objective == "energy":
        return runs.bill.joules / runs.tokens
    if objective == "time":
        return runs.wall_seconds
    return 1.0 / runs.tokens_per_second if several else runs.step_seconds


def _rank(job: Job, sizes: list[_Sized]) -> list[_Choice]:
    """The layouts to show, best first, that differ in something that matters."""
    found = [_Choice(sized, row) for sized in sizes for row in range(len(sized.candidates))]
    batch = LayoutBatch.from_layouts([choice.layout for choice in found])
    step, device = (np.array([choice.sized.candidates[choice.row][i] for choice in found]) for i in (0, 1))
    order = _best_first(np.array([choice.score for choice in found]), step)
    # A layout of another size is no near copy: the size travels in a column that copies must share.
    sized_pp = batch.pp + MAX_GPUS * np.array([choice.sized.pricer.cluster.num_gpus for choice in found])
    chosen = pareto.different(replace(batch, pp=sized_pp), step, device, order, SPARE * job.search.top_k)
    place = {id(found[row]): rank for rank, row in enumerate(order)}
    shown = _runnable(job, [found[row] for row in chosen])[: job.search.top_k]
    return sorted(shown, key=lambda choice: place[id(choice)])


def _runnable(job: Job, choices: list[_Choice]) -> list[_Choice]:
    """The choices that the trainer's export can run, up to top_k; all of them where it can run none (a model it does not ship)."""
    able: list[_Choice] = []
    for choice in choices:
        exported = _exported(job, choice)
        if exported is None or not exported.blockers:
            able.append(choice)
        else:
            reason = f"{exported.trainer} {exported.version} cannot run it"
            choice.sized.rejected[reason] = choice.sized.rejected.get(reason, 0) + 1
        if len(able) == job.search.top_k:
            break
    return able or choices


def _exported(job: Job, choice: _Choice) -> Export | None:
    target = EXPORTS.get(job.training.trainer)
    return None if target is None else export(choice.layout, job.model, choice.sized.pricer.cluster, job.training, to=target)


def _best_first(scores: FloatColumn, step_seconds: FloatColumn) -> IntColumn:
    """Order by score; scores within a millionth are ties (runs that wait for the same upload, say), and the faster step wins."""
    return np.lexsort((step_seconds, np.round(np.log(scores), 6)))


def _options(sizes: list[_Sized]) -> list[SizeOption]:
    """The best candidate of every size, with the front of time against cost (GPU-hours where the GPUs are free)."""
    runs_of = [(sized, sized.runs) for sized in sizes if sized.runs is not None]
    best = [(sized, runs, int(_best_first(sized.scores, runs.step_seconds)[0])) for sized, runs in runs_of]
    points = np.array([(runs.wall_seconds[row], runs.bill.cost[row], runs.bill.gpu_hours[row]) for _, runs, row in best])
    beaten = np.all(points[None] <= points[:, None], axis=2) & np.any(points[None] < points[:, None], axis=2)
    return [
        SizeOption(
            num_gpus=sized.pricer.cluster.num_gpus,
            layout=_Choice(sized, row).layout,
            tokens_per_second=float(runs.tokens_per_second[row]),
            step_seconds=float(runs.step_seconds[row]),
            time_to_train_seconds=float(runs.wall_seconds[row]),
            cost=float(runs.bill.cost[row]),
            energy_joules=float(runs.bill.joules[row]),
            co2_grams=float(runs.bill.grams[row]),
            on_front=not dominated,
        )
        for (sized, runs, row), dominated in zip(best, beaten.any(axis=1), strict=True)
    ]


def _plan(job: Job, ports: Ports, sizes: list[_Sized], ranked: list[_Choice], seconds: float) -> Plan:
    estimates = _estimates(ranked)
    entries = [_entry(job, rank, choice, estimates[rank - 1]) for rank, choice in enumerate(ranked, start=1)]
    winner = ranked[0]
    total = Counter[str]()
    for sized in sizes:
        total.update(sized.rejected)
    return Plan(
        id=ports.ids.new_id("plan"),
        job=job.request,
        created_at=ports.clock.now().isoformat(),
        ranked=entries,
        pareto=_pareto(job, ranked),
        rejected=dict(total.most_common()),
        nearest_miss=None,
        searched=_searched(sizes, winner.sized, seconds),
        versus_current=_versus_current(job, winner.sized, winner.layout, estimates[0]),
        headline=_headline(entries),
        warnings=[*warnings_for(winner.sized.pricer, winner.layout, estimates[0]), *_run_warnings(entries[0], sizes)],
        seed=job.search.seed,
        model_version=MODEL_VERSION,
        calibration_id=CALIBRATION_ID,
        sizes=_options([sized for sized in sizes if sized.candidates]),
        regret=regret(np.array([choice.score for choice in ranked]), winner.sized.pricer.profile.time_sd, job.search.objective),
    )


def _estimates(ranked: list[_Choice]) -> list[Estimate]:
    """The estimate of every choice, priced together at each size."""
    answers: dict[int, Estimate] = {}
    for sized in {id(choice.sized): choice.sized for choice in ranked}.values():
        places = [place for place, choice in enumerate(ranked) if choice.sized is sized]
        answers.update(zip(places, estimate_layouts(sized.pricer, [ranked[place].layout for place in places]), strict=True))
    return [answers[place] for place in range(len(ranked))]


def _searched(sizes: list[_Sized], winner: _Sized, seconds: float) -> Searched:
    return Searched(
        layouts=sum(s.num_layouts for s in sizes),
        valid=sum(s.num_layouts for s in sizes),
        fitting=sum(s.screened.num_fitting for s in sizes),
        seconds=seconds,
        simulated=sum(s.num_simulated for s in sizes),
        priced=sum(s.screened.num_priced for s in sizes),
        study=winner.study,
    )


def _run_warnings(winner: RankedLayout, sizes: list[_Sized]) -> list[str]:
    """What the whole run of the winner runs into, and the sizes that are no choice."""
    unfit = [f"{sized.pricer.cluster.num_gpus:,}" for sized in sizes if not sized.candidates]
    nothing = [f"no layout fits on {', '.join(unfit)} GPUs"] if unfit else []
    return [*(winner.run.warnings if winner.run is not None else []), *nothing]


def _entry(job: Job, rank: int, choice: _Choice, estimate: Estimate) -> RankedLayout:
    sized, layout = choice.sized, choice.layout
    reasons = _reasons(job, rank, sized, layout, estimate)
    exported = _exported(job, choice)
    return RankedLayout(
        rank=rank,
        layout=layout,
        num_gpus=sized.pricer.cluster.num_gpus,
        estimate=estimate,
        source="simulated" if layout.pp > 1 else "screened",
        reasons=reasons,
        export={} if exported is None else {exported.trainer: exported.as_dict()},
        run=None if sized.runs is None else run_estimate(sized.pricer, sized.runs, choice.row),
    )


def _reasons(job: Job, rank: int, sized: _Sized, layout: Layout, estimate: Estimate) -> list[str]:
    """The winner's reasons in full, with its neighbours that the search allows; for the others what costs them most and what they need."""
    found = [n for n in neighbours(sized.pricer, layout) if _allowed(job, n)] if rank == 1 else []
    lines = winner_reasons(sized.pricer, layout, estimate, found)[:SHOWN_REASONS]
    following = next_bottleneck(estimate) if rank == 1 else ""
    return [lines[0], following, *lines[1:]] if following else lines


def _allowed(job: Job, neighbour: Neighbour) -> bool:
    """Whether `search.fix` and `search.allow` leave this change open."""
    allowed = job.search.allow.get(neighbour.field)
    return neighbour.field not in job.search.fix and (allowed is None or neighbour.new in allowed)


def _headline(entries: list[RankedLayout]) -> list[str]:
    winner = entries[0]
    if len(entries) == 1:
        return [winner.layout.short()]
    second = entries[1]
    if second.num_gpus != winner.num_gpus and winner.run is not None and second.run is not None:
        ours, theirs = winner.run, second.run
        return [
            winner.layout.short(),
            f"number 2 is {second.layout.short()} on {second.num_gpus:,} GPUs instead of {winner.num_gpus:,}",
            f"trains for {format_seconds(theirs.time_to_train_seconds)} instead of {format_seconds(ours.time_to_train_seconds)}, "
            f"for ${theirs.cost:,.0f} instead of ${ours.cost:,.0f}, "
            f"with {theirs.joules_per_token / ours.joules_per_token - 1.0:+.1%} energy",
        ]
    return [winner.layout.short(), *difference(winner.estimate, second.estimate, winner.layout, second.layout)]


def _pareto(job: Job, ranked: list[_Choice]) -> list[ParetoPoint]:
    """Throughput against headroom at the winner's size, over everything screened that fits."""
    sized = ranked[0].sized
    screened = sized.screened
    fits = np.flatnonzero(screened.oom <= OOM_LIMIT)
    rows = fits[pareto.front(screened.step_seconds[fits], screened.device_bytes[fits])]
    places = {choice.layout: index for index, choice in enumerate(ranked, start=1)}
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
