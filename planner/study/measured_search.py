"""The measured search at one size: candidates, the closed loop, and its outcome as candidates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner.calibration.basis import rests_on, used_in
from planner.calibration.kernels import KernelTiming
from planner.columns import BoolColumn, LayoutBatch
from planner.search.size_candidates import OneSize
from planner.search.space.enumerate import build_space
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.measurement import Measurement
from planner.specs.plan import LEAST_MOVED, RankedLayout
from planner.study.ask_tell import Event, Measure, Ranked, StudyResult, run
from planner.study.candidates import Candidates, enumerate_candidates
from planner.study.evaluations import ProbeCost
from planner.study.isolating import isolating, measures
from planner.study.kernel_timings import StudyKernels
from planner.study.ledger import Budget, StudySettings
from planner.study.micro_probes import MicroProbe, ObservedEffect
from planner.study.samplers import Pick, layout_of
from planner.study.study import AskedBefore

MICRO_START_SECONDS = 10.0  # launch of a program that builds no model; judgement
# launch, build and first step of a probe; 60 on a GPU with compilation; judgement until
# the first results
START_SECONDS = {"cpu": 15.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """How to spend probes.

    measure: runs and stores them.
    known, resumed, asked_before: see `planner.study.ask_tell.run`.
    num_devices: of the pool; larger layouts are only emulated.
    emulates: whether the pool can run one rank of a layout by itself on a GPU.
    timed: kernel timings that exist already, which are another fidelity; None: none are made.
    kernel_seconds_before: GPU-seconds that this study spent on them before it was resumed.
    refuses: why the program that runs probes cannot run a layout; None if it can.
    """

    measure: Measure
    num_devices: int
    known: Sequence[Measurement] = ()
    resumed: Sequence[Measurement] = ()
    asked_before: AskedBefore = field(default_factory=dict)
    on_event: Callable[[Event], None] | None = None
    should_stop: Callable[[], bool] | None = None
    emulates: bool = False
    refuses: Callable[[Layout], str | None] | None = None
    timed: Sequence[KernelTiming] | None = None
    kernel_seconds_before: float = 0.0
    steps: int = 13


def probe_size(
    job: Job,
    at_size: OneSize,
    probing: Probing,
    include: Sequence[Layout],
    paper: Layout | None = None,
) -> StudyResult:
    """Spends the job's probes at this size.

    include: layouts that must be candidates (those of the plan on paper, measured ones).
    paper: the fastest on paper; what it rests on that nobody measured is measured first.
    """
    assert job.probe is not None, "the job has probes to spend"
    pricer = at_size.pricer
    measured = [
        m.job.layout for m in (*probing.known, *probing.resumed) if m.job.layout is not None
    ]
    isolated = isolating(pricer, include[0], paper) if include and paper is not None else None
    beside = [isolated.layout] if isolated is not None else []
    wanted = list(dict.fromkeys((*include, *beside, *measured)))
    candidates = enumerate_candidates(
        pricer, build_space(pricer.rules_context, job.search), include=wanted
    )
    row = None if isolated is None else candidates.find(isolated.layout)
    pair = Pick(row=row, reason=isolated.reason) if isolated and row is not None else None
    micro_probes: tuple[MicroProbe, ...] = ()
    observed: tuple[ObservedEffect, ...] = ()
    if probing.timed is not None:  # what no timing covers, and effects of the earlier ones
        kernels = StudyKernels.of(pricer, candidates)
        micro_probes = kernels.probes(
            [timing.shape for timing in probing.timed],
            num_gpus=min(probing.num_devices, pricer.cluster.gpus_per_node),
            start_seconds=MICRO_START_SECONDS,
        )
        observed = kernels.observed(probing.timed)
    refused, reasons = None, dict[str, int]()
    if probing.refuses is not None:
        refused, reasons = unsupported_candidates(candidates, probing.refuses)
    settings = StudySettings(
        sampler=job.search.sampler,
        seed=job.search.seed,
        budget=Budget(
            probes=job.probe.max_probes, gpu_seconds=job.probe.gpu_seconds(pricer.cluster.num_gpus)
        ),
        cost=ProbeCost(
            start_seconds=START_SECONDS.get(pricer.cluster.gpu.name, 60.0), steps=probing.steps
        ),
        whole=probing.num_devices >= pricer.cluster.num_gpus,
        emulates=probing.emulates and pricer.cluster.num_gpus > 1,
        refused=refused,
        micro_probes=micro_probes,
        observed=observed,
        gpu_seconds_before=probing.kernel_seconds_before,
        first=candidates.find(include[0]) if include else None,
        first_measures=measures(
            [one for first in include[:1] for one in rests_on(first, pricer, pricer.calibration)]
        ),
        isolating=pair,
    )
    found = run(
        candidates,
        settings,
        probing.measure,
        known=probing.known,
        resumed=probing.resumed,
        asked_before=probing.asked_before,
        on_event=probing.on_event,
        should_stop=probing.should_stop,
    )
    return replace(found, refused=reasons)


def unsupported_candidates(
    candidates: Candidates, refuses: Callable[[Layout], str | None]
) -> tuple[BoolColumn, dict[str, int]]:
    """Candidates that the probes' program cannot run: (mask (N,), candidates by reason).

    `refuses` is asked once for all candidates that differ only in their sizes.
    """
    batch = candidates.batch
    asked = [
        column > 1 if name in WIDTHS else column
        for name, column in batch.columns()
        if name not in SIZES
    ]
    kinds, first, which = np.unique(
        np.stack(asked, axis=1), axis=0, return_index=True, return_inverse=True
    )
    reasons = [refuses(batch.row(int(row))) for row in first]
    rows = np.array([reason is not None for reason in reasons])[which.ravel()]
    sizes = np.bincount(which.ravel(), minlength=len(kinds))
    counts: dict[str, int] = {}
    for reason, size in zip(reasons, sizes, strict=True):
        if reason is not None:
            counts[reason] = counts.get(reason, 0) + int(size)
    return rows, counts


WIDTHS = ("tp", "pp", "cp", "ep", "etp")  # a program's rules check whether there is such an axis
# and do not check these
SIZES = ("dp_replicate", "dp_shard", "micro_batch_size", "split", "ac_value", "virtual_stages")


def listed(outcome: StudyResult, top_k: int) -> list[Ranked]:
    """Candidates that a plan shows: the first top_k, and every other layout that itself ran.

    They are in the order of the outcome.
    """
    ran = [one for one in outcome.ranked[top_k:] if one.record is not None and one.record.measured]
    return [*outcome.ranked[:top_k], *ran]


def measured_candidates(
    at_size: OneSize, outcome: StudyResult, top_k: int
) -> tuple[OneSize, list[Ranked]]:
    """The size with the study's best as its candidates, winner first, and the record of each.

    What the layouts that ran used is measured from now on.
    """
    ranked = listed(outcome, top_k)
    ran = [one.layout for one in ranked if one.record is not None and one.record.measured]
    calibration = at_size.pricer.calibration
    taught = replace(calibration, seen=calibration.seen | used_in(at_size.pricer, ran))
    batch = LayoutBatch.from_layouts([one.layout for one in ranked])
    device = at_size.pricer.price(batch).device_bytes
    found = [
        (one.expected_seconds, float(device[row]), one.layout) for row, one in enumerate(ranked)
    ]
    pricer = replace(at_size.pricer, calibration=taught)
    return replace(at_size, candidates=found, pricer=pricer), ranked


def with_measurement(entry: RankedLayout, one: Ranked, best: Ranked) -> RankedLayout:
    """A layout of the plan with its measurements and its expected time relative to number one.

    One that measurements of others moved says so, and one whose own run is not believed alone.
    """
    record = one.record
    update: dict[str, Any] = {"expected_step_seconds": one.expected_seconds}
    faster = best.expected_seconds / one.expected_seconds
    moved = entry.model_copy(update=update).moved
    said = []
    if record is None or record.log_seconds is None:
        if best.record is not None and best.record.measured and faster > 1.0 + LEAST_MOVED:
            said.append(
                f"expected {faster:.2f} times as fast as number 1, and not measured: probe it next"
            )
        if moved is not None:
            said.append(f"ranked by {moved:.2f} times its prediction, as others measured")
        return entry.model_copy(update={**update, "reasons": [*said, *entry.reasons]})
    if one.odd is not None:
        said = [
            f"one run took {one.odd:.2f} times its prediction and is not believed alone: ranked by "
            f"{moved or 1.0:.2f} times its prediction; run it again"
        ]
        update["reasons"] = [*said, *entry.reasons]
    else:
        update["source"] = "probed" if record.measured else "emulated"
    update["measurement"] = {
        "status": record.status,
        "step_seconds": record.step_seconds,
        "runs": record.runs,
        "mean_step_seconds": record.mean_step_seconds,
        "memory_margin": record.margin,
        "rung": record.fidelity,
        "relative_error": math.sqrt(record.variance or 0.0),
        "believed": one.odd is None,
    }
    return entry.model_copy(update=update)


def summary(outcome: StudyResult) -> dict[str, Any]:
    """Summary of the study, JSON-safe.

    Trials with their reasons and results, spending, regret, and why it stopped.
    """
    trials = [
        {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "layout": layout_of(trial.params).model_dump(mode="json"),
            "value": float(trial.values[0]) if trial.values else None,
            **{
                key: value
                for key, value in trial.user_attrs.items()
                if isinstance(value, str | int | float) or key in PAIRS
            },
        }
        for trial in outcome.study.get_trials(deepcopy=False)
    ]
    return {
        "probes": outcome.spent.probes,
        "looks": outcome.spent.low_fidelity,
        "gpu_seconds": outcome.spent.gpu_seconds,
        "stopped": outcome.stopped,
        "broken": outcome.broken,
        "expected_regret": outcome.regret.expected_share,
        "trials": trials,
        "ruled_out": [
            {"layout": layout.short(), "reason": reason}
            for layout, reason in outcome.pruned[:MOST_RULED_OUT]
        ],
        "num_ruled_out": len(outcome.pruned),
        "refused": [
            {"reason": reason, "layouts": count} for reason, count in outcome.refused.items()
        ],
    }


MOST_RULED_OUT = 20
PAIRS = ("interval_seconds",)  # the attributes of a trial that are lists
