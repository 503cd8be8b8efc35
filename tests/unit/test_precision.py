"""Precision recipes: every field is read, and libraries, releases, layers get what sources say."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.layer.gemm import gemm_cost
from planner.cost.machine import device as compute
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
from planner.rules import violations
from planner.specs.job import Job
from planner.trainers.base import TrainerRules
from planner.trainers.registry import TRAINERS
from planner.work.ops import Gemm, Tensor
from planner.work.quantised import quantised_model
from tests.conftest import job_values
from tests.pricing import batch_of, priced, pricer

Recipes = tuple[Recipe, ...]
TITAN = TRAINERS["torchtitan"]


@dataclass(frozen=True, kw_only=True)
class Case:
    precision: str
    model: str = "llama3-8b"
    gpu: str = "h100-sxm-80gb"
    trainer: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)

    def job(self) -> Job:
        layout = {"precision": self.precision, **self.layout}
        given = {"layout": layout, **self.trainer}
        return read_job(job_values(self.model, self.gpu, 16, 8192, 64, **given))

    def priced(self) -> tuple[Pricer, LayoutBatch]:
        return priced(self.job())

    def recipes(self) -> Recipes:
        training = self.job().training
        return TRAINERS[training.trainer].recipes(training.trainer_version)

    def recipe(self) -> Recipe:
        return self.recipes()[code(self.precision)]


code = PRECISIONS.names.index
TENSORWISE, ROWWISE = "float8-tensorwise", "float8-rowwise"
TP = {"dp_shard": 8, "tp": 2}
TE = {"trainer": "megatron"}
KEPT = Case(precision=TENSORWISE, layout={**TP, "compile": True, "ac": "none"})
EAGER = Case(precision=TENSORWISE, layout=TP)
FUSED = Case(precision=TENSORWISE, layout={**TP, "compile": True})
SHARDED = {"dp_shard": 16, "compile": True}
GATHERED = Case(precision=TENSORWISE, layout={**SHARDED, "float8_all_gather": True})
DELAYED = Case(precision="float8-delayed", trainer=TE, layout={**TP, "micro_batch_size": 4})
MOE = "qwen3-30b-a3b"
EXPERTS = Case(precision=ROWWISE, model=MOE, layout={**SHARDED, "ep": 8})
RINGED = Case(precision=ROWWISE, model=MOE, layout={**SHARDED, "dp_shard": 8, "cp": 2, "ep": 4})
ON_16 = {"dp_shard": 16, "ep": 8, "micro_batch_size": 4}
GROUPED = Case(precision="mxfp8", model=MOE, gpu="b200-sxm-180gb", trainer=TE, layout=ON_16)
TITAN_03 = {"trainer_version": "0.3.0"}
WHOLE = {**SHARDED, "ac": "none"}
NVFP4 = Case(precision="nvfp4", gpu="b200-sxm-180gb", trainer=TITAN_03, layout=WHOLE)


def outcome(case: Case, **fields: Any) -> tuple[float, float, list[str]]:
    """(seconds, bytes, broken rules) when the case's recipe has these fields."""
    name, job = case.precision, case.job()
    recipes = tuple(replace(one, **fields) if one.name == name else one for one in case.recipes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerRules, "recipes", lambda *_: recipes)
        patch.setattr(compute, "torchao", lambda: recipes)
        p, batch = case.priced()
        found = p.price(batch)
        broken = violations(job.layout, job.model, job.cluster, job.training)
    rules = [f"{one.field}: {one.rule}" for one in broken]
    return float(found.step_seconds[0]), float(found.device_bytes[0]), rules


