"""Rows that each trainer moves between the router and the experts, what its kernels move, and their
exchange: DeepEP against published timings, bytes and hiding by hand.
"""

import re
from typing import Any

import numpy as np
import pytest

from planner.cost.layer.exchange import DEEPEP, DISPATCHERS, kernel_seconds, reached
from planner.cost.memory.reserved import dispatch_buffer_bytes
from planner.cost.price import Pricer
from planner.intake.models import read_model
from planner.work.axes import local_sizes
from planner.work.blocks import layer_ops
from planner.work.expert_path import PATHS
from planner.work.ops import Collective, Elementwise
from planner.work.pieces import Code
from tests.golden.rows import timings
from tests.pricing import batch_of, collective_of, pricer

SEQ, TOP_K, EXPERTS = 4096, 8, 128  # of qwen3-30b-a3b


def sizes(trainer: str, **values: Any) -> dict[str, float]:
    p = pricer("qwen3-30b-a3b", 16, trainer=trainer, moe_imbalance=1.5)
    found = local_sizes(batch_of(p, **values), p.model, p.training, p.rules)
    return {name: float(column[0]) for name, column in found.items()}


COPIES = SEQ * TOP_K


@pytest.mark.parametrize(("trainer", "layout", "rows"), [
    # (sent, copied, unsorted, regrouped, routed)
    ("torchtitan", {"ep": 8}, (1.5, 1.0, 1.0, 1.5, 1.5)),
    # without EP rows are padded all the same
    ("torchtitan", {}, (1.5, 1.0, 1.0, 1.5, 1.5)),
    # whole experts: TP ranks share the tokens, but each lays out all of them at the end
    ("torchtitan", {"tp": 2, "ep": 8}, (0.75, 0.5, 1.0, 0.75, 0.75)),
    # cut experts: every TP rank exchanges all tokens
    ("torchtitan", {"tp": 2, "ep": 8, "etp": 2}, (1.5, 1.0, 1.0, 1.5, 1.5)),
    ("megatron", {}, (1.5, 1.0, 1.0, 0.0, 1.5)),
    # cut experts: each rank exchanges its own tokens, then their rows are gathered
    ("megatron", {"tp": 2, "ep": 8, "etp": 2}, (0.75, 0.5, 0.5, 1.5, 1.5)),
    # the kernel reads the tokens themselves
    ("megatron", {"ep": 8, "moe_dispatcher": "deepep"}, (1.5, 0.0, 0.0, 1.5, 1.5)),
])  # fmt: skip
def test_rows_by_hand(trainer: str, layout: Any, rows: tuple[float, ...]) -> None:
    found = sizes(trainer, **layout)
    names = ("sent", "copied", "unsorted", "regrouped", "routed")
    assert [found[f"tokens_{name}"] / COPIES for name in names] == list(rows)


@pytest.mark.parametrize(("trainer", "layout", "rows"), [
    # torchtitan 0.2.2: bf16 8, fp8 16, mxfp8 32 rows are allocated for every expert
    ("torchtitan", {"precision": "bf16"}, 8),
    ("torchtitan", {"precision": "float8-rowwise"}, 16),
    ("torchtitan", {"precision": "float8-tensorwise"}, 16),
    ("torchtitan", {"precision": "mxfp8"}, 32),
    # its float8 experts refuse pipelines and CP (quantization/float8.py), and stay in bf16
    ("torchtitan", {"precision": "float8-rowwise", "cp": 2}, 8),
    ("torchtitan", {"precision": "mxfp8", "cp": 2}, 32),
    # Megatron-LM rounds quantised counts up, to 16, mxfp8 32, nvfp4 128
    ("megatron", {"precision": "bf16"}, 0),
    ("megatron", {"precision": "float8-delayed"}, 7.5),
    ("megatron", {"precision": "float8-blockwise"}, 7.5),
    ("megatron", {"precision": "mxfp8"}, 15.5),
    ("megatron", {"precision": "nvfp4"}, 63.5),
])  # fmt: skip
def test_padding_rows_follow_the_kernel(trainer: str, layout: Any, rows: float) -> None:
    found = sizes(trainer, **({"ep": 8} | layout))
    padding = found["tokens_grouped"] - found["tokens_routed"]
    assert padding == pytest.approx(rows * EXPERTS / 8, abs=1e-6)


