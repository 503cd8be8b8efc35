"""A layout: what a search chooses. It has one field for each row of the contract's table."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field, field_validator

from planner.precision import PRECISIONS
from planner.schedules import SCHEDULES
from planner.specs.validation import Value, build, closest, enum_of, registered

MAX_DEGREE = 2**20
Degree = Annotated[int, Field(strict=True, ge=1, le=MAX_DEGREE)]
Flag = Annotated[bool, Field(strict=True)]
Layers = Annotated[int, Field(strict=True, ge=0, le=MAX_DEGREE)]
Share = Annotated[float, Field(strict=True, gt=0.0, le=1.0)]
# The value of one field. Types are listed so that JSON's lists come back as tuples.
FieldValue = bool | int | float | str | tuple[int, ...] | None
ZeroStage = Annotated[int, Field(strict=True, ge=0, le=3)]

CP_METHODS = ("allgather", "alltoall", "ulysses")
MOE_DISPATCHERS = ("alltoall", "deepep", "hybridep", "allgather")
# what tells them apart where no token leaves its rank: "alltoall" permutes once more
WITHOUT_EP = ("alltoall", "allgather")
AC_KINDS = (
    "none", "full", "selective-op", "selective-layer", "selective-attention", "memory-budget",
    "block", "uniform", "modules",
)  # fmt: skip
# Megatron-LM's --recompute-modules; a set of them is stored as a number, its n-th bit for the n-th
RECOMPUTE_MODULES = (
    "core_attn", "mlp", "layernorm", "moe_act", "moe", "mla_up_proj", "shared_experts",
)  # fmt: skip
CORE_ATTN_BIT = 1 << RECOMPUTE_MODULES.index("core_attn")
COUNTED_AC = {"selective-layer": 1, "block": 1, "uniform": 2}  # the least N of each
DTYPES = ("bfloat16", "float32")


ScheduleName = Annotated[str, registered(SCHEDULES), enum_of(SCHEDULES)]
PrecisionName = Annotated[str, registered(PRECISIONS), enum_of(PRECISIONS)]


def parse_ac(text: str) -> tuple[str, float]:
    """(kind, number) of an activation checkpointing mode.

    ("selective-layer", 2) for "selective-layer-2", ("memory-budget", 0.5) for "memory-budget-0.5",
    ("block", 4) for "block-4", ("modules", bits) for "modules-A+B", and (kind, 0) for the rest;
    "modules-core_attn" is selective-attention. Raises ValueError "rule; remedy" for anything else.
    """
    if text.startswith("modules-"):
        return _modules(text.removeprefix("modules-").split("+"))
    if text in ("none", "full", "selective-op", "selective-attention"):
        return text, 0.0
    kind, _, number = text.rpartition("-")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if kind in COUNTED_AC and value == int(value) and COUNTED_AC[kind] <= value <= MAX_DEGREE:
        return kind, value
    if kind == "memory-budget" and 0.0 <= value <= 1.0:
        return kind, value
    known = (
        "none, full, selective-op, selective-layer-N (N >= 1), selective-attention, "
        "memory-budget-X (X from 0 to 1), block-N (N >= 1), uniform-N (N >= 2) or modules-A+B (of "
        f"{', '.join(RECOMPUTE_MODULES)})"
    )
    raise ValueError(f"is no activation checkpointing mode; use {known}")


def _modules(names: Sequence[str]) -> tuple[str, float]:
    """(kind, number) of a set of modules. Raises ValueError "rule; remedy" for an unknown name."""
    unknown = [name for name in names if name not in RECOMPUTE_MODULES]
    if unknown:
        rule = f"names {unknown[0]!r}, which is no module that Megatron-LM recomputes"
        raise ValueError(f"{rule}; {closest(unknown[0], RECOMPUTE_MODULES)}")
    bits = sum(1 << RECOMPUTE_MODULES.index(name) for name in set(names))
    return ("selective-attention", 0.0) if bits == CORE_ATTN_BIT else ("modules", float(bits))


def modules_of(number: float) -> tuple[str, ...]:
    """Names of the modules that a stored number stands for, in the order of RECOMPUTE_MODULES."""
    return tuple(name for bit, name in enumerate(RECOMPUTE_MODULES) if int(number) >> bit & 1)


def format_ac(kind: str, number: float) -> str:
    """The mode's one spelling, inverse of `parse_ac`; memory budgets have four decimals."""
    if kind == "modules":
        return f"modules-{'+'.join(modules_of(number))}"
    if kind in COUNTED_AC:
        return f"{kind}-{int(number)}"
    if kind == "memory-budget":
        return f"{kind}-{number:.4f}".rstrip("0").rstrip(".")
    return kind


