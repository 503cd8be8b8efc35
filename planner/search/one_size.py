"""The search at one cluster size.

It screens everything, simulates the best, looks at what enumeration leaves out, and rates whole
runs.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.price import Pricer
from planner.cost.refine import first_groups
from planner.rules import Context
from planner.rules.sharding import HOST_TOO_SMALL
from planner.search.choice.preference import FAR_BEHIND, Weighed, leaders
from planner.search.fit import OOM_LIMIT
from planner.search.left_out import NEAR, LeftOut
from planner.search.screen import PARETO_SLACK, Goal
from planner.search.size_candidates import OneSize, by_step
from planner.search.space.enumerate import Space, build_space
from planner.search.space.supported import supported_space
from planner.search.space_search import SpaceSearch, searched
from planner.search.variations.budgets import takes_budget
from planner.search.variations.floors import floors_with_room
from planner.search.variations.neighbours import simpler_twins
from planner.search.variations.offload import (
    STEPS,
    activations,
    best_of_both,
    best_offloaded,
    largest_share,
    least_offloaded,
    states,
)
from planner.search.variations.splits import SplitSearch
from planner.specs.cluster import ClusterSpec
from planner.specs.job import Job
from planner.specs.layout import Layout, parse_ac
from planner.units import counted

SIMULATED = 300
# distinct (schedule, pp, stages, microbatches) among them; each is simulated once
SIMULATED_GROUPS = 16
BUDGETS_SIMULATED = SIMULATED_OFFLOADED = 40
MEASURED = 8  # where all that is near the best uses something unmeasured
UNSEEN = 0.999  # a layout that gains less is not looked for
POLISHED = 64  # of the classes whose best splits were found together
# judgement: single moves, each simulated, have gained 9% over a split that closed forms chose
POLISHABLE = 1.1
OFFLOADED_SPLIT = 16
TWINNED = 16  # of the best, those whose simpler twins are looked at
SAMPLED_SEEDS = 4
NOTHING_LEFT_OUT = "no value that enumeration leaves out makes the best layouts faster"
STRUCTURE = (
    "pp", "pp_schedule", "virtual_stages", "tp", "cp", "ep", "micro_batch_size", "precision",
)  # fmt: skip
LEAST_WANTED = 10
DIALS = ("memory-budget",)  # searched by themselves, on top of a layout
SUPPORTED_SHOWN = 3  # different layouts of the second search that must be certain
MOST_OFFLOADED = 2**17  # cells of the largest space whose states may move to the host; judgement

Progress = Callable[[str], None]


def search_size(
    job: Job,
    cluster: ClusterSpec,
    say: Progress,
    calibration: Calibration | None = None,
    *,
    samples: bool = True,
) -> OneSize:
    """Searches at one size: on the device, and with CPU offload what can beat that.

    If nothing fits either way, it lists what came closest.
    samples: also sample the space beyond enumeration.
    """
    pricer = Pricer.build(job.model, cluster, job.training, calibration)
    offloads = "cpu_offload" not in {*job.search.fix, *job.search.allow}
    found = on_device = searched(pricer, _space(job, cluster), _goal(job))
    rejected, num_layouts = Counter(found.space.rejected), found.space.num_layouts
    screened = found.screened
    if not screened.num_fitting:
        ways = [partial(_space, job, cluster, offload=True)] if offloads else []
        most = largest_share(pricer.rules_context)
        if offloads and 0.0 < most < 1.0 and _takes_shares(job, pricer):
            ways.append(partial(_space, job, cluster, offload=True, share=most))
        for space in (*ways, partial(_space, job, cluster, oversized=True)):
            found = searched(pricer, space(), _goal(job))
            num_layouts = max(num_layouts, found.space.num_layouts)
            screened = found.screened if len(found.screened.batch) else screened
            if screened.num_fitting:
                rejected = Counter(found.space.rejected)
                break
        offloads = False
    say(
        f"{counted(num_layouts, 'legal layout')} on {counted(cluster.num_gpus, 'GPU')}, "
        f"{screened.num_priced:,} priced, {screened.num_fitting:,} fit"
    )
    rejected["out of memory"] += screened.out_of_memory
    rejected["slower than the best by a proven bound"] += screened.bounded_out
    at_size = OneSize(
        pricer=pricer,
        screened=screened,
        num_layouts=num_layouts,
        rejected={k: v for k, v in rejected.items() if v},
    )
    if not screened.num_fitting:
        return at_size
    _simulate(job, at_size, found)
    _simulate_supported(job, at_size)
    if job.search.objective != "memory":
        if offloads and "cpu_offload" not in pricer.rules.by_request and _may_offload(found):
            found = _offload(job, at_size)
        if _may_offload(found) and _may_offload(on_device):
            _offload_less(job, at_size, on_device.space, found.space)
    if samples:
        sample(job, at_size)
    return at_size


def _may_offload(search: SpaceSearch) -> bool:
    return len(search.space.cells) <= MOST_OFFLOADED


def _goal(job: Job, limit_seconds: float = np.inf) -> Goal:
    smallest = job.search.objective == "memory"
    return Goal(
        count=_wanted(job),
        smallest=smallest,
        limit_seconds=limit_seconds,
        budgets=0 if smallest or not _free_recomputation(job) else BUDGETS_SIMULATED,
    )


def _space(
    job: Job,
    cluster: ClusterSpec,
    *,
    offload: bool = False,
    oversized: bool = False,
    share: float = 1.0,
) -> Space:
    """share: of the states on the host, where the user leaves it open."""
    context = Context(model=job.model, cluster=cluster, training=job.training)
    search = job.search
    if share < 1.0:
        fix = {**search.fix, "optimizer_offload_fraction": share}
        search = search.model_copy(update={"fix": fix})
    return build_space(context, search, offload=offload, oversized=oversized)


def _offload(job: Job, at_size: OneSize) -> SpaceSearch:
    """Adds what is faster with states on the host than anything without.

    States that leave the device make room for less recomputation, or for a simpler layout. Returns
    the search of their space.
    """
    pricer, limit = at_size.pricer, UNSEEN * at_size.best_seconds
    found = searched(pricer, _space(job, pricer.cluster, offload=True), _goal(job, limit))
    _simulate(job, at_size, found, limit)
    return found


def _takes_shares(job: Job, pricer: Pricer) -> bool:
    """Whether a share of the optimizer's states may lie on the host."""
    search = job.search
    return (
        pricer.rules_context.released.offloads_partly
        and "optimizer_offload_fraction" not in {*search.fix, *search.allow}
        and search.fix.get("cpu_offload", True) is True
        and True in search.allow.get("cpu_offload", [True])
    )


