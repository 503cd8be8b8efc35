"""Reads TorchTitan's settings, from a TOML or from flags, as a job and a layout.

Sources: torchtitan 0.2.2 config/job_config.py, train.py (batch sizes),
    distributed/parallel_dims.py; 0.3.0 config/configs.py, trainer.py,
    models/*/config_registry.py.
"""

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from planner.errors import Fault, SpecError, fault
from planner.export.base import flatten
from planner.export.titan_precision import read_precision_02, read_precision_03
from planner.export.titan_read import read_compiled, read_dispatcher_03, read_settings
from planner.export.titan_settings import CHECKPOINT_MODES, GRAPHS_OFF, LAYERS, MICRO, SAME_KEYS
from planner.intake.trainer_files.known_models import model_of
from planner.intake.trainer_files.statement import Machine, Run, StatedModel
from planner.intake.trainer_files.titan_module import read_module
from planner.specs.model import ModelSpec
from planner.trainers.release import GRAPH_TRAINER
from planner.trainers.titan_settings import (
    BEFORE_02,
    BY_TOKENS,
    DEFAULTS,
    FORMER_NAMES,
    KEYS,
    P,
    T,
    configs_03,
    unknown,
)

SHARD = SAME_KEYS["dp_shard"]
DEGREES = tuple(SAME_KEYS[name] for name in ("dp_replicate", "cp", "tp", "pp"))
EXTENDED = frozenset({"job.custom_config_module", "experimental.custom_args_module"})
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
OPTIMIZERS = frozenset({"adamw", "adam"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedTitan:
    """A TorchTitan run.

    line: "0.2" or "0.3".
    given: dotted settings that the text has, by their current names.
    modules: Python modules that it names and that were found, by name.
    registered: dotted settings of the user's own function that `--config` names; None for one of
        TorchTitan's.
    spelling: current name -> name in the text, where they differ.
    skipped: parts of a script that are only known once it runs.
    named: its model, where the text names one of another kind.
    """

    line: str
    named: StatedModel | None = None
    trainer: str = "torchtitan"
    given: Mapping[str, object]
    machine: Machine = field(default_factory=Machine)
    modules: Mapping[str, str] = field(default_factory=dict)
    registered: Mapping[str, object] | None = None
    spelling: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """The newest release of its line that we export for."""
        known = {"0.2": "0.2.2", "0.3": "0.3.0"}[self.line]
        return f"{known}, {GRAPH_TRAINER}" if self._graph else known

    @property
    def _graph(self) -> bool:
        """Whether it runs the trainer in experiments/graph_trainer."""
        return str(self.given.get("module", "")).startswith(GRAPH_TRAINER)

    @property
    def _config(self) -> str:
        """The function of the registry; the graph trainer's are the core trainer's by a prefix."""
        return str(self.given.get("config", "")).removeprefix(f"{GRAPH_TRAINER}_")

    @property
    def settings(self) -> dict[str, object]:
        """Every setting: the given ones, then 0.3's --config, then the release's defaults."""
        config = self.registered or {}
        if self.line == "0.3" and self.registered is None and self._config in configs_03():
            config = configs_03()[self._config].sets
        return _in_sequences(
            {**DEFAULTS[self.line], **config, **self.given}, {*config, *self.given}
        )

    @property
    def counts_tokens(self) -> bool:
        """Whether it states its batches in tokens, as the repository does since August 2026."""
        return not BY_TOKENS.keys().isdisjoint({*self.given, *(self.registered or ())})

    @property
    def model(self) -> StatedModel:
        """The catalogue's model for its module and flavor, or the shapes in a user's own module."""
        if self.named is not None:
            return self.named
        if self.line == "0.2":
            settings = self.settings
            custom = self.modules.get(str(settings.get("experimental.custom_import")))
            if custom is not None:
                return read_module(custom)
            return model_of(
                str(settings["model.name"]),
                str(settings["model.flavor"]),
                str(settings.get("model.hf_assets_path", "")),
            )
        module, config = str(self.given.get("module", "")), self._config
        if self.registered is None and config in configs_03():
            asked = configs_03()[config]
            return model_of(asked.module, asked.flavor, str(self.given.get("hf_assets_path", "")))
        asks = str((self.registered or {}).get("model_spec", ""))
        return read_module(self.modules[module], asks, module.rpartition(".")[2])

    def run(self, model: ModelSpec, num_gpus: int) -> Run:
        """The run on this many GPUs. Raises SpecError for a setting of the wrong kind."""
        settings = self.settings
        _check_kinds(settings, self.line)
        if settings[SHARD] == -1:
            settings[SHARD] = max(1, num_gpus // math.prod(_int(settings, key) for key in DEGREES))
        layout = {
            **read_settings(settings, self.line, model.num_hidden_layers),
            **self._precision(settings),
            **self._dispatcher(settings),
        }
        if self._graph:  # experiments/graph_trainer/configs.py: it always compiles
            policy = settings.get("compile.memory_policy", "default")
            layout |= {"compile": True, "ac": "full" if policy == "full" else "selective-op"}
        notes, refusals = [*self._notes(settings, layout)], [*self._refusals(settings)]
        ranks = {name: _int(settings, key) for name, key in SAME_KEYS.items() if name in AXES}
        sharded = ranks["dp_shard"] * ranks["cp"] > 1
        if self.line == "0.2" and not sharded and ranks["tp"] * ranks["pp"] > 1:
            # 0.2.2 distributed/utils.py, maybe_enable_amp: "Mixed precision training is disabled"
            kept = layout["master_dtype"]
            if layout["param_dtype"] != kept:
                notes.append(
                    f"mixed precision is off: TorchTitan 0.2 casts to {layout['param_dtype']} in "
                    f"FSDP alone, so TP or PP without it computes in {kept}; priced so"
                )
                layout["param_dtype"] = kept
        if layout["float8_all_gather"] and ranks["dp_shard"] == 1:
            layout["float8_all_gather"] = False  # components/quantization/float8.py
            notes.append("float8 all-gather is off without dp_shard above 1: priced so")
        local = _int(settings, T + "local_batch_size")
        asked = _int(settings, T + "global_batch_size")
        width = ranks["dp_shard"] * ranks["dp_replicate"]
        batch = local * width if asked < 0 else asked
        if batch % (local * width):
            rule = (
                f"is no multiple of {local} sequences on each of {width} data-parallel ranks, "
                "where TorchTitan stops"
            )
            refusals.append(
                Fault(T + "global_batch_size", batch, rule, f"use a multiple of {local * width}")
            )
        elif ranks["pp"] > 1 and batch > local * width:
            passes = batch // (local * width)
            notes.append(
                f"it runs the pipeline {passes} times a step, {local} sequences each; priced as "
                "one pass of all microbatches"
            )
        return Run(
            training=self._training(settings, batch),
            layout=layout,
            notes=tuple(notes),
            refusals=tuple(refusals),
        )

    @property
    def _asks(self) -> str | None:
        """The call in 0.3's module that asks for its model, else all of the module."""
        asks = (self.registered or {}).get("model_spec")
        return str(asks) if asks else self.modules.get(str(self.given.get("module")))

    @property
    def precision(self) -> str:
        return str(self._precision(self.settings)["precision"])

    def _precision(self, settings: Mapping[str, object]) -> dict[str, object]:
        if self.line == "0.2":
            return read_precision_02(settings)
        config = configs_03().get(self._config)
        if config is not None and self.registered is None:
            return {"precision": config.precision, "float8_all_gather": False}
        return read_precision_03(self._asks)

    def _dispatcher(self, settings: Mapping[str, object]) -> dict[str, object]:
        """How 0.3 sends tokens to experts, which its model's module says; 0.2 has a setting."""
        if self.line == "0.2":
            return {}
        config = configs_03().get(self._config)
        if config is not None and config.dispatcher and self.registered is None:
            return {"moe_dispatcher": config.dispatcher}
        return read_dispatcher_03(self._asks)

    def _loss_in_chunks(self, settings: Mapping[str, object]) -> bool | None:
        """The loss that 0.3's module states; None for the release's own."""
        module = self.modules.get(str(settings.get("module")))
        whole = module is not None and "CrossEntropyLoss" in module
        return False if self.line == "0.3" and whole and "Chunked" not in str(module) else None

    def _training(self, settings: Mapping[str, object], batch: int) -> dict[str, object]:
        norm = settings[T + "max_norm"]
        training: dict[str, object] = {
            "trainer": "torchtitan",
            "trainer_version": self.version,
            "seq_len": settings[T + "seq_len"],
            "global_batch_size": batch,
            "max_grad_norm": norm
            if isinstance(norm, int | float) and 0 < norm < math.inf
            else None,
        }
        _, loss = read_compiled(settings)
        if loss is not None:
            training["fused_cross_entropy"] = loss
        if settings["optimizer.implementation"] == "fused_opt_states_bf16":
            training["optimizer"] = "adamw-bf16-states"
        if self._loss_in_chunks(settings) is False:
            training["chunked_loss"] = False
        if settings.get(GRAPHS_OFF) and _could_capture(settings):
            training["cuda_graphs"] = "none"
        if settings.get(P + "disable_loss_parallel"):
            training["vocab_parallel_loss"] = False
        if settings["checkpoint.enable"]:
            modes = {word: name for name, word in CHECKPOINT_MODES.items()}
            mode = modes.get(str(settings["checkpoint.async_mode"]), "sync")
            interval = settings["checkpoint.interval"]
            training["checkpoint"] = {"interval_steps": interval, "mode": mode}
        return training

    def _refusals(self, settings: Mapping[str, object]) -> Iterator[Fault]:
        """Refusals of the trainer, in its words."""
        local, micro = _int(settings, T + "local_batch_size"), _int(settings, MICRO)
        if _int(settings, SAME_KEYS["pp"]) > 1 and local % micro:
            rule = (
                f"is no multiple of pipeline_parallel_microbatch_size {micro}, where TorchTitan "
                "stops"
            )
            yield Fault(T + "local_batch_size", local, rule, "correct one of them")
        if self.line == "0.3" and not settings[GRAPHS_OFF] and settings[SAME_KEYS["pp"]] != 1:
            rule = "is not set, and TorchTitan stops: no CUDA graphs under pipeline parallelism"
            yield Fault(GRAPHS_OFF, False, rule, "set it to true")

    def _notes(self, settings: Mapping[str, object], layout: Mapping[str, object]) -> Iterator[str]:
        """Sentences on settings that are priced differently from the file."""
        former, old_line = sorted(self.spelling.values()), self.line == "0.2"
        if self.skipped:
            yield f"not read, since only running it tells: {'; '.join(self.skipped)}"
        if former:
            yield f"{', '.join(former)}: names from before 0.2, read as 0.2's"
        if old_line and (own := unknown(self.given, "0.2")):
            yield f"{', '.join(own)}: of your own configuration module, not priced"
        old = sorted(self.given.keys() & (BEFORE_02 - KEYS["0.2"]) - self.spelling.keys())
        if old_line and old:
            yield f"{', '.join(old)}: from before 0.2, not priced"
        if self.counts_tokens:
            yield (
                "batches in tokens are settings of the repository since 20 August 2026, priced by "
                "the rules of 0.3.0"
            )
        if str(settings["optimizer.name"]).lower() not in OPTIMIZERS:
            yield f"optimizer {settings['optimizer.name']} is priced as AdamW"
        if settings.get(P + "pipeline_parallel_schedule_csv"):
            yield "the schedule in pipeline_parallel_schedule_csv is not read"
        rowwise = str(layout["precision"]).startswith("float8-rowwise")
        if old_line and rowwise and _int(settings, SAME_KEYS["tp"]) > 1:
            yield (
                f"{layout['precision']} with TP gained nothing where it was measured (torchtitan "
                "issue 1207: 0.965 of bf16's speed on 4 H100): measure it against bf16"
            )


def _could_capture(settings: Mapping[str, object]) -> bool:
    """Whether 0.3 takes CUDA graphs with these settings, whatever the model.

    A run that must do without is no choice of the user's. Source: torchtitan 0.3.0 trainer.py
    _validate_cuda_graphs.
    """
    degrees = (settings[SAME_KEYS["pp"]], settings[SAME_KEYS["ep"]])
    return degrees == (1, 1) and not settings[SAME_KEYS["cpu_offload"]]


def _in_sequences(settings: dict[str, object], given: set[str]) -> dict[str, object]:
    """The settings with batches counted in sequences, where they are given in tokens.

    Source: pull request 4121 (trainer.py: tokens a pipeline microbatch, microbatches a pass).
    Raises SpecError for tokens that are no whole sequences.
    """
    stated = {key: settings[key] for key in BY_TOKENS if key in given}
    if not stated:
        return settings
    length, tokens, whole, passes = BY_TOKENS
    seq_len = stated.get(length, settings[T + "seq_len"])
    settings[T + "seq_len"] = seq_len
    faults = []
    for key in (tokens, whole):
        value = stated.get(key)
        if isinstance(value, int) and isinstance(seq_len, int) and value > 0:
            if seq_len < 1 or value % seq_len:
                rule = f"is no whole number of sequences of {seq_len} tokens, which are priced"
                faults.append(Fault(key, value, rule, f"use a multiple of {length}"))
            else:
                settings[BY_TOKENS[key]] = value // seq_len
    if faults:
        raise SpecError(faults)
    if settings[SAME_KEYS["pp"]] != 1:
        micro, count = settings[T + "local_batch_size"], stated.get(passes, 1)
        settings[BY_TOKENS[passes]] = micro
        if isinstance(micro, int) and isinstance(count, int):
            settings[T + "local_batch_size"] = micro * count
    return settings


def check_keys(keys: Mapping[str, object], line: str) -> None:
    """Raises SpecError for settings that TorchTitan does not have, where it would stop.

    A run that extends JobConfig by a module of its own may have any.
    """
    if not EXTENDED.isdisjoint(keys):
        return
    graph = str(keys.get("module", "")).startswith(GRAPH_TRAINER)
    stops = "Invalid field names" if line == "0.2" else "Unrecognized options"
    faults = []
    for key in unknown(keys, line, graph=graph):
        near = difflib.get_close_matches(key, KEYS[line], n=1, cutoff=0.6)
        remedy = f"did you mean {near[0]}?" if near else "remove it"
        rule = f'is no setting of TorchTitan {line}, which stops there ("{stops}")'
        faults.append(Fault(key, keys[key], rule, remedy))
    if faults:
        raise SpecError(faults)


def read_toml(text: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    """(dotted settings by their current names, current name -> name in the text where they differ).

    Raises SpecError for a text that is no TOML.
    """
    try:
        given = flatten(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise fault("current", name, f"is not valid TOML ({error})", "correct the file") from None
    converters = given.get("model.converters")
    if isinstance(converters, str):  # before 0.2
        given["model.converters"] = [name.strip() for name in converters.split(",") if name.strip()]
    spelling = {FORMER_NAMES[key]: key for key in given if key in FORMER_NAMES}
    for key in ("float8.enable_float8_linear", "training.fp8_linear"):
        if given.get(key):
            del given[key]
            given["model.converters"], spelling["model.converters"] = ["float8"], key
    return {FORMER_NAMES.get(key, key): value for key, value in given.items()}, spelling


def _int(settings: Mapping[str, object], key: str) -> int:
    value = settings[key]
    assert isinstance(value, int), f"{key} was checked"
    return value


def _check_kinds(settings: Mapping[str, object], line: str) -> None:
    """Raises SpecError for settings that TorchTitan would not take, each by its own name."""
    faults = []
    layers = settings.get(LAYERS)
    checked: dict[str, object] = {**DEFAULTS[line], **({} if layers is None else {LAYERS: 1})}
    for key, usual in checked.items():
        value = settings[key]
        if isinstance(usual, bool) and not isinstance(value, bool):
            faults.append(Fault(key, value, "is not true or false", "correct the file"))
        elif isinstance(usual, int) and not isinstance(usual, bool):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or (isinstance(value, int) and value < 1 and value != usual):
                faults.append(
                    Fault(key, value, "is not a positive whole number", "correct the file")
                )
    if faults:
        raise SpecError(faults)
