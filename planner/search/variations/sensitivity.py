"""One step up and one step down in every field of a layout.

Each step shows what it does to time and memory, or the rule that forbids it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from planner.columns import LayoutBatch
from planner.cost.pipeline.stages import layers_of_stages
from planner.cost.price import Pricer
from planner.precision import PRECISIONS
from planner.rules import violations, violations_of
from planner.rules.base import divisors
from planner.rules.cuda_graphs import captured
from planner.rules.experts import overlaps_exchange
from planner.schedules import SCHEDULES
from planner.search.fit import fitting
from planner.search.space.domains import virtual_stages
from planner.search.variations.split_moves import moved
from planner.specs.layout import (
    COUNTED_AC,
    CP_METHODS,
    DTYPES,
    MOE_DISPATCHERS,
    FieldValue,
    Layout,
    format_ac,
    parse_ac,
)
from planner.specs.plan_comparisons import SensitivityStep
from planner.specs.training import CUDA_GRAPHS, TrainingSpec
from planner.trainers.registry import training_release
from planner.work.axes import busiest_load

# from saving all to saving least
AC_BY_STRENGTH = ("none", "selective-layer-2", "selective-op", "selective-attention", "full")
BUDGET_STEP = SHARE_STEP = 0.1
LOADS = (1.0, 2.0)  # of the busiest expert rank over the mean
FLAGS = (
    "sequence_parallel", "async_tp", "float8_all_gather", "compile", "optimizer_in_backward",
    "cpu_offload",
)  # fmt: skip
DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "master_dtype")
Change = tuple[object, Layout]  # the new value, and the layout with it


def sensitivity(pricer: Pricer, layout: Layout) -> list[SensitivityStep]:
    """Every single step, by field in the layout's order, then those of training settings."""
    changes = [
        (name, new, variant)
        for name in Layout.model_fields
        for new, variant in steps_in(pricer, layout, name)
    ]
    return [*priced_steps(pricer, layout, changes), *_of_training(pricer, layout)]


def priced_steps(
    pricer: Pricer, layout: Layout, changes: Sequence[tuple[str, object, Layout]]
) -> list[SensitivityStep]:
    """Each (field, new value, layout with it), priced, or with the rule that refuses it.

    Priced steps have their step time relative to the layout's own.
    """
    variants = [variant for *_, variant in changes]
    broken = violations_of(variants, LayoutBatch.from_layouts(variants), pricer.rules_context)
    legal = [variant for variant, faults in zip(variants, broken, strict=True) if not faults]
    prices = pricer.price(LayoutBatch.from_layouts([layout, *legal]))
    fits, rows, steps = fitting(pricer, prices.least_device_bytes), count(1), []
    for (name, new, variant), faults in zip(changes, broken, strict=True):
        step = {"field": name, "old": getattr(layout, name), "new": new, "layout": variant}
        if faults:
            step["refused"] = f"{faults[0].rule}; {faults[0].remedy}"
        else:
            row = next(rows)
            seconds = float(prices.step_seconds[row])
            step |= {
                "step_seconds": seconds,
                "step_ratio": seconds / float(prices.step_seconds[0]),
                "device_bytes": float(prices.device_bytes[row]),
                "fits": bool(fits[row]),
            }
        steps.append(SensitivityStep.model_validate(step))
    return steps


