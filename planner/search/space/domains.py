"""Which values of each field a search tries, per trainer.

`search.fix` and `search.allow` override them.
Legality is not decided here (`planner.rules` does that): a domain leaves out what is legal but
cannot win, or what is another way of writing the same layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.columns import CODES, TRAINER_SPLIT, Column, dtype_of
from planner.errors import Fault, SpecError
from planner.precision import PRECISIONS
from planner.rules import Context
from planner.rules.base import divisors
from planner.rules.mixers import split_between_indexers
from planner.rules.pipeline import ENDS
from planner.rules.precisions import gpu_precisions
from planner.rules.recomputed_modules import modules_in
from planner.schedules import SCHEDULES
from planner.search.space.keeps import KEEPS, STATES, Keep, one_form
from planner.specs.job import SearchSpec
from planner.specs.layout import (
    AC_KINDS,
    CP_METHODS,
    MOE_DISPATCHERS,
    Layout,
    check_layout_values,
    modules_of,
    parse_ac,
)
from planner.specs.mixers import SHARING
from planner.trainers.registry import layout_defaults

# Crossed one after another, so that a rule prunes as soon as all fields it reads are known.
CELL_FIELDS = (
    "tp", "cp", "pp", "dp_replicate", "dp_shard", "sequence_parallel", "ep", "etp",
    "micro_batch_size", "precision", "param_dtype", "reduce_dtype", "master_dtype", "ac",
)  # fmt: skip
# Expanded cell by cell.
FREE_FIELDS = (
    "pp_schedule", "virtual_stages", "layers_per_stage", "zero_stage", "cp_method",
    "moe_dispatcher",
    "compile", "async_tp",
    "float8_all_gather", "optimizer_in_backward", "cpu_offload",
    "optimizer_offload_fraction", "activation_offload_layers",
)  # fmt: skip
assert {*CELL_FIELDS, *FREE_FIELDS} == set(Layout.model_fields)

Values = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The values of one field, best guess first.

    keep: see Keep.
    first_legal: only the first legal value is listed, all else equal, as it is at least as good in
        time and memory; of float8 all-gathers by judgement, which `left_out` checks.
    given: the user chose the values, so neither applies.
    """

    values: Values
    keep: Keep | None = None
    first_legal: bool = False
    given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Domains:
    """One domain per field, and the table of splits that their columns refer to."""

    by_field: Mapping[str, Domain]
    splits: tuple[tuple[int, ...], ...] = field(default=())

    def columns(self, name: str) -> dict[str, Column]:
        """The values of one field as columns of LayoutBatch, all of one length."""
        values = self.by_field[name].values
        if name == "ac":
            parsed = [parse_ac(str(value)) for value in values]
            kinds = np.array([AC_KINDS.index(kind) for kind, _ in parsed], dtype=np.int64)
            return {
                "ac_kind": kinds,
                "ac_value": np.array([number for _, number in parsed], dtype=np.float64),
            }
        if name == "layers_per_stage":
            index = self.splits.index
            codes = [index(one) if isinstance(one, tuple) else TRAINER_SPLIT for one in values]
            return {"split": np.array(codes, dtype=np.int64)}
        if name in CODES:
            codes = [CODES[name].index(str(value)) for value in values]
            return {name: np.array(codes, dtype=np.int64)}
        return {name: np.array(values, dtype=dtype_of(name))}


# ---- the table -----------------------------------------------------------------------------------

STEPS_OF_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def virtual_stages(c: Context) -> tuple[int, ...]:
    """Stages a rank: in steps of at most 25%, and every number that may split the layers evenly."""
    layers = range(c.model.num_hidden_layers, c.model.num_hidden_layers + ENDS + 1)
    even = {count for number in layers for count in divisors(number) if 2 * count <= number}
    return tuple(sorted({*STEPS_OF_STAGES, *even}))


def _precisions(c: Context) -> Values:
    wanted = ("bf16" if "bf16" in gpu_precisions(c) else "fp16", *c.trainer.searched_precisions)
    return tuple(name for name in PRECISIONS if name in wanted)


def _recomputations(c: Context) -> Values:
    """Modes of recomputation that the release offers, without modules the model lacks.

    Selective attention drops the score matrix, which flash attention never stores.
    """

    def helps(kind: str, number: float) -> bool:
        if kind == "selective-attention":
            return c.unfused
        return kind != "modules" or modules_in(c).issuperset(modules_of(number))

    parsed = {value: parse_ac(value) for value in c.trainer.searched_ac}
    able = c.released.ac_kinds
    return tuple(value for value, ac in parsed.items() if ac[0] in able and helps(*ac))


def _schedules(c: Context) -> Values:
    """A fork's schedules are tried only for a version that names the fork."""
    named = c.release.named
    forks = ((name, SCHEDULES[name].fork) for name in c.trainer.schedules)
    return tuple(name for name, fork in forks if not fork or named.names_fork(fork))


def _between_indexers(c: Context) -> Values:
    """Splits of models whose layers share the tokens that an indexer chose."""
    if not SHARING & {*c.model.mixers}:
        return ()
    splits = (split_between_indexers(c.model, n) for n in range(2, c.model.num_hidden_layers))
    return tuple(dict.fromkeys(split for split in splits if split is not None))


