"""Judges a script as Megatron-LM does before it trains: flags it does not know, its assertions.

Rules on layouts (`planner.rules`) say the rest. A script that a fork or a release before those of
`planner.catalog.megatron_arguments` reads may have flags of its own; they are named, not refused.
Sources: Megatron-LM core 0.14 to 0.20 megatron/training/arguments.py (validate_args);
    megatron/core/transformer/transformer_config.py (__post_init__);
    megatron/core/pipeline_parallel/schedules.py (forward_backward_pipelining_with_interleaving).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.catalog.megatron_arguments import (
    TABLES,
    alike,
    argument,
    arguments,
    pairs,
    releases_of,
)
from planner.errors import Fault, fault
from planner.export.commands import spelled
from planner.export.megatron import MUON
from planner.export.megatron_read import Words, whole, word
from planner.intake.trainer_files.flags import Command
from planner.schedules.depth_first import microbatches_per_round
from planner.specs.layout import Layout
from planner.trainers.registry import TRAINERS, release_of
from planner.trainers.release import Release

OWN_PROGRAMS = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py")
FORK_FLAGS = frozenset({"--enable-zero-bubble", "--zero-bubble-max-pending-backward"})
OF_FORKS = frozenset({("--fp4-recipe", "mxfp4")})  # ROCm/Megatron-LM
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EACH, STAGES = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
LAYOUT_TEXT = "pipeline_model_parallel_layout"
GONE = {
    "checkpoint_activations": "--recompute-activations", "batch_size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction", "model_parallel_size": "--tensor-model-parallel-size",
}  # fmt: skip
CORRECT, OUT, ONE_OUT = "correct it", "take it out", "take one of them out"
LEVELS, SPLIT = "hierarchical_context_parallel_sizes", "sequence_parallel"  # the latter: with TP
# values where an argument is not given, as far as the table of pairs asks
USUAL: Words = {
    "recompute_modules": ["core_attn"], "moe_token_dispatcher_type": ["allgather"],
    "optimizer": ["adam"], "ckpt_format": ["torch_dist"], "fp8_recipe": ["delayed"],
    "attention_dropout": ["0.1"], "position_embedding_type": ["learned_absolute"],
}  # fmt: skip
MODULES = frozenset(
    {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts",
        "gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"}
)  # fmt: skip
# programs of other models, and others that do not train; flags of other models, and of RL (slime)
_OTHERS = re.compile(
    r"(?:pretrain_(?:bert|t5|ict|retro|vision|vlm|mimo)|train_mimo|generat|convert|preprocess"
    r"|inference|evaluat)[^/]*\.py$|tasks/main"
)
_OTHER_FLAGS = ("language_model_type", "rollout_batch_size")
Broken = tuple[str, str, str]
"""Flag that an assertion is about, which a rewritten script may do without; rule; remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlags:
    """Flags that a command gives to its program.

    program: the file that it starts, without its folder; "" where it is not known.
    given: flag, as it is written -> its values.
    whole: whether every part of the command is known.
    """

    program: str
    given: Mapping[str, Sequence[str]]
    whole: bool = True

    def release(self) -> str | None:
        """The newest release whose parser has every flag; None for the one that is the default."""
        usual = release_of("megatron", None)
        known = [flag for flag in self.given if flag in arguments()]
        for one in (usual.known, *reversed(usual.history)):
            release = release_of("megatron", one.number)
            if knows(release) and all(argument(flag, one.number) for flag in known):
                return None if one is usual.known else one.number
        return None

    def judged(self, release: Release) -> tuple[list[Fault], list[str]]:
        """Faults of what the parser refuses, and arguments that it may not know."""
        faults, foreign, newer = [], [], []
        strict = self.program in OWN_PROGRAMS and knows(release)
        for flag, words in self.given.items():
            row = argument(flag, release.number)
            if flag in FORK_FLAGS:
                continue
            if flag not in arguments():
                near = alike(flag)
                if strict:
                    faults.append(_unknown(flag, words, near))
                else:
                    foreign.append(f"{flag} ({near}?)" if near else flag)
            elif row is None and release.named.text and strict:
                remedy = "take it out, or name another training.trainer_version"
                rule = f"is not an argument of {release.number}; {releases_of(flag)} has it"
                faults.append(Fault(flag, " ".join(words) or None, rule, remedy))
            elif row is None:
                newer.append(f"{flag} ({releases_of(flag)})")
            elif (flag, *words) in OF_FORKS:
                continue
            elif self.whole and all(words) and (refusal := row.refusal(words)):
                faults.append(Fault(flag, " ".join(words) or None, refusal, CORRECT))
        notes = []
        if foreign:
            notes.append(
                "read without flags that no release of Megatron-LM from 0.14 on has, whatever they "
                f"change (optimizer, norms, positions, ...): {', '.join(foreign)}"
            )
        if newer:
            notes.append(f"priced by the rules of {release.number}: {', '.join(newer)}")
        return faults, notes