def _of_training(pricer: Pricer, layout: Layout) -> Iterator[SensitivityStep]:
    """Steps in settings of the training, which a search does not change.

    These are other CUDA graphs, the exchange of experts under compute or not, where the trainer
    takes it, and an even and a doubled load of the busiest expert rank.
    """
    one, context, asked = LayoutBatch.from_layouts([layout]), pricer.rules_context, pricer.training
    steps: list[tuple[str, FieldValue, FieldValue, TrainingSpec]] = []
    graphs = CUDA_GRAPHS[int(captured(one, context)[0])]
    for kind in CUDA_GRAPHS:
        other = asked.model_copy(update={"cuda_graphs": kind})
        if kind != graphs and not _broken(pricer, layout, other):
            steps.append(("training.cuda_graphs", graphs, kind, other))
    if layout.ep > 1 and pricer.model.is_moe:
        runs = bool(overlaps_exchange(one, context)[0])
        overlap = asked.overlap.model_copy(update={"ep": not runs})
        other = asked.model_copy(update={"overlap": overlap})
        if not _broken(pricer, layout, other):
            steps.append(("training.overlap.ep", runs, not runs, other))
        now = round(float(busiest_load(one, pricer.model, asked)[0]), 2)
        for load in () if asked.moe_capacity_factor else LOADS:
            other = asked.model_copy(update={"moe_imbalance": load})
            steps.append(("training.moe_imbalance", now, load, other))
    seconds = float(pricer.price(one).step_seconds[0])
    for name, old, new, training in steps:
        prices = replace(pricer, training=training).price(one)
        yield SensitivityStep(
            field=name,
            old=old,
            new=new,
            layout=layout,
            step_seconds=float(prices.step_seconds[0]),
            step_ratio=float(prices.step_seconds[0]) / seconds,
            device_bytes=float(prices.device_bytes[0]),
            fits=bool(fitting(pricer, prices.least_device_bytes)[0]),
        )


def _broken(pricer: Pricer, layout: Layout, training: TrainingSpec) -> bool:
    return bool(violations(layout, pricer.model, pricer.cluster, training))


