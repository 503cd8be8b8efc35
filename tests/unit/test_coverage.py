"""Which kernels candidates run, and which of them are worth a micro-probe."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest

from planner.calibration.coverage import NEAR, Use, choose, gaps, probe_seconds, uses
from planner.calibration.kernels import KernelShape, shape_seconds
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.trainers.registry import resolve_layout
from tests.conftest import ROOT, job_values

TRAINING = {"seq_len": 4096, "global_batch_size": 64}


def used(
    *layouts: dict, model: str = "llama3-8b", gpus: int = 8, **training: object
) -> tuple[Use, ...]:
    job = read_job(job_values(model, "h100-sxm-80gb", gpus, 4096, 64, **training))
    chosen = [resolve_layout(values, trainer="torchtitan", num_gpus=gpus) for values in layouts]
    pricer = Pricer.build(job.model, job.cluster, job.training)
    return uses(pricer, LayoutBatch.from_layouts(chosen))


def shapes(
    found: tuple[Use, ...], kind: str, name: str = "", dtype: str = "bf16"
) -> set[tuple[int, ...]]:
    return {
        tuple(size for _, size in use.shape.sizes)
        for use in found
        if (use.shape.kind, use.shape.name, use.shape.dtype) == (kind, name, dtype)
    }


def test_the_products_of_a_dense_layer_are_all_there_in_three_passes() -> None:
    found = shapes(used({"micro_batch_size": 2}), "gemm")
    tokens, hidden, ffn, vocab = 8192, 4096, 14336, 128256
    forward = {
        (hidden, tokens, hidden),
        (hidden, tokens, 1024),
        (hidden, tokens, ffn),
        (ffn, tokens, hidden),
        (hidden, tokens, vocab),
    }
    assert forward <= found
    # k, m, n: gradients of the input swap k and n, gradients of the weight have the tokens in their
    #     depth
    assert {(n, m, k) for k, m, n in forward} <= found
    assert {(m, k, n) for k, m, n in forward} <= found


def test_tensor_parallelism_divides_heads_and_widths_and_adds_its_collectives() -> None:
    found = used({"tp": 4})
    assert (4096, 4096, 14336 // 4) in shapes(found, "gemm")
    assert shapes(found, "attention") == {(1, 128, 8, 2, 4096, 128, 0)}
    hidden_bytes = 4096 * 4096 * 2
    assert (hidden_bytes, 4, 1) in shapes(found, "collective", "all-gather")
    assert (hidden_bytes, 4, 1) in shapes(found, "collective", "reduce-scatter")
    gathers = shapes(found, "collective", "all-gather")
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
    a = KernelShape.of("gemm", m=1023, n=1023, k=1023)
    assert a.octaves_to(a) == 0.0
    assert a.octaves_to(KernelShape.of("gemm", m=2047, n=1023, k=1023)) == pytest.approx(1.0)
    near = KernelShape.of("gemm", m=2047, n=2047, k=1023)
    assert a.octaves_to(near) == pytest.approx(math.sqrt(2.0))
    size = {"m": 1023, "n": 1023, "k": 1023}
    assert a.octaves_to(KernelShape.of("gemm", dtype="float8-rowwise", **size)) == math.inf
    assert a.octaves_to(KernelShape.of("grouped-gemm", **size, groups=2)) == math.inf


def test_what_is_measured_is_no_gap_and_what_is_far_is_worth_more() -> None:
    near, far = (KernelShape.of("gemm", m=m, n=4096, k=4096) for m in (4096, 65536))
    both = [Use(shape=near, seconds=1e-3, share=0.1), Use(shape=far, seconds=1e-2, share=0.1)]
    found = gaps(both, [KernelShape.of("gemm", m=4200, n=4096, k=4096)])
    assert [gap.use.shape for gap in found] == [far]
    assert found[0].octaves > NEAR
    assert found[0].nearest == KernelShape.of("gemm", m=4200, n=4096, k=4096)
    blank = gaps([Use(shape=near, seconds=1e-3, share=0.1)], [])
    assert blank[0].nearest is None
    assert blank[0].value == pytest.approx(0.1)


def test_choice_stays_in_budget_and_copies_do_not_crowd_out_the_rest() -> None:
    found = used(
        {"micro_batch_size": 1},
        {"micro_batch_size": 2},
        {"tp": 2},
        {"tp": 8},
        {"precision": "float8-rowwise", "compile": True},
    )
    chosen = choose(found, [], budget_seconds=8.0)
    assert sum(probe_seconds(gap.use) for gap in chosen) <= 8.0
    assert all(gap.use.shape.num_gpus == 1 for gap in chosen)
    for early, late in pairwise(chosen):
        assert early.use.shape.octaves_to(late.use.shape) > NEAR
    everything = choose(found, [], budget_seconds=1e9, num_gpus=8)
    assert {"collective", "gemm", "attention", "attention-backward", "memory", "optimizer"} <= {
        gap.use.shape.kind for gap in everything
    }
    shapes = [gap.use.shape for gap in everything]
    assert choose(found, shapes, budget_seconds=1e9, num_gpus=8) == ()
    assert choose(found, [], budget_seconds=0.0) == ()


def test_a_minute_covers_a_plan_of_a_large_model() -> None:
    layouts = (
        {"tp": 8},
        {"tp": 8, "precision": "float8-rowwise", "compile": True},
        {"tp": 4, "pp": 2},
        {"tp": 2, "cp": 2},
    )
    found = used(*layouts, model="llama3-70b", gpus=64, seq_len=8192)
    chosen = choose(found, [], budget_seconds=60.0)
    single = [use for use in found if use.shape.num_gpus == 1]
    shapes = [gap.use.shape for gap in chosen]
    near = [use for use in single if any(use.shape.octaves_to(x) <= NEAR for x in shapes)]
    covered = sum(use.share for use in near)
    assert covered > 0.99 * sum(use.share for use in single)


def test_shapes_survive_json() -> None:
    shape = KernelShape.of(
        "attention", batch=2, heads=8, kv_heads=1, seq=8192, head_dim=128, v_head_dim=128, window=0
    )
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
    machine = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    job = read_job({"model": "llama3-8b", "cluster": machine, "training": TRAINING})
    pricer = Pricer.build(job.model, job.cluster, job.training)
    asked = [KernelShape.of("memory", name, bytes=1 << 30) for name in ("copy", "add")]
    copy, add = shape_seconds(pricer, asked)
    assert copy > 0.0
    assert add == 0.0


GENERATIONS = ("flash2", "flash3", "cudnn")


@pytest.mark.slow
def test_the_fit_of_kernels_prints_every_recipe_beside_what_ships() -> None:
    script = ROOT / "benchmarks" / "fit_kernels.py"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for recipe in ("bf16", "float8-tensorwise", "float8-blockwise", "nvfp4"):
        lines = [line for line in done.stdout.splitlines() if f" {recipe} " in line]
        assert any("half depth" in line for line in lines), recipe
    fits = [line for line in done.stdout.splitlines() if " fit: " in line]
    assert done.stdout.count("shipped: mean error") >= len(fits) > len(GENERATIONS)
    assert all(any(f" {name} " in line for line in fits) for name in GENERATIONS)
