"""Rules on pipelines: how layers go to stages, and what each schedule demands.

The demands are those that `planner.schedules` declares.
"""

import math
from functools import lru_cache

import numpy as np

from planner.columns import TRAINER_SPLIT, BoolColumn, IntColumn, LayoutBatch, schedule_is
from planner.rules.base import Context, Rule, by_split, choices, num_microbatches, under
from planner.schedules import SCHEDULES
from planner.schedules.base import RUNTIMES, Runtime, Schedule, ScheduleRule
from planner.specs.layout import Layout
from planner.trainers.titan_models import lacking, line_of, pipelines
from planner.units import counted

# A simulation evaluates about pp x stages x (microbatches until the order repeats) actions. At this
# bound it takes seconds and 0.5 GB. The longest published pipeline has 64 ranks (Narayanan 2021, 1T
# parameters).
MOST_PLAYED = 2**16
ENDS = 2  # embedding and head: each may count as one layer of the split


_TITAN, _MEGATRON = under("torchtitan"), under("megatron")


def of_fork(codes: IntColumn) -> BoolColumn:
    return schedule_is(codes, lambda schedule: bool(schedule.fork))


def num_stages(x: LayoutBatch) -> IntColumn:
    """Stages of the whole pipeline. (N,).

    1 without a pipeline, whatever schedule and virtual stages are.
    """
    return np.where(x.pp > 1, x.pp * x.virtual_stages, 1)


def _most_stages(c: Context) -> int:
    """Stages, two of which may hold no layer where the trainer counts embedding and head."""
    return c.model.num_hidden_layers + (0 if c.trainer.split == "uneven" else ENDS)


def _layers(c: Context) -> str:
    ends = "" if c.trainer.split == "uneven" else ", embedding and head"
    return f"{counted(c.model.num_hidden_layers, 'layer')}{ends} of {c.model.name}"


def divides_layers(stages: IntColumn, c: Context) -> BoolColumn:
    """Whether so many stages divide the layers. (N,).

    Embedding and head may each count as a layer.
    """
    fits = np.zeros(np.shape(stages), dtype=np.bool_)
    for ends in range(ENDS + 1):
        fits |= (c.model.num_hidden_layers + ends) % stages == 0
    return fits


def _uneven(x: LayoutBatch, c: Context) -> BoolColumn:
    """Whether the trainer's own split cannot be even. (N,)."""
    stages = num_stages(x)
    own = (x.pp > 1) & (x.split == TRAINER_SPLIT) & (stages <= _most_stages(c))
    return np.asarray(own & ~divides_layers(stages, c))


def spelled_out(x: LayoutBatch, c: Context) -> BoolColumn:
    """Whether a trainer that splits evenly must be told every stage's layers. (N,)."""
    return np.asarray(_uneven(x, c) & np.bool_(c.trainer.split == "even"))


def _uneven_remedy(x: Layout, c: Context) -> str:
    fitting = [
        n
        for n in range(1, _most_stages(c) + 1)
        if n % x.pp == 0 and bool(divides_layers(np.array([n]), c)[0])
    ]
    own = "" if SCHEDULES[x.pp_schedule].fork else "give layers_per_stage"
    stages = f"use {choices(fitting)} stages" if fitting else ""
    return ", or ".join(text for text in (own, stages) if text) or "use another pp"


def _cannot_pipeline(c: Context) -> bool:
    """Whether TorchTitan has the model but cannot split it into stages."""
    if not _TITAN(c):
        return False
    line = line_of(c.release)
    return not lacking(c.model, line) and not pipelines(c.model, line)


def _pipelines_in_03(c: Context) -> bool:
    return not lacking(c.model, "0.3") and pipelines(c.model, "0.3")


def _without_layout(x: LayoutBatch, c: Context) -> BoolColumn:
    """Pipelines that Megatron can only split evenly. (N,).

    These are all pipelines in releases without an argument for splits, and the schedules of the
    zero-bubble fork in any.
    """
    return np.asarray(of_fork(x.pp_schedule) | np.bool_(not c.released.writes_splits))


