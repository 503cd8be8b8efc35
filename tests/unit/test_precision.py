"""Precision recipes: every field is read, and libraries, releases, layers get what sources say."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest

import planner
from planner.catalog.clusters import gpu_names
from planner.columns import LayoutBatch
from planner.cost.layer.gemm import gemm_cost
from planner.cost.layer.unit_costs import lacking_precisions
from planner.cost.machine import device as compute
from planner.cost.machine.profile import KERNELS
from planner.cost.price import Pricer
from planner.estimates import estimate_layouts
from planner.intake.jobs import read_job
from planner.intake.models import load_model
from planner.plan.explain import precision_sentences
from planner.plan.together import Together
from planner.precision import (
    NOTHING,
    PRECISIONS,
    Operands,
    Recipe,
    bf16_tail,
    stays_16_bit,
    torchao,
    transformer_engine,
)
from planner.rules import precisions, violations
from planner.rules.base import Context
from planner.specs.job import Job
from planner.trainers.base import TrainerRules
from planner.trainers.registry import TRAINERS
from planner.work.ops import Gemm, Tensor
from planner.work.quantised import quantised_model

Recipes = tuple[Recipe, ...]
TITAN = TRAINERS["torchtitan"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout with one low precision."""

    precision: str
    model: str = "llama3-8b"
    gpu: str = "h100-sxm-80gb"
    trainer: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)

    def job(self) -> Job:
        return read_job(
            {
                "model": self.model,
                "cluster": {"gpu": self.gpu, "num_gpus": 16},
                "training": {"seq_len": 8192, "global_batch_size": 64, **self.trainer},
                "layout": {"precision": self.precision, **self.layout},
            }
        )

    def pricer(self) -> Pricer:
        job = self.job()
        return Pricer.build(job.model, job.cluster, job.training)

    def recipes(self) -> Recipes:
        training = self.job().training
        return TRAINERS[training.trainer].recipes(training.trainer_version)

    def recipe(self) -> Recipe:
        return self.recipes()[PRECISIONS.names.index(self.precision)]


TP = {"dp_shard": 8, "tp": 2}
TE = {"trainer": "megatron"}
KEPT = Case(precision="float8-tensorwise", layout={**TP, "compile": True, "ac": "none"})
EAGER = Case(precision="float8-tensorwise", layout=TP)
FUSED = Case(precision="float8-tensorwise", layout={**TP, "compile": True})
SHARDED = {"dp_shard": 16, "compile": True}
GATHERED = Case(precision="float8-tensorwise", layout={**SHARDED, "float8_all_gather": True})
DELAYED = Case(precision="float8-delayed", trainer=TE, layout={**TP, "micro_batch_size": 4})
MOE = "qwen3-30b-a3b"
EXPERTS = Case(precision="float8-rowwise", model=MOE, layout={**SHARDED, "ep": 8})
RINGED = Case(
    precision="float8-rowwise",
    model="qwen3-30b-a3b",
    layout={"dp_shard": 8, "cp": 2, "ep": 4, "compile": True},
)
ON_16 = {"dp_shard": 16, "ep": 8, "micro_batch_size": 4}
GROUPED = Case(precision="mxfp8", model=MOE, gpu="b200-sxm-180gb", trainer=TE, layout=ON_16)
TITAN_03 = {"trainer_version": "0.3.0"}
NVFP4 = Case(
    precision="nvfp4",
    gpu="b200-sxm-180gb",
    trainer=TITAN_03,
    layout={"dp_shard": 16, "compile": True, "ac": "none"},
)


def patched(
    case: Case, monkeypatch: pytest.MonkeyPatch, recipes: Recipes
) -> tuple[Pricer, list[str]]:
    """A pricer whose trainer has these recipes, and the rules that its layout then breaks."""
    monkeypatch.setattr(TrainerRules, "recipes", lambda *_: recipes)
    monkeypatch.setattr(compute, "torchao", lambda: recipes)
    job = case.job()
    assert job.layout is not None
    pricer = Pricer.build(job.model, job.cluster, job.training)
    found = violations(job.layout, job.model, job.cluster, job.training)
    return pricer, [f"{v.field}: {v.rule}" for v in found]


def outcome(
    case: Case, monkeypatch: pytest.MonkeyPatch, change: Callable[[Recipe], Recipe]
) -> tuple[float, float, tuple[str, ...]]:
    """(seconds, bytes, broken rules) when the case's recipe is another."""
    name = case.precision
    recipes = tuple(change(one) if one.name == name else one for one in case.recipes())
    pricer, broken = patched(case, monkeypatch, recipes)
    layout = case.job().layout
    found = pricer.price(LayoutBatch.from_layouts([layout]))
    return float(found.step_seconds[0]), float(found.device_bytes[0]), tuple(broken)


