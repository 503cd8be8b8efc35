"""Rows that each trainer moves between the router and the experts, and what its kernels move."""

from typing import Any

import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.trainers.registry import resolve_layout
from planner.work.axes import local_sizes
from planner.work.blocks import layer_ops
from planner.work.expert_path import PATHS
from planner.work.ops import Collective, Elementwise
from planner.work.pieces import Code
from tests.conftest import job_values

SEQ, TOP_K, EXPERTS = 4096, 8, 128  # of qwen3-30b-a3b


def sizes(trainer: str, **values: Any) -> dict[str, float]:
    given = {"trainer": trainer, "moe_imbalance": 1.5}
    job = read_job(job_values("qwen3-30b-a3b", "h100-sxm-80gb", 16, SEQ, 64, **given))
    p = Pricer.build(job.model, job.cluster, job.training)
    batch = LayoutBatch.from_layouts([resolve_layout(values, trainer=trainer, num_gpus=16)])
    found = local_sizes(batch, p.model, p.training, p.rules)
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
def test_rows_by_hand(trainer: str, layout: dict[str, Any], rows: tuple[float, ...]) -> None:
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
def test_padding_rows_follow_the_kernel(trainer: str, layout: dict[str, Any], rows: float) -> None:
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
    assert sum(place.forward for place in PATHS["torch"].values()) == sum(forward.values())
    # llama 4 scales rows in fp32 before the experts: float 3, product 4, cast 3; then only a sum
    before = PATHS["torch-scores-first"]
    assert before["gather"].forward - PATHS["torch"]["gather"].forward == 3 + 4 + 3
    fused = PATHS["fused"].values()
    assert all(place.forward == place.backward == 2.0 for place in fused)


def moved(model: Any, compiles: bool = True, path: str = "torch") -> dict[str, Any]:
    spec = read_job(
        {"model": model, "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
         "training": {"seq_len": SEQ, "global_batch_size": 8}}
    ).model  # fmt: skip
    kind = next(kind for kind, _ in spec.distinct_layers() if kind.moe)
    code = Code(expert_path=path, compiles_exchange=compiles)
    ops = layer_ops(spec, kind, True, code)
    return {op.name: op for op in ops if isinstance(op, Elementwise | Collective)}


def test_torch_compile_leaves_the_exchange_alone_where_the_release_does() -> None:
    assert all(not moved("qwen3-30b-a3b", False)[place].compiles for place in PATHS["torch"])
    assert all(moved("qwen3-30b-a3b")[place].compiles for place in PATHS["torch"])


def test_megatron_adds_biases_of_experts_outputs_one_by_one() -> None:
    """b * p, t + bp, cat and to() of fp32 rows; only where experts have biases."""
    op = moved("gpt-oss-20b", path="fused")["expert_bias"]
    assert op.forward_moves == op.fused_forward_moves == 2 + (1 + 2 + 2) + (2 + 2) + (2 + 1)
    assert op.each == ("experts_local",)
    assert "expert_bias" not in moved("gpt-oss-20b").keys() | moved("qwen3-30b-a3b", path="fused")


def test_borders_of_tp() -> None:
    """TorchTitan's block gathers and scatters once; a shared expert's borders are the same ones."""
    assert {"experts_tp_enter", "experts_tp_exit"} <= moved("qwen3-30b-a3b").keys()
    assert not {"experts_tp_enter", "etp_enter"} & moved("deepseek-v2-lite").keys()
    fused = moved("qwen3-30b-a3b", path="fused")
    assert {"etp_enter", "etp_exit"} <= fused.keys()
    assert "experts_tp_enter" not in fused