def _tried(c: Context, offload: bool) -> dict[str, Values]:
    gpus, model = tuple(divisors(c.cluster.num_gpus)), c.model
    defaults = layout_defaults(c.training.trainer, c.training.trainer_version)
    return {
        # every way to factor num_gpus
        **dict.fromkeys(("tp", "cp", "pp", "dp_replicate", "dp_shard"), gpus),
        # off only pays where latency outweighs the repeated norms
        "sequence_parallel": (True, False),
        "ep": tuple(divisors(max(1, model.num_experts))),
        "etp": gpus if model.is_moe else (1,),  # rules know who takes 1 and tp alone
        "micro_batch_size": tuple(divisors(c.training.global_batch_size)),
        # the modes a user sets by name, and modules that cost little to repeat; others are a later
        # stage's
        "ac": _recomputations(c),
        # all recipes of trainer and GPU; fp16 needs loss scaling and fp4 a recipe of its own, so by
        # allow
        "precision": _precisions(c),
        # the trainer's own; other dtypes train another model
        **{name: (defaults[name],) for name in ("param_dtype", "reduce_dtype", "master_dtype")},
        "pp_schedule": _schedules(c),
        # every number that splits the layers evenly, embedding and head counted or not; of the
        # uneven ones steps of at most 25%, up to 16: a bubble 16 times smaller is gone
        "virtual_stages": virtual_stages(c),
        # the trainer's own split; others are a later stage's
        "layers_per_stage": (None, *_between_indexers(c)),
        "zero_stage": c.trainer.sharding.stages,  # reshard or not; Megatron's distributed optimizer
        "cp_method": tuple(name for name in CP_METHODS if name in c.trainer.cp_methods),
        "moe_dispatcher": tuple(
            name for name in MOE_DISPATCHERS if name in c.released.moe_dispatchers
        ),
        "compile": (True, False),  # fuses pointwise kernels: less time, less memory
        "async_tp": (False, True),  # pays only where GEMMs are long enough to hide chunks
        # half the bytes of FSDP's all-gather
        "float8_all_gather": (True, False) if c.trainer.sharding.gathers_float8 else (False,),
        "optimizer_in_backward": (False, True),  # frees gradients early, costs 1 to 2% of time
        "cpu_offload": (offload,),  # slow: a second pass, for what beats all on the device
        "optimizer_offload_fraction": (1.0,),  # the least that fits is a later stage's
        "activation_offload_layers": (0,),  # the fewest that fit are a later stage's
    }


# carries STATES; a keep applies as soon as all columns it reads are known
STATES_FIELD = "precision"
_FIRST_LEGAL = frozenset({"compile", "float8_all_gather"})


def default_domains(
    context: Context, *, offload: bool = False, oversized: bool = False
) -> dict[str, Domain]:
    """Values that a search tries when the user makes no request.

    offload: cpu_offload on instead of off.
    oversized: also degrees whose model states by themselves exceed the device.
    """
    keeps = KEEPS if offload or oversized else {**KEEPS, STATES_FIELD: STATES}
    table = _tried(context, offload)
    usual = {**context.trainer.layout_defaults, **dict.fromkeys(("tp", "cp", "pp", "ep"), 1)}
    for name in context.trainer.by_request:
        if name != "cpu_offload" or not offload:
            table[name] = (usual[name],)  # by allow: few run it with code of their own
    return {
        name: Domain(values=table[name], keep=keeps.get(name), first_legal=name in _FIRST_LEGAL)
        for name in (*CELL_FIELDS, *FREE_FIELDS)
    }


# ---- what the user says --------------------------------------------------------------------------


def domains_of(
    context: Context, search: SearchSpec, *, offload: bool = False, oversized: bool = False
) -> Domains:
    """The default domains with `search.fix` and `search.allow` in their places.

    Raises SpecError with every unknown field and ill-typed value ("search.fix.tp").
    """
    faults: list[Fault] = []
    given: dict[str, Values] = {}
    for name, value in search.fix.items():
        given[name] = _read(name, _listed(name, value), "search.fix", faults)
    for name, values in search.allow.items():
        if name in search.fix:
            rule, remedy = "is fixed by search.fix too", f"drop {name} from one of the two"
            faults.append(Fault(f"search.allow.{name}", values, rule, remedy))
        else:
            given[name] = _read(name, _listed(name, values), "search.allow", faults)
    if faults:
        raise SpecError(faults)
    offloads = any(given.get("cpu_offload", ()))  # its states need not fit the device
    domains = default_domains(context, offload=offload, oversized=oversized or offloads)
    for name, chosen in given.items():
        domains[name] = replace(
            domains[name], values=chosen, keep=None, first_legal=False, given=True
        )
    if "zero_stage" in given and context.trainer.sharding.degrees_decide:
        domains["zero_stage"] = replace(domains["zero_stage"], keep=one_form(given["zero_stage"]))
    splits = tuple(
        value for value in domains["layers_per_stage"].values if isinstance(value, tuple)
    )
    return Domains(by_field=domains, splits=splits)


def _listed(name: str, value: object) -> Sequence[object]:
    """A list means several values; a list of numbers is one value of layers_per_stage."""
    if not isinstance(value, list | tuple):
        return [value]
    if name == "layers_per_stage" and value and all(isinstance(item, int) for item in value):
        return [value]
    return value


def _read(name: str, values: Sequence[object], where: str, faults: list[Fault]) -> Values:
    if not values:
        remedy = "list at least one, or leave the field out"
        faults.append(Fault(f"{where}.{name}", list(values), "lists no value", remedy))
    read: list[object] = []
    for value in values:
        try:
            read.append(check_layout_values({name: value}, where)[name])
        except SpecError as error:
            faults.extend(error.faults)
    return tuple(dict.fromkeys(read))
