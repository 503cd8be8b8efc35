"""The use case: a job in, a ranked and explained plan out.

enumerate -> screen all -> simulate the best -> sample what cannot be enumerated -> choose different
ones -> estimate, explain, export.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.refine import simulated_step_seconds
from planner.cost.run.whole_run import run_estimate
from planner.estimates import estimate_layouts
from planner.export import exports
from planner.export.base import Export
from planner.plan.advice import beyond_balance, four_bits, overlapped, warnings_for
from planner.plan.considered import Fitting, considered, fitting_layouts
from planner.plan.explain import BETTER, difference, next_bottleneck, regret, winner_reasons
from planner.plan.together import Together
from planner.rules import Context
from planner.rules.support import check_supported, fork_needed
from planner.search.choice.ranking import (
    after_probes,
    best_measured,
    covariance,
    fastest_on_paper,
    rank,
    rests_on_nothing,
    rests_on_unmeasured,
)
from planner.search.infeasible.near_batch import near_batch
from planner.search.infeasible.report import check_given, nothing_fits
from planner.search.one_size import Progress, search_size
from planner.search.size_candidates import OneSize, PlanCandidate, rate, rejected
from planner.search.space.conflicts import refused_choices
from planner.search.variations.neighbours import neighbours
from planner.search.variations.sensitivity import sensitivity
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.plan import Plan, RankedLayout, Searched
from planner.specs.plan_comparisons import ParetoPoint, SensitivityStep, SizeOption, VersusCurrent
from planner.trainers.registry import TRAINERS
from planner.units import counted, format_seconds
from planner.version import MODEL_VERSION

if TYPE_CHECKING:  # they import Optuna, which a plan on paper does not need to start
    from planner.study.ask_tell import Ranked, StudyResult
    from planner.study.measured_search import Probing

Answer = TypeVar("Answer")

# shown rejection reasons, if fewer layouts are found than asked for
MOST_REASONS = 3
MOST_ON_FRONT = 20
SHOWN_REASONS = 18  # one for every field that a neighbour changes, and room for the other sentences


def recommend(
    job: Job,
    *,
    now: Callable[[], datetime],
    progress: Progress | None = None,
    calibration: Calibration | None = None,
    probing: "Probing | None" = None,
    plan_id: str = "plan",
) -> Plan:
    """The plan of a job.

    now: the present, in UTC, with its time zone.
    calibration: fitted to measurements on the job's GPU; the shipped one unless given.
    probing: how to spend the job's probes at the winner's size; without it the plan is on paper.
    plan_id: the plan's id.

    Raises InfeasibleError when nothing fits, UnsupportedError when the trainer cannot run the job
    at all, SpecError for a request that cannot be searched.
    """
    started = now()
    say = progress or (lambda _: None)
    clusters = [job.cluster.with_num_gpus(count) for count in job.cluster.num_gpus_choices]
    check_supported(
        Context(model=job.model, cluster=cluster, training=job.training) for cluster in clusters
    )
    check_given(job, clusters)
    sizes = _search_sizes(job, clusters, say, calibration)
    fitting = [size for size in sizes if size.candidates]
    if not fitting:
        raise nothing_fits(job, sizes, say)
    for at_size in fitting:
        rate(job, at_size, several=len(sizes) > 1)
    fits = [fitting_layouts(at_size) for at_size in fitting]
    ranking = rank(job, fitting)
    ranked = ranking.choices
    outcome: StudyResult | None = None
    known: list[Ranked] = []
    if probing is not None:
        from planner.study.measured_search import measured_candidates, probe_size

        say("spending probes")
        outcome = probe_size(
            job,
            ranked[0].at_size,
            probing,
            [choice.layout for choice in ranked if choice.at_size is ranked[0].at_size],
            ranking.fastest.layout if ranking.fastest.at_size is ranked[0].at_size else None,
        )
        if outcome.learnt:
            at_size, known = measured_candidates(ranked[0].at_size, outcome, job.search.top_k)
            rate(job, at_size, several=False)
            ranked = [PlanCandidate(at_size, row) for row in range(len(known))]
            ranking = after_probes(ranked)
    say("explaining the winner")
    plan = _plan(job, plan_id, started, now(), sizes, fits, ranked)
    preference = {
        "fastest_on_paper": fastest_on_paper(job, ranking),
        "rests_on": rests_on_nothing(job, ranking),
        "best_measured": best_measured(ranking),
    }
    plan = plan.model_copy(update=preference)
    return plan if outcome is None else _with_measurements(plan, outcome, known)


def _search_sizes(
    job: Job, clusters: Sequence[ClusterSpec], say: Progress, calibration: Calibration | None
) -> list[OneSize]:
    sizes = []
    for cluster in clusters:
        sizes.append(search_size(job, cluster, say, calibration))
        if len(clusters) > 1:
            sizes[-1].pricer.known.forget()  # too much to keep of every size
    return sizes


def _with_measurements(plan: Plan, outcome: "StudyResult", known: "list[Ranked]") -> Plan:
    """The plan ranked by measurements and model together, each layout with its measurements."""
    from planner.study.measured_search import summary, with_measurement

    if not known:  # nothing was learnt: the plan on paper is unchanged
        return plan.model_copy(update={"probing": summary(outcome)})
    entries = [
        with_measurement(entry, one, known[0])
        for entry, one in zip(plan.ranked, known, strict=True)
    ]
    return plan.model_copy(update={"ranked": entries, "probing": summary(outcome)})


def _exports(job: Job, ranked: list[PlanCandidate]) -> list[Export | None]:
    """The export of each choice.

    Another program's settings for a trainer that has none of its own, only if that can run the
    layout.
    """
    target = TRAINERS[job.training.trainer].export_format
    found = _by_size(
        ranked,
        lambda size, those: exports(those, job.model, size.pricer.cluster, job.training, to=target),
    )
    own = target == job.training.trainer
    return [exported if own or not exported.blockers else None for exported in found]


def _options(sizes: list[OneSize], winner: PlanCandidate) -> list[SizeOption]:
    """The best candidate of every size, number 1 at its own, and the front of time against cost.

    Cost is GPU-hours if the GPUs are free.
    """
    num_gpus = winner.at_size.pricer.cluster.num_gpus
    chosen = [
        winner  # of what was measured, if probes ran, and not of what is first on paper
        if at_size.pricer.cluster.num_gpus == num_gpus
        else PlanCandidate(at_size, at_size.first)
        for at_size in sizes
    ]
    best = [(at_size, at_size.rated.runs, row) for at_size, row in chosen]
    points = np.array(
        [
            (runs.wall_seconds[row], runs.bill.cost[row], runs.bill.gpu_hours[row])
            for _, runs, row in best
        ]
    )
    there, here = points[None], points[:, None]
    beaten = np.all(there <= here, axis=2) & np.any(there < here, axis=2)
    return [
        SizeOption(
            num_gpus=at_size.pricer.cluster.num_gpus,
            layout=PlanCandidate(at_size, row).layout,
            tokens_per_second=float(runs.tokens_per_second[row]),
            step_seconds=float(runs.step_seconds[row]),
            time_to_train_seconds=float(runs.wall_seconds[row]),
            cost=float(runs.bill.cost[row]),
            energy_joules=float(runs.bill.joules[row]),
            co2_grams=float(runs.bill.grams[row]),
            on_front=not dominated,
        )
        for (at_size, runs, row), dominated in zip(best, beaten.any(axis=1), strict=True)
    ]


def _plan(
    job: Job,
    plan_id: str,
    started: datetime,
    ended: datetime,
    sizes: list[OneSize],
    fitting: list[Fitting],
    ranked: list[PlanCandidate],
) -> Plan:
    winner = ranked[0]
    with_candidates = [at_size for at_size in sizes if at_size.candidates]

    entries = _entries(job, ranked)
    others = considered(job, with_candidates, ranked, fitting)
    believed = [one for one in ranked if one.supported] if winner.supported else ranked
    expected = np.array([choice.expected for choice in believed])
    moved = sensitivity(winner.at_size.pricer, winner.layout)
    near = [*_near_batch(job, winner), *overlapped(job, winner.at_size)]
    exported = _exports(job, ranked)
    lost = regret(expected, covariance(job, believed), job.search, of=len(ranked))
    entries = [
        entry.model_copy(update={"export": {one.trainer: one.as_dict()}}) if one else entry
        for entry, one in zip(entries, exported, strict=True)
    ]
    estimate = entries[0].estimate
    num_gpus = winner.at_size.pricer.cluster.num_gpus
    at_winner = next(
        fits
        for at_size, fits in zip(with_candidates, fitting, strict=True)
        if at_size.pricer.cluster.num_gpus == num_gpus
    )
    return Plan(
        id=plan_id,
        job=job.request,
        created_at=ended.isoformat(),
        ranked=entries,
        pareto=_pareto(job, ranked, at_winner),
        rejected=dict(rejected(sizes).most_common()),
        nearest_miss=None,
        searched=_searched(sizes, winner.at_size, (ended - started).total_seconds()),
        versus_current=None if job.layout is None else _versus_current(job, winner, estimate),
        headline=_headline(entries, job.search.objective),
        warnings=[
            *_warnings(job, ranked, entries[0], sizes, [*near, *four_bits(moved, job.search)]),
            *fewer_than_asked(job.search.top_k, len(ranked), sizes),
        ],
        seed=job.search.seed,
        model_version=MODEL_VERSION,
        calibration_id=winner.at_size.pricer.calibration.id,
        considered=others,
        sensitivity=moved,
        sizes=_options(with_candidates, winner),
        regret=lost,
        num_parameters=job.model.total_parameters(),
        num_active_parameters=job.model.active_parameters(),
    )


def _entries(job: Job, ranked: list[PlanCandidate]) -> list[RankedLayout]:
    together = {
        id(one.at_size): Together(
            one.at_size.pricer, [other.layout for other in ranked if other.at_size is one.at_size]
        )
        for one in ranked
    }
    estimates = _by_size(ranked, lambda at_size, those: estimate_layouts(at_size.pricer, those))
    return [
        _entry(job, rank, choice, estimate, together[id(choice.at_size)])
        for rank, (choice, estimate) in enumerate(zip(ranked, estimates, strict=True), start=1)
    ]


def _by_size(
    ranked: list[PlanCandidate], ask: Callable[[OneSize, list[Layout]], Iterable[Answer]]
) -> list[Answer]:
    """The answer for every choice, asked of all layouts of a size together."""
    answers: dict[int, Answer] = {}
    for at_size in {id(choice.at_size): choice.at_size for choice in ranked}.values():
        places = [index for index, choice in enumerate(ranked) if choice.at_size is at_size]
        found = ask(at_size, [ranked[index].layout for index in places])
        answers.update(zip(places, found, strict=True))
    return [answers[index] for index in range(len(ranked))]


def _searched(sizes: list[OneSize], winner: OneSize, seconds: float) -> Searched:
    return Searched(
        layouts=sum(s.num_layouts for s in sizes),
        valid=sum(s.num_layouts for s in sizes),
        fitting=sum(s.screened.num_fitting for s in sizes),
        seconds=seconds,
        simulated=sum(s.num_simulated for s in sizes),
        priced=sum(s.screened.num_priced for s in sizes),
        study=winner.study,
    )


def _warnings(
    job: Job,
    ranked: list[PlanCandidate],
    entry: RankedLayout,
    sizes: list[OneSize],
    near: list[str],
) -> list[str]:
    """Warnings before launching the winner; near: about similar jobs."""
    winner = ranked[0]
    pricer = winner.at_size.pricer
    of_size = {
        rank: one.layout
        for rank, one in enumerate(ranked, start=1)
        if one.at_size is winner.at_size
    }
    context = Context(model=job.model, cluster=pricer.cluster, training=job.training)
    return [
        *_about_trainer(context),
        *warnings_for(pricer, winner.layout, entry.estimate),
        *beyond_balance(pricer, of_size),
        *near,
        *_run_warnings(entry, sizes),
        *refused_choices(context, job.search),
    ]


def _near_batch(job: Job, winner: PlanCandidate) -> list[str]:
    """A nearby batch size that would train much faster, if speed is the objective."""
    if job.search.objective not in BETTER:
        return []
    pricer, batch = winner.at_size.pricer, LayoutBatch.from_layouts([winner.layout])
    predicted = simulated_step_seconds(pricer, batch, pricer.price(batch))
    found = near_batch(pricer, winner.layout, float(predicted[0]), job.search)
    return [] if found is None else [found.sentence(job.training.global_batch_size, winner.layout)]


def _about_trainer(context: Context) -> list[str]:
    """A note on these GPUs' fork of the trainer; the winner's estimate has that on its release."""
    fork, gpu = fork_needed(context), context.cluster.gpu
    return [f"on {gpu.name} {context.trainer.name} runs through the fork {fork}"] if fork else []


def fewer_than_asked(asked: int, found: int, sizes: list[OneSize]) -> list[str]:
    """Why there are fewer layouts than asked for, in one sentence; empty if there are as many."""
    if found >= asked:
        return []
    total = rejected(sizes)
    fitting = sum(at_size.screened.num_fitting for at_size in sizes)
    legal = sum(at_size.num_layouts for at_size in sizes)
    few = f"{found} of the {asked} layouts asked for: {fitting:,} of {legal:,} legal ones fit"
    why = ", ".join(f"{reason} ({count:,})" for reason, count in total.most_common(MOST_REASONS))
    return [f"{few}; rejected: {why}" if why else few]


def _run_warnings(winner: RankedLayout, sizes: list[OneSize]) -> list[str]:
    """Warnings of the winner's whole run, and the sizes at which nothing fits."""
    found = [] if winner.run is None else [*winner.run.warnings]
    unfit = [f"{at_size.pricer.cluster.num_gpus:,}" for at_size in sizes if not at_size.candidates]
    if unfit:
        found.append(f"no layout fits on {', '.join(unfit)} {'GPU' if unfit == ['1'] else 'GPUs'}")
    stuck = sum(at_size.num_stuck for at_size in sizes)
    if stuck:
        found.append(
            f"{counted(stuck, 'pipelined layout')} left out: their ranks would wait for each other "
            "for good under this trainer's sends"
        )
    return found


