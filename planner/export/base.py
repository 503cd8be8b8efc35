"""An export: the files to write, the command to paste, and the gaps that a trainer leaves.

No field of a layout is dropped silently: it becomes a setting, or a `Gap` that names field, value,
rule and remedy. A blocking gap means that the trainer would stop, or run something other than what
was priced.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from planner.errors import Fault, SpecError
from planner.specs.cluster import RANK_ORDER, ClusterSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

Value = bool | int | float | str | list[str] | list[list[str]]
Settings = dict[str, Value]
DEFAULT_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Gap:
    """One value that the trainer has no setting for.

    fault.field: a field of the layout, or a dotted field of the job (`training.x`, `model`).
    """

    fault: Fault
    blocking: bool

    def __str__(self) -> str:
        return str(self.fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A layout in a trainer's own settings.

    files: name -> text, to be written into one folder.
    command: what to paste there.
    arguments: the part of the command that the trainer reads.
    notes: what the user must check.
    gaps: what the settings cannot express.
    num_layers, num_gpus: of the run.
    """

    trainer: str
    version: str
    num_layers: int
    num_gpus: int
    files: Mapping[str, str]
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()

    @property
    def blockers(self) -> tuple[Fault, ...]:
        """Faults that keep the trainer from running this layout as priced."""
        return tuple(gap.fault for gap in self.gaps if gap.blocking)

    def refused(self, faults: Sequence[Fault]) -> "Export":
        """A copy of the export with these faults from the rules as blockers.

        They replace the export's own blockers for the same fields.
        """
        named = {fault.field for fault in faults}
        own = (gap for gap in self.gaps if not (gap.blocking and gap.fault.field in named))
        return replace(self, gaps=(*own, *(Gap(fault, blocking=True) for fault in faults)))

    def require_runnable(self) -> "Export":
        """The export itself. Raises SpecError with every blocker."""
        if self.blockers:
            raise SpecError(self.blockers)
        return self

    def as_dict(self) -> dict[str, object]:
        """JSON-safe form; notes and harmless gaps are one list of sentences."""
        return {
            "trainer": self.trainer,
            "version": self.version,
            "command": list(self.command),
            "files": dict(self.files),
            "notes": [*self.notes, *(str(gap) for gap in self.gaps if not gap.blocking)],
            "blockers": [
                {**asdict(fault), "value": _plain(fault.value)} for fault in self.blockers
            ],
        }


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@dataclass(slots=True)
class Draft:
    """An export under construction: its inputs, and what has been collected so far.

    asked: the release to write for; None for the job's.
    version: the release that is written.
    """

    layout: Layout
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    asked: str | None = None
    version: str = ""
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The model's name as one word."""
        return safe_name(self.model.name)

    @property
    def passes(self) -> int:
        """Microbatches of a step on a data-parallel rank."""
        return max(1, self.layout.num_microbatches(self.training.global_batch_size))

    def finished(
        self, trainer: str, command: tuple[str, ...], arguments: tuple[str, ...] = ()
    ) -> Export:
        """The export with the files, notes and gaps that were collected."""
        return Export(
            trainer=trainer,
            version=self.version,
            num_layers=self.model.num_hidden_layers,
            num_gpus=self.layout.num_gpus,
            files=self.files,
            command=command,
            arguments=arguments,
            notes=tuple(self.notes),
            gaps=tuple(self.gaps),
        )

    def gap(
        self, name: str, rule: str, remedy: str, *, blocking: bool = True, shown: object = None
    ) -> None:
        """Records a value that no setting expresses.

        name: a field of the layout, or a dotted one of the job.
        shown: the value, where it is not the field's own.
        """
        owner, _, field = name.rpartition(".")
        value = getattr(getattr(self, owner or "layout"), field) if shown is None else shown
        value = list(value) if isinstance(value, tuple) else value
        self.gaps.append(Gap(Fault(name, value, rule, remedy), blocking))

    def inert(self, name: str, rule: str) -> None:
        """Records a field that has no setting because it has no effect in this layout."""
        self.gap(name, rule, "no setting is needed", blocking=False)

    @property
    def layer_split(self) -> tuple[int, ...] | None:
        """`layers_per_stage`, if it splits this model's layers over these stages; else None."""
        split, layout = self.layout.layers_per_stage, self.layout
        if split is None:
            return None
        whole = (
            sum(split) == self.model.num_hidden_layers
            and len(split) == layout.pp * layout.virtual_stages
        )
        return split if whole else None

    def write_known(self, title: str, version: str) -> None:
        """Takes the one release whose settings are known; a note says so where it is not asked."""
        self.version = version
        if self.asked not in (None, version):
            self.notes.append(
                f"Written for {title} {version}, the release that is known here, not {self.asked}."
            )

    def check_common(self) -> None:
        """Collects the gaps and notes that are the same for every trainer."""
        layout, split = self.layout, self.layout.layers_per_stage
        if layout.pp == 1:
            if layout.virtual_stages != 1:
                self.inert("virtual_stages", "means nothing without pipeline parallelism")
            if split is not None:
                self.inert("layers_per_stage", "means nothing without pipeline parallelism")
        elif split is not None and self.layer_split is None:
            rule = "does not agree with layers_per_stage"
            self.gap("virtual_stages", rule, "correct layers_per_stage")
        order = list(self.cluster.rank_order)
        if order != list(RANK_ORDER):
            rule = f"is not the trainer's own placement {', '.join(RANK_ORDER)}"
            remedy = "renumber the hosts, or price the default order"
            self.gap("cluster.rank_order", rule, remedy, blocking=False, shown=order)