def steps_in(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    yield from _BY_FIELD[name](pricer, layout, name)


# ---- one step in a field -------------------------------------------------------------------------


def _with(layout: Layout, **update: object) -> Layout:
    return layout.model_copy(update=update)


def _degree(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    """Half and twice, at the expense of dp_shard; dp_shard at the expense of dp_replicate."""
    old, giver = getattr(layout, name), "dp_replicate" if name == "dp_shard" else "dp_shard"
    for new in (old // 2, old * 2):
        ranks = getattr(layout, giver) * old
        if new < 1 or new == old or ranks % new:
            continue
        update: dict[str, object] = {name: new, giver: ranks // new}
        if name == "tp":
            update |= {"sequence_parallel": new > 1, "async_tp": layout.async_tp and new > 1}
            update["etp"] = new if layout.etp == old > 1 else layout.etp
        if name == "pp":
            update |= {"virtual_stages": 1, "pp_schedule": "1F1B"} if new == 1 else {}
        yield new, _with(layout, **update)


def _expert_degree(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    """Half and twice; experts regroup the existing ranks. Empty for a model without experts."""
    old = getattr(layout, name)
    for new in (old // 2, old * 2) if pricer.model.is_moe else ():
        if new >= 1 and new != old:
            yield new, _with(layout, **{name: new})


def _micro_batch(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    local = pricer.training.global_batch_size // layout.dp_degree
    yield from _around(layout, name, divisors(max(local, 1)))


def _stages(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    if layout.pp > 1 and not SCHEDULES[layout.pp_schedule].single_stage:
        counts = virtual_stages(pricer.rules_context)
        yield from _around(layout, name, [n for n in counts if n > 1])


def _zero(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    if layout.dp_shard * layout.cp > 1 or not pricer.rules.sharding.degrees_decide:
        yield from _around(layout, name, sorted(pricer.rules.zero_stages))


def _around(layout: Layout, name: str, values: Sequence[int]) -> Iterator[Change]:
    """The next smaller and the next larger of these values."""
    old = getattr(layout, name)
    below = [value for value in values if value < old]
    above = [value for value in values if value > old]
    for new in (*below[-1:], *above[:1]):
        yield new, _with(layout, **{name: new})


def _checkpointing(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    """The next weaker and the next stronger mode of the trainer.

    Of a memory budget: a tenth less and a tenth more.
    """
    kind, number = parse_ac(layout.ac)
    if kind == "memory-budget":
        tenths = [round(number + step, 2) for step in (-BUDGET_STEP, BUDGET_STEP)]
        texts = [format_ac(kind, budget) for budget in tenths if 0.0 <= budget <= 1.0]
    elif kind in COUNTED_AC:
        counts = (number - 1, number + 1)
        texts = [format_ac(kind, n) for n in counts if n >= COUNTED_AC[kind]]
    else:
        *weaker, strongest = AC_BY_STRENGTH
        known = [
            text
            for text in dict.fromkeys((*weaker, layout.ac, strongest))
            if parse_ac(text)[0] in pricer.rules.ac_kinds or text == layout.ac
        ]
        place = known.index(layout.ac)
        texts = [*known[max(place - 1, 0) : place], *known[place + 1 : place + 2]]
    for new in texts:
        yield new, _with(layout, ac=new)


def _precision(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    for new in PRECISIONS:
        if new != layout.precision and new in pricer.rules.precisions:
            gathers = layout.float8_all_gather and new == "float8-tensorwise"
            yield new, _with(layout, precision=new, float8_all_gather=gathers)


def _schedule(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    for new in SCHEDULES if layout.pp > 1 else ():
        if new != layout.pp_schedule and new in pricer.rules.schedules:
            stages = 1 if SCHEDULES[new].single_stage else max(2, layout.virtual_stages)
            yield new, _with(layout, pp_schedule=new, virtual_stages=stages, layers_per_stage=None)


def _method(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    if layout.cp > 1:
        yield from _others(layout, name, CP_METHODS, pricer.rules.cp_methods)


def _dispatcher(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    able = pricer.rules.at(training_release(pricer.training)).moe_dispatchers
    if layout.ep > 1:
        yield from _others(layout, name, MOE_DISPATCHERS, able)


def _others(
    layout: Layout, name: str, known: Sequence[str], able: Collection[str]
) -> Iterator[Change]:
    for new in known:
        if new != getattr(layout, name) and new in able:
            yield new, _with(layout, **{name: new})


def _split(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    """One layer off the first stage, and one off the last, to the smallest stage between."""
    if layout.pp == 1:
        return
    own = layers_of_stages(LayoutBatch.from_layouts([layout]), 0, pricer.model, pricer.rules)
    taker = min(range(1, len(own) - 1) or (1,), key=lambda stage: own[stage])
    for giver in (0, len(own) - 1):
        sizes = moved(own, giver, taker, 1)
        if min(sizes) >= 0 and sizes != layout.layers_per_stage:
            yield sizes, _with(layout, layers_per_stage=sizes)


def _flag(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    new = not getattr(layout, name)
    if layout.tp > 1 or name not in ("sequence_parallel", "async_tp"):
        whole = {"optimizer_offload_fraction": 1.0} if name == "cpu_offload" else {}
        yield new, _with(layout, **{name: new}, **whole)


def _share(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    """A tenth less and a tenth more of the states on the host."""
    old = getattr(layout, name)
    for new in (round(old - SHARE_STEP, 4), min(round(old + SHARE_STEP, 4), 1.0)):
        if layout.cpu_offload and 0.0 < new != old:
            yield new, _with(layout, **{name: new})


def _layers_away(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    """An eighth of the layers less and more, where activations may leave."""
    old, most = getattr(layout, name), pricer.model.num_hidden_layers - 1
    able = pricer.rules.at(training_release(pricer.training)).offloads_activations
    step = max(most // 8, 1)
    for new in {max(old - step, 0), min(old + step, most)} - {old}:
        if old or (able and layout.pp == 1 and layout.ac == "none"):
            yield new, _with(layout, **{name: new})


def _dtype(pricer: Pricer, layout: Layout, name: str) -> Iterator[Change]:
    yield from _others(layout, name, DTYPES, DTYPES)


_BY_FIELD: Mapping[str, Callable[[Pricer, Layout, str], Iterator[Change]]] = {
    **dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp"), _degree),
    **dict.fromkeys(("ep", "etp"), _expert_degree),
    **dict.fromkeys(FLAGS, _flag), **dict.fromkeys(DTYPE_FIELDS, _dtype),
    "micro_batch_size": _micro_batch, "virtual_stages": _stages, "zero_stage": _zero,
    "ac": _checkpointing, "precision": _precision,
    "pp_schedule": _schedule, "cp_method": _method, "moe_dispatcher": _dispatcher,
    "layers_per_stage": _split, "optimizer_offload_fraction": _share,
    "activation_offload_layers": _layers_away,
}  # fmt: skip
assert set(_BY_FIELD) == set(Layout.model_fields)