def _offload_less(job: Job, at_size: OneSize, on_device: Space, on_host: Space) -> None:
    """Adds what is faster with the least on the host that makes it fit.

    That is a share of the optimizer's states, activations of some layers, or both. Splits of layers
    are climbed for the best of them.
    on_host: the space of layouts with CPU offload.
    """
    pricer, fixed = at_size.pricer, {*job.search.fix, *job.search.allow}
    limit, shares = NEAR * at_size.best_seconds, _takes_shares(job, pricer)
    found, share = on_host.cells.take(np.arange(0)), states(pricer)
    if shares:
        hosted = on_host
        if on_host.rejected.get(HOST_TOO_SMALL):  # a share may leave room
            hosted = _space(job, pricer.cluster, offload=True, share=1.0 / STEPS)
        whole = [layout for _, _, layout in at_size.candidates if layout.cpu_offload]
        found = best_offloaded(pricer, hosted, share, limit, SIMULATED_OFFLOADED)
        if whole:
            less, _ = least_offloaded(pricer, LayoutBatch.from_layouts(whole), share, limit)
            found = LayoutBatch.concatenate([found, less])
    layers = pricer.rules_context.released.offloads_activations
    if layers and "activation_offload_layers" not in fixed:
        dial = activations(pricer)
        found = LayoutBatch.concatenate(
            [found, best_offloaded(pricer, on_device, dial, limit, SIMULATED_OFFLOADED)]
        )
        if shares:
            both = best_of_both(pricer, hosted, dial, limit, SIMULATED_OFFLOADED)
            found = LayoutBatch.concatenate([found, both])
    step = at_size.consider(found)
    if not shares or "layers_per_stage" in fixed:
        return
    near = np.argsort(step, kind="stable")
    near = near[(step[near] < NEAR * at_size.best_seconds) & (found.pp[near] > 1)][:OFFLOADED_SPLIT]
    if len(near):
        classes = found.take(near)
        closed = np.zeros(len(near), dtype=np.bool_)
        search = SplitSearch(pricer, classes, closed, np.zeros(len(near)))
        less, _ = least_offloaded(pricer, search.next(limit), share, limit)
        step = at_size.consider(less)
        first = np.argsort(step, kind="stable")[:POLISHED]
        if len(first):
            polished = search.polished(less.take(first))
            less, _ = least_offloaded(pricer, polished, share, limit)
            at_size.consider(LayoutBatch.concatenate([polished, less]))


