"""The mechanisms of a layout: what it uses beyond plain FSDP within the measured range.

Each mechanism has points, and is marked as measured or not. A point is one more thing that has to
be configured, can break, and may not have been tested. Points are a judgement, written down once
here and in docs/decisions/0006; `preference` has the numbers that weigh them. Whether a mechanism
is measured is a fact: a test compares the mark with the published runs in benchmarks/measured.
Letters: N layouts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.columns import TRAINER_SPLIT, BoolColumn, IntColumn, LayoutBatch, schedule_is
from planner.precision import PRECISIONS
from planner.schedules import Schedule
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import AC_KINDS, CP_METHODS, Layout
from planner.specs.model import ModelSpec

MANY_EXPERTS = 16  # models with fewer have been trained without expert parallelism
# twice the widest sharding of the published runs; from here on fabrics are not flat
# (leaf and spine)
WIDE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismContext:
    """What is the same for all layouts of a job.

    domain: GPUs of one scale-up domain (NVLink or similar).
    num_experts: 0 in dense models.
    """

    domain: int
    num_experts: int

    @classmethod
    def of(cls, model: ModelSpec, cluster: ClusterSpec) -> "MechanismContext":
        """The context of one job."""
        return cls(domain=cluster.fabric[0].gpus, num_experts=model.num_experts)


Mask = Callable[[LayoutBatch, MechanismContext], BoolColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """One mechanism.

    name: for the reader.
    points: its weight.
    measured: whether a published run uses it.
    used: whether each layout uses it, (N,).
    """

    name: str
    points: int
    measured: bool
    used: Mask


def _where(condition: Callable[[LayoutBatch], BoolColumn]) -> Mask:
    return lambda x, setting: np.asarray(condition(x))


def _ac(*names: str) -> Mask:
    return _where(lambda x: np.isin(x.ac_kind, [AC_KINDS.index(name) for name in names]))


def _precision(*names: str) -> Mask:
    return _where(lambda x: np.isin(x.precision, [PRECISIONS.names.index(name) for name in names]))


def _schedule(holds: Callable[[Schedule], bool]) -> Mask:
    return _where(lambda x: (x.pp > 1) & schedule_is(x.pp_schedule, holds))


MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        name=f"weights gathered from more than {WIDE} ranks", points=2, measured=False,
        used=_where(lambda x: (x.zero_stage >= 2) & (x.dp_shard * x.cp > WIDE)),
    ),
    Mechanism(
        name="replicated shard groups (HSDP)", points=1, measured=True,
        used=_where(lambda x: (x.dp_replicate > 1) & (x.dp_shard > 1)),
    ),
    Mechanism(
        name="tensor parallelism", points=1, measured=True, used=_where(lambda x: x.tp > 1)
    ),
    Mechanism(
        name="tensor parallelism across nodes", points=2, measured=False,
        used=lambda x, c: np.asarray(x.tp > c.domain),
    ),
    Mechanism(name="async TP", points=1, measured=True, used=_where(lambda x: x.async_tp)),
    Mechanism(
        name="context parallelism", points=2, measured=True, used=_where(lambda x: x.cp > 1)
    ),
    Mechanism(
        name="keys and values passed round a ring", points=0, measured=False,
        used=_where(lambda x: (x.cp > 1) & (x.cp_method == CP_METHODS.index("alltoall"))),
    ),
    Mechanism(name="a pipeline", points=2, measured=True, used=_where(lambda x: x.pp > 1)),
    Mechanism(
        name="several stages a pipeline rank", points=1, measured=True,
        used=_schedule(lambda s: s.published and not s.splits_backward and not s.single_stage),
    ),
    Mechanism(
        name="a schedule nobody published runs of", points=1, measured=False,
        used=_schedule(lambda s: not s.published and not s.splits_backward),
    ),
    Mechanism(
        name="a split backward in Megatron's fork", points=2, measured=True,
        used=_schedule(lambda s: s.splits_backward and bool(s.fork)),
    ),
    Mechanism(
        name="a split backward", points=2, measured=False,
        used=_schedule(lambda s: s.splits_backward and not s.fork),
    ),
    Mechanism(
        name="a layer split of its own", points=1, measured=False,
        used=_where(lambda x: (x.pp > 1) & (x.split != TRAINER_SPLIT)),
    ),
    Mechanism(
        name="all of many experts gathered on every rank", points=1, measured=False,
        used=lambda x, c: np.asarray((x.ep * x.etp == 1) & (c.num_experts >= MANY_EXPERTS)),
    ),
    Mechanism(
        name="expert parallelism across nodes", points=2, measured=True,
        used=lambda x, c: np.asarray(x.ep * x.etp > c.domain),
    ),
    Mechanism(
        name="experts cut by TP", points=1, measured=True, used=_where(lambda x: x.etp > 1)
    ),
    Mechanism(
        name="checkpointing of every n-th layer", points=1, measured=True,
        used=_ac("selective-layer"),
    ),
    Mechanism(
        name="an activation memory budget", points=2, measured=False, used=_ac("memory-budget")
    ),
    Mechanism(
        name="float8", points=1, measured=True,
        used=_precision(
            "float8-tensorwise", "float8-rowwise", "float8-delayed", "float8-blockwise",
            "float8-rowwise-gw-hp",
        ),
    ),
    Mechanism(
        name="microscaling formats", points=2, measured=True, used=_precision("mxfp8", "nvfp4")
    ),
    Mechanism(
        name="the optimizer in the backward", points=1, measured=False,
        used=_where(lambda x: x.optimizer_in_backward),
    ),
    Mechanism(
        name="CPU offload", points=2, measured=False, used=_where(lambda x: x.cpu_offload)
    ),
)  # fmt: skip


UNMEASURED = tuple(mechanism for mechanism in MECHANISMS if not mechanism.measured)


def points(batch: LayoutBatch, setting: MechanismContext) -> IntColumn:
    """Sum of the points of what each layout uses, (N,)."""
    total = np.zeros(len(batch), dtype=np.int64)
    for mechanism in MECHANISMS:
        total += mechanism.points * mechanism.used(batch, setting)
    return total


def unmeasured(batch: LayoutBatch, setting: MechanismContext) -> BoolColumn:
    """Which unmeasured mechanisms each layout uses, (N, len(UNMEASURED))."""
    return np.stack([mechanism.used(batch, setting) for mechanism in UNMEASURED], axis=1)


def used_by(layout: Layout, setting: MechanismContext) -> tuple[Mechanism, ...]:
    """The mechanisms of one layout, in the order of the table."""
    batch = LayoutBatch.from_layouts([layout])
    return tuple(mechanism for mechanism in MECHANISMS if mechanism.used(batch, setting)[0])