# One change of every field that decides anything, and a layout for which it decides. `name` is the
# row's key.
CHANGES: dict[str, tuple[Case, Any]] = {
    "gradients_as": (FUSED, "float8-rowwise"), "rescaled": (FUSED, 4.0),
    "eager_rescaled": (EAGER, 12.0), "scale_fuses": (FUSED, 0.0), "peak": (EAGER, "bf16"),
    "gain_key": (FUSED, "gemm_fp8_rowwise"), "forward": (FUSED, False),
    "input_grad": (FUSED, False), "weight_grad": (FUSED, False), "experts": (EXPERTS, ""),
    "experts_alone": (RINGED, False), "dense_only": (EXPERTS, True), "bf16_layers": (NVFP4, 0.5),
    "scale": (FUSED, None), "cast": (FUSED, None), "eager_scale": (EAGER, None),
    "eager_cast": (EAGER, None), "transposed": (DELAYED, None), "padding": (GROUPED, 0.0),
    "group_multiple": (GROUPED, 128), "fused_kernels": (FUSED, 200.0),
    "eager_kernels": (EAGER, 200.0), "expert_launches": (GROUPED, 200.0),
    "weight_once": (DELAYED, False), "column_amax": (FUSED, None), "row_amax": (FUSED, None),
    "step_amax": (GATHERED, 9.0), "gather_amax": (GATHERED, True), "saved_bytes": (KEPT, 1.0),
    "saved_weight_bytes": (NVFP4, 2.0), "weight_copy_bytes": (DELAYED, 2.0),
    "weight_copies": (DELAYED, 1.0), "native": (DELAYED, True), "wire_bytes": (GATHERED, 1.5),
    "tp_wire_bytes": (FUSED, 1.0), "tp_gradient_wire_bytes": (FUSED, 1.0),
    "multiple": (FUSED, 10_000), "rows_multiple": (FUSED, 10_000),
    "fallback_multiple": (FUSED, 10_000), "small": (FUSED, ((1e9, 1e9),)),
    "listed": (FUSED, False),
}  # fmt: skip
BY_OPERAND = [f.name for f in fields(Recipe) if isinstance(getattr(torchao()[0], f.name), Operands)]


def test_every_field_has_a_change() -> None:
    assert set(CHANGES) == {f.name for f in fields(Recipe)} - {"name"}


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in BY_OPERAND])
def test_every_field_decides_something(name: str) -> None:
    case, value = CHANGES[name]
    assert getattr(case.recipe(), name) != value
    before = outcome(case)
    assert before[2] == [], "the case itself is legal"
    assert outcome(case, **{name: value}) != before


@pytest.mark.parametrize("operand", Operands._fields)
@pytest.mark.parametrize("name", BY_OPERAND)
def test_every_operand_decides_something(name: str, operand: str) -> None:
    """All costs only add seconds."""
    case, _ = CHANGES[name]
    costs = getattr(case.recipe(), name)
    more = costs._replace(**{operand: getattr(costs, operand) + 20.0})
    before, after = (outcome(case, weight_once=False, **{name: one}) for one in (costs, more))
    assert after[0] > before[0]


@pytest.mark.parametrize("table", [torchao(), transformer_engine()])
def test_recipes_save_no_more_than_16_bits_and_what_those_must_not_have(table: Recipes) -> None:
    assert tuple(recipe.name for recipe in table) == tuple(PRECISIONS)
    for recipe in table:
        costs = [getattr(recipe, name) for name in BY_OPERAND]
        assert (costs != [NOTHING] * 7) == recipe.low, recipe.name
        widths = (recipe.saved_bytes, recipe.wire_bytes, recipe.tp_wire_bytes)
        assert recipe.saved_bytes <= 2.0
        assert recipe.low or (*widths, recipe.experts) == (2.0, 2.0, 2.0, "")


def test_recipes_with_kernels_of_their_own_have_curves_of_their_own() -> None:
    """Delayed scales run the cuBLAS kernel of tensorwise ones: one scale a tensor."""
    keys = {recipe.name: recipe.gain_key for recipe in torchao()}
    own = (TENSORWISE, ROWWISE, "float8-blockwise", "mxfp8", "nvfp4", "bf16")
    assert len({keys[name] for name in own}) == len(own)
    assert keys["float8-delayed"] == keys[TENSORWISE]


def linear_seconds(case: Case, tokens: int, k: int, n: int) -> tuple[float, float]:
    """(16-bit, quantised) seconds of one linear layer's three products, its casts and scales."""
    p, batch = case.priced()
    values = {"tokens": tokens, "hidden": k, "ffn": n}
    sizes = {name: np.array([float(value)]) for name, value in values.items()}
    context = replace(p.context(batch), sizes=sizes)
    source, result = (Tensor(name, ("tokens", name)) for name in ("hidden", "ffn"))
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
    ours = linear_seconds(Case(precision=TENSORWISE, layout=SHARDED), tokens, k, n)
    assert [1e3 * seconds for seconds in ours] == pytest.approx([high, low], rel=0.2)


