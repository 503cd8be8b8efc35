"""Files for Megatron-LM, exported and rewritten, against what its parser declares and asserts."""

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from current_cases import EXAMPLES, job_of_text
from export_cases import cluster, layout, model, to_megatron, training
from test_megatron_judge import CASES

from planner.catalog.megatron_arguments import argument
from planner.export.base import Export
from planner.export.commands import read_flags
from planner.export.megatron_read import plain_names
from planner.intake.current import read_again
from planner.intake.models import read_model
from planner.intake.trainer_files.canonical import canonical
from planner.intake.trainer_files.megatron_judge import assertions
from planner.intake.trainer_files.megatron_model import model_keys
from planner.intake.trainer_files.rewrite import rewrite
from planner.rules import violations
from planner.specs.job import Job
from planner.specs.layout import MOE_DISPATCHERS, Layout
from planner.specs.model import ModelSpec
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import layout_line, release_of
from planner.trainers.release import Release

JOBS = (
    ("llama3-70b", 64, 36), ("llama3.1-405b", 512, 252), ("qwen3-235b-a22b", 256, 1152),
    ("deepseek-v3", 256, 480), ("mixtral-8x7b", 16, 128), ("kimi-k2", 256, 512),
    ("gpt3-175b", 128, 96), ("qwen3-30b-a3b", 16, 256), ("qwen3-next-80b-a3b", 64, 256),
)  # fmt: skip
REWRITE = "42-rewrite-keeps-flags"
SCRIPTS = {"example": EXAMPLES / "pretrain_llama3_70b.sh"} | {
    name: CASES / f"{name}.sh"
    for name in (
        f"{REWRITE}/saved_activations", f"{REWRITE}/shared_expert_overlap",
        "08-70b-128-tp8pp8/pp2_no_sp", "08-70b-128-tp8pp8/pretrain", "11-mixtral-16-h100/tp4pp4",
        "23b-recompute-modules/core_attn", "23b-recompute-modules/moe_layernorm",
    )
}  # fmt: skip


def legal(
    spec: ModelSpec, num_gpus: int, batch: int, seed: int, version: str | None = None
) -> Iterator[Layout]:
    """Layouts that a release's rules allow, in an order that the seed decides."""
    draw = random.Random(seed)
    job = training(
        trainer="megatron", trainer_version=version, global_batch_size=batch, seq_len=4096
    )
    experts = {"ep": (1, 2, 4, 8, 16), "moe_dispatcher": MOE_DISPATCHERS} if spec.is_moe else {}
    choices: dict[str, Sequence[object]] = {
        **experts, "micro_batch_size": (1, 2), "zero_stage": (0, 1, 1, 1, 3),
        "ac": ("none", "full", "selective-attention", "uniform-2", "block-1", "modules-mlp",
            "modules-moe_act+layernorm", "modules-moe+mla_up_proj+shared_experts"),
        "precision": ("bf16", "fp16", "float8-delayed", "float8-blockwise"),
        "reduce_dtype": ("float32", "bfloat16"), "activation_offload_layers": (0, 0, 0, 3),
    }  # fmt: skip
    while True:
        tp, pp, cp = (draw.choice((1, 2, 4, 8)) for _ in range(3))
        virtual = draw.choice((1, 2, 3, 5)) if pp > 1 else 1
        made = layout(
            num_gpus,
            "megatron",
            **{"tp": tp, "pp": pp, "cp": min(cp, 2), "virtual_stages": virtual},
            pp_schedule="Interleaved1F1B" if virtual > 1 else "1F1B",
            sequence_parallel=tp > 1 and (spec.is_moe or draw.random() < 0.7),
            **{field: draw.choice(values) for field, values in choices.items()},
            **{field: draw.random() < 0.2 for field in ("async_tp", "cpu_offload")},
        )
        if not violations(made, spec, cluster(num_gpus), job):
            yield made


def refusals(made: Export) -> list[str]:
    """What Megatron's parser says of the arguments of an export."""
    found = []
    for flag, words in read_flags(made.arguments).items():
        row = argument(flag, made.version)
        if refused := f"is not in {made.version}" if row is None else row.refusal(words):
            found.append(f"{flag}: {refused}")
    return found


