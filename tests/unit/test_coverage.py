"""Which kernels candidates run, and which of them are worth a micro-probe."""

import math
import sys
from itertools import pairwise

import pytest

from planner.calibration.coverage import NEAR, Use, choose, gaps, probe_seconds, uses
from planner.calibration.kernels import KernelShape, shape_seconds
from tests.conftest import ROOT, ran
from tests.pricing import batch_of, pricer


def used(
    *layouts: dict, model: str = "llama3-8b", gpus: int = 8, **training: object
) -> tuple[Use, ...]:
    p = pricer(model, gpus, **training)
    return uses(p, batch_of(p, *layouts))


def shapes(
    found: tuple[Use, ...], kind: str, name: str = "", dtype: str = "bf16"
) -> set[tuple[int, ...]]:
    return {
        tuple(size for _, size in use.shape.sizes)
        for use in found
        if (use.shape.kind, use.shape.name, use.shape.dtype) == (kind, name, dtype)
    }


def test_the_products_of_a_dense_layer_are_all_there_in_three_passes() -> None:
    """k, m, n: gradients of the input swap k and n, of the weight sum over tokens."""
    tokens, hidden, ffn, vocab = 8192, 4096, 14336, 128256
    weights = [(hidden, hidden), (hidden, 1024), (hidden, ffn), (ffn, hidden), (hidden, vocab)]
    passes = [{(k, tokens, n), (n, tokens, k), (tokens, k, n)} for k, n in weights]
    assert set().union(*passes) <= shapes(used({"micro_batch_size": 2}), "gemm")


