"""The Optuna study of a plan, for Optuna's own tools.

Its trials have the layout's fields as parameters, in the contract's names, and what differs between
no two of them stands in the study's attribute `fixed`. States of a trial:
- complete: priced, or measured where the plan spent probes. Its constraint is positive where the
    plan holds that it does not fit;
- pruned: refused by a rule, cut by a bound, or out of memory in a probe; `reason` says which. A
    trial without parameters stands for as many layouts as its attribute `layouts` says;
- failed: its probe gave no numbers.

The same plan gives the same study.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from planner.errors import fault
from planner.search.fit import OOM_LIMIT
from planner.specs.layout import INTEGERS, SHARES, Layout, changed_fields
from planner.specs.plan import ConsideredLayout, Plan, RankedLayout
from planner.study.samplers import fields_of
from planner.study.trials import LEAST_MARGIN, quiet, without_none

Study = optuna.Study

# The form of constraints that every release of Optuna and its dashboard reads.
CONSTRAINTS = "constraints"
OBJECTIVES: Mapping[str, str] = {
    "throughput": "step_seconds",
    "memory": "device_bytes",
    "time": "time_to_train_seconds",
    "cost": "cost",
    "energy": "joules_per_token",
}
# of a layout that the plan considered, what its trial shows as it is
ATTRIBUTES = {
    *("rank", "source", "num_gpus", "interval_seconds", "device_bytes", "oom_probability"),
    *("time_to_train_seconds", "cost", "gpu_hours", "sampled_by"),
}
SHOWN_OTHERWISE = {"number", "state", "layout", "value"}  # of a probe's trial
MEASURED, PREDICTED, TIME_MEMORY, TIME_COST = "measured", "predicted", "time-memory", "time-cost"
VALUES: Mapping[str, str] = {
    MEASURED: "step seconds of the probes; of plans that spent some, which have them by default",
    PREDICTED: "what the plan minimises, on paper",
    TIME_MEMORY: "step seconds and device bytes, at the winner's number of GPUs",
    TIME_COST: "time to train and its cost (GPU-hours where the GPUs are free)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A trial to be: values None where it is pruned or failed; layout None for a count.

    over: constraint, positive where it does not fit; None where that is not known.
    """

    state: TrialState
    layout: Layout | None = None
    values: tuple[float, ...] | None = None
    over: float | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


def study_of(plan: Plan, values: str | None = None) -> Study:
    """The study of a plan, in memory.

    values: one of VALUES; unless given, what was measured where the plan spent probes, else what
    was predicted. The study is called after the plan, with `-VALUES` behind it where that is given
    and is not the default.

    Raises SpecError for other values, and for measured ones of a plan without probes.
    """
    default = MEASURED if _trials_of_probes(plan) else PREDICTED
    chosen = default if values is None else values
    if chosen not in VALUES:
        remedy = f"use one of {', '.join(VALUES)}"
        raise fault("values", values, "is no choice of values", remedy)
    if chosen == MEASURED != default:
        remedy = "leave it out, or probe: `planner-cli recommend --probe N`"
        raise fault("values", values, "is of a plan that spent probes", remedy)
    entries = [*_probed(plan)] if chosen == MEASURED else [*_on_paper(plan, chosen)]
    names = [*_measures(plan, chosen)]
    with quiet():
        study = optuna.create_study(
            study_name=plan.id if chosen == default else f"{plan.id}-{chosen}",
            directions=["minimize"] * len(names),
        )
        study.set_metric_names(names)
    shown = [entry for entry in entries if entry.layout is not None]
    distributions, fixed = _distributions([fields_of(one.layout) for one in shown if one.layout])
    made = datetime.fromisoformat(plan.created_at).replace(tzinfo=None)
    study.add_trials([_frozen(entry, distributions, made, len(names)) for entry in entries])
    for name, value in {**_about(plan, chosen), "fixed": fixed}.items():
        study.set_user_attr(name, value)
    return study


# ---- what becomes a trial --------------------------------------------------------------------