# One change of every field that decides anything, and a layout for which it decides. `name` is the
# row's key.
CHANGES: dict[str, tuple[Case, Any]] = {
    "gradients_as": (FUSED, "float8-rowwise"), "rescaled": (FUSED, 4.0),
    "eager_rescaled": (EAGER, 12.0), "scale_fuses": (FUSED, 0.0),
    "peak": (EAGER, "bf16"), "gain_key": (FUSED, "gemm_fp8_rowwise"), "forward": (FUSED, False),
    "input_grad": (FUSED, False),
    "weight_grad": (FUSED, False), "experts": (EXPERTS, ""), "experts_alone": (RINGED, False),
    "dense_only": (EXPERTS, True),
    "bf16_layers": (NVFP4, 0.5),
    "scale": (FUSED, None), "cast": (FUSED, None), "eager_scale": (EAGER, None),
    "eager_cast": (EAGER, None), "transposed": (DELAYED, None),
    "padding": (GROUPED, 0.0), "group_multiple": (GROUPED, 128),
    "fused_kernels": (FUSED, 200.0), "eager_kernels": (EAGER, 200.0),
    "expert_launches": (GROUPED, 200.0),
    "weight_once": (DELAYED, False),
    "column_amax": (FUSED, None), "row_amax": (FUSED, None), "step_amax": (GATHERED, 9.0),
    "gather_amax": (GATHERED, True),
    "saved_bytes": (KEPT, 1.0), "saved_weight_bytes": (NVFP4, 2.0),
    "weight_copy_bytes": (DELAYED, 2.0), "weight_copies": (DELAYED, 1.0),
    "native": (DELAYED, True), "wire_bytes": (GATHERED, 1.5), "tp_wire_bytes": (FUSED, 1.0),
    "tp_gradient_wire_bytes": (FUSED, 1.0),
    "multiple": (FUSED, 10_000), "rows_multiple": (FUSED, 10_000),
    "fallback_multiple": (FUSED, 10_000), "small": (FUSED, ((1e9, 1e9),)),
}  # fmt: skip
BY_OPERAND = [f.name for f in fields(Recipe) if isinstance(getattr(torchao()[0], f.name), Operands)]