def _stages_of(x: Layout) -> int:
    return x.pp * x.virtual_stages if x.pp > 1 else 1


_SPLIT_RULES: tuple[Rule, ...] = (
    Rule(
        key="more pipeline ranks than layers",
        field="pp",
        broken=lambda pp, c: pp > _most_stages(c),
        rule=lambda x, c: f"pp={x.pp} exceeds the {_layers(c)}",
        remedy=lambda x, c: f"set pp to at most {_most_stages(c)}",
    ),
    Rule(
        key="pipeline too long to be simulated",
        field="pp",
        reads=frozenset({"pp", "virtual_stages"}),
        broken=lambda x, c: (
            (x.pp <= _most_stages(c)) & (x.pp > 1) & (x.pp * num_stages(x) > MOST_PLAYED)
        ),
        rule=lambda x, c: (
            f"pp={x.pp} x {counted(_stages_of(x), 'stage')} is more than the planner plays out "
            f"action by action ({MOST_PLAYED:,})"
        ),
        remedy=lambda x, c: f"set pp to at most {math.isqrt(MOST_PLAYED // x.virtual_stages)}",
    ),
    Rule(
        key="TorchTitan cannot pipeline the model",
        field="pp",
        applies=_cannot_pipeline,
        broken=lambda pp: pp > 1,
        rule=lambda x, c: (
            f"TorchTitan {line_of(c.release)}'s model for {c.model.name} has no pipelining_fn"
        ),
        remedy=lambda x, c: (
            "set pp to 1" + (", or trainer_version to 0.3.0" if _pipelines_in_03(c) else "")
        ),
    ),
    Rule(
        key="more pipeline stages than layers",
        field="virtual_stages",
        reads=frozenset({"pp", "virtual_stages"}),
        broken=lambda x, c: (x.pp <= _most_stages(c)) & (num_stages(x) > _most_stages(c)),
        rule=lambda x, c: (
            f"pp={x.pp} x virtual_stages={x.virtual_stages} = {counted(_stages_of(x), 'stage')} "
            f"exceed the {_layers(c)}"
        ),
        remedy=lambda x, c: f"set virtual_stages to at most {max(1, _most_stages(c) // x.pp)}",
    ),
    Rule(
        key="stages do not divide the layers",
        field="virtual_stages",
        reads=frozenset({"pp", "virtual_stages", "split", "pp_schedule"}),
        applies=lambda c: c.trainer.split == "even",
        broken=lambda x, c: _uneven(x, c) & _without_layout(x, c),
        rule=lambda x, c: (
            f"{counted(_stages_of(x), 'stage')} do not divide "
            f"{counted(c.model.num_hidden_layers, 'layer')} of {c.model.name}, "
            f"nor with embedding and head counted as layers"
        ),
        remedy=_uneven_remedy,
    ),
    Rule(
        key="layers_per_stage has the wrong length",
        field="layers_per_stage",
        reads=frozenset({"pp", "virtual_stages", "split"}),
        broken=lambda x, c: by_split(x, num_stages(x), [*map(len, x.splits)]) != num_stages(x),
        rule=lambda x, c: (
            f"layers_per_stage lists {counted(len(x.layers_per_stage or ()), 'stage')}, "
            f"pp x virtual_stages makes {_stages_of(x)}"
        ),
        remedy=lambda x, c: f"list {_stages_of(x)} counts",
    ),
    Rule(
        key="layers_per_stage does not sum to the layers",
        field="layers_per_stage",
        reads=frozenset({"split"}),
        broken=lambda x, c: (
            by_split(x, c.model.num_hidden_layers, [*map(sum, x.splits)])
            != c.model.num_hidden_layers
        ),
        rule=lambda x, c: (
            f"layers_per_stage sums to {sum(x.layers_per_stage or ())}; {c.model.name} has "
            f"{c.model.num_hidden_layers}"
        ),
        remedy="make it sum to {c.model.num_hidden_layers}",
    ),
    Rule(
        key="trainer lacks the schedule",
        field="pp_schedule",
        broken=lambda pp, pp_schedule, c: (
            (pp > 1)
            & ~schedule_is(pp_schedule, lambda schedule: schedule.name in c.trainer.schedules)
        ),
        rule="{c.trainer.name} has no schedule {x.pp_schedule}",
        remedy=lambda x, c: (
            f"use {choices(name for name in SCHEDULES if name in c.trainer.schedules)}"
        ),
    ),
    Rule(
        key="interleaving over two ranks needs overlapped sends",
        field="virtual_stages",
        # megatron/training/arguments.py: "to avoid having multiple p2p sends and recvs between same
        # 2 ranks per communication batch"
        applies=lambda c: _MEGATRON(c) and not c.training.overlap.pp,
        broken=lambda pp, virtual_stages: (pp == 2) & (virtual_stages > 1),
        rule="{c.trainer.title} interleaves stages over pp=2 ranks only with overlapped sends "
        "(training.overlap.pp)",
        remedy="set virtual_stages to 1, pp above 2, or training.overlap.pp to true (without "
        "--no-overlap-p2p-communication)",
    ),
    Rule(
        key="zero bubble is a fork's",
        field="pp_schedule",
        # an exact release is NVIDIA's own; a date or a free text may mean the fork
        applies=lambda c: _MEGATRON(c) and c.release.exact,
        broken=lambda pp, pp_schedule: (pp > 1) & of_fork(pp_schedule),
        rule=lambda x, c: (
            f"{x.pp_schedule} is in the fork {SCHEDULES[x.pp_schedule].fork}, not in "
            f"Megatron-LM {c.release.number}"
        ),
        remedy="use 1F1B, or name the fork: training.trainer_version zero-bubble",
    ),
    Rule(
        key="zero bubble takes the trainer's own split",
        field="layers_per_stage",
        # Megatron got its layout string after the fork had branched off
        applies=_MEGATRON,
        broken=lambda pp, split, pp_schedule: (
            (pp > 1) & (split != TRAINER_SPLIT) & of_fork(pp_schedule)
        ),
        rule="the fork that has {x.pp_schedule} reads no --pipeline-model-parallel-layout",
        remedy="leave layers_per_stage out, or use 1F1B",
    ),
)


