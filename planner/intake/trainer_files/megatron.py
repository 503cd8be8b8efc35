"""Reads a Megatron-LM argument script as a job and a layout, and writes another layout into it.

Source: Megatron-LM core 0.14 megatron/training/arguments.py (defaults and derived arguments),
    examples/*/train_*.sh.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

from planner.errors import Fault, SpecError, fault
from planner.export.base import Export
from planner.export.commands import plain_name, spelled
from planner.export.megatron import MUON
from planner.export.megatron_graphs import read_graphs
from planner.export.megatron_mixers import with_layers
from planner.export.megatron_read import exported_words, number, read_arguments, whole, word
from planner.export.megatron_settings import CAPACITY, GRAPH_ARGUMENTS, GROUPS, PADDED
from planner.intake.trainer_files import megatron_deepspeed
from planner.intake.trainer_files.canonical import canonical
from planner.intake.trainer_files.flags import Command, best_command, commands_of, edit_flags
from planner.intake.trainer_files.known_models import by_hint, named
from planner.intake.trainer_files.megatron_judge import (
    GROUP,
    GivenFlags,
    assertions,
    muon_faults,
    refuse_others,
)
from planner.intake.trainer_files.megatron_log import dumped, words_of
from planner.intake.trainer_files.megatron_model import model_keys
from planner.intake.trainer_files.megatron_unpriced import fuses_cross_entropy, unpriced
from planner.intake.trainer_files.shell import read_script
from planner.intake.trainer_files.statement import Machine, Run, StatedModel, machine_of
from planner.schedules.depth_first import microbatches_per_round
from planner.specs.job import CurrentSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import MuonTpMode
from planner.trainers.megatron_models import adds_a_token
from planner.trainers.registry import release_of
from planner.trainers.release import Release

Words = Mapping[str, Sequence[str]]
_PROGRAM = re.compile(r"pretrain_\w+\.py|megatron")
# tokenizer -> its tokens; pretrain_gpt.py takes the first where none is named
TOKENIZERS = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
_KNOWN = frozenset(
    {"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size",
        "num_layers", "hidden_size"}
)  # fmt: skip
# `--attention-backend`; `auto` is what the release brings. Which flash-attn is installed, a script
# does not say: 2, until somebody builds 3.
ATTENTION_KERNELS = {"flash": "flash2", "fused": "cudnn", "unfused": "unfused", "local": "unfused"}
NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

ONE_CONNECTION = (
    "--use-megatron-fsdp refuses CUDA_DEVICE_MAX_CONNECTIONS=1: take that out where it is set"
)
# Arguments that some layouts need beside their own.
FOLLOWING = (GROUP, "moe_router_dtype", "ckpt_format", "use_precision_aware_optimizer")
_RELEVANT = GRAPH_ARGUMENTS.union(_KNOWN, *GROUPS.values()) | {
    "global_batch_size",
    "seq_length",
    "num_experts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedMegatron:
    """A Megatron run.

    words: argument, named with _ -> its values.
    flags: what the command gives to its program, as it is written there.
    asked: the release that the job names; None for none.
    ran: whether it is of a log, so that Megatron did not stop at it.
    skipped: parts of a script that are only known once it runs.
    unset: flag -> the variable that it takes its value from, and that nobody sets.
    absent: files that the script reads in and that are not there, in words; "" for none.
    needed: arguments without which there is no run.
    """

    words: Words
    trainer: str = "megatron"
    flags: GivenFlags = field(default_factory=lambda: GivenFlags(program="", given={}))
    asked: str | None = None
    machine: Machine = field(default_factory=Machine)
    expandable: bool = False
    ran: bool = False
    skipped: tuple[str, ...] = ()
    unset: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""
    needed: tuple[str, ...] = NEEDED[3:]

    @property
    def version(self) -> str | None:
        """The newest release whose parser has every flag; None for the default one."""
        return self.flags.release()

    @property
    def release(self) -> Release:
        return release_of("megatron", self.asked or self.version)

    @property
    def model(self) -> StatedModel:
        """The catalogue's model with these shapes, else the shapes; None where some are missing."""
        words = with_layers(self.words)
        missing = [name for name in NEEDED[:3] if word(words, name) is None]
        if missing:
            lacking = f"it has no {', '.join(map(self.shown, missing))}{self.absent}"
            return StatedModel(value=None, lacking=lacking)
        keys = model_keys(words)
        null = word(self.words, "tokenizer_type") == "NullTokenizer"
        if null and "vocab_size" in keys:
            keys["vocab_size"] = whole(self.words, "vocab_size") + adds_a_token(self.release)
        hint = (word(self.words, "tokenizer_model") or "").rstrip("/").rpartition("/")[2].lower()
        hint = "" if hint.endswith((".model", ".json")) else hint  # a file of any model
        if "vocab_size" in keys:
            return named(keys, hint=hint)
        known = by_hint({**keys, "vocab_size": 1}, leave_open=frozenset({"vocab_size"}), hint=hint)
        if known is None and self.tokens is not None:
            return named({**keys, "vocab_size": self.tokens}, hint=hint)
        lacking = f"it has no {self.shown('vocab_size')}, which its tokenizer knows"
        return StatedModel(value=known, lacking="" if known else lacking)

    @property
    def tokens(self) -> int | None:
        """Tokens of a tokenizer that always has the same ones; None for any other."""
        usual = "GPT2BPETokenizer" if "vocab_file" in self.words else ""
        return TOKENIZERS.get(word(self.words, "tokenizer_type") or usual)

    def shown(self, name: str) -> str:
        """A missing argument, with the variable that hides its value."""
        variable = self.unset.get(name)
        return spelled(name) + (f" ({variable} is only known once it runs)" if variable else "")

    def run(self, model: ModelSpec, num_gpus: int) -> Run:
        """The run on this many GPUs.

        Raises SpecError where an argument that Megatron needs is missing or malformed.
        """
        faults = [
            Fault(self.shown(name), None, "is not in the arguments", "give the script that sets it")
            for name in self.needed
            if word(self.words, name) is None
        ]
        if faults:
            raise SpecError(faults)
        layout = read_arguments(self.words, model.num_hidden_layers, num_gpus)
        read = Layout.model_validate(layout)
        batch = whole(self.words, "global_batch_size", read.micro_batch_size * read.dp_degree)
        release = self.release
        refused, foreign = self.flags.judged(release)
        if not self.ran:
            refused += muon_faults(self.words, release)
            refused += assertions(self.words, read, model.num_hidden_layers, batch, release)
        return Run(
            training=self._training(batch),
            layout=layout,
            notes=(*self._notes(read, batch), *foreign),
            refusals=tuple(refused),
        )

    def _training(self, batch: int) -> dict[str, object]:
        words = self.words
        clip = number(words, "clip_grad", 1.0)
        training: dict[str, object] = {
            "trainer": self.trainer,
            "global_batch_size": batch,
            "max_grad_norm": clip if clip > 0 else None,
        }
        if "seq_length" in words:
            training["seq_len"] = whole(words, "seq_length")
        hidden = {"overlap_grad_reduce", "use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"}
        changed = {"dp": False} if hidden.isdisjoint(words) else {}
        if "no_overlap_p2p_communication" in words:
            changed["pp"] = False
        if "overlap_moe_expert_parallel_comm" in words:
            changed["ep"] = True
        if changed:
            training["overlap"] = changed
        backend = word(words, "attention_backend")
        version = word(words, "flash_attention_version")
        if version == "3" and backend in (None, "auto", "flash"):
            training["attention_kernel"] = "flash3"
        elif backend in ATTENTION_KERNELS:
            training["attention_kernel"] = ATTENTION_KERNELS[backend]
        if word(words, "optimizer") == "sgd":
            training["optimizer"] = "sgd"
        elif word(words, "optimizer") in MUON:
            training["optimizer"] = "muon"
            mode = word(words, "muon_tp_mode")
            if mode in get_args(MuonTpMode):
                training["muon_tp_mode"] = mode
        elif word(words, "exp_avg_dtype") == "bf16":
            training["optimizer"] = "adamw-bf16-states"
        switches = {
            "qk_clip": "qk_clip" in words,
            "fused_cross_entropy": fuses_cross_entropy(words),
            "expandable_segments": self.expandable,
        }
        training |= {name: True for name, on in switches.items() if on}
        capacity = number(words, CAPACITY, -1.0)
        if capacity > 0 and PADDED in words:
            training["moe_capacity_factor"] = capacity
        graphs = read_graphs(words)
        if graphs is not None:
            training["cuda_graphs"] = graphs
        if self.version is not None:
            training["trainer_version"] = self.version
        if "save" in words and word(words, "save_interval") is not None:
            mode = "async" if "async_save" in words else "sync"
            training["checkpoint"] = {"interval_steps": whole(words, "save_interval"), "mode": mode}
        return training

    def _notes(self, layout: Layout, global_batch_size: int) -> Iterator[str]:
        words = self.words
        method, layers = word(words, "recompute_method"), word(words, "recompute_num_layers")
        if self.skipped:
            shown = "; ".join(text[:160] for text in self.skipped)
            yield f"not read, since only running it tells: {shown}"
        if "vocab_size" not in words and self.tokens is not None and self.model.value is not None:
            yield f"its tokenizer is taken to have {self.tokens:,} tokens"
        if method == "uniform" and layers not in (None, "1"):
            yield f"recomputing {layers} layers at a time is priced as one by one"
        if method == "block":
            yield f"recomputing the first {layers} layers of each stage is priced as {layout.ac}"
        optimizer = word(words, "optimizer")
        if optimizer not in (None, "adam", "sgd", *MUON):
            yield f"optimizer {optimizer} is priced as Adam"
        if "rampup_batch_size" in words:
            yield "the batch is priced at its final size"
        size = int(microbatches_per_round(layout.pp, layout.num_microbatches(global_batch_size)))
        rounds = whole(words, GROUP, size)
        if layout.pp > 1 and layout.virtual_stages > 1 and rounds != size:
            yield f"rounds of {rounds} microbatches are priced as rounds of {size}"
        if "fp8_param_gather" in words and layout.zero_stage and not layout.float8_all_gather:
            yield f"--fp8-param-gather of {layout.precision} is priced as a gather in 16 bits"
        latent = "multi_latent_attention" in words
        if latent and "qk_layernorm" not in words:
            yield (
                "without --qk-layernorm the latent queries, keys and values have no norms: priced "
                "with them"
            )
        if latent and "tp_comm_overlap" in words:
            yield "--tp-comm-overlap is switched off by Megatron-LM for multi-latent attention"
        yield from unpriced(words)