def test_every_field_has_a_change() -> None:
    assert set(CHANGES) == {f.name for f in fields(Recipe)} - {"name"}


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in BY_OPERAND])
def test_every_field_decides_something(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, value = CHANGES[name]
    before = outcome(case, monkeypatch, lambda recipe: recipe)
    assert before[2] == (), "the case itself is legal"
    assert getattr(case.recipe(), name) != value
    assert outcome(case, monkeypatch, lambda recipe: replace(recipe, **{name: value})) != before


@pytest.mark.parametrize("operand", Operands._fields)
@pytest.mark.parametrize("name", BY_OPERAND)
def test_every_operand_decides_something(
    name: str, operand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All costs only add seconds."""
    case, _ = CHANGES[name]

    def change(recipe: Recipe) -> Recipe:
        costs = getattr(recipe, name)
        return replace(
            recipe,
            weight_once=False,
            **{name: costs._replace(**{operand: getattr(costs, operand) + 20.0})},
        )

    before = outcome(case, monkeypatch, lambda recipe: replace(recipe, weight_once=False))
    assert outcome(case, monkeypatch, change)[0] > before[0]


@pytest.mark.parametrize("table", [torchao(), transformer_engine()])
def test_what_a_16_bit_recipe_must_not_have(table: Recipes) -> None:
    for recipe in table:
        costs = (
            recipe.scale, recipe.cast, recipe.eager_scale, recipe.eager_cast, recipe.transposed,
            recipe.column_amax, recipe.row_amax,
        )  # fmt: skip
        assert (costs != (NOTHING,) * 7) == recipe.low, recipe.name
        assert recipe.low or (
            recipe.saved_bytes,
            recipe.wire_bytes,
            recipe.tp_wire_bytes,
            recipe.experts,
        ) == (2.0, 2.0, 2.0, "")


# ---- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", sorted(gpu_names()))
def test_every_precision_that_a_gpu_may_run_has_a_rate(gpu: str) -> None:
    case = Case(precision="bf16", gpu=gpu, layout={"dp_shard": 16})
    job = case.job()
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    able = precisions.gpu_precisions(context)
    assert not {*able} & {*lacking_precisions(case.pricer().device)}


def test_recipes_with_kernels_of_their_own_have_curves_of_their_own() -> None:
    keys = {recipe.name: recipe.gain_key for recipe in torchao()}
    assert (
        len(
            {
                keys[name]
                for name in (
                    "float8-tensorwise",
                    "float8-rowwise",
                    "float8-blockwise",
                    "mxfp8",
                    "nvfp4",
                    "bf16",
                )
            }
        )
        == 6
    )
    # the same cuBLAS kernel: one scale a tensor
    assert keys["float8-delayed"] == keys["float8-tensorwise"]
    for kernels in KERNELS.values():
        assert set(kernels.gemm) == set(kernels.gemm_half_depth)


def linear_seconds(case: Case, tokens: int, k: int, n: int) -> tuple[float, float]:
    """(16-bit, quantised) seconds of one linear layer's three products, its casts and scales."""
    job = case.job()
    pricer = case.pricer()
    values = {"tokens": tokens, "hidden": k, "ffn": n}
    sizes = {name: np.array([float(value)]) for name, value in values.items()}
    context = replace(pricer.context(LayoutBatch.from_layouts([job.layout])), sizes=sizes)
    source, result = (Tensor(name=name, dims=("tokens", name)) for name in ("hidden", "ffn"))
    dims = {"rows": ("tokens",), "cols": ("ffn",), "depth": ("hidden",)}
    op = Gemm(name="w", **dims, saves=(source,), output=result)
    never, ever = np.zeros(1, dtype=np.bool_), np.ones(1)
    costs = [gemm_cost(context, op, share, never) for share in (0.0 * ever, ever)]
    high, low = (float((c.forward + c.input_grad + c.weight_grad)[0]) for c in costs)
    return high, low


@pytest.mark.parametrize(("tokens", "k", "n", "high", "low"), [
    (8192, 8192, 8192, 5.027, 3.510),
    (16384, 8192, 1280, 1.954, 1.757),
    (16384, 1024, 8192, 1.701, 1.193),
    (16384, 8192, 7168, 9.871, 5.707),
    (16384, 3584, 8192, 5.192, 3.034),
])  # fmt: skip
def test_a_compiled_layer_takes_what_torchao_measured(
    tokens: int, k: int, n: int, high: float, low: float
) -> None:
    """Milliseconds forward and backward on one H100, bf16 and float8 through the tensorwise kernel.

    Source: github.com/pytorch/ao pull requests 940 and 2185 (first table).
    """
    ours = linear_seconds(
        Case(precision="float8-tensorwise", layout={"dp_shard": 16, "compile": True}), tokens, k, n
    )
    assert [1e3 * seconds for seconds in ours] == pytest.approx([high, low], rel=0.2)


def test_scales_cost_less_the_larger_their_block() -> None:
    """A scale a tensor or a row needs a pass of its own; blocks find theirs while they cast."""
    for table in (torchao(), transformer_engine()):
        by = {recipe.name: recipe for recipe in table}
        names = ("float8-blockwise", "mxfp8", "float8-tensorwise")
        block, mx, tensor = (by[name].scale.input for name in names)
        assert block < mx < tensor


# ---- which products ------------------------------------------------------------------------------


def test_a_16_bit_weight_gradient_saves_its_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's rowwise_with_gw_hp; plain rowwise multiplies all three in float8."""
    case = Case(precision="float8-rowwise", layout={"dp_shard": 16, "compile": True})
    assert case.recipe().weight_grad
    before = outcome(case, monkeypatch, lambda recipe: recipe)
    after = outcome(case, monkeypatch, lambda recipe: replace(recipe, weight_grad=False))
    assert after[0] > before[0]
    gone = outcome(
        case,
        monkeypatch,
        lambda recipe: replace(
            recipe, weight_grad=False, cast=recipe.cast._replace(input_again=99.0)
        ),
    )
    assert gone == outcome(case, monkeypatch, lambda recipe: replace(recipe, weight_grad=False)), (
        "nothing is cast for it"
    )


# ---- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "k", "n", "stays"), [
    ("float8-tensorwise", 4096, 1024, True),
    ("float8-tensorwise", 4112, 1024, False),
    ("float8-tensorwise", 4096, 1040, False),
    ("float8-rowwise", 16384, 2048, True),
    ("float8-rowwise", 1024, 28672, True),
    ("float8-rowwise", 2048, 4096, True),
    ("float8-rowwise", 2064, 4096, False),
    ("float8-rowwise", 2064, 2064, False),
    ("float8-rowwise", 8192, 8200, True),
    ("mxfp8", 1024, 1024, False),
    ("mxfp8", 1000, 1024, True),
    ("bf16", 8192, 8192, True),
])  # fmt: skip
def test_small_and_unaligned_layers_stay_in_16_bits(
    precision: str, k: int, n: int, stays: bool
) -> None:
    assert stays_16_bit(TITAN.recipes("0.2.2")[PRECISIONS.names.index(precision)], k, n) == stays