@cache
def exports() -> tuple[tuple[Layout, ModelSpec, int, Release, Export], ...]:
    """A legal layout of each of JOBS under each of five releases."""
    found = []
    for seed, (name, num_gpus, batch) in enumerate(JOBS):
        spec = model(name)
        for version in ("0.18", None, "0.16", "0.14", "0.20"):
            if lacking(spec, release_of("megatron", version)):
                continue
            made = training(trainer="megatron", global_batch_size=batch, seq_len=4096)
            chosen = next(legal(spec, num_gpus, batch, seed, version))
            written = to_megatron(chosen, spec, cluster(num_gpus), made, version)
            found.append((chosen, spec, batch, release_of("megatron", version), written))
    return tuple(found)


def test_exports_of_every_release_start() -> None:
    made = exports()
    assert len(made) == 5 * len(JOBS) - 1  # 0.14 has no gated DeltaNet
    for chosen, spec, batch, release, exported in made:
        assert refusals(exported) == []
        words = plain_names(read_flags(exported.arguments))
        assert assertions(words, chosen, spec.num_hidden_layers, batch, release) == []
    assert any(ROUND in exported.arguments for *_, exported in made)


def job_of(name: str) -> Job:
    return job_of_text(SCRIPTS[name].name, SCRIPTS[name].read_text(encoding="utf-8"))


def rewritten(name: str, winner: Layout) -> tuple[str, dict[str, list[str] | None]]:
    """The user's script as the planner rewrites it, and the flags that it changed."""
    job = job_of(name)
    current = read_again(job.request, job.model, winner.num_gpus)
    exported = to_megatron(winner, job.model, job.cluster, job.training)
    plain = canonical(winner, job.model.num_hidden_layers, "megatron")
    new = rewrite(current, plain, exported, job.training.global_batch_size)
    assert new.files.keys() == {SCRIPTS[name].name}
    return new.files[SCRIPTS[name].name], dict(new.settings)


@pytest.mark.parametrize("name", SCRIPTS)
def test_forty_rewritten_scripts_start(name: str) -> None:
    """Seven of each, so that flags which only the old layout allowed are gone."""
    job = job_of(name)
    batch, layers = job.training.global_batch_size, job.model.num_hidden_layers
    layouts = legal(job.model, job.cluster.num_gpus, batch, len(name))
    for winner in itertools.islice(layouts, 7):
        text, _ = rewritten(name, winner)
        assert text != SCRIPTS[name].read_text(encoding="utf-8")
        after = job_of_text(SCRIPTS[name].name, text)
        run = read_again(after.request, after.model, winner.num_gpus).run
        assert run.refusals == (), winner.short()
        # a split that is not even is written out
        written = after.layout.model_copy(update={"layers_per_stage": None})
        assert canonical(written, layers, "megatron") == canonical(winner, layers, "megatron")


@pytest.mark.parametrize(("name", "flag", "winner"), [
    ("example", "--num-layers-per-virtual-pipeline-stage", {"tp": 8}),
    (f"{REWRITE}/saved_activations", "--distribute-saved-activations",
        {"tp": 4, "pp": 4, "ac": "none"}),
    (f"{REWRITE}/shared_expert_overlap", "--moe-shared-expert-overlap",
        {"ep": 4, "pp": 2, "moe_dispatcher": "allgather"}),
])  # fmt: skip
def test_a_flag_that_contradicts_the_new_layout_goes(name: str, flag: str, winner: dict) -> None:
    chosen = layout(job_of(name).cluster.num_gpus, "megatron", **winner)
    before, after = rewritten(name, chosen)[1][flag]
    assert (bool(before), after) == (True, None)


CHUNKS = {"tp": 8, "pp": 8, "pp_schedule": "Interleaved1F1B", "virtual_stages": 10}


def test_a_chunk_of_one_layer_recomputes_it_wholly_whatever_the_old_count() -> None:
    """The script groups five layers of PP 8; core 0.17 and newer end a group with the chunk."""
    chosen = layout(128, "megatron", **CHUNKS, ac="full")
    text, settings = rewritten("08-70b-128-tp8pp8/pretrain", chosen)
    assert job_of_text("pretrain.sh", text).layout.ac == "full"
    assert "--recompute-num-layers" not in settings