def _entry(
    job: Job, rank: int, choice: PlanCandidate, estimate: Estimate, together: Together
) -> RankedLayout:
    at_size, layout = choice.at_size, choice.layout
    reasons = _reasons(job, rank, together, layout, estimate)
    return RankedLayout(
        rank=rank,
        layout=layout,
        num_gpus=at_size.pricer.cluster.num_gpus,
        estimate=estimate,
        source="simulated" if layout.pp > 1 else "screened",
        reasons=reasons,
        unmeasured=[one.words for one in rests_on_unmeasured(choice)],
        export={},
        run=run_estimate(at_size.pricer, at_size.rated.runs, choice.row),
    )


def _reasons(
    job: Job, rank: int, together: Together, layout: Layout, estimate: Estimate
) -> list[str]:
    """The winner's reasons in full, with the neighbours that the search allows.

    For the others: what costs them most and what they need.
    """
    found = neighbours(together.pricer, layout) if rank == 1 else []
    allowed = [one for one in found if _allowed(job, one, together.pricer.rules.by_request)]
    lines = winner_reasons(together, layout, estimate, allowed)[:SHOWN_REASONS]
    following = next_bottleneck(estimate) if rank == 1 else ""
    return [lines[0], following, *lines[1:]] if following else lines


def _allowed(job: Job, step: SensitivityStep, by_request: frozenset[str]) -> bool:
    """Whether `search.fix`, `search.allow` and the trainer leave this change open."""
    allowed = job.search.allow.get(step.field)
    if allowed is None:
        return step.field not in {*job.search.fix, *by_request}
    return step.field not in job.search.fix and step.new in allowed


