"""Reads a Megatron-LM argument script as a job and a layout, and writes another layout into it.

Source: Megatron-LM core 0.14 megatron/training/arguments.py (defaults and derived arguments),
    examples/*/train_*.sh.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import get_args

from planner.errors import Fault, SpecError
from planner.export.base import Export
from planner.export.commands import spelled
from planner.export.megatron import MUON
from planner.export.megatron_graphs import ARGUMENTS as GRAPH_ARGUMENTS
from planner.export.megatron_graphs import read_graphs
from planner.export.megatron_mixers import mixer_keys, with_layers
from planner.export.megatron_model import MLA
from planner.export.megatron_read import DEGREES, exported_words, read_arguments, whole, word
from planner.intake.trainer_files.canonical import canonical
from planner.intake.trainer_files.flags import Command, best_command, edit_flags, plain_name
from planner.intake.trainer_files.launch import machine_of
from planner.intake.trainer_files.megatron_judge import GROUP, GivenFlags, assertions, muon_faults
from planner.intake.trainer_files.megatron_log import dumped, words_of
from planner.intake.trainer_files.megatron_unpriced import fuses_cross_entropy, unpriced
from planner.intake.trainer_files.shapes import by_hint, named
from planner.intake.trainer_files.statement import Machine, Run, StatedModel
from planner.schedules.depth_first import microbatches_per_round
from planner.specs.current import CurrentSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import MuonTpMode
from planner.trainers.megatron_models import adds_a_token
from planner.trainers.registry import release_of

Words = Mapping[str, Sequence[str]]
_PROGRAM = re.compile(r"pretrain_\w+\.py|megatron")
_KNOWN = frozenset(
    {"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size",
        "num_layers", "hidden_size"}
)  # fmt: skip
# `--attention-backend`; `auto` is what the release brings. Which flash-attn is installed, a script
# does not say: 2, until somebody builds 3.
ATTENTION_KERNELS = {"flash": "flash2", "fused": "cudnn", "unfused": "unfused", "local": "unfused"}
NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Fields of a layout -> the arguments that set them together. Degrees come first, since the others
# are read with them.
GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    *(((name,), (argument,)) for name, argument in DEGREES.items()),
    (
        ("moe_dispatcher",),
        ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
    ),
    (("cp_method",), ("cp_comm_type",)),
    (("sequence_parallel",), ("sequence_parallel",)),
    (("async_tp",), ("tp_comm_overlap",)),
    (
        ("pp_schedule", "virtual_stages", "layers_per_stage"),
        (
            "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout", "hybrid_layer_pattern",
            "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split", "enable_zero_bubble",
            "zero_bubble_max_pending_backward", GROUP,
        ),
    ),
    (
        ("zero_stage", "dp_replicate"),
        (
            "use_distributed_optimizer", "num_distributed_optimizer_instances", "use_megatron_fsdp",
            "use_custom_fsdp", "use_torch_fsdp2",
            "data_parallel_sharding_strategy", "overlap_param_gather",
            "no_gradient_accumulation_fusion",
        ),
    ),
    (("micro_batch_size",), ("micro_batch_size",)),
    (
        ("ac",),
        ("recompute_activations", "recompute_granularity", "recompute_method",
            "recompute_num_layers", "recompute_modules"),
    ),
    (
        ("precision", "float8_all_gather", "param_dtype"),
        ("fp8_format", "fp8", "fp8_recipe", "fp8_param_gather", "fp4_format", "fp4_recipe",
         "bf16", "fp16"),
    ),
    (("reduce_dtype",), ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32")),
    (
        ("cpu_offload", "optimizer_offload_fraction"),
        ("optimizer_cpu_offload", "optimizer_offload_fraction"),
    ),
    (("activation_offload_layers",), ("cpu_offloading_num_layers",)),
)  # fmt: skip
ONE_CONNECTION = (
    "--use-megatron-fsdp refuses CUDA_DEVICE_MAX_CONNECTIONS=1: take that out where it is set"
)
# Arguments that some layouts need beside their own.
FOLLOWING = (GROUP, "moe_router_dtype", "ckpt_format", "use_precision_aware_optimizer")
_RELEVANT = (
    frozenset(name for _, names in GROUPS for name in names)
    | _KNOWN
    | {"global_batch_size", "seq_length", "num_experts"}
    | GRAPH_ARGUMENTS
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedMegatron:
    """A Megatron run.

    words: argument, named with _ -> its values.
    flags: what the command gives to its program, as it is written there.
    asked: the release that the job names; None for none.
    ran: whether it is of a log, so that Megatron did not stop at it.
    skipped: parts of a script that are only known once it runs.
    needed: arguments without which there is no run.
    """

    words: Words
    flags: GivenFlags = field(default_factory=lambda: GivenFlags(program="", given={}))
    asked: str | None = None
    machine: Machine = field(default_factory=Machine)
    expandable: bool = False
    ran: bool = False
    skipped: tuple[str, ...] = ()
    needed: tuple[str, ...] = NEEDED[3:]

    @property
    def trainer(self) -> str:
        return "megatron"

    @property
    def version(self) -> str | None:
        """The newest release whose parser has every flag; None for the default one."""
        return self.flags.release()

    @property
    def model(self) -> StatedModel:
        """The catalogue's model with these shapes, else the shapes; None where some are missing."""
        words = with_layers(self.words)
        missing = [name for name in NEEDED[:3] if word(words, name) is None]
        if missing:
            lacking = f"it has no {', '.join(map(spelled, missing))}"
            return StatedModel(value=None, lacking=lacking)
        keys = model_keys(words)
        null = word(self.words, "tokenizer_type") == "NullTokenizer"
        if null and "vocab_size" in keys:
            release = release_of("megatron", self.asked or self.version)
            keys["vocab_size"] = whole(self.words, "vocab_size") + adds_a_token(release)
        hint = (word(self.words, "tokenizer_model") or "").rstrip("/").rpartition("/")[2].lower()
        if "vocab_size" in keys:
            return named(keys, hint=hint)
        known = by_hint({**keys, "vocab_size": 1}, leave_open=frozenset({"vocab_size"}), hint=hint)
        return (
            StatedModel(value=known)
            if known is not None
            else StatedModel(value=None, lacking="it has no --vocab-size")
        )

    def run(self, model: ModelSpec, num_gpus: int) -> Run:
        """The run on this many GPUs.

        Raises SpecError where an argument that Megatron needs is missing or malformed.
        """
        faults = [
            Fault(spelled(name), None, "is not in the arguments", "give the script that sets it")
            for name in self.needed
            if word(self.words, name) is None
        ]
        if faults:
            raise SpecError(faults)
        layout = read_arguments(self.words, model.num_hidden_layers, num_gpus)
        micro, ranks = whole(self.words, "micro_batch_size"), _ranks(layout)
        batch = whole(self.words, "global_batch_size", micro * ranks)
        read = Layout.model_validate(layout)
        release = release_of("megatron", self.asked or self.version)
        refused, foreign = self.flags.judged(release)
        if not self.ran:
            refused += muon_faults(self.words, release)
            refused += assertions(self.words, read, model.num_hidden_layers, batch)
        return Run(
            training=self._training(batch),
            layout=layout,
            notes=(*self._notes(read, batch), *foreign),
            refusals=tuple(refused),
        )

    def _training(self, batch: int) -> dict[str, object]:
        words = self.words
        clip = float(word(words, "clip_grad") or 1.0)
        training: dict[str, object] = {
            "trainer": self.trainer,
            "global_batch_size": batch,
            "max_grad_norm": clip if clip > 0 else None,
        }
        if "seq_length" in words:
            training["seq_len"] = whole(words, "seq_length")
        sharded = (
            "use_megatron_fsdp" in words or "use_custom_fsdp" in words or "use_torch_fsdp2" in words
        )
        overlap = {
            "dp": "overlap_grad_reduce" in words or sharded,
            "pp": "no_overlap_p2p_communication" not in words,
        }
        changed = {name: False for name, on in overlap.items() if not on}
        if "overlap_moe_expert_parallel_comm" in words:
            changed["ep"] = True
        if changed:
            training["overlap"] = changed
        backend = word(words, "attention_backend")
        if backend in ATTENTION_KERNELS:
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
        if "qk_clip" in words:
            training["qk_clip"] = True
        if fuses_cross_entropy(words):
            training["fused_cross_entropy"] = True
        if self.expandable:
            training["expandable_segments"] = True
        graphs = read_graphs(words)
        if graphs is not None:
            training["cuda_graphs"] = graphs
        if self.version is not None:
            training["trainer_version"] = self.version
        if "save" in words and word(words, "save_interval") is not None:
            mode = "async" if "async_save" in words else "sync"
            training["checkpoint"] = {"interval_steps": whole(words, "save_interval"), "mode": mode}
        return training

    def _notes(self, layout: Layout, global_batch_size: int) -> list[str]:
        words = self.words
        count = layout.num_microbatches(global_batch_size)
        size = int(microbatches_per_round(layout.pp, count))
        rounds = whole(words, GROUP, size)
        method, layers = word(words, "recompute_method"), word(words, "recompute_num_layers")
        rows = (
            (
                bool(self.skipped),
                f"not read, since only running it tells: {'; '.join(self.skipped)}",
            ),
            (
                method == "uniform" and layers not in (None, "1"),
                f"recomputing {layers} layers at a time is priced as one by one",
            ),
            (
                method == "block",
                f"recomputing the first {layers} layers of each stage is priced as {layout.ac}",
            ),
            (
                word(words, "optimizer") not in (None, "adam", "sgd", *MUON),
                f"optimizer {word(words, 'optimizer')} is priced as Adam",
            ),
            ("rampup_batch_size" in words, "the batch is priced at its final size"),
            (
                layout.pp > 1 and layout.virtual_stages > 1 and rounds != size,
                f"rounds of {rounds} microbatches are priced as rounds of {size}",
            ),
            (
                "multi_latent_attention" in words and "qk_layernorm" not in words,
                "without --qk-layernorm the latent queries, keys and values have no norms: priced "
                "with them",
            ),
            (
                "multi_latent_attention" in words and "tp_comm_overlap" in words,
                "--tp-comm-overlap is switched off by Megatron-LM for multi-latent attention",
            ),
            *unpriced(words),
        )
        return [text for holds, text in rows if holds]