def test_a_line_whose_flags_all_go_goes_with_them() -> None:
    name = "08-70b-128-tp8pp8/pretrain"
    text, _ = rewritten(name, layout(128, "megatron", tp=4, pp=4, ac="none"))
    lines = text.splitlines()
    assert not any("--recompute" in line or line.strip() == "\\" for line in lines)
    assert len(lines) == len(SCRIPTS[name].read_text(encoding="utf-8").splitlines()) - 1


ROUND = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(("name", "batch", "values", "flag", "words"), [
    # 36 microbatches over 8 ranks make 4 rounds of 9: written where Megatron's own would stop
    ("llama3-70b", 36, CHUNKS, ROUND, ["9"]), ("llama3-70b", 32, CHUNKS, ROUND, None),
    ("llama3-70b", 20, CHUNKS, ROUND, ["10"]),
    # DeepEP takes its probabilities in fp32
    *(
        ("qwen3-30b-a3b", 512, {"ep": 8, "moe_dispatcher": name}, "--moe-router-dtype", dtype)
        for name, dtype in (("deepep", ["fp32"]), ("alltoall", None), ("hybridep", None))
    ),
])  # fmt: skip
def test_a_flag_is_written_where_megatron_would_stop_without(
    name: str, batch: int, values: dict[str, object], flag: str, words: list[str] | None
) -> None:
    job = training(trainer="megatron", global_batch_size=batch)
    made = to_megatron(layout(64, "megatron", **values), model(name), cluster(64), job)
    assert read_flags(made.arguments).get(flag) == words


COUNTED = {
    "attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "lm_head_bias": True,
    "qk_norm": "head", "norms_per_layer": 4, "embedding_norm": True, "attention_sinks": True,
    "shared_expert_gate": True, "router_bias": True, "router_correction_bias": True,
    "expert_bias": True, "norm": "layernorm", "norm_bias": True, "norm_plus_one": True,
    "qk_l2_norm": True, "attention_multiplier": 0.5, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5, "logits_multiplier": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("base", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt3-175b"])
def test_every_norm_bias_and_scale_has_an_argument_or_is_named_as_missing(base: str) -> None:
    def said(spec: ModelSpec) -> tuple[object, ...]:
        made = to_megatron(layout(8, "megatron"), spec, cluster(8), training(seq_len=2048))
        return made.arguments, tuple(str(gap) for gap in made.gaps)

    plain = read_model(base)
    for name, value in COUNTED.items():
        other = ModelSpec.model_validate({**plain.model_dump(), name: value})
        scale = name.endswith("multiplier") or name in ("norm_plus_one", "qk_l2_norm")
        if other.total_parameters() != plain.total_parameters() or scale:
            assert said(other) != said(plain), name


@pytest.mark.parametrize(
    "name", ["deepseek-v2", "deepseek-v3", "kimi-k2", "qwen3-30b-a3b", "gpt3-175b", "qwen2.5-7b"]
)
def test_the_arguments_alone_count_every_parameter(name: str) -> None:
    spec = model(name)
    made = to_megatron(layout(8, "megatron"), spec, cluster(8), training(seq_len=2048))
    flags = read_flags(made.arguments)
    assert made.blockers == ()
    assert ("--qk-layernorm" in flags) == (spec.uses_mla or spec.qk_norm == "head")
    back = read_model(model_keys(plain_names(flags)))
    assert back.total_parameters() == spec.total_parameters()


def test_latent_attention_gets_no_tp_overlap() -> None:
    chosen = layout(64, "megatron", tp=8, async_tp=True)
    made = to_megatron(chosen, model("deepseek-v3"), cluster(64), training())
    assert "--tp-comm-overlap" not in made.arguments
    assert [fault.field for fault in made.blockers] == ["async_tp"]


def test_context_parallelism_is_named_in_megatrons_words() -> None:
    for method, word in (("alltoall", "p2p"), ("ulysses", "a2a")):
        chosen = layout(64, "megatron", tp=8, cp=2, cp_method=method)
        assert f"cp 2 {word}" in layout_line(chosen, "megatron")
        assert f"cp 2 {method}" in layout_line(chosen, "torchtitan")