def _count(x: Layout, c: Context) -> int:
    return max(1, x.num_microbatches(c.training.global_batch_size))


def _schedule_rule(schedule: Schedule, code: int, demand: ScheduleRule, of: Runtime) -> Rule:
    def broken(x: LayoutBatch, c: Context) -> BoolColumn:
        count = np.maximum(1, num_microbatches(x, c))
        return np.asarray(
            (x.pp_schedule == code) & (x.pp > 1) & ~demand.holds(x.pp, x.virtual_stages, count)
        )

    def describe(x: Layout, c: Context) -> tuple[str, str]:
        return demand.describe(x.pp, x.virtual_stages, _count(x, c))

    what = "stages a rank" if demand.field == "virtual_stages" else "microbatches"
    return Rule(
        key=demand.key or f"{schedule.name} refuses the number of {what}",
        field=demand.field,
        reads=frozenset(
            {"pp", "pp_schedule", "virtual_stages", "dp_replicate", "dp_shard", "micro_batch_size"}
        ),
        applies=lambda c: c.trainer.framework.runtime == of,
        broken=broken,
        rule=lambda x, c: describe(x, c)[0],
        remedy=lambda x, c: describe(x, c)[1],
    )


@lru_cache(maxsize=8)
def _schedule_rules(schedules: tuple[Schedule, ...]) -> tuple[Rule, ...]:
    return tuple(
        _schedule_rule(schedule, code, demand, of)
        for of in RUNTIMES
        for code, schedule in enumerate(schedules)
        if of in schedule.runtimes
        for demand in schedule.rules(of)
    )


def pipeline_rules() -> tuple[Rule, ...]:
    """The rules on splits, and those of every registered schedule."""
    return (*_SPLIT_RULES, *_schedule_rules(tuple(SCHEDULES.values())))
