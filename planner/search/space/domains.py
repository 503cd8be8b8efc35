"""Which values of each field a search tries, per trainer, with the reason.

`search.fix` and `search.allow` override them.
Legality is not decided here (`planner.rules` does that): a domain leaves out what is legal but
cannot win, or what is another way of writing the same layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.columns import CODES, TRAINER_SPLIT, BoolColumn, Column, LayoutBatch, dtype_of
from planner.errors import Fault, SpecError
from planner.precision import PRECISIONS
from planner.rules import Context
from planner.rules.base import divisors, num_microbatches, sharding_degree
from planner.rules.features import scale_up_gpus
from planner.rules.mixers import split_between_indexers
from planner.rules.pipeline import ENDS, divides_layers
from planner.rules.precisions import gpu_precisions
from planner.rules.sharding import splits_backward
from planner.schedules import SCHEDULES
from planner.specs.job import SearchSpec
from planner.specs.layout import (
    AC_KINDS,
    CP_METHODS,
    MOE_DISPATCHERS,
    WITHOUT_EP,
    Layout,
    check_layout_values,
    parse_ac,
)
from planner.specs.mixers import SHARING
from planner.specs.training import mean_state_bytes

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
LARGE_NODE, ATTENTION_TILE, BYTES_16_BIT = 8, 128, 2
SATURATED_TOKENS = 1 << 18  # judgement: twice the largest microbatch of the public rows (16 x 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which rows of a domain are worth listing; the others duplicate a row or cannot beat one.

    reads: as of a rule.
    mask: True for rows to list, elementwise and broadcasting.
    reason: why the rest is left out.
    counted: key under which what is left out counts as rejected; empty for duplicates, which
        are not reported.
    """

    reads: frozenset[str]
    mask: Callable[[LayoutBatch, Context], BoolColumn]
    reason: str
    counted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The values of one field, best guess first.

    keep: see Keep.
    first_legal: only the first legal value is listed, all else equal, as it is at least as good in
        time and memory.
    given: the user chose the values, so neither applies.
    """

    name: str
    values: Values
    reason: str
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
            codes = [
                self.splits.index(value) if isinstance(value, tuple) else TRAINER_SPLIT
                for value in values
            ]
            return {"split": np.array(codes, dtype=np.int64)}
        if name in CODES:
            return {
                name: np.array([CODES[name].index(str(value)) for value in values], dtype=np.int64)
            }
        return {name: np.array(values, dtype=dtype_of(name))}


# ---- what is left out, and why -------------------------------------------------------------------


def _pays(x: LayoutBatch, c: Context) -> BoolColumn:
    """Leaves out split-backward schedules that recompute twice, once for I and once for W.

    They do so under activation checkpointing.
    """
    recomputes = splits_backward(x.pp_schedule) & (x.ac_kind != AC_KINDS.index("none"))
    return np.asarray(
        (x.pp_schedule == SCHEDULES.names.index("1F1B"))
        | ((x.pp > 1) & ~(recomputes & c.trainer.framework.splits_backward_by_group))
    )


def _stages_pay(x: LayoutBatch, c: Context) -> BoolColumn:
    """Leaves out uneven stages of trainers that only split evenly, if even ones are possible."""
    even = (
        np.bool_(c.trainer.split != "even" or c.released.writes_splits)
        | ~divides_layers(x.pp, c)
        | divides_layers(x.pp * x.virtual_stages, c)
    )
    return np.asarray(np.where(x.pp > 1, even, x.virtual_stages == 1))


def _steps_once(x: LayoutBatch, c: Context) -> BoolColumn:
    return np.asarray(
        ~x.optimizer_in_backward | ((num_microbatches(x, c) == 1) & (sharding_degree(x, c) > 1))
    )


def _microbatch_pays(x: LayoutBatch, c: Context) -> BoolColumn:
    """Lists microbatches of 1, and larger ones that fit, fill the pipeline and are still useful.

    Fit: 2 x micro_batch_size x seq_len x hidden_size x layers / (cp x tp x pp) bytes are at most
    the device's memory. These are the layers' inputs in 16 bit on the rank with the most layers,
    which no recomputation saves. Useful: not longer than any kernel needs.
    """
    sequence_bytes = (
        BYTES_16_BIT * c.training.seq_len * c.model.hidden_size * c.model.num_hidden_layers
    )
    fits = x.micro_batch_size * sequence_bytes <= c.cluster.gpu.memory_bytes * (x.cp * x.tp * x.pp)
    fills = (x.pp == 1) | (num_microbatches(x, c) >= x.pp)
    useful = x.micro_batch_size * c.training.seq_len <= SATURATED_TOKENS * x.cp
    return np.asarray((x.micro_batch_size == 1) | (fits & fills & useful))


def _states_fit(x: LayoutBatch, c: Context) -> BoolColumn:
    """Whether the mean rank's model states fit, whatever the rest of the layout is.

    This bound needs only the degrees. Bytes per parameter are as in `cost.memory`.
    FSDP: (master + optimizer) / sharding ranks, and under a pipeline the unsharded gradients that
        accumulate in reduce_dtype.
    Others: parameters and gradients of the rank, sharded optimizer.
    """
    experts = c.model.num_moe_layers * c.model.num_experts * c.model.expert_parameters()
    dense = c.model.total_parameters() - experts
    local = (dense / x.tp + experts / (x.ep * x.etp)) / x.pp
    shard = (dense + experts) / (x.tp * x.pp * x.dp_shard * x.cp)
    master, reduce = (
        np.where(dtype == 0, BYTES_16_BIT, 2 * BYTES_16_BIT)
        for dtype in (x.master_dtype, x.reduce_dtype)
    )
    states = mean_state_bytes(c.training.optimizer, c.model) * np.minimum(1.0, master / 4.0)
    if c.trainer.sharding.keeps_copies:
        held = local * 2 * BYTES_16_BIT + shard * (master + states)
    else:
        held = shard * (master + states) + np.where(x.pp > 1, local * reduce, 0.0)
    return np.asarray(held <= c.cluster.usable_memory_bytes)


STATES = Keep(
    reads=frozenset({"tp", "cp", "pp", "dp_shard", "ep", "etp", "master_dtype", "reduce_dtype"}),
    mask=_states_fit,
    reason="parameters, gradients and optimizer alone exceed the device",
    counted="model states exceed the device",
)  # fmt: skip
KEEPS: Mapping[str, Keep] = {
    "tp": Keep(
        reads=frozenset({"tp"}), mask=lambda x, c: x.tp <= max(LARGE_NODE, scale_up_gpus(c)),
        reason="beyond NVLink every layer's collectives cross the network on the critical path; "
            "judgement, 8 where a node holds fewer",
    ),
    "cp": Keep(
        reads=frozenset({"cp"}), mask=lambda x,
        c: (x.cp == 1) | (c.training.seq_len >= ATTENTION_TILE * x.cp),
        reason="a flash-attention tile takes 128 queries; with fewer a rank the tensor cores idle",
    ),
    "micro_batch_size": Keep(
        reads=frozenset({"cp", "tp", "pp", "micro_batch_size", "num_microbatches"}),
        mask=_microbatch_pays,
        reason="the layers' inputs alone would exceed the device; or fewer microbatches than "
            "pipeline ranks idle half of them, and a "
        "smaller microbatch does not; or GEMMs of so many rows have long saturated and hide "
            "any gather. 1 always stays",
    ),
    "pp_schedule": Keep(
        reads=frozenset({"pp", "pp_schedule", "ac_kind"}), mask=_pays,
        reason="ignored at pp 1; a split backward under activation checkpointing recomputes twice "
            "and was measured 10 times slower "
        "in torch (torchtitan issue 773: 13 against 128 tokens/s, pytorch issue 136766)",
    ),
    "virtual_stages": Keep(
        reads=frozenset({"pp", "virtual_stages"}), mask=_stages_pay,
        reason="ignored at pp 1; of trainers that only split evenly, stages that do not divide "
            "the layers where others of the same pp do",
    ),
    "zero_stage": Keep(
        reads=frozenset({"zero_stage", "sharding_degree", "cpu_offload"}), mask=lambda x,
        c: np.where(x.cpu_offload & (x.zero_stage > 0), True,
                    (sharding_degree(x, c) > 1) == (x.zero_stage > 0)),
        reason="with one sharding rank every stage is stage 0, but that offload may need another; "
            "with more, sharding the optimizer costs no traffic and saves memory",
    ),
    "cp_method": Keep(
        reads=frozenset({"cp", "cp_method"}), mask=lambda x,
        c: (x.cp > 1) | (x.cp_method == CP_METHODS.index("allgather")),
        reason="ignored at cp 1",
    ),
    "moe_dispatcher": Keep(
        reads=frozenset({"ep", "moe_dispatcher"}), mask=lambda x,
        c: (x.ep > 1)
        | np.isin(x.moe_dispatcher, [MOE_DISPATCHERS.index(name) for name in WITHOUT_EP]),
        reason="at ep 1 the others do what alltoall does",
    ),
    "sequence_parallel": Keep(
        reads=frozenset({"tp", "sequence_parallel"}), mask=lambda x,
        c: (x.tp > 1) | ~x.sequence_parallel, reason="ignored at tp 1",
    ),
    "optimizer_in_backward": Keep(
        reads=frozenset({"optimizer_in_backward", "num_microbatches", "sharding_degree"}),
        mask=_steps_once,
        reason="it would step once a microbatch, and before DDP has reduced the gradients: another "
            "training run",
    ),
}  # fmt: skip

# ---- the table -----------------------------------------------------------------------------------

STEPS_OF_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def virtual_stages(c: Context) -> tuple[int, ...]:
    """Stages a rank: in steps of at most 25%, and every number that may split the layers evenly."""
    layers = range(c.model.num_hidden_layers, c.model.num_hidden_layers + ENDS + 1)
    even = {count for number in layers for count in divisors(number) if 2 * count <= number}
    return tuple(sorted({*STEPS_OF_STAGES, *even}))


def _divisors(number: int) -> Values:
    return tuple(divisors(number))


def _precisions(c: Context) -> Values:
    wanted = ("bf16" if "bf16" in gpu_precisions(c) else "fp16", *c.trainer.searched_precisions)
    return tuple(name for name in PRECISIONS if name in wanted)


def _recomputations(c: Context) -> Values:
    """The trainer's modes; flash attention needs no selective attention.

    Selective attention drops the score matrix, which flash attention never stores.
    """
    return tuple(
        value for value in c.trainer.searched_ac if c.unfused or value != "selective-attention"
    )


def _cell_domains(c: Context) -> dict[str, tuple[Values, str]]:
    gpus, model, defaults = _divisors(c.cluster.num_gpus), c.model, c.trainer.layout_defaults
    own = "the trainer's own; other dtypes train another model"
    return {
        **{
            axis: (gpus, "every way to factor num_gpus")
            for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard")
        },
        "sequence_parallel": (
            (True, False),
            "off only pays where latency outweighs the repeated norms",
        ),
        "ep": (
            _divisors(model.num_experts) if model.is_moe else (1,),
            "every divisor of the experts",
        ),
        "etp": (
            gpus if model.is_moe else (1,),
            "every divisor; rules know who takes 1 and tp alone",
        ),
        "micro_batch_size": (
            _divisors(c.training.global_batch_size),
            "every divisor of the local batch",
        ),
        "ac": (
            _recomputations(c),
            "the modes a user sets by name; every memory budget is for allow, or a later stage",
        ),
        "precision": (
            _precisions(c),
            "all recipes of trainer and GPU; fp16 needs loss scaling and fp4 a recipe of its "
            "own, so by allow",
        ),
        **{
            name: ((defaults[name],), own)
            for name in ("param_dtype", "reduce_dtype", "master_dtype")
        },
    }


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


def _free_domains(c: Context, offload: bool) -> dict[str, tuple[Values, str]]:
    return {
        "pp_schedule": (
            _schedules(c),
            "all of the trainer's; zero bubble where the version is its fork's",
        ),
        "virtual_stages": (
            virtual_stages(c),
            "every number that splits the layers evenly, embedding and head counted or not; of the "
            "uneven ones steps of at most 25%, up to 16: a bubble 16 times smaller is gone",
        ),
        "layers_per_stage": (
            (None, *_between_indexers(c)),
            "the trainer's own split; others are a later stage's",
        ),
        "zero_stage": (
            c.trainer.sharding.stages,
            "reshard or not; Megatron's distributed optimizer",
        ),
        "cp_method": (
            tuple(name for name in CP_METHODS if name in c.trainer.cp_methods),
            "all of the trainer's",
        ),
        "moe_dispatcher": (
            tuple(name for name in MOE_DISPATCHERS if name in c.released.moe_dispatchers),
            "all of the trainer's",
        ),
        "compile": ((True, False), "fuses pointwise kernels: less time, less memory"),
        "async_tp": ((False, True), "pays only where GEMMs are long enough to hide chunks"),
        "float8_all_gather": (
            (True, False) if c.trainer.sharding.gathers_float8 else (False,),
            "half the bytes of FSDP's all-gather",
        ),
        "optimizer_in_backward": ((False, True), "frees gradients early, costs 1 to 2% of time"),
        "cpu_offload": ((offload,), "slow: a second pass, for what beats all on the device"),
        "optimizer_offload_fraction": ((1.0,), "the least that fits is a later stage's"),
        "activation_offload_layers": ((0,), "the fewest that fit are a later stage's"),
    }


# carries STATES; a keep applies as soon as all columns it reads are known
STATES_FIELD = "precision"
_FIRST_LEGAL = frozenset({"compile", "float8_all_gather"})


def _keep(name: str, bounded: bool) -> Keep | None:
    return STATES if name == STATES_FIELD and bounded else KEEPS.get(name)


def default_domains(
    context: Context, *, offload: bool = False, oversized: bool = False
) -> dict[str, Domain]:
    """What a search tries when the user makes no request.

    offload: cpu_offload on instead of off.
    oversized: also degrees whose model states by themselves exceed the device.
    """
    bounded = not (offload or oversized)
    table = {**_cell_domains(context), **_free_domains(context, offload)}
    usual = {**context.trainer.layout_defaults, **dict.fromkeys(("tp", "cp", "pp", "ep"), 1)}
    for name in context.trainer.by_request:
        if name != "cpu_offload" or not offload:
            table[name] = ((usual[name],), "by allow: few run it with code of their own")
    return {
        name: Domain(
            name=name,
            values=table[name][0],
            reason=table[name][1],
            keep=_keep(name, bounded),
            first_legal=name in _FIRST_LEGAL,
        )
        for name in (*CELL_FIELDS, *FREE_FIELDS)
    }


def _one_form(stages: Values) -> Keep:
    """Lists a layout whose one sharding rank shards nothing under one of these stages alone."""
    return Keep(
        reads=frozenset({"zero_stage", "sharding_degree"}),
        mask=lambda x, c: (sharding_degree(x, c) > 1) | (x.zero_stage == stages[0]),
        reason="with one sharding rank every stage is the same run",
    )


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
            faults.append(
                Fault(
                    f"search.allow.{name}",
                    values,
                    "is fixed by search.fix too",
                    f"drop {name} from one of the two",
                )
            )
        else:
            given[name] = _read(name, _listed(name, values), "search.allow", faults)
    if faults:
        raise SpecError(faults)
    offloads = any(given.get("cpu_offload", ()))  # its states need not fit the device
    domains = default_domains(context, offload=offload, oversized=oversized or offloads)
    for name, chosen in given.items():
        domains[name] = replace(
            domains[name], values=chosen, reason="given", keep=None, first_legal=False, given=True
        )
    if "zero_stage" in given and context.trainer.sharding.degrees_decide:
        domains["zero_stage"] = replace(domains["zero_stage"], keep=_one_form(given["zero_stage"]))
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
        faults.append(
            Fault(
                f"{where}.{name}",
                list(values),
                "lists no value",
                "list at least one, or leave the field out",
            )
        )
    read: list[object] = []
    for value in values:
        try:
            read.append(check_layout_values({name: value}, where)[name])
        except SpecError as error:
            faults.extend(error.faults)
    return tuple(dict.fromkeys(read))