def find_command(text: str, files: Mapping[str, str] | None = None) -> Command:
    """The command that starts Megatron: of several, the one with the most of its arguments.

    Raises SpecError where there is none.
    """
    remedy = "give the script that calls pretrain_gpt.py"
    return best_command(commands_of(text, files), _rating, "Megatron-LM", remedy)


def named_by(text: str) -> list[str]:
    """Files that a script names: those it reads in, and DeepSpeed's JSON."""
    script = read_script(text)
    commands = [" ".join(field.text for field in command) for command in script.commands]
    return script.sourced + [name for text in commands for name in megatron_deepspeed.named(text)]


def _rating(command: Command) -> int:
    return 2 * len(_KNOWN & set(command.words())) + any(
        _PROGRAM.search(text) for text in command.texts
    )


def say(spec: CurrentSpec, asked: str | None = None) -> StatedMegatron:
    """Reads a script. Raises SpecError where no command in it starts Megatron.

    asked: the release that the job names.
    """
    command = find_command(spec.text, spec.files)
    script = command.script
    expandable = any("expandable_segments:True" in (script.value(name) or "") for name in ALLOCATOR)
    skipped = tuple(
        text
        for text in script.skipped
        if _RELEVANT & {plain_name(one) for one in text.split() if one.startswith("--")}
    )
    flags, words = _given_flags(command), command.words()
    refuse_others(command)
    unset = _unset(spec.text, words)
    lost = [name for name in script.sourced if name not in spec.files]
    if lost and (hidden := [spelled(name) for name in unset if name in _RELEVANT]):
        rule = f"is read in, is not there, and {', '.join(hidden)} may come from it"
        raise fault("current", lost[0], rule, "put it beside the script")
    deepspeed = megatron_deepspeed.MARK in words
    zero = megatron_deepspeed.zero_of(command, spec.files) if deepspeed else None
    skipped += (megatron_deepspeed.UNREAD,) if deepspeed and zero is None else ()
    return StatedMegatron(
        words=megatron_deepspeed.read_deepspeed(words, zero) if deepspeed else words,
        trainer=megatron_deepspeed.NAME if deepspeed else "megatron",
        ran=deepspeed,
        flags=GivenFlags(program="", given={}) if deepspeed else flags,
        asked=asked,
        machine=machine_of(command),
        expandable=expandable,
        skipped=skipped,
        unset=unset,
        absent=f"; {', '.join(lost)}, which it reads in, is not there" if lost else "",
    )