def _wanted(job: Job) -> int:
    """How many different layouts must be certain.

    At least LEAST_WANTED, so that asking for fewer never changes the answer.
    """
    return max(job.search.top_k, LEAST_WANTED)


def _simulate(
    job: Job, at_size: OneSize, search: SpaceSearch, limit_seconds: float = np.inf
) -> None:
    """Simulates the best screened layouts of a space, with and without memory budgets.

    limit_seconds: slower layouts are not wanted.
    """
    pricer, screened = at_size.pricer, search.screened
    best = screened.batch.take(slice(0, 0))
    if screened.num_fitting or np.isinf(limit_seconds):
        chosen = first_groups(pricer, screened.batch, SIMULATED, SIMULATED_GROUPS)
        weighed = Weighed.of(screened.batch, pricer)
        expected = weighed.expected(screened.step_seconds, screened.oom)
        simplest = leaders(expected, weighed.points)
        best = screened.batch.take(np.union1d(chosen, simplest))
        measured = ~weighed.unmeasured.any(axis=0) & (screened.oom <= OOM_LIMIT)
        nearest = screened.step_seconds[measured].min(initial=np.inf)
        near = screened.num_fitting and nearest <= PARETO_SLACK * screened.step_seconds[0]
        if screened.num_fitting and not near and np.isinf(limit_seconds):
            best = LayoutBatch.concatenate([best, search.measured(MEASURED)])
    if search.goal.budgets:
        shown = screened.step_seconds[: min(_wanted(job), screened.num_fitting)]
        worth = float(min(limit_seconds, shown.max(initial=0.0) if len(shown) else np.inf))
        best = LayoutBatch.concatenate([best, search.best_budgets(worth)])
    at_size.consider(best)
    if "layers_per_stage" not in {*job.search.fix, *job.search.allow}:
        _split(job, at_size, search)
    if job.search.simplest_first and at_size.candidates:
        ahead = list(dict.fromkeys(layout for *_, layout in at_size.candidates))[:TWINNED]
        at_size.consider(simpler_twins(pricer.rules_context, job.search, ahead))