def test_an_imbalance_is_of_the_busiest_rank_alone() -> None:
    found = sizes("torchtitan", ep=8)
    assert found["tokens_routed"] == 1.5 * found["tokens_copied"]
    assert found["tokens_per_expert"] == 1.5 * COPIES / (EXPERTS / 8)


def test_kernels_by_kernel() -> None:
    """torchtitan 0.2.2, elements read and written of one routed row, scores behind the experts."""
    forward = {"index": 2, "vstack": 2, "index padded": 2, "index_put": 2, "zeros": 1,
               "index_put back": 2, "float": 3, "bmm": 2}  # fmt: skip
    assert sum(moves.forward for moves, *_ in PATHS["torch"].values()) == sum(forward.values())
    # llama 4 scales rows in fp32 before the experts: float 3, product 4, cast 3; then only a sum
    before = PATHS["torch-scores-first"]
    assert before["gather"][0].forward - PATHS["torch"]["gather"][0].forward == 3 + 4 + 3
    fused = PATHS["fused"].values()
    assert all(moves.forward == moves.backward == 2.0 for moves, *_ in fused)


def moved(model: str, compiles: bool = True, path: str = "torch") -> dict[str, Any]:
    spec = read_model(model)
    kind = next(kind for kind, _ in spec.distinct_layers() if kind.moe)
    ops = layer_ops(spec, kind, True, Code(expert_path=path, compiles_exchange=compiles))
    return {op.name: op for op in ops if isinstance(op, Elementwise | Collective)}


def test_torch_compile_leaves_the_exchange_alone_where_the_release_does() -> None:
    assert all(not moved("qwen3-30b-a3b", False)[place].compiles for place in PATHS["torch"])
    assert all(moved("qwen3-30b-a3b")[place].compiles for place in PATHS["torch"])


def test_megatron_adds_biases_of_experts_outputs_one_by_one() -> None:
    """b * p, t + bp, cat and to() of fp32 rows; only where experts have biases."""
    op = moved("gpt-oss-20b", path="fused")["expert_bias"]
    assert op.moves.forward == op.moves.fused_forward == 2 + (1 + 2 + 2) + (2 + 2) + (2 + 1)
    assert op.each == ("experts_local",)
    assert "expert_bias" not in moved("gpt-oss-20b").keys() | moved("qwen3-30b-a3b", path="fused")


def test_borders_of_tp() -> None:
    """TorchTitan's block gathers and scatters once; a shared expert's borders are the same ones."""
    assert {"experts_tp_enter", "experts_tp_exit"} <= moved("qwen3-30b-a3b").keys()
    assert not {"experts_tp_enter", "etp_enter"} & moved("deepseek-v2-lite").keys()
    fused = moved("qwen3-30b-a3b", path="fused")
    assert {"etp_enter", "etp_exit"} <= fused.keys()
    assert "experts_tp_enter" not in fused


GPUS = {
    "H100-SXM-80GB": "h100-sxm-80gb", "H200-SXM-141GB": "h200-sxm-141gb",
    "B200-SXM-180GB": "b200-sxm-180gb",
}  # fmt: skip
SHAPE = re.compile(r"(\d+) tokens a rank, hidden (\d+), top-(\d+), (\d+) experts")


@pytest.mark.parametrize(("gpu", "ranks", "error"), [
    ("H100-SXM-80GB", 8, 0.06), ("H200-SXM-141GB", 8, 0.06), ("B200-SXM-180GB", 8, 0.10),
    ("H100-SXM-80GB", 16, 0.15), ("H100-SXM-80GB", 32, 0.10),
])  # fmt: skip
def test_deepep_s_timings(gpu: str, ranks: int, error: float) -> None:
    family, nvlink = ("hopper", 450e9) if gpu.startswith("H") else ("blackwell", 900e9)
    kernels = DISPATCHERS[DEEPEP](family)
    node = pricer("qwen3-30b-a3b", ranks, GPUS[gpu]).fabric.gpus[0]
    group, errors = (np.array([float(ranks)]), np.array([1.0])), []
    for row in timings("DeepEP normal combine time", gpu):  # in 16 bits
        shape = SHAPE.match(row["shape_message"])
        if shape and int(row["ranks"]) == ranks:
            tokens, hidden, top_k, _ = map(int, shape.groups())
            moved, rates = np.array([2.0 * tokens * hidden]), (nvlink, 50e9)
            seconds = kernel_seconds(moved, (top_k, 0), kernels, group, node, rates)
            errors.append(float(np.log(seconds[0] / float(row["value"]))))
    assert len(errors) >= 18
    assert np.mean(np.abs(errors)) < error