def test_tensor_parallelism_divides_heads_and_widths_and_adds_its_collectives() -> None:
    found = used({"tp": 4})
    assert (4096, 4096, 14336 // 4) in shapes(found, "gemm")
    assert shapes(found, "attention") == {(1, 128, 8, 2, 4096, 128, 0)}
    gathers = shapes(found, "collective", "all-gather")
    assert (4096 * 4096 * 2, 4, 1) in gathers & shapes(found, "collective", "reduce-scatter")
    assert any((ranks, stride) == (2, 4) for _, ranks, stride in gathers)


def test_context_parallelism_attends_in_pieces_and_ulysses_in_heads() -> None:
    ring = used({"cp": 4})
    assert shapes(ring, "attention") == {(1, 128, 32, 8, 1024, 128, 0)}
    assert shapes(ring, "attention-backward") == shapes(ring, "attention")


def test_experts_are_grouped_products_and_exchange_their_tokens() -> None:
    found = used({"ep": 8}, model="mixtral-8x7b", moe_imbalance=1.0)
    assert (1, 4096, 8192, 14336) in shapes(found, "grouped-gemm")
    assert shapes(found, "collective", "all-to-all") == {(8192 * 4096 * 2, 8, 1)}


def test_a_pipeline_sends_and_float8_is_a_kernel_of_its_own() -> None:
    assert shapes(used({"pp": 2}), "collective", "send") == {(4096 * 4096 * 2, 2, 4)}
    low = used({"precision": "float8-rowwise", "compile": True})
    assert (4096, 4096, 14336) in shapes(low, "gemm", dtype="float8-rowwise")
    assert all(128256 in sizes for sizes in shapes(low, "gemm"))


def test_shares_are_of_a_step() -> None:
    found = used({"ac": "none"}, gpus=1, global_batch_size=8)
    total = sum(use.share for use in found)
    assert 0.75 < total < 1.05
    assert [use.share for use in found] == sorted((use.share for use in found), reverse=True)
    assert all(use.seconds > 0 for use in found)


def test_a_kernel_of_one_candidate_in_two_counts_half() -> None:
    two, four = {"micro_batch_size": 2}, {"micro_batch_size": 4}
    alone, both = used(two), used(two, four)
    shape = next(use.shape for use in alone if use.shape.kind == "attention")
    shares = [next(use.share for use in found if use.shape == shape) for found in (alone, both)]
    assert shares[1] == pytest.approx(shares[0] / 2)


def test_distance_counts_factors_of_two_and_never_joins_different_kernels() -> None:
    size = {"m": 1023, "n": 1023, "k": 1023}
    kernels = [
        KernelShape.of("gemm", **size),
        KernelShape.of("gemm", **size | {"m": 2047}),
        KernelShape.of("gemm", **size | {"m": 2047, "n": 2047}),
        KernelShape.of("gemm", dtype="float8-rowwise", **size),
        KernelShape.of("grouped-gemm", **size, groups=2),
    ]
    octaves = [kernels[0].octaves_to(one) for one in kernels]
    assert octaves == pytest.approx([0.0, 1.0, math.sqrt(2.0), math.inf, math.inf])


def test_what_is_measured_is_no_gap_and_what_is_far_is_worth_more() -> None:
    near, far, known = (KernelShape.of("gemm", m=m, n=4096, k=4096) for m in (4096, 65536, 4200))
    used = [Use(shape=one, seconds=1e-3, share=0.1) for one in (near, far)]
    (found,) = gaps(used, [known])
    assert (found.use.shape, found.octaves) == (far, far.octaves_to(known))
    assert found.octaves > NEAR
    blank = gaps(used[:1], [])[0]
    assert (blank.octaves, blank.value) == (math.inf, pytest.approx(0.1))


def test_choice_stays_in_budget_and_copies_do_not_crowd_out_the_rest() -> None:
    sizes, low = [{"micro_batch_size": 1}, {"micro_batch_size": 2}], "float8-rowwise"
    found = used(*sizes, {"tp": 2}, {"tp": 8}, {"precision": low, "compile": True})
    chosen = choose(found, [], budget_seconds=8.0)
    assert sum(probe_seconds(gap.use) for gap in chosen) <= 8.0
    assert all(gap.use.shape.num_gpus == 1 for gap in chosen)
    for early, late in pairwise(chosen):
        assert early.use.shape.octaves_to(late.use.shape) > NEAR
    all_of_it = {"budget_seconds": 1e9, "num_gpus": 8}
    every = [gap.use.shape for gap in choose(found, [], **all_of_it)]
    kinds = {"collective", "gemm", "attention", "attention-backward", "memory", "optimizer"}
    assert kinds <= {shape.kind for shape in every}
    assert choose(found, every, **all_of_it) == choose(found, [], budget_seconds=0.0) == ()


def test_a_minute_covers_a_plan_of_a_large_model() -> None:
    low = {"tp": 8, "precision": "float8-rowwise", "compile": True}
    layouts = ({"tp": 8}, low, {"tp": 4, "pp": 2}, {"tp": 2, "cp": 2})
    found = used(*layouts, model="llama3-70b", gpus=64, seq_len=8192)
    shapes = [gap.use.shape for gap in choose(found, [], budget_seconds=60.0)]
    single = [use for use in found if use.shape.num_gpus == 1]
    near = [use for use in single if any(use.shape.octaves_to(x) <= NEAR for x in shapes)]
    assert sum(use.share for use in near) > 0.99 * sum(use.share for use in single)


def test_shapes_survive_json() -> None:
    heads = {"heads": 8, "kv_heads": 1, "head_dim": 128, "v_head_dim": 128}
    shape = KernelShape.of("attention", batch=2, seq=8192, window=0, **heads)
    assert KernelShape.from_dict(shape.as_dict()) == shape


@pytest.mark.parametrize(("change", "said"), [
    ({"kind": "fft"}, "is none of gemm"),
    ({"name": "fast"}, "has no names"),
    ({"dtype": "int4"}, "dtype='int4' is none of bf16"),
    ({"sizes": {"m": 4}}, "sizes of a gemm are k, m, n, not m"),
    ({"sizes": {"m": 4, "n": 4, "k": -4}}, "size k=-4 is no whole number of at least 1"),
    ({"sizes": {"m": 4, "n": 4, "k": 1.5}}, "size k=1.5"),
    ({"sizes": {"m": 4, "n": 4, "k": True}}, "size k=True"),
    ({"kind": "collective", "name": "all-gather", "sizes": {"bytes": 1024}},
        "sizes of a collective are bytes, ranks, stride"),
    ({"kind": "collective", "name": "gossip"}, "is none of all-gather"),
    ({"kind": "memory", "name": "copies"}, "is none of copy"),
])  # fmt: skip
def test_what_is_no_kernel_is_refused(change: dict[str, object], said: str) -> None:
    good = {"kind": "gemm", "name": "", "dtype": "bf16", "sizes": {"m": 4, "n": 4, "k": 4}}
    assert KernelShape.from_dict(good)["k"] == 4
    with pytest.raises(ValueError, match=said):
        KernelShape.from_dict({**good, **change})


def test_only_copies_stand_for_memory_bound_kernels() -> None:
    asked = [KernelShape.of("memory", name, bytes=1 << 30) for name in ("copy", "add")]
    copy, add = shape_seconds(pricer(), asked)
    assert copy > add == 0.0


@pytest.mark.slow
def test_the_fit_of_kernels_prints_every_recipe_beside_what_ships() -> None:
    done = ran(sys.executable, ROOT / "benchmarks" / "fit_kernels.py", check=True)
    lines = done.stdout.splitlines()
    depths = [line for line in lines if "half depth" in line]
    for recipe in ("bf16", "float8-tensorwise", "float8-blockwise", "nvfp4"):
        assert any(f" {recipe} " in line for line in depths), recipe
    fits = [line for line in lines if " fit: " in line]
    assert done.stdout.count("shipped: mean error") >= len(fits) > 3
    for generation in ("flash2", "flash3", "cudnn"):
        assert any(f" {generation} " in line for line in fits), generation