def _unset(text: str, words: Words) -> dict[str, str]:
    """Arguments without a value -> the variable that is written there."""
    found = {
        name: re.search(rf"{spelled(name)}[\s=]+['\"]?(\$\{{?\w+\}}?)", text)
        for name, values in words.items()
        if not any(values)
    }
    return {name: variable[1] for name, variable in found.items() if variable is not None}


def say_log(spec: CurrentSpec) -> StatedMegatron:
    values = dumped(spec.text)
    world = values.get("world_size", "")
    return StatedMegatron(
        words=words_of(values),
        machine=Machine(num_gpus=int(world) if world.isdigit() else None),
        ran=True,
    )


def _given_flags(command: Command) -> GivenFlags:
    """The words after the program's name; all of them where no program is named."""
    texts = command.texts
    at = next((index for index, text in enumerate(texts) if text.endswith(".py")), None)
    if at is None:
        return GivenFlags(program="", given={})
    own = replace(command, fields=command.fields[at + 1 :])
    known = not command.script.unset and not command.script.skipped
    return GivenFlags(
        program=texts[at].rpartition("/")[2],
        given={
            placed.flag.text.partition("=")[0]: [text for text in placed.words if text]
            for placed in own.flags
        },
        whole=known,
    )


def megatron_changes(
    stated: StatedMegatron, winner: Layout, exported: Export, global_batch_size: int
) -> tuple[dict[str, Sequence[str] | None], list[str]]:
    """(argument -> its new values, or None to remove it; what arguments cannot express)."""
    wanted = exported_words(exported)
    layers, goal = exported.num_layers, winner.model_dump()
    changes: dict[str, Sequence[str] | None] = {}
    words: dict[str, Sequence[str]] = dict(stated.words)

    def change(name: str, new: Sequence[str] | None) -> None:
        held = words.pop(name, None)
        if new is not None:
            words[name] = new
        if (None if held is None else [*held]) != (None if new is None else [*new]):
            changes[name] = new

    def refused() -> set[str]:
        faults = assertions(words, winner, layers, global_batch_size, stated.release)
        return {plain_name(fault.field) for fault in faults}

    for fields, names in GROUPS.items():
        now = canonical(
            Layout.model_validate(read_arguments(words, layers, winner.num_gpus)),
            layers,
            "megatron",
        ).model_dump()
        if all(now[name] == goal[name] for name in fields):
            continue
        muon = ("optimizer",) if "zero_stage" in fields and word(words, "optimizer") in MUON else ()
        for name in (*names, *muon):
            change(name, wanted.get(name))
    micro = winner.micro_batch_size * winner.dp_degree
    if whole(words, "global_batch_size", micro) != global_batch_size:
        change("global_batch_size", [str(global_batch_size)])
    for name in FOLLOWING:
        if name in wanted or name == GROUP:
            change(name, wanted.get(name))
    while contrary := sorted(refused() & words.keys() - wanted.keys()):
        for name in contrary:
            change(name, None)
    connections = "use_megatron_fsdp" in wanted and "use_megatron_fsdp" not in stated.words
    return changes, [ONE_CONNECTION] * connections


def edited_script(spec: CurrentSpec, changes: Mapping[str, Sequence[str] | None]) -> str:
    return edit_flags(
        spec.text, partial(find_command, files=spec.files), changes, spelled, _RELEVANT.__contains__
    )