def _simulate_supported(job: Job, at_size: OneSize) -> None:
    """Adds the best layouts whose speed runs support, where the fastest is none of them.

    They may come first in its place (`preference.eligible`), so they are searched as thoroughly.
    Memory budgets, which do not lead either, are a dial of layouts that are here without them.
    """
    if not job.search.simplest_first or not at_size.candidates:
        return
    pricer = at_size.pricer
    plain = (layout for *_, layout in at_size.candidates if parse_ac(layout.ac)[0] not in DIALS)
    fastest = LayoutBatch.from_layouts([next(plain, at_size.candidates[0][2])])
    if Weighed.of(fastest, pricer).supported[0]:
        return
    limit = FAR_BEHIND * at_size.best_seconds
    goal = replace(_goal(job, limit), count=SUPPORTED_SHOWN, budgets=0)
    found = searched(pricer, supported_space(pricer, job.search), goal)
    if not found.screened.num_fitting:
        return
    others = replace(at_size, screened=found.screened, candidates=[])
    _simulate(job, others, found)
    at_size.candidates = sorted([*at_size.candidates, *others.candidates], key=by_step)
    at_size.num_simulated, at_size.num_stuck = others.num_simulated, others.num_stuck


def _split(job: Job, at_size: OneSize, search: SpaceSearch) -> None:
    """Looks for better splits, and budgets with them, in every class that a bound leaves open."""
    pricer, screened = at_size.pricer, search.screened
    budgets = "memory-budget" in pricer.rules.dials and _free_recomputation(job)
    if not at_size.candidates:
        return
    limit = UNSEEN * at_size.best_seconds
    classes = screened.pipelined.take(screened.floor_seconds < limit)
    if budgets:
        classes = classes.take(~takes_budget(pricer, classes))
    floor = floors_with_room(pricer, classes, limit)
    classes, floor = classes.take(floor < limit), floor[floor < limit]
    open_budget = np.zeros(len(classes), dtype=np.bool_)
    if budgets:
        more, their_floor = search.split_classes(limit)
        classes = LayoutBatch.concatenate([classes, more])
        floor = np.concatenate([floor, their_floor])
        open_budget = np.arange(len(classes)) >= len(open_budget)
    splits = SplitSearch(pricer, classes, open_budget, floor)
    while len(found := splits.next(UNSEEN * at_size.best_seconds)):
        step = at_size.consider(found)
        # closed forms do not tell how a rank's layers lie in its stages: by chance it is played out
        # 20% slower than after a few moves
        least = np.where(np.isfinite(step), np.minimum(step, pricer.step_seconds(found)), np.inf)
        near = np.argsort(least, kind="stable")[:POLISHED]
        near = near[least[near] < POLISHABLE * at_size.best_seconds]
        if len(near):
            at_size.consider(splits.polished(found.take(near)))


def _free_recomputation(job: Job) -> bool:
    return "ac" not in job.search.fix and "ac" not in job.search.allow


def sample(job: Job, at_size: OneSize) -> None:
    """Tries values that enumeration leaves out; Optuna samples where one of them gains."""
    if not at_size.candidates:
        return
    first: dict[tuple[object, ...], Layout] = {}
    for _, _, layout in at_size.candidates:
        first.setdefault(tuple(getattr(layout, name) for name in STRUCTURE), layout)
    best, seeds = at_size.best_seconds, tuple(first.values())[:SAMPLED_SEEDS]
    search = LeftOut(pricer=at_size.pricer, search=job.search, seeds=seeds, best_seconds=best)
    gains = search.gains()
    at_size.study = {"sampler": job.search.sampler, "seed": job.search.seed, "trials": 0}
    if not gains:
        at_size.study["reason"] = NOTHING_LEFT_OUT
        return
    trials = search.propose(gains, name=job.search.sampler, seed=job.search.seed)
    found = [
        (trial.step_seconds, trial.device_bytes, trial.layout)
        for trial in dict.fromkeys(trials)
        if trial.fits and trial.step_seconds is not None and trial.device_bytes is not None
    ]
    at_size.candidates = sorted(
        [*at_size.candidates, *sorted(found, key=by_step)[:SAMPLED_SEEDS]], key=by_step
    )
    refused = sum(trial.refused is not None for trial in trials)
    gain = best / at_size.best_seconds - 1.0
    at_size.study |= {"trials": len(trials), "pruned": refused, "gain": gain}
    at_size.sampled = tuple(trials)
    at_size.num_simulated += len(trials) - refused