def _on_paper(plan: Plan, chosen: str) -> Iterator[Entry]:
    base, ranked = plan.ranked[0].layout, {one.rank: one for one in plan.ranked}
    size, fields = plan.ranked[0].num_gpus, _measures(plan, chosen).values()
    seen: set[tuple[int, Layout]] = set()
    for one in plan.considered or _of_older_plan(plan):
        layout = Layout(**{**base.model_dump(), **one.changed})
        seen.add((one.num_gpus, layout))
        if chosen == TIME_MEMORY and one.num_gpus != size:
            continue
        if one.refused is not None:
            yield _refused(layout, one.refused, {"sampled_by": one.sampled_by})
            continue
        values = tuple(getattr(one, field) for field in fields)
        if None in values:
            continue
        over = None if one.oom_probability is None else one.oom_probability - OOM_LIMIT
        shown = ranked.get(one.rank) if one.rank is not None else None
        measured = shown.measurement if shown else None
        attributes = {
            **one.model_dump(include=ATTRIBUTES, mode="json"),
            "layout": layout.short(),
            "predicted_step_seconds": one.step_seconds,
            "gpu_seconds": 0.0,
            "reasons": shown.reasons if shown else None,
            "measured_step_seconds": measured and measured.get("step_seconds"),
            "expected_step_seconds": shown.expected_step_seconds if shown and measured else None,
        }
        yield Entry(
            state=TrialState.COMPLETE,
            layout=layout,
            values=values,
            over=over,
            attributes=without_none(attributes),
        )
    for step in plan.sensitivity:
        if step.refused is not None and (size, step.layout) not in seen:
            yield _refused(step.layout, step.refused, {"source": f"number 1 with {step.field}"})
    yield from _counts(plan.rejected)


def _of_older_plan(plan: Plan) -> Iterator[ConsideredLayout]:
    """The ranked layouts and the front, of a plan that was stored without what was considered."""
    base, size = plan.ranked[0].layout, plan.ranked[0].num_gpus
    for one in plan.ranked:
        estimate, run = one.estimate, one.run
        yield ConsideredLayout(
            changed=changed_fields(base, one.layout),
            num_gpus=one.num_gpus,
            rank=one.rank,
            source=one.source,
            step_seconds=estimate.step_seconds,
            interval_seconds=estimate.interval.step_seconds if estimate.interval else None,
            device_bytes=estimate.device_bytes,
            oom_probability=estimate.oom_probability,
            objective=_objective(plan, one),
            time_to_train_seconds=run.time_to_train_seconds if run else None,
            cost=run.cost if run else None,
        )
    usable = plan.ranked[0].estimate.usable_bytes
    by_step = _asked_for(plan) == "throughput" and len(plan.sizes) < 2
    for point in plan.pareto:
        if point.rank is None and usable is not None:
            yield ConsideredLayout(
                changed=changed_fields(base, point.layout),
                num_gpus=size,
                step_seconds=point.step_seconds,
                device_bytes=usable - point.headroom_bytes,
                oom_probability=0.0,  # the front is of what fits
                objective=point.step_seconds if by_step else None,
            )


def _objective(plan: Plan, one: RankedLayout) -> float | None:
    """Value that a plan stored without it minimises, of a ranked layout."""
    asked, run = _asked_for(plan), one.run
    if asked == "memory":
        return one.estimate.device_bytes
    if run is None:
        return one.estimate.step_seconds if asked == "throughput" else None
    return {
        "throughput": 1.0 / run.tokens_per_second
        if len(plan.sizes) > 1
        else one.estimate.step_seconds,
        "time": run.time_to_train_seconds,
        "cost": run.cost,
        "energy": run.joules_per_token,
    }[asked]


def _probed(plan: Plan) -> Iterator[Entry]:
    """The trials of a plan that spent probes."""
    for trial in _trials_of_probes(plan):
        layout, step = Layout(**trial["layout"]), trial.get("value")
        state = TrialState[trial["state"].upper()]
        over = trial.get("memory_over_usable")
        if over is None and trial.get("status") == "oom":
            over = LEAST_MARGIN  # of plans stored before the margin was
        ranked = next((one for one in plan.ranked if one.layout == layout), None)
        reason = trial.get("message") if state is not TrialState.COMPLETE else None
        yield Entry(
            state=state if state.is_finished() else TrialState.FAIL,
            layout=layout,
            values=(float(step),) if state is TrialState.COMPLETE and step is not None else None,
            over=over,
            attributes=without_none(
                {name: value for name, value in trial.items() if name not in SHOWN_OTHERWISE}
                | {
                    "asked_because": trial.get("reason"),
                    "reason": reason or ("out of memory" if trial.get("status") == "oom" else None),
                    "rank": ranked.rank if ranked else None,
                    "layout": layout.short(),
                    "num_gpus": layout.num_gpus,
                }
            ),
        )
    probing = plan.probing or {}
    ruled_out = probing.get("ruled_out") or []
    for one in ruled_out:
        yield Entry(state=TrialState.PRUNED, attributes={**one, "layouts": 1})
    rest = int(probing.get("num_ruled_out") or 0) - len(ruled_out)
    refused = {one["reason"]: int(one["layouts"]) for one in probing.get("refused") or ()}
    yield from _counts({"ruled out by what was measured": rest, **refused})