def test_the_filter_sees_whole_weights_and_decides_by_layer() -> None:
    """Llama 3: keys and values are 4096 or 8192 x 1024. Head and router are never asked."""
    small, large = (
        quantised_model(load_model(name), TITAN.recipes("0.2.2")).shares
        for name in ("llama3-8b", "llama3-70b")
    )
    names = ("float8-tensorwise", "float8-rowwise")
    tensorwise, rowwise = map(PRECISIONS.names.index, names)
    assert {name for name, share in small.items() if share[tensorwise] == 0} == {"wk", "wv"}
    assert not {name for name, share in large.items() if share[tensorwise] == 0}
    assert {name for name, share in large.items() if share[rowwise] == 0} == {"wk", "wv"}
    assert "head" not in small


def test_nvfp4_keeps_the_last_layers() -> None:
    recipe = TITAN.recipes("0.3")[PRECISIONS.names.index("nvfp4")]
    assert [bf16_tail(recipe, layers) for layers in (1, 20, 32, 80)] == [1, 3, 5, 12]
    shares = quantised_model(load_model("llama3-8b"), TITAN.recipes("0.3")).shares
    assert shares["wq"][PRECISIONS.names.index("nvfp4")] == 27 / 32


def test_experts_have_recipes_of_their_own() -> None:
    """0.2 has grouped float8 products without PP and CP only; 0.1 none; torchao no nvfp4."""

    def of(version: str | None, precision: str) -> tuple[str, bool]:
        recipe = TITAN.recipes(version)[PRECISIONS.names.index(precision)]
        return recipe.experts, recipe.experts_alone

    assert of("0.2.2", "float8-tensorwise") == ("float8-rowwise", True)
    assert of("0.3.0", "float8-rowwise") == ("float8-rowwise", False)
    assert of("0.1.0", "float8-rowwise")[0] == of("0.2.2", "nvfp4")[0] == ""


# ---- wires ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "wire"), [
    ("0.1.0", 1.0), ("0.2.2", 2.0), ("0.3.0", 2.0), (None, 2.0), ("6ba7a1f, 2025-03-14", 1.0),
    ("5b5d46856b, 2025-10-14", 2.0),
])  # fmt: skip
def test_torchtitan_gathers_tp_inputs_in_float8_only_while_its_plan_found_the_converter(
    version: str | None, wire: float
) -> None:
    recipes = TITAN.recipes(version)
    tensorwise = recipes[PRECISIONS.names.index("float8-tensorwise")]
    assert tensorwise.tp_wire_bytes == tensorwise.tp_gradient_wire_bytes == wire
    assert all(
        recipe.tp_wire_bytes == 2.0
        for recipe in recipes
        if recipe.name in ("bf16", "float8-rowwise", "mxfp8", "nvfp4")
    )


def exposed_tp(case: Case) -> float:
    layout = case.job().layout
    return float(case.pricer().price(LayoutBatch.from_layouts([layout])).parts["tp"][0])


def test_the_release_decides_what_tp_sends() -> None:
    layout = {"dp_shard": 2, "tp": 8, "compile": True, "micro_batch_size": 2}
    old, new, plain = (
        exposed_tp(Case(precision=precision, trainer={"trainer_version": version}, layout=layout))
        for precision, version in (
            ("float8-tensorwise", "0.1.0"),
            ("float8-tensorwise", "0.2.2"),
            ("bf16", "0.2.2"),
        )
    )
    assert old < 0.95 * plain, "one of four equal parts in half the bytes"
    assert new >= plain, "the same bytes, and reductions of scales"