def test_scales_cost_less_the_larger_their_block() -> None:
    """A scale a tensor or a row needs a pass of its own; blocks find theirs while they cast."""
    for table in (torchao(), transformer_engine()):
        by = {recipe.name: recipe for recipe in table}
        names = ("float8-blockwise", "mxfp8", "float8-tensorwise")
        block, mx, tensor = (by[name].scale.input for name in names)
        assert block < mx < tensor


def test_a_16_bit_weight_gradient_saves_its_cast() -> None:
    """torchao's rowwise_with_gw_hp; plain rowwise multiplies all three in float8. Nothing is cast
    for what stays in 16 bits."""
    case = Case(precision=ROWWISE, layout=SHARDED)
    assert case.recipe().weight_grad
    dear = case.recipe().cast._replace(input_again=99.0)
    before, after = outcome(case), outcome(case, weight_grad=False)
    assert after[0] > before[0]
    assert outcome(case, weight_grad=False, cast=dear) == after


@pytest.mark.parametrize(("precision", "k", "n", "stays"), [
    ("float8-tensorwise", 4096, 1024, True), ("float8-tensorwise", 4112, 1024, False),
    ("float8-tensorwise", 4096, 1040, False), ("float8-rowwise", 16384, 2048, True),
    ("float8-rowwise", 1024, 28672, True), ("float8-rowwise", 2048, 4096, True),
    ("float8-rowwise", 2064, 4096, False), ("float8-rowwise", 2064, 2064, False),
    ("float8-rowwise", 8192, 8200, True), ("mxfp8", 1024, 1024, False), ("mxfp8", 1000, 1024, True),
    ("bf16", 8192, 8192, True),
])  # fmt: skip
def test_small_and_unaligned_layers_stay_in_16_bits(
    precision: str, k: int, n: int, stays: bool
) -> None:
    assert stays_16_bit(TITAN.recipes("0.2.2")[code(precision)], k, n) == stays


@pytest.mark.parametrize(("model", "precision", "high"), [
    ("llama3-8b", TENSORWISE, {"wk", "wv"}),
    ("llama3-70b", TENSORWISE, set()),
    ("llama3-70b", ROWWISE, {"wk", "wv"}),
])  # fmt: skip
def test_the_filter_sees_whole_weights_and_decides_by_layer(
    model: str, precision: str, high: set[str]
) -> None:
    """Llama 3: keys and values are 4096 or 8192 x 1024. Head and router are never asked."""
    shares = quantised_model(load_model(model), TITAN.recipes("0.2.2")).shares
    assert {name for name, share in shares.items() if share[code(precision)] == 0} == high
    assert "head" not in shares


def test_nvfp4_keeps_the_last_layers() -> None:
    recipes = TITAN.recipes("0.3")
    tails = [bf16_tail(recipes[code("nvfp4")], layers) for layers in (1, 20, 32, 80)]
    assert tails == [1, 3, 5, 12]
    shares = quantised_model(load_model("llama3-8b"), recipes).shares
    assert shares["wq"][code("nvfp4")] == 27 / 32


@pytest.mark.parametrize(("version", "precision", "experts", "alone"), [
    ("0.2.2", TENSORWISE, ROWWISE, True), ("0.3.0", ROWWISE, ROWWISE, False),
    ("0.1.0", ROWWISE, "", False), ("0.2.2", "nvfp4", "", False),
])  # fmt: skip
def test_experts_have_own_recipes(version: str, precision: str, experts: str, alone: bool) -> None:
    """0.2 has grouped float8 products without PP and CP only; 0.1 none; torchao no nvfp4."""
    recipe = TITAN.recipes(version)[code(precision)]
    assert recipe.experts == experts
    assert recipe.experts_alone == alone or not experts


@pytest.mark.parametrize(("version", "wire"), [
    ("0.1.0", 1.0), ("0.2.2", 2.0), ("0.3.0", 2.0), (None, 2.0), ("6ba7a1f, 2025-03-14", 1.0),
    ("5b5d46856b, 2025-10-14", 2.0),
])  # fmt: skip
def test_torchtitan_gathers_tp_inputs_in_float8_only_while_its_plan_found_the_converter(
    version: str | None, wire: float
) -> None:
    recipes = TITAN.recipes(version)
    tensorwise = recipes[code(TENSORWISE)]
    assert tensorwise.tp_wire_bytes == tensorwise.tp_gradient_wire_bytes == wire
    others = [recipes[code(name)] for name in ("bf16", ROWWISE, "mxfp8", "nvfp4")]
    assert [recipe.tp_wire_bytes for recipe in others] == [2.0] * 4


