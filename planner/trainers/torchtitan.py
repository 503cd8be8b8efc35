"""TorchTitan."""

from dataclasses import replace
from functools import lru_cache

from planner.precision import Recipe, torchao
from planner.specs.layout import COMMON
from planner.specs.model import ModelSpec
from planner.trainers import titan_models
from planner.trainers.attention import CUDNN, TORCHTITAN_SDPA
from planner.trainers.base import Change, TrainerRules
from planner.trainers.release import GRAPH_TRAINER, Known, Release, Releases
from planner.trainers.strategies import FSDP2, TORCH
from planner.trainers.tp_overlap import SYMMETRIC_MEMORY

AC_MODES = frozenset({"none", "full", "selective-op", "selective-layer", "memory-budget"})
_PRECISIONS = frozenset(
    {"bf16", "float8-tensorwise", "float8-rowwise", "float8-rowwise-gw-hp", "mxfp8"}
)
# Pull request 1701 renamed the converter `float8`, for which the TP plan looks.
CONVERTERS_RENAMED = "2025-09-12"
# Pull request 3127 (converters of a model's config) and 3914 (components/quantization/nvfp4.py).
ON_CONFIGS = Releases(since="0.3", since_day="2026-04-29")
NVFP4 = Releases(since="0.3", since_day="2026-08-01")


# The trainer in experiments/graph_trainer traces forward, loss and backward into one graph and runs
# passes over it: it always compiles, and gathers and scatters by transformer block, as FSDP2 does.
_GRAPH_TRAINER = (
    Change(
        Releases(distribution=GRAPH_TRAINER),
        # 0.3.0 configs.py: memory_policy `default` (selective), `full`, or none; pull request 3516
        {
            "ac_kinds": frozenset({"none", "selective-op", "full"}),
            "always_compiles": True,
            "steps_in_backward": False,
            # passes.py (final_inductor_compile_passes): attention and norms alone, unless asked
            "fused_sharded_loss_bytes": 16.0,
        },
    ),
    # pull request 3115 turned chunks off; 3614 of June, not merged at first, turns them on
    Change(
        Releases(distribution=GRAPH_TRAINER, before="0.3", before_day="2026-07-01"),
        {"chunked_loss": False},
    ),
    # pull request 2868 (cudagraph_pass in aot_fx_trace), 3548 (pieces of the graph)
    Change(
        Releases(distribution=GRAPH_TRAINER, since="0.3", since_day="2026-04-07"),
        {"cuda_graphs": frozenset({"none", "partial", "full"}), "default_cuda_graphs": "full"},
    ),
)


def _lacks(model: ModelSpec, release: Release) -> list[str]:
    return titan_models.lacking(model, titan_models.line_of(release))


def recipe_line(release: Release) -> str:
    """The release's line by its quantisation; a commit is placed by the date written with it."""
    day = release.named.day
    if ON_CONFIGS.hold(release):
        return "0.3"
    return "0.2" if day >= CONVERTERS_RENAMED and release.before("0.2") else release.line


def _recipes(release: Release) -> tuple[Recipe, ...]:
    """Torchao's recipes as the release uses them.

    0.1 plans TP with torchao's Float8ColwiseParallel and Float8RowwiseParallel, which all-gather
    tensorwise inputs and, backward, gradients of outputs in float8. Since 0.2 the plan looks for a
    converter that no longer has that name, and gathers in 16 bits. 0.2 filters small layers, as our
    export asks it to, and computes the scales of all weights in one all-reduce; plain torch does
    neither. It refuses float8 experts under PP and CP. 0.3 hands its filters descriptions of
    layers, and torchao's filter for small layers declines all of them, so the export does not ask
    for it.
    """
    return _in_line(recipe_line(release), torchao())


@lru_cache(maxsize=64)
def _in_line(line: str, recipes: tuple[Recipe, ...]) -> tuple[Recipe, ...]:
    if line == "0.1":
        return tuple(
            replace(
                recipe,
                small=(),
                tp_wire_bytes=recipe.wire_bytes,
                tp_gradient_wire_bytes=recipe.wire_bytes,
                experts="",
            )
            for recipe in recipes
        )
    if line == "0.3":
        return tuple(
            replace(
                recipe,
                small=(),
                fallback_multiple=(
                    recipe.fallback_multiple if recipe.name.startswith("float8") else 0
                ),
            )
            for recipe in recipes
        )
    return tuple(
        replace(recipe, experts_alone=recipe.experts == "float8-rowwise") for recipe in recipes
    )