@pytest.mark.parametrize("name", ["float8-tensorwise", "float8-rowwise"])
def test_tp_reduces_scales_of_operands_that_are_split(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a layer: a column-parallel one's gradient and weight, a row-parallel one's input and
    weight.

    Source: torchao float8_linear.py and float8_utils.py (amax over the device mesh of a split
        tensor).
    """
    case = Case(precision=name, layout={**TP, "compile": True})
    assert (sum(case.recipe().column_amax), sum(case.recipe().row_amax)) == (2, 2)
    free = replace(case.recipe(), column_amax=NOTHING, row_amax=NOTHING)

    def reducing(count: float) -> float:
        counted = replace(free, column_amax=Operands(gradient=count))
        return outcome(case, monkeypatch, lambda _: counted)[0]

    none, one, two = map(reducing, (0.0, 1.0, 2.0))
    assert two - one == pytest.approx(one - none)
    assert one > none


def test_scales_of_all_weights_in_one_reduction_are_cheaper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """precompute_float8_dynamic_scale_for_fsdp, as our export sets it; plain torch has none."""
    one = outcome(GATHERED, monkeypatch, lambda recipe: recipe)[0]
    apart = {"gather_amax": True, "step_amax": 0.0}
    each = outcome(GATHERED, monkeypatch, lambda recipe: replace(recipe, **apart))[0]
    assert each > one
    plain = TRAINERS["fsdp"].recipes(None)[PRECISIONS.names.index("float8-tensorwise")]
    assert (plain.gather_amax, plain.step_amax) == (True, 0.0)


def test_quantised_gathers_cast_one_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """TE casts before it gathers; without sequence parallelism every rank casts all of it."""
    split = Case(
        precision="mxfp8",
        gpu="b200-sxm-180gb",
        trainer=TE,
        layout={"dp_shard": 2, "tp": 8, "micro_batch_size": 8},
    )

    def casts(case: Case) -> float:
        cast = Operands(input=400.0)
        dear = outcome(case, monkeypatch, lambda recipe: replace(recipe, cast=cast))[0]
        return dear - outcome(case, monkeypatch, lambda recipe: replace(recipe, cast=NOTHING))[0]

    parallel = replace(split, layout={**split.layout, "sequence_parallel": False})
    assert casts(parallel) > 1.5 * casts(split)


# ---- saved bytes ---------------------------------------------------------------------------------


def test_saved_bytes_count_their_scales() -> None:
    """A byte a 32 for mx, fp32 a 128 for blocks, a byte a 16 for nvfp4; torchao keeps 16 bits."""
    tables = (transformer_engine(), torchao())
    te, ao = ({recipe.name: recipe.saved_bytes for recipe in table} for table in tables)
    assert te["mxfp8"] == 33 / 32
    assert te["float8-blockwise"] == 1 + 4 / 128
    assert te["nvfp4"] == ao["nvfp4"] == 9 / 16
    assert te["mxfp4"] == 17 / 32
    assert te["float8-delayed"] == 1.0
    assert ao["float8-tensorwise"] == ao["float8-rowwise"] == ao["mxfp8"] == 2.0


# ---- words ---------------------------------------------------------------------------------------


def sentences(case: Case) -> str:
    pricer, layout = case.pricer(), case.job().layout
    assert layout is not None
    (estimate,) = estimate_layouts(pricer, [layout])
    return "; ".join(precision_sentences(Together(pricer, [layout]), layout, estimate))


def test_a_plan_says_what_low_precision_leaves_and_costs() -> None:
    layout = {"dp_shard": 2, "tp": 8, "compile": True}
    said = sentences(Case(precision="float8-tensorwise", layout=layout))
    assert "float8-tensorwise leaves wk, wv in 16 bits" in said
    assert "scaling and casting for float8-tensorwise takes" in said
    assert "TP all-gathers stay in 16 bits" in said
    assert "the last 5 of 32 layers" in sentences(NVFP4)
    assert sentences(Case(precision="bf16", layout=TP)) == ""
    old = Case(
        precision="float8-tensorwise",
        trainer={"trainer_version": "0.1.0"},
        layout={"dp_shard": 2, "tp": 8, "compile": True},
    )
    assert "stay in 16 bits under" not in sentences(old)


def test_weight_gradients_in_16_bits_cost_a_third_of_the_gain() -> None:
    """Two of three products stay in float8, and fewer operands are quantised."""
    job: dict[str, Any] = {
        "model": "llama3.1-405b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 512},
        "training": {"seq_len": 8192, "global_batch_size": 512},
    }
    seconds = {
        name: planner.estimate(
            **job, layout={"ac": "none", "compile": True, "precision": name}
        ).time.compute_seconds
        for name in ("bf16", "float8-rowwise-gw-hp", "float8-rowwise")
    }
    gain = seconds["bf16"] - seconds["float8-rowwise"]
    kept = seconds["bf16"] - seconds["float8-rowwise-gw-hp"]
    assert kept / gain == pytest.approx(2 / 3, abs=0.12)