def unstated(model: ModelSpec) -> list[str]:
    """Fields that every network of this kind has but that nothing states for this one."""
    wanted = ["rope_theta"] * (model.position_embedding == "rope") + ["norm_eps"]
    wanted += ["scoring_func", "norm_topk_prob"] * model.is_moe
    return [field for field in wanted if getattr(model, field) is None]


def train_steps(training: TrainingSpec) -> int:
    """Steps for `total_tokens`; DEFAULT_STEPS where the job does not state them."""
    if training.total_tokens is None:
        return DEFAULT_STEPS
    return max(
        1, math.ceil(training.total_tokens / (training.seq_len * training.global_batch_size))
    )


def safe_name(name: str) -> str:
    """A user's name as one word that shells, schedulers and file systems take without quotes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:60] or "model"


def overlay_gaps(values: dict[str, object], gaps: Sequence[Gap]) -> Layout:
    """The layout from parsed settings, completed by the values in the gaps."""
    for gap in gaps:
        if gap.fault.field in Layout.model_fields:
            values[gap.fault.field] = gap.fault.value
    return Layout.model_validate(values)


def write_toml(settings: Mapping[str, Value], header: Sequence[str] = ()) -> str:
    """TOML text of dotted keys, one table per prefix, in the given order.

    tomllib and TorchTitan's ConfigManager read it.
    """
    tables: dict[str, list[str]] = {}
    for key, value in settings.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {_toml_value(value)}")
    lines = [f"# {line}" for line in header]
    for table, rows in tables.items():
        lines += ["", f"[{table}]", *rows]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml_value(value: Value) -> str:
    if isinstance(value, float):
        return repr(value)  # with inf, which JSON has not
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def imports_for(source: str, modules: Mapping[str, str]) -> str:
    """Lines that import the names which a Python source uses; modules: name -> where it is."""
    used, found = {*re.findall(r"\w+", source)}, dict[str, list[str]]()
    for name in [name for name in modules if name in used]:
        found.setdefault(modules[name], []).append(name)
    lines = (f"from {module} import {', '.join(sorted(found[module]))}\n" for module in found)
    return "".join(lines)


def leaves(document: object, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Every value of nested mappings, by its keys from the outside in."""
    if not isinstance(document, Mapping):
        return {place: document}
    found: dict[tuple[str, ...], object] = {}
    for key, value in document.items():
        found |= leaves(value, (*place, str(key)))
    return found


def flatten(tables: Mapping[str, object]) -> dict[str, object]:
    """Nested tables as dotted keys; the inverse of `write_toml` for keys."""
    return {".".join(place): value for place, value in leaves(tables).items()}
