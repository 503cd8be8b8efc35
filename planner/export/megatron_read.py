"""Reads Megatron-LM's arguments as fields of a layout, with Megatron's defaults for the rest.

Source: Megatron-LM core 0.14 megatron/training/arguments.py,
    megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

import re
from collections.abc import Mapping, Sequence

from planner.errors import fault
from planner.export.base import Export
from planner.export.commands import plain_name, read_flags, spelled
from planner.export.megatron_settings import DEGREES
from planner.precision import PRECISIONS
from planner.specs.layout import RECOMPUTE_MODULES
from planner.trainers.megatron import CP_TYPES

Words = Mapping[str, Sequence[str]]
# precisions whose gathers in eight bits are priced; Megatron has others
GATHERED = ("float8-tensorwise", "float8-delayed")
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
FP8_RECIPES, FP4_RECIPES = (
    {
        precision.name: precision.megatron_settings[recipe]
        for precision in PRECISIONS.values()
        if recipe in precision.megatron_settings
    }
    for recipe in ("fp8_recipe", "fp4_recipe")
)
_GROUP, _ONE = re.compile(r"\(([^()]*)\)\*(\d+)"), re.compile(r"([A-Za-z|])\*(\d+)")
MOST_STAGES = 10_000
# of --hybrid-layer-pattern: ends of a stage, and of the main model
NEXT_STAGE, MORE = "|", "/"


def plain_names(flags: Words) -> dict[str, Sequence[str]]:
    """The flags without dashes: --tensor-model-parallel-size becomes tensor_model_parallel_size."""
    return {plain_name(flag): words for flag, words in flags.items()}


def exported_words(exported: Export) -> dict[str, Sequence[str]]:
    """The arguments of an export, named with _ -> their values."""
    return plain_names(read_flags(exported.arguments))


def whole(words: Words, name: str, default: int | None = None) -> int:
    """The value of an argument that is a whole number.

    Raises SpecError where it is no whole number, or is missing and has no default.
    """
    given = words.get(name)
    if given is None and default is not None:
        return default
    text = given[0] if given else None
    try:
        return int(text or "")  # as the parser's own, so that 2_000 is one
    except ValueError:
        rule = "is not a whole number" if text else "has no value that the text alone tells"
        raise fault(spelled(name), text, rule, "correct the arguments") from None


def number(words: Words, name: str, default: float) -> float:
    """The value of an argument that is a number. Raises SpecError where it is none."""
    text = word(words, name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise fault(spelled(name), text, "is not a number", "correct the arguments") from None


def word(words: Words, name: str) -> str | None:
    """The first value of an argument; None where it is not given."""
    given = words.get(name)
    return given[0] if given else None


def read_arguments(words: Words, num_layers: int, num_gpus: int) -> dict[str, object]:
    """Every field of the layout that Megatron's arguments set.

    words: argument, named with _ -> its values.
    """
    kind = word(words, "cp_comm_type") or "p2p"
    degrees = {name: whole(words, argument, 1) for name, argument in DEGREES.items()}
    # experts are split over TP unless the arguments say otherwise; without any it means nothing
    sparse = "num_experts" in words
    degrees["etp"] = whole(words, DEGREES["etp"], degrees["tp"]) if sparse else 1
    values: dict[str, object] = {
        **degrees,
        "moe_dispatcher": _dispatcher(words),
        "micro_batch_size": whole(words, "micro_batch_size"),
        "cp_method": next((name for name, known in CP_TYPES.items() if known == kind), "ulysses"),
        "sequence_parallel": "sequence_parallel" in words,
        # Megatron-LM switches it off for MLA
        "async_tp": "tp_comm_overlap" in words and "multi_latent_attention" not in words,
        "compile": False,
        "optimizer_in_backward": False,
        **_offload(words),
        "activation_offload_layers": whole(words, "cpu_offloading_num_layers", 0),
        "master_dtype": "float32",
        "reduce_dtype": "bfloat16" if _narrow(words) else "float32",
    }
    values |= {
        **_data_parallel(words, num_gpus // (degrees["tp"] * degrees["pp"]), degrees["cp"]),
        **_stages(words, num_layers),
        **_recompute(words, num_layers),
        **_precision(words),
    }
    gathers = values["zero_stage"] != 0 and values["precision"] in GATHERED
    return {**values, "float8_all_gather": gathers and "fp8_param_gather" in words}


def _narrow(words: Words) -> bool:
    """Whether gradients are in 16 bits, which validate_args widens under bf16."""
    asked = word(words, "megatron_fsdp_main_grads_dtype") == "bf16"
    plain = "fp16" in words and "accumulate_allreduce_grads_in_fp32" not in words
    return plain or asked or "grad_reduce_in_bf16" in words


def _offload(words: Words) -> dict[str, object]:
    """Megatron's own share is all; a share of nothing is no offload."""
    if "optimizer_cpu_offload" not in words:
        return {"cpu_offload": False}
    text = word(words, "optimizer_offload_fraction") or "1"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        rule = "is no share from 0 to 1"
        raise fault("--optimizer-offload-fraction", text, rule, "correct the arguments")
    return {"cpu_offload": share > 0.0, "optimizer_offload_fraction": share or 1.0}