def _ranks(layout: Mapping[str, object]) -> int:
    replicate, shard = layout["dp_replicate"], layout["dp_shard"]
    assert isinstance(replicate, int)
    assert isinstance(shard, int)
    return replicate * shard


def model_keys(words: Words) -> dict[str, object]:
    """Megatron's model arguments as Hugging Face keys, completed by Megatron's defaults.

    Raises SpecError where one is malformed.
    """
    hidden, heads, layers = (
        whole(words, name) for name in ("hidden_size", "num_attention_heads", "num_layers")
    )
    gated = "swiglu" in words or "quick_geglu" in words
    wide = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    biased = "disable_bias_linear" not in words
    position = {"learned_absolute": "learned", "none": "none"}.get(
        word(words, "position_embedding_type") or "learned_absolute", "rope"
    )
    norm = {"RMSNorm": "rmsnorm"}.get(word(words, "normalization") or "LayerNorm", "layernorm")
    keys: dict[str, object] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": whole(words, "ffn_hidden_size", wide),
        "mlp": "swiglu" if gated else "squared-relu" if "squared_relu" in words else "gelu",
        "norm": norm,
        "norm_bias": norm == "layernorm",
        "position_embedding": position,
        "tie_word_embeddings": "untie_embeddings_and_output_weights" not in words,
        "attention_bias": biased or "add_qkv_bias" in words,
        "attention_output_bias": biased,
        "mlp_bias": biased and "num_experts" not in words,
        "attention_sinks": word(words, "softmax_type") == "learnable",
        "qk_norm": "head"
        if "qk_layernorm" in words and "multi_latent_attention" not in words
        else "none",
    }
    if position == "learned":
        keys["max_position_embeddings"] = whole(
            words, "max_position_embeddings", whole(words, "seq_length")
        )
    if "vocab_size" in words:
        keys["vocab_size"] = whole(words, "vocab_size")
    if "multi_latent_attention" in words:
        keys |= {ours: whole(words, theirs, usual) for theirs, (ours, usual) in MLA.items()}
        keys |= {"q_lora_rank": whole(words, "q_lora_rank")} if "q_lora_rank" in words else {}
    else:
        groups = (
            whole(words, "num_query_groups", heads) if "group_query_attention" in words else heads
        )
        keys |= {
            "head_dim": whole(words, "kv_channels", hidden // heads),
            "num_key_value_heads": groups,
        }
    window = word(words, "window_size")
    if window is not None and window.partition(",")[0].strip("( ").isdigit():
        keys["sliding_window"] = int(window.partition(",")[0].strip("( "))
        kinds = {True: "sliding_attention", False: "full_attention"}
        keys["layer_types"] = [
            kinds[one] for one in _placed(words, "window_attn_skip_freq", layers)
        ]
    keys |= _experts(words, layers) if "num_experts" in words else {}
    variant = "experimental_attention_variant" in words
    linear = _placed(words, "linear_attention_freq", layers) if variant else []
    return {**keys, **mixer_keys(words, linear)}


def _experts(words: Words, layers: int) -> dict[str, object]:
    places = _moe_places(word(words, "moe_layer_freq") or "1", layers)
    dense_width = whole(words, "ffn_hidden_size", 4 * whole(words, "hidden_size"))
    width = whole(words, "moe_ffn_hidden_size", dense_width)
    keys: dict[str, object] = {
        "num_experts": whole(words, "num_experts"),
        "num_experts_per_tok": whole(words, "moe_router_topk", 2),
        "moe_intermediate_size": width,
        "moe_latent_size": whole(words, "moe_latent_size", 0),
    }
    dense = [index for index, moe in enumerate(places) if not moe]
    if not dense:
        keys["intermediate_size"] = None
    elif dense == list(range(len(dense))):
        keys["first_k_dense_replace"] = len(dense)
    else:
        keys |= _regular(places, dense)
    shared = whole(words, "moe_shared_expert_intermediate_size", 0)
    if shared:
        keys |= {
            "shared_expert_intermediate_size": shared,
            "shared_expert_gate": "moe_shared_expert_gate" in words,
            "n_shared_experts": max(1, shared // width),
        }
    if "disable_bias_linear" not in words:  # transformer/moe/router.py, experts.py
        keys |= {"router_bias": True, "expert_bias": True}
    if "moe_router_enable_expert_bias" in words:
        keys["router_correction_bias"] = True
    return keys


def _regular(places: Sequence[bool], dense: list[int]) -> dict[str, object]:
    """MoE at every n-th layer, else the indices of the dense layers."""
    moe = [index for index, flag in enumerate(places) if flag]
    steps = {b - a for a, b in pairwise(moe)}
    if len(steps) == 1 and moe[0] < min(steps) and moe[-1] + min(steps) >= len(places):
        return {"moe_layer_freq": min(steps), "moe_layer_offset": moe[0]}
    return {"dense_layers": dense}


_PATTERN = re.compile(r"[\[\]\d\s,*+()]+")


def _moe_places(text: str, layers: int) -> list[bool]:
    """Which layers are MoE: every n-th, or a list such as ([0]*3+[1]*58), as Megatron evaluates it.

    Raises SpecError for any other text.
    """
    if text.isdigit() and int(text) > 0:
        return [place % int(text) == 0 for place in range(layers)]
    return _flags_of(text, layers, "--moe-layer-freq")


def _flags_of(text: str, layers: int, flag: str) -> list[bool]:
    try:
        flags = (
            _list(ast.parse(text, mode="eval").body, layers) if _PATTERN.fullmatch(text) else None
        )
    except (SyntaxError, ValueError, RecursionError):
        flags = None
    if flags is None or len(flags) != layers:
        remedy = "write for example ([0]*3+[1]*58)"
        raise SpecError(Fault(flag, text, f"is no pattern of {layers} layers", remedy))
    return [bool(flag) for flag in flags]


def _placed(words: Words, name: str, layers: int) -> list[bool]:
    """The layers that an argument chooses: all, all but every n-th, or a list."""
    text = word(words, name)
    if text is None:
        return [True] * layers
    if text.isdigit() and int(text) > 0:
        return [place % int(text) != 0 for place in range(1, layers + 1)]
    return _flags_of(text, layers, spelled(name))


def _list(node: ast.expr, most: int) -> list[int]:
    """The value of lists that are joined and repeated.

    Raises ValueError for anything else, and before it builds a list longer than `most`.
    """
    if isinstance(node, ast.List):
        return [
            item.value
            for item in node.elts
            if isinstance(item, ast.Constant) and isinstance(item.value, int)
        ]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list(node.left, most) + _list(node.right, most)
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and isinstance(node.right, ast.Constant)
    ):
        times = node.right.value
        inner = _list(node.left, most)
        if isinstance(times, int) and 0 <= times * max(1, len(inner)) <= most:
            return inner * times
    raise ValueError("no list")


def find_command(text: str) -> Command:
    """The command that starts Megatron: of several, the one with the most of its arguments.

    Raises SpecError where there is none.
    """
    return best_command(text, _rating, "Megatron-LM", "give the script that calls pretrain_gpt.py")


def _rating(command: Command) -> int:
    return 2 * len(_KNOWN & set(command.words())) + any(
        _PROGRAM.search(text) for text in command.texts
    )


def say(spec: CurrentSpec, asked: str | None = None) -> StatedMegatron:
    """Reads a script. Raises SpecError where no command in it starts Megatron.

    asked: the release that the job names.
    """
    command = find_command(spec.text)
    script = command.script
    expandable = any("expandable_segments:True" in (script.value(name) or "") for name in ALLOCATOR)
    skipped = tuple(
        text
        for text in script.skipped
        if _RELEVANT & {plain_name(one) for one in text.split() if one.startswith("--")}
    )
    return StatedMegatron(
        words=command.words(),
        flags=_given_flags(command),
        asked=asked,
        machine=machine_of(command),
        expandable=expandable,
        skipped=skipped,
    )


def say_log(spec: CurrentSpec) -> StatedMegatron:
    """Reads the arguments that a log prints."""
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

    for fields, names in GROUPS:
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
    while contrary := _contrary(words, wanted, winner, layers, global_batch_size):
        for name in contrary:
            change(name, None)
    connections = "use_megatron_fsdp" in wanted and "use_megatron_fsdp" not in stated.words
    return changes, [ONE_CONNECTION] * connections


def _contrary(
    words: Words, wanted: Words, winner: Layout, layers: int, global_batch_size: int
) -> list[str]:
    """Flags that Megatron would refuse beside the new layout, which does not set them."""
    refused = assertions(words, winner, layers, global_batch_size)
    names = dict.fromkeys(plain_name(fault.field) for fault in refused)
    return [name for name in names if name in words and name not in wanted]


def edited_script(spec: CurrentSpec, changes: Mapping[str, Sequence[str] | None]) -> str:
    """The script with these arguments changed."""
    return edit_flags(
        spec.text, find_command, changes, lambda name: spelled(name), _RELEVANT.__contains__
    )