class Layout(Value, extra="forbid"):
    """A fully set layout.

    dp_replicate x dp_shard x cp x tp x pp is num_gpus. The axes `ep` and `etp` regroup the same
    ranks for experts.

    dp_replicate: data parallelism with whole copies: DDP, or the outer part of HSDP.
    dp_shard: data parallelism that shards states: FSDP and ZeRO shard over dp_shard x cp.
    cp: context parallelism: ranks that share one sequence.
    tp: tensor parallelism: ranks that share each matrix.
    pp: pipeline parallelism: ranks that share the layers.
    ep: expert parallelism: ranks that share the experts.
    etp: tensor parallelism inside experts; TorchTitan: 1 or tp.
    moe_dispatcher: the library that exchanges tokens between experts.
    zero_stage: 0 is DDP; 1 shards the optimizer, 2 the gradients too and keeps parameters gathered
        until backward, 3 gathers them again in backward.
    sequence_parallel: norms and residuals are cut over TP ranks along the sequence.
    async_tp: TP's communication in pieces under its products; needs compile.
    cp_method: all keys and values gathered, passed round a ring, or heads exchanged (Ulysses).
    pp_schedule: the order in which stages work; names are torch's, ZB-1p and ZB-2p those of a fork
        of Megatron-LM.
    virtual_stages: stages a pipeline rank: 1 for GPipe, 1F1B and ZB, 2 for ZBV and DualPipeV.
    layers_per_stage: layers of each stage; null: the trainer's own split.
    micro_batch_size: sequences of a microbatch on one data-parallel rank.
    ac: activation checkpointing: none, full, selective-op, selective-layer-N (every Nth layer),
        selective-attention, memory-budget-X (X from 0 to 1), block-N, uniform-N or modules-A+B
        (Megatron-LM's).
    precision: the recipe of matrix products: operands, scales, and which layers.
    float8_all_gather: FSDP gathers weights in float8; float8-tensorwise only.
    param_dtype: parameters as computed with.
    reduce_dtype: gradients as they are reduced.
    master_dtype: parameters as the optimizer keeps them.
    compile: torch.compile a block.
    optimizer_in_backward: each parameter is updated as soon as its gradient is there.
    cpu_offload: parameters, gradients and optimizer states live on the host.
    optimizer_offload_fraction: the share of the optimizer's states, and of its update, that
        cpu_offload moves to the host.
    activation_offload_layers: how many layers keep their activations on the host.

    The last two and moe_dispatcher have defaults for layouts stored before they were fields.
    """

    dp_replicate: Degree
    dp_shard: Degree
    cp: Degree
    tp: Degree
    pp: Degree
    ep: Degree
    etp: Degree
    moe_dispatcher: Literal["alltoall", "deepep", "hybridep", "allgather"] = "alltoall"
    zero_stage: ZeroStage
    sequence_parallel: Flag
    async_tp: Flag
    cp_method: Literal["allgather", "alltoall", "ulysses"]
    pp_schedule: ScheduleName
    virtual_stages: Degree
    layers_per_stage: tuple[Annotated[int, Field(strict=True, ge=0)], ...] | None
    micro_batch_size: Degree
    ac: str
    precision: PrecisionName
    float8_all_gather: Flag
    param_dtype: Literal["bfloat16", "float32"]
    reduce_dtype: Literal["bfloat16", "float32"]
    master_dtype: Literal["bfloat16", "float32"]
    compile: Flag
    optimizer_in_backward: Flag
    cpu_offload: Flag
    optimizer_offload_fraction: Share = 1.0
    activation_offload_layers: Layers = 0

    @field_validator("ac")
    @classmethod
    def _known_ac(cls, value: str) -> str:
        return format_ac(*parse_ac(value))

    @property
    def num_gpus(self) -> int:
        """Product of the five degrees that multiply ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def dp_degree(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    def num_microbatches(self, global_batch_size: int) -> int:
        """Microbatches (or accumulation steps) a step: global batch / (microbatch x DP degree)."""
        return global_batch_size // (self.micro_batch_size * self.dp_degree)

    def short(self, cp_words: Mapping[str, str] | None = None) -> str:
        """One line that an engineer reads at a glance.

        cp_words: how a trainer names the CP methods; as in the layout where it is not given.
        For example "fsdp 32 · tp 8 · mbs 2 · ac full · float8-rowwise · compile".
        """
        data, method = self._data_name(), ""
        if self.cp_method != "allgather":
            method += f" {(cp_words or {}).get(self.cp_method, self.cp_method)}"
        if self.dp_shard == 1 and self.zero_stage < 3:
            method += f" {data}"
        replicas = "hsdp" if self.dp_shard * self.cp > 1 else "ddp"
        stages = f" x{self.virtual_stages}" if self.virtual_stages > 1 else ""
        gather = "+gather" if self.float8_all_gather else ""
        share = self.optimizer_offload_fraction
        parts = (
            (self.dp_replicate > 1, f"{replicas} {self.dp_replicate}"),
            (self.dp_shard > 1, f"{data} {self.dp_shard}"),
            (self.tp > 1, f"tp {self.tp}"),
            (self.cp > 1, f"cp {self.cp}{method}"),
            (self.ep > 1, f"ep {self.ep}"),
            (self.etp > 1, f"etp {self.etp}"),
            (self.moe_dispatcher != "alltoall", self.moe_dispatcher),
            (self.pp > 1, f"pp {self.pp} {self.pp_schedule}{stages}"),
            (self.layers_per_stage is not None, f"layers {in_runs(self.layers_per_stage or ())}"),
            (True, f"mbs {self.micro_batch_size}"),
            (True, f"ac {self.ac}"),
            (True, f"{self.precision}{gather}"),
            (self.param_dtype != "bfloat16", f"params {self.param_dtype}"),
            (self.reduce_dtype != "float32", f"grads {self.reduce_dtype}"),
            (self.master_dtype != "float32", f"masters {self.master_dtype}"),
            (self.tp > 1 and not self.sequence_parallel, "no-sp"),
            (self.compile, "compile"),
            (self.async_tp, "async-tp"),
            (self.cpu_offload, "offload" if share == 1.0 else f"offload {share:g}"),
            (self.activation_offload_layers, f"offload-act {self.activation_offload_layers}"),
            (self.optimizer_in_backward, "opt-in-bwd"),
        )
        return " · ".join(text for shown, text in parts if shown)

    def _data_name(self) -> str:
        return {0: "ddp", 1: "zero1", 2: "fsdp/zero2", 3: "fsdp"}[self.zero_stage]


def in_runs(numbers: Sequence[int]) -> str:
    """Numbers with repeats shortened: 9, six times 10 and 9 become "9,10x6,9"."""
    found = [(value, len(list(same))) for value, same in groupby(numbers)]
    return ",".join(f"{value}x{count}" if count > 1 else str(value) for value, count in found)


def check_layout_values(values: object, field: str = "layout") -> dict[str, object]:
    """The mapping itself, with each value checked; unset fields stay unset.

    Raises SpecError with every fault.
    """
    probe: Mapping[str, object] = values if isinstance(values, Mapping) else {}
    checked = build(Layout, {**_FILLER, **probe} if isinstance(values, Mapping) else values, field)
    return {name: getattr(checked, name) for name in probe}


INTEGERS, FLAGS, SHARES = (
    tuple(name for name, info in Layout.model_fields.items() if info.annotation is kind)
    for kind in (int, bool, float)
)  # fields, in the order of the contract's table
# what trainers assume of unset fields, unless they say otherwise
COMMON: Mapping[str, object] = {
    "etp": 1, "moe_dispatcher": "alltoall", "sequence_parallel": True, "async_tp": False,
    "cp_method": "allgather", "pp_schedule": "1F1B", "virtual_stages": 1, "layers_per_stage": None,
    "micro_batch_size": 1, "precision": "bf16", "float8_all_gather": False, "param_dtype":
    "bfloat16", "reduce_dtype": "float32", "master_dtype": "float32", "compile": False,
    "optimizer_in_backward": False, "cpu_offload": False, "optimizer_offload_fraction": 1.0,
    "activation_offload_layers": 0,
}  # fmt: skip
_FILLER: Mapping[str, object] = {**dict.fromkeys(INTEGERS, 1), **COMMON, "ac": "none"}


FIELD_WORDS = {
    "float8_all_gather": "float8 all-gather",
    "async_tp": "async TP",
    "cpu_offload": "CPU offload",
    "compile": "torch.compile",
    "layers_per_stage": "layers by stage",
    "training.moe_imbalance": "load of the busiest expert rank",
}


def in_words(name: str, value: object) -> str:
    """A field's value as a sentence has it: "tp 8", "with torch.compile"."""
    words = FIELD_WORDS.get(name, name.replace("_", " "))
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {words}"
    return f"{words} {value_in_words(name, value)}"


def value_in_words(name: str, value: object) -> str:
    """The value alone: "8", "on", "2x30,1,0"."""
    if isinstance(value, tuple | list):
        return in_runs(value)
    if name == "cp_method" and value == "alltoall":
        return "alltoall (ring)"  # Megatron-LM's a2a is Ulysses
    if name == "layers_per_stage":
        return "the trainer's split"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def changed_fields(base: Layout, layout: Layout) -> dict[str, FieldValue]:
    return {
        name: value
        for name in Layout.model_fields
        if (value := getattr(layout, name)) != getattr(base, name)
    }