def _headline(entries: list[RankedLayout], objective: str) -> list[str]:
    winner = entries[0]
    if len(entries) == 1:
        return [winner.layout.short()]
    second = entries[1]
    if second.num_gpus != winner.num_gpus and winner.run is not None and second.run is not None:
        ours, theirs = winner.run, second.run
        return [
            winner.layout.short(),
            f"number 2 is {second.layout.short()} on {counted(second.num_gpus, 'GPU')} "
            f"instead of {winner.num_gpus:,}",
            f"trains for {format_seconds(theirs.time_to_train_seconds)} instead of "
            f"{format_seconds(ours.time_to_train_seconds)}, "
            f"for ${theirs.cost:,.0f} instead of ${ours.cost:,.0f}, "
            f"with {theirs.joules_per_token / ours.joules_per_token - 1.0:+.1%} energy",
        ]
    lines = difference(winner.estimate, second.estimate, winner.layout, second.layout)
    cost, other = winner.shown.cost, second.shown.cost
    if objective == "cost" and cost and other:
        dearer = other / cost - 1.0
        lines.insert(
            0,
            f"{abs(dearer):.1%} {'dearer' if dearer >= 0 else 'cheaper'}: ${other:,.0f} against "
            f"${cost:,.0f} for the run",
        )
    return [winner.layout.short(), *lines]


def _pareto(job: Job, ranked: list[PlanCandidate], fitting: Fitting) -> list[ParetoPoint]:
    """Throughput against headroom at the winner's size, over everything priced that fits."""
    cluster = ranked[0].at_size.pricer.cluster
    places = {choice.layout: index for index, choice in enumerate(ranked, start=1)}
    tokens = job.training.global_batch_size * job.training.seq_len / cluster.num_gpus
    return [
        ParetoPoint(
            layout=fitting.layouts[row],
            tokens_per_second_per_gpu=tokens / float(fitting.step_seconds[row]),
            headroom_bytes=cluster.usable_memory_bytes - float(fitting.device_bytes[row]),
            step_seconds=float(fitting.step_seconds[row]),
            rank=places.get(fitting.layouts[row]),
        )
        for row in fitting.front(MOST_ON_FRONT)
    ]


def _versus_current(job: Job, winner: PlanCandidate, estimate: Estimate) -> VersusCurrent | None:
    # only imported with a current layout, because it reads trainers' files
    from planner.plan.versus import versus_current

    return versus_current(job, winner.layout, estimate, winner.at_size.pricer)