def _dispatcher(words: Words) -> str:
    """Megatron's own default is allgather; `flex` has two backends, of which DeepEP is the older.

    Without experts it means nothing: the usual one.
    """
    if "num_experts" not in words:
        return "alltoall"
    kind = word(words, "moe_token_dispatcher_type") or "allgather"
    backend = word(words, "moe_flex_dispatcher_backend") or "deepep"
    return backend if kind == "flex" else "alltoall" if kind == "alltoall_seq" else kind


def _data_parallel(words: Words, sharded: int, cp: int) -> dict[str, object]:
    """sharded: ranks over which the optimizer may be cut, context ranks included."""
    replicas = whole(words, "num_distributed_optimizer_instances", 1)
    strategy = word(words, "data_parallel_sharding_strategy")
    stage = next(
        (stage for stage, known in SHARDING.items() if known == strategy),
        int("use_distributed_optimizer" in words or word(words, "optimizer") == "dist_muon"),
    )
    if "use_torch_fsdp2" in words:
        stage = 2 if "torch_fsdp2_no_reshard_after_forward" in words else 3
    if sharded == 1 and "num_distributed_optimizer_instances" not in words:
        stage = 0 if stage == 1 else stage  # a distributed optimizer of one rank
    shards = max(1, sharded // cp // replicas)
    return {"dp_replicate": replicas, "dp_shard": shards, "zero_stage": stage}


def _stages(words: Words, num_layers: int) -> dict[str, object]:
    degree = whole(words, "pipeline_model_parallel_size", 1)
    text = word(words, "pipeline_model_parallel_layout")
    split = pattern_split(words, num_layers) if text is None else read_layout(text)
    virtual = (
        len(split) // degree
        if split is not None
        else whole(words, "num_virtual_stages_per_pipeline_rank", 1)
    )
    each = word(words, "num_layers_per_virtual_pipeline_stage")
    if each is not None and each.isdigit() and int(each) > 0:
        virtual = max(1, num_layers // degree // int(each))
    if split is None and degree > 1:
        split = _uneven(words, num_layers, degree * virtual)
    schedule = "1F1B" if virtual == 1 else "Interleaved1F1B"
    if "enable_zero_bubble" in words:
        schedule = (
            "ZB-1p"
            if whole(words, "zero_bubble_max_pending_backward", degree) == degree
            else "ZB-2p"
        )
    return {"layers_per_stage": split, "virtual_stages": virtual, "pp_schedule": schedule}


def pattern_of(words: Words) -> str:
    """The pattern of a hybrid model, stages marked; empty where there is none."""
    text = word(words, "hybrid_layer_pattern") or word(words, "hybrid_override_pattern") or ""
    return text.partition(MORE)[0]


def pattern_split(words: Words, num_layers: int) -> tuple[int, ...] | None:
    """Layers of each stage that a pattern marks; None where it marks none.

    A model's layer of two branches is two letters.
    """
    stages = [len(part) for part in pattern_of(words).split(NEXT_STAGE)]
    if len(stages) == 1:
        return None
    each, rest = divmod(sum(stages), num_layers)
    even = each > 1 and not rest and all(count % each == 0 for count in stages)
    return tuple(count // each for count in stages) if even else tuple(stages)


def _uneven(words: Words, num_layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers per stage where the first or last stage has another number; None for an even split."""
    embedding = "account_for_embedding_in_pipeline_split" in words
    loss = "account_for_loss_in_pipeline_split" in words
    if embedding or loss:
        each, left = divmod(num_layers + embedding + loss, stages)
        split = [each] * stages
        split[0] -= embedding
        split[-1] -= loss
        return tuple(split) if not left else None
    given = [word(words, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    if given == [None, None]:
        return None
    ends = [int(end) if end is not None and end.isdigit() else None for end in given]
    inner = stages - sum(end is not None for end in ends)
    rest = num_layers - sum(end for end in ends if end is not None)
    each, left = divmod(rest, inner) if inner > 0 else (0, rest)
    head, tail = ([end] if end is not None else [] for end in ends)
    return (*head, *[each] * inner, *tail) if not left else None


def read_layout(text: str) -> tuple[int, ...]:
    """Layers of each stage in Megatron's layout string: "Et*3|(tt|)*29mL" has 31 stages.

    Raises SpecError for an endless one.
    """
    for pattern in (_GROUP, _ONE):
        while (found := pattern.search(text)) is not None:
            if len(found[1]) * int(found[2]) + len(text) > MOST_STAGES:
                flag, rule = "--pipeline-model-parallel-layout", "is longer than any pipeline"
                raise fault(flag, text[:80], rule, "correct it")
            text = text[: found.start()] + found[1] * int(found[2]) + text[found.end() :]
    return tuple(stage.count("t") for stage in text.replace(",", "").split("|"))


def _recompute(words: Words, num_layers: int) -> dict[str, object]:
    selective = "recompute_activations" in words  # which decides, whatever else is given
    granularity = "selective" if selective else word(words, "recompute_granularity")
    alone = "moe_layer_recompute" in words  # deprecated: sets the granularity to selective
    if granularity is None and not alone:
        return {"ac": "none"}
    if granularity != "full":
        given = (*words.get("recompute_modules", ("core_attn",)), *["moe"] * alone)
        modules = [name for name in RECOMPUTE_MODULES if name in given]
        return {"ac": f"modules-{'+'.join(modules)}" if modules else "none"}
    stages = whole(words, "pipeline_model_parallel_size", 1) * max(
        1, whole(words, "num_virtual_stages_per_pipeline_rank", 1)
    )
    here = -(-num_layers // stages)
    count = min(whole(words, "recompute_num_layers", 1), here)
    method = word(words, "recompute_method")
    if method == "block" and count < here:
        return {"ac": f"block-{count}" if count else "none"}
    return {"ac": f"uniform-{count}" if method == "uniform" and count > 1 else "full"}


def _precision(words: Words) -> dict[str, object]:
    low = word(words, "fp8_format") or word(words, "fp8")  # without one a recipe means nothing
    recipe = word(words, "fp8_recipe") or "delayed"
    plain = "fp16" if "fp16" in words else "bf16"
    known = next((name for name, known in FP8_RECIPES.items() if known == recipe), None)
    return {
        "precision": (known or "float8-delayed")
        if low is not None
        else ("mxfp4" if word(words, "fp4_recipe") == FP4_RECIPES["mxfp4"] else "nvfp4")
        if "fp4_format" in words
        else plain,
        "param_dtype": "bfloat16" if "bf16" in words or "fp16" in words else "float32",
    }