def test_places_that_a_token_reaches() -> None:
    draws = np.random.default_rng(0).integers(0, 8, size=(200_000, 6))
    distinct = np.mean([len(set(row)) for row in draws[:20_000]])
    assert reached(np.array([8.0]), 6)[0] == pytest.approx(distinct, rel=0.01)
    assert reached(np.array([1.0]), 6)[0] == 1.0


def exposed(p: Pricer, **values: Any) -> float:
    prices = p.price(batch_of(p, **values))
    assert sum(prices.parts.values())[0] == pytest.approx(prices.step_seconds[0])
    return float(prices.parts["ep"][0])


def on(num_gpus: int, model: Any = "qwen3-30b-a3b", **training: Any) -> Pricer:
    given = {"trainer": "megatron", "trainer_version": "0.14", **training}
    return pricer(model, num_gpus, **{"global_batch_size": 1024, **given})


def test_alltoall_sends_every_copy_and_deepep_one_a_node() -> None:
    """Across nodes DeepEP sends at most one copy to each, alltoall top-k of them."""
    assert exposed(on(64), ep=32, moe_dispatcher="deepep") < 0.6 * exposed(on(64), ep=32)


def test_allgather_gathers_and_reduces_the_tokens_of_all() -> None:
    p, buffer = on(64, moe_imbalance=1.0), 32 * 4096 * 2048 * 2.0
    both = [collective_of(p, name, buffer, 32)[0] for name in ("all-gather", "reduce-scatter")]
    microbatches, layers, directions = 1024 / 64, 48, 2
    by_hand = pytest.approx(microbatches * layers * directions * sum(both))
    assert exposed(p, ep=32, moe_dispatcher="allgather") == by_hand


def test_nothing_hides_the_exchange_unless_the_run_says_so() -> None:
    plain, told = on(16), on(16, overlap={"ep": True})
    share, whole = told.profile.ep_hidden, exposed(plain, ep=8)
    assert 0 < share < 1
    counts = (whole - exposed(told, ep=8)) / share / whole  # all but the exchange of counts
    assert 0.9 < counts <= 1.0
    assert exposed(told, ep=8, ac="full") == pytest.approx(exposed(plain, ep=8, ac="full"))


@pytest.mark.parametrize(("batch", "layout", "alone"), [
    (128, {}, 1.0), (256, {}, 1 / 2), (1024, {}, 1 / 8),
    (1024, {"pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 4}, 2 / 16),
])  # fmt: skip
def test_the_first_and_the_last_exchanges_run_alone(batch: int, layout: Any, alone: float) -> None:
    """Those of pp of m microbatches, where launches do not leave the device idle."""
    given = {"cuda_graphs": "full", "trainer_version": "0.18", "global_batch_size": batch}
    layout = {"ep": 8, "micro_batch_size": 8, "moe_dispatcher": "hybridep", **layout}
    plain, told = (exposed(on(16, overlap={"ep": way}, **given), **layout) for way in (False, True))
    share = on(16).profile.ep_hidden
    assert told / plain == pytest.approx(1.0 - share * (1.0 - alone), rel=1e-3)


@pytest.mark.parametrize(("trainer", "covers"), [("torchtitan", True), ("megatron", False)])
def test_shared_experts_cover_torchtitan_s_combine_alone(trainer: str, covers: bool) -> None:
    shared = {"n_shared_experts": 1, "shared_expert_intermediate_size": 768}
    models = ("qwen3-30b-a3b", {"base": "qwen3-30b-a3b", **shared})
    own = {"trainer": trainer, "trainer_version": None}
    without, with_one = (exposed(on(8, model, **own), ep=8) for model in models)
    assert (with_one < without) == covers


@pytest.mark.parametrize(("ep", "nodes"), [(8, 0), (32, 4)])
def test_buffers_of_deepep_by_hand(ep: int, nodes: int) -> None:
    p = pricer("deepseek-v3", 32, global_batch_size=1024)
    both = batch_of(p, *({"ep": ep, "moe_dispatcher": name} for name in ("deepep", "alltoall")))
    nvlink, network = 10 * 8 * 256 * 7168 * 2, 10 * nodes * 2 * 128 * 7168 * 2
    held = dispatch_buffer_bytes(both, p.model, p.cluster, p.training)
    assert held.tolist() == [nvlink + network, 0.0]