def test_the_release_decides_what_tp_sends() -> None:
    """One of four equal parts in half the bytes; or the same bytes, and reductions of scales."""
    layout = {"dp_shard": 2, "tp": 8, "compile": True, "micro_batch_size": 2}
    releases = [(TENSORWISE, "0.1.0"), (TENSORWISE, "0.2.2"), ("bf16", "0.2.2")]
    runs = (
        Case(precision=name, trainer={"trainer_version": version}, layout=layout).priced()
        for name, version in releases
    )
    old, new, plain = (float(p.price(batch).parts["tp"][0]) for p, batch in runs)
    assert old < 0.95 * plain
    assert new >= plain


@pytest.mark.parametrize("name", [TENSORWISE, ROWWISE])
def test_tp_reduces_scales_of_operands_that_are_split(name: str) -> None:
    """Two a layer: a column-parallel one's gradient and weight, a row-parallel one's input and
    weight.

    Source: torchao float8_linear.py and float8_utils.py (amax over the device mesh of a split
        tensor).
    """
    case = Case(precision=name, layout={**TP, "compile": True})
    assert (sum(case.recipe().column_amax), sum(case.recipe().row_amax)) == (2, 2)
    none, one, two = (
        outcome(case, column_amax=Operands(gradient=count), row_amax=NOTHING)[0]
        for count in (0.0, 1.0, 2.0)
    )
    assert two - one == pytest.approx(one - none)
    assert one > none


def test_scales_of_all_weights_in_one_reduction_are_cheaper() -> None:
    """precompute_float8_dynamic_scale_for_fsdp, as our export sets it; plain torch has none."""
    assert outcome(GATHERED, gather_amax=True, step_amax=0.0)[0] > outcome(GATHERED)[0]


def test_quantised_gathers_cast_one_ranks_share() -> None:
    """TE casts before it gathers; without sequence parallelism every rank casts all of it."""
    layout = {"dp_shard": 2, "tp": 8, "micro_batch_size": 8}

    def casts(sequence_parallel: bool) -> float:
        given = {**layout, "sequence_parallel": sequence_parallel}
        case = Case(precision="mxfp8", gpu="b200-sxm-180gb", trainer=TE, layout=given)
        return outcome(case, cast=Operands(input=400.0))[0] - outcome(case, cast=NOTHING)[0]

    assert casts(False) > 1.5 * casts(True)


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


def sentences(case: Case) -> str:
    p, layouts = case.priced()[0], [case.job().layout]
    (estimate,) = estimate_layouts(p, layouts)
    return "; ".join(precision_sentences(Together(p, layouts), layouts[0], estimate))


def test_a_plan_says_what_low_precision_leaves_and_costs() -> None:
    case = Case(precision=TENSORWISE, layout={"dp_shard": 2, "tp": 8, "compile": True})
    said = sentences(case)
    assert "float8-tensorwise leaves wk, wv in 16 bits" in said
    assert "scaling and casting for float8-tensorwise takes" in said
    assert "TP all-gathers stay in 16 bits" in said
    assert "the last 5 of 32 layers" in sentences(NVFP4)
    assert sentences(Case(precision="bf16", layout=TP)) == ""
    assert "stay in 16 bits" not in sentences(replace(case, trainer={"trainer_version": "0.1.0"}))


def test_weight_gradients_in_16_bits_cost_a_third_of_the_gain() -> None:
    """Two of three products stay in float8, and fewer operands are quantised."""
    p = pricer("llama3.1-405b", 512, seq_len=8192, global_batch_size=512)
    names = ("bf16", "float8-rowwise-gw-hp", ROWWISE)
    batch = batch_of(p, *({"ac": "none", "compile": True, "precision": name} for name in names))
    plain, mixed, low = p.price(batch).parts["compute"]
    assert (plain - mixed) / (plain - low) == pytest.approx(2 / 3, abs=0.12)