def _trials_of_probes(plan: Plan) -> Sequence[Mapping[str, Any]]:
    return (plan.probing or {}).get("trials") or ()


def _refused(layout: Layout, rule: str, attributes: Mapping[str, Any]) -> Entry:
    shown = {"reason": rule, "layouts": 1, "layout": layout.short(), **attributes}
    return Entry(state=TrialState.PRUNED, layout=layout, attributes=without_none(shown))


def _counts(rejected: Mapping[str, int]) -> Iterator[Entry]:
    """One trial without parameters for all layouts that were left out for one reason."""
    for reason, count in rejected.items():
        if count > 0:
            attributes = {"reason": reason, "layouts": count}
            yield Entry(state=TrialState.PRUNED, attributes=attributes)


def _measures(plan: Plan, chosen: str) -> dict[str, str]:
    """Names of the values, with their unit, and the field of a considered layout with each."""
    cost = {"gpu_hours": "gpu_hours"} if _free(plan) else {"cost_usd": "cost"}
    if chosen == MEASURED:
        return {"step_seconds": "step_seconds"}
    if chosen == TIME_MEMORY:
        return {"step_seconds": "step_seconds", "device_bytes": "device_bytes"}
    if chosen == TIME_COST:
        return {"time_to_train_seconds": "time_to_train_seconds", **cost}
    asked = _asked_for(plan)
    if asked == "throughput" and len(plan.sizes) > 1:
        return {"seconds_per_token": "objective"}
    return dict.fromkeys(cost if asked == "cost" else [OBJECTIVES[asked]], "objective")


def _asked_for(plan: Plan) -> str:
    return str((plan.job.get("search") or {}).get("objective") or "throughput")


def _free(plan: Plan) -> bool:
    """Whether its GPUs cost nothing."""
    return any(not one.cost for one in plan.considered if one.cost is not None)


# ---- what an Optuna study is made of ---------------------------------------------------------


def _distributions(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, BaseDistribution], dict[str, Any]]:
    """(The distribution of every field in which trials differ, the value of every other)."""
    distributions: dict[str, BaseDistribution] = {}
    fixed: dict[str, Any] = {}
    for name in Layout.model_fields if rows else ():
        found = dict.fromkeys(row[name] for row in rows)
        if len(found) == 1:
            fixed[name] = rows[0][name]
        elif name in INTEGERS:
            low, high = min(found), max(found)
            distributions[name] = IntDistribution(low, high, log=low > 0)
        elif name in SHARES:
            distributions[name] = FloatDistribution(min(found), max(found))
        else:
            distributions[name] = CategoricalDistribution(sorted(found, key=str))
    return distributions, fixed


def _frozen(
    entry: Entry, distributions: Mapping[str, BaseDistribution], made: datetime, num_values: int
) -> FrozenTrial:
    fields = {} if entry.layout is None else fields_of(entry.layout)
    used = {name: one for name, one in distributions.items() if name in fields}
    values = entry.values or ()
    system = {} if entry.over is None else {CONSTRAINTS: [entry.over]}
    trial = optuna.create_trial(
        state=entry.state,
        values=values if len(values) == num_values else None,
        params={name: fields[name] for name in used},
        distributions=used,
        user_attrs=dict(entry.attributes),
        system_attrs=system,
    )
    trial.datetime_start = trial.datetime_complete = made
    return trial


def _about(plan: Plan, chosen: str) -> dict[str, Any]:
    """The study's attributes: what was asked, how it was searched, and what the constraint is."""
    constraint = (
        "device bytes over usable bytes - 1"
        if chosen == MEASURED
        else f"P(out of memory) - {OOM_LIMIT:g}"
    )
    about = {
        "plan": plan.id,
        "job": plan.job,
        "objective": _asked_for(plan),
        "constraint": constraint,
        "usable_bytes": plan.ranked[0].estimate.usable_bytes,
        "searched": plan.searched.model_dump(mode="json", exclude={"seconds"}),
        "seed": plan.seed,
        "model_version": plan.model_version,
        "calibration_id": plan.calibration_id,
    }
    if chosen == MEASURED and plan.probing is not None:
        spent = ("probes", "looks", "gpu_seconds", "stopped", "expected_regret")
        about |= {name: plan.probing.get(name) for name in spent}
    return about