TORCHTITAN = TrainerRules(
    name="torchtitan",
    title="TorchTitan",
    # README (CUDA; ROCm in its CI, .github/workflows/integration_test_8gpu_features.yaml)
    vendors={"nvidia": "", "amd": ""},
    # the days when the files in its wheels on PyPI were written
    history=(
        Known(number="0.1.0", day="2025-06-18"),
        Known(number="0.2.0", day="2025-10-18"),
        Known(number="0.2.1", day="2025-12-26"),
        Known(number="0.2.2", day="2026-02-20"),
        Known(number="0.3.0", day="2026-09-03"),
    ),
    # The newest that runs on torch 2.13, which we test with: there FSDP of 0.3.0 stops at "all
    # parameters must be DTensors on the full SPMD mesh". It starts with 2.14.1 (27 November 2026),
    # but no run of its own trainer stands behind the calibration yet.
    default_release="0.2.2",
    # a day is that of the pull request in the repository, where it came before the release
    changes=(
        # pull request 2107: expert_parallel_comm_backend
        Change(
            Releases(since="0.2.1", since_day="2025-12-15"),
            {"moe_dispatchers": frozenset({"alltoall", "deepep"})},
        ),
        # pull request 2207
        Change(
            Releases(since="0.3", since_day="2026-03-01"),
            {"moe_dispatchers": frozenset({"alltoall", "deepep", "hybridep"})},
        ),
        # components/quantization/float8.py has rowwise recipes alone
        Change(ON_CONFIGS, {"precisions": _PRECISIONS - {"float8-tensorwise"}}),
        Change(NVFP4, {"precisions": _PRECISIONS - {"float8-tensorwise"} | {"nvfp4"}}),
        # models/*/config_registry.py (ChunkedLossWrapper, in all but debug models); pull request
        # 2937, the default by the day of 3115
        Change(
            Releases(since="0.3", since_day="2026-04-27"),
            {"chunked_loss": True, "chunks_loss": True},
        ),
        # pull request 1580 (activation_checkpoint.early_stop, False by default); it waited for
        # torch's 160781, merged at the end of August
        Change(Releases(since="0.2.0", since_day="2025-09-01"), {"early_stop": False}),
        # what joined the save list of selective-op: all of SDPA's kernels by pull request 2095,
        # what EP sends by 1672
        Change(Releases(before="0.2.1", before_day="2025-12-01"), {"unlisted": frozenset({CUDNN})}),
        Change(
            Releases(before="0.2.0", before_day="2025-09-06"),
            {"unlisted": frozenset({CUDNN, "ep_exchange"})},
        ),
        # models/llama4/infra/parallelize.py: 0.2.0 compiles the whole block with graph breaks,
        # 0.2.1 its children without dispatch and combine, 0.3 (distributed/compile.py) the whole
        # block
        Change(
            Releases(since="0.2.1", since_day="2025-11-01", before="0.3"),
            {"compiles_exchange": False},
        ),
        Change(
            Releases(since="0.3"),
            {
                # config/configs.py (fused_opt_states_bf16)
                "optimizers": ("adamw", "adamw-bf16-states"),
                # no setting for every n-th layer
                "ac_kinds": AC_MODES - {"selective-layer"},
                # gathers keys and values, and has no setting
                "cp_methods": frozenset({"allgather"}),
                "steps_in_backward": False,
                # config/configs.py (disable_cuda_graphs is off), trainer.py (wrap_with_cuda_graph
                # around the forward and backward of a step)
                "cuda_graphs": frozenset({"none", "full"}),
                "default_cuda_graphs": "full",
                # model_registry(attn_backend="varlen"), tools/utils.py
                # get_cuda_flash_attention_impl: FlashAttention-3 on Hopper
                "attention_kernels": frozenset({"flash3"}),
            },
        ),
        *_GRAPH_TRAINER,
    ),
    distributions={GRAPH_TRAINER: {"compile": True}},
    offered=("0.2.2", "0.3.0"),
    export_format="torchtitan",
    lacks=_lacks,
    optimizers=("adamw",),
    zero_stage=3,
    zero_stage_under_pp=2,
    ac="selective-op",
    layout_defaults=COMMON,
    expandable_segments=True,
    zero_stages=frozenset({0, 2, 3}),
    precisions=_PRECISIONS,
    ac_kinds=AC_MODES,
    cp_methods=frozenset({"allgather", "alltoall"}),
    compiles=True,
    compiles_loss=True,  # config/job_config.py (Compile.components)
    # components/optimizer.py
    steps_in_backward=True,
    # distributed/parallel_dims.py: seq_len_divisor, _validate
    seq_divisor_always=True,
    etp_one_or_tp=True,
    # distributed/pipeline_parallel.py generate_llm_fqn_per_model_part
    split="effective",
    ep_over_replicas=False,
    searched_ac=("none", "selective-op", "selective-layer-2", "full"),
    searched_precisions=("float8-tensorwise", "float8-rowwise", "mxfp8"),
    sharding=FSDP2,
    framework=TORCH,
    tp_overlaps=(SYMMETRIC_MEMORY,),
    recipes_in=_recipes,
    fused_kernels=False,
    drops_residual=False,
    tf32=False,
    # SDPA and FlexAttention are chosen in the model's code; only 0.3's `varlen` is a setting
    attention=TORCHTITAN_SDPA,
    attention_kernels=frozenset(),
    early_stop=True,
    # 0.2.2 of February 2026 passes enable_gqa (models/llama3/model/model.py)
    repeats_kv_until=("0.2.1", "2025-12"),
    # 0.1.0 of June 2025 asks for torch nightlies of that month
    composite_norm_until=("0.1.0", "2025-06"),
    # norm_type fused_rmsnorm, a Triton kernel, since pull request 181; the month is a judgement
    composite_norm_since="2024-09",
    expert_alignment=8,
    fused_sums=False,
    loss_bytes=12.0,
    # The compiled loss holds the 16-bit logits and their gradient, nothing in fp32: torch 2.13
    # (tests/unit/test_loss_bytes_torch.py), and 2.7.0 and 2.9.0 by the same test.
    fused_loss_bytes=4.0,
    sharded_loss_bytes=16.0,
    fused_sharded_loss_bytes=10.0,  # torch 2.13 (tests/unit/test_loss_bytes_torch.py)
    # components/loss.py until pull request 1033 of 2 April: "compiling loss function causes CUDA
    # errors, turning off for now"
    eager_loss_until="2025-03",
    loss_leftover_bytes=2.0,
    placeholders_since="",
    source="torchtitan 0.2.2 torchtitan/config/job_config.py and "
    "torchtitan/distributed/parallel_dims.py",
)