def refuse_others(command: Command) -> None:
    """Raises SpecError for a program that trains no language model, or trains none at all."""
    programs = [text for text in command.texts if text.endswith(".py") and _OTHERS.search(text)]
    programs += [spelled(name) for name in _OTHER_FLAGS if name in command.words()]
    if programs:
        rule = "starts something else than the training of a GPT, which is not priced"
        remedy = "give a script of pretrain_gpt.py or pretrain_hybrid.py"
        raise fault("current", programs[0], rule, remedy)


def knows(release: Release) -> bool:
    """Whether the arguments of a release's parser are known: from the oldest of the file on."""
    return release.since(TABLES[0])


def _unknown(flag: str, words: Sequence[str], near: str | None) -> Fault:
    rule = "is no argument of Megatron-LM (core 0.14 to 0.20), which stops at it"
    remedy = (
        f"write {near}"
        if near
        else "take it out; where a fork or an older release has it, name that in "
        "training.trainer_version"
    )
    return Fault(flag, " ".join(words) or None, rule, remedy)


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A run as its words and its layout describe it. microbatches: of a step."""

    words: Words
    layout: Layout
    layers: int
    microbatches: int

    def has(self, *names: str) -> bool:
        return all(name in self.words for name in names)

    def word(self, name: str) -> str | None:
        return word(self.words, name)

    def number(self, name: str, default: int = 0) -> int:
        return whole(self.words, name, default)

    @property
    def modules(self) -> Sequence[str]:
        return self.words.get("recompute_modules", USUAL["recompute_modules"])

    def holds(self, condition: str) -> bool:
        """Whether a condition of the table of pairs holds."""
        name, sign, values = _atom(condition)
        if sign == ">":
            return bool(getattr(self.layout, name) > int(values[0]))
        given = self.words.get(name) or USUAL.get(name, ())
        return not set(values).isdisjoint(given) if sign else name in self.words

    @property
    def rank_layers(self) -> int:
        """Layers with embedding and loss, where they count."""
        ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        return self.layers + sum(self.has(end) for end in ends)


def assertions(
    words: Words, layout: Layout, layers: int, global_batch_size: int, release: Release
) -> list[Fault]:
    """Assertions of Megatron that the flags of a script break, each once."""
    words = {name: one for name, one in words.items() if name != SPLIT or layout.tp > 1}
    if "recompute_activations" in words:
        words = {**words, "recompute_granularity": ["selective"]}
    run = ScriptRun(words, layout, layers, layout.num_microbatches(global_batch_size))
    broken = [Fault(spelled(name), run.word(name), *why) for name, *why in _rest(run)]
    return [*_pairs(run, release), *broken, *_stages(run), *_rounds(run)]


def _pairs(run: ScriptRun, release: Release) -> Iterator[Fault]:
    """Yields violated pairs: arguments without what they need, or beside what they exclude."""
    number = release.number if release.named.text else None
    for pair in pairs():
        met = pair.holds_in(number) and all(map(run.holds, pair.given))
        found = [other for other in pair.others if run.holds(other)]
        if met and bool(found) is pair.excludes:
            name, named = _atom(pair.given[0])[0], [_shown(one) for one in found or pair.others]
            rule = f"{'excludes' if pair.excludes else 'needs'} {' or '.join(named)}"
            remedy = ONE_OUT if pair.excludes else f"add {named[0].partition(' or ')[0]}"
            yield Fault(spelled(name), run.word(name), rule, remedy)


def _rest(run: ScriptRun) -> Iterator[Broken]:
    if run.word("recompute_granularity") == "selective" and not MODULES.issuperset(run.modules):
        yield "recompute_modules", f"knows only {', '.join(sorted(MODULES))}", CORRECT
    unsplit = not run.has("kv_channels") and not run.has("multi_latent_attention")
    if unsplit and run.number("hidden_size") % run.number("num_attention_heads", 1):
        yield "hidden_size", "does not divide by --num-attention-heads", "give --kv-channels"
    positions = "max_position_embeddings"
    if run.has(positions) and run.number(positions) < run.number("seq_length"):
        yield positions, "is less than --seq-length", "set it to --seq-length or more"
    sizes = run.words.get(LEVELS, ())
    if sizes and math.prod(int(one) for one in sizes if one.isdigit()) != run.layout.cp:
        yield LEVELS, f"has another product than cp={run.layout.cp}", CORRECT
    for name in GONE.keys() & run.words.keys():
        yield name, "is no longer valid", f"use {GONE[name]} instead"


def _atom(text: str) -> tuple[str, str, list[str]]:
    """Splits a condition of the table into argument, sign and values."""
    name, sign, values = re.split(r"([=>]|$)", text, maxsplit=1)
    return name, sign, values.split(",") if sign else []


def _shown(text: str) -> str:
    name, sign, values = _atom(text)
    shown = f"{name} above" if sign == ">" else spelled(name)
    return " ".join([shown, " or ".join(values)] if sign else [shown])


def muon_faults(words: Words, release: Release) -> Iterator[Fault]:
    """Faults in how a release shards Muon (core 0.16 and 0.17: "Muon optimizer check")."""
    muon, given = TRAINERS["megatron"].at(release).muon, word(words, "optimizer")
    if given not in MUON:
        return
    rule = f"is not for {given} in Megatron-LM {release.number}"
    if muon.named_sharded and "use_distributed_optimizer" in words:
        remedy = "take it out, and set --optimizer dist_muon"
        yield Fault("--use-distributed-optimizer", None, rule, remedy)
    if not (muon.hides_whole if given == MUON[0] else muon.hides_sharded):
        for name in {"overlap_grad_reduce", "overlap_param_gather"} & words.keys():
            yield Fault(spelled(name), None, rule, OUT)


def _rounds(run: ScriptRun) -> Iterator[Fault]:
    """Rounds of the interleaved schedule, of which none may hold fewer than pp microbatches."""
    pp, count = run.layout.pp, run.microbatches
    if pp == 1 or run.layout.virtual_stages == 1 or count < pp:
        return  # fewer microbatches than pp are a rule's concern
    size, flag = run.number(GROUP, pp), spelled(GROUP)
    fitting = microbatches_per_round(pp, count)
    remedy = (
        f"set it to {fitting}"
        if count % fitting == 0
        else "choose --global-batch-size so that the microbatches are a multiple of pp"
    )
    if not pp <= size <= count:
        yield Fault(flag, size, f"is not between pp={pp} and {count} microbatches", remedy)
    elif 0 < count % size < pp:
        rule = (
            f"makes rounds of {size} of {count} microbatches: the last has {count % size}, fewer "
            f"than pp={pp}"
        )
        given = "" if run.has(GROUP) else " (its default is pp)"
        yield Fault(flag, size, rule + given, remedy)


def _stages(run: ScriptRun) -> Iterator[Fault]:
    """Faults in how layers are split over pipeline ranks and stages."""
    pp, layers = run.layout.pp, run.rank_layers
    said = [name for name in (EACH, STAGES, LAYOUT_TEXT) if run.has(name)]
    if len(said) > 1:
        one, other = (spelled(name) for name in said[:2])
        yield Fault(other, run.word(said[1]), f"excludes {one}", "keep one of them")
        return
    if said == [LAYOUT_TEXT]:
        split = run.layout.layers_per_stage or ()
        if len(split) % pp:
            rule = f"has {len(split)} stages, no multiple of pp={pp}"
            yield Fault("--pipeline-model-parallel-layout", run.word(LAYOUT_TEXT), rule, CORRECT)
        return
    ends = run.has(FIRST) or run.has(LAST)
    each, virtual = run.number(EACH, 1), run.number(STAGES, 1)
    if run.has(EACH):
        if ends:
            rule = "excludes first and last ranks with layers of their own"
            remedy = "use --num-virtual-stages-per-pipeline-rank"
            yield Fault("--num-layers-per-virtual-pipeline-stage", each, rule, remedy)
            return
        if each < 1 or (layers % pp == 0 and layers // pp % each):
            rule = f"does not divide the {layers // pp} layers of a pipeline rank"
            remedy = "give a divisor of them"
            yield Fault("--num-layers-per-virtual-pipeline-stage", each, rule, remedy)
            return
        virtual = layers // pp // each
    if virtual > 1 and pp == 1:
        rule = "makes interleaved stages, and --pipeline-model-parallel-size is 1"
        flag = spelled(said[0])
        yield Fault(flag, run.word(said[0]), rule, OUT)
    elif ends:
        yield from _uneven(run, virtual)
    elif layers % (pp * virtual):
        rule = (
            f"{layers} layers{', embedding and loss counted,' * (layers != run.layers)} do not "
            f"divide over {pp} pipeline ranks{f' x {virtual} stages' * (virtual > 1)}"
        )
        remedy = "give --pipeline-model-parallel-layout, or another number of stages"
        yield Fault("--num-layers", run.layers, rule, remedy)


def _uneven(run: ScriptRun, virtual: int) -> Iterator[Fault]:
    """First and last ranks with layers of their own, and what is left for those between."""
    ranks, left = run.layout.pp, run.layers
    for name in (FIRST, LAST):
        if run.has(name):
            own = run.number(name)
            if own < 1 or own % virtual:
                rule = f"is no multiple of {virtual} stages a rank" if own > 0 else "is below 1"
                yield Fault(spelled(name), own, rule, CORRECT)
                return
            ranks, left = ranks - 1, left - own
    if bool(left) != bool(ranks) or (ranks > 0 and left % (ranks * virtual)):
        name = FIRST if run.has(FIRST) else LAST
        rule = (
            f"leaves {left} layers to {ranks} pipeline ranks between"
            f"{f' of {virtual} stages' * (virtual > 1)}"
        )
        remedy = "choose both so that the rest divides, or give --pipeline-model-parallel-layout"
        yield Fault(spelled(name), run.number(name), rule, remedy)
