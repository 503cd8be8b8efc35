"""Kernels timed for real on this machine's CPU, alone and between two processes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from planner.calibration.kernels import SIZES, KernelShape
from planner.probes.kernels import KERNELS
from tests.conftest import ROOT, needed
from tests.e2e.probe_jobs import torchrun

torch = needed("torch")
micro = needed("planner.probes.micro")
pytestmark = pytest.mark.torch

ATTENTION = {"batch": 1, "heads": 4, "kv_heads": 2, "seq": 64, "head_dim": 16}
ATTENTION |= {"v_head_dim": 16, "window": 0}
ALONE = [
    KernelShape.of("gemm", m=64, n=48, k=32),
    KernelShape.of("gemm", dtype="float32", m=64, n=48, k=32),
    KernelShape.of("gemm", dtype="float8-rowwise", m=32, n=32, k=32),
    KernelShape.of("gemm", dtype="float8-tensorwise", m=32, n=32, k=32),
    KernelShape.of("grouped-gemm", m=16, n=32, k=32, groups=3),
    KernelShape.of("attention", **ATTENTION),
    KernelShape.of("attention-backward", **ATTENTION),
    *(
        KernelShape.of("memory", name, bytes=65536)
        for name in ("copy", "add", "swiglu", "rmsnorm", "cross-entropy")
    ),
    KernelShape.of("optimizer", "adamw", "float32", parameters=10_000),
]
NAMES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send")
TOGETHER = [KernelShape.of("collective", name, bytes=8192, ranks=2, stride=1) for name in NAMES]


def run(folder: Path, shapes: list[KernelShape], seconds: float = 60.0, ranks: int = 1) -> Any:
    """Rows of the command, run here or by torchrun."""
    given, out = folder / "shapes.jsonl", folder / "out.jsonl"
    given.write_text("".join(json.dumps(shape.as_dict()) + "\n" for shape in shapes))
    how = f"--shapes {given} --out {out} --device cpu --each-seconds 0.01 --seconds {seconds}"
    if ranks == 1:
        assert micro.main(how.split()) == 0
    else:
        ours = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        done = torchrun(ranks, "-m", "planner.probes.micro", *how.split(), env=ours)
        assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_every_kind_of_kernel_is_timed_here(tmp_path: Path) -> None:
    absent = [
        KernelShape.of("gemm", dtype="nvfp4", m=64, n=64, k=64),
        KernelShape.of("attention", **{**ATTENTION, "window": 32}),
        TOGETHER[0],
    ]
    first, *rows, last = run(tmp_path, [*ALONE, *absent])
    assert first["kind"] == "environment"
    assert last == {**last, "kind": "end", "measured": len(rows), "not_reached": []}
    assert [KernelShape.from_dict(row) for row in rows] == [*ALONE, *absent]
    timed, others = rows[: len(ALONE)], rows[len(ALONE) :]
    for row in timed:
        assert row["status"] == "ok", row
        assert row["runs"] >= 5
        assert 0 < row["seconds"] < 5
        assert row["software"]["torch"]
    flops = 2 * 64 * 48 * 32 / timed[0]["seconds"]
    assert timed[0]["flops_per_second"] == pytest.approx(flops)
    assert timed[-1]["bytes_per_second"] > 0
    assert [row["status"] for row in others] == ["unavailable"] * 3
    assert "needs torchrun with 2 processes" in others[-1]["message"]


@pytest.mark.slow
def test_collectives_are_timed_between_processes(tmp_path: Path) -> None:
    beyond = KernelShape.of("collective", "all-reduce", bytes=8192, ranks=2, stride=2)
    rows = run(tmp_path, [ALONE[0], *TOGETHER, beyond], ranks=2)[1:-1]
    assert [row["status"] for row in rows] == ["ok"] * 6 + ["unavailable"]
    for row in rows[1:6]:
        assert row["bytes_per_second"] == pytest.approx(8192 / row["seconds"])


def test_time_up_names_what_was_not_reached(tmp_path: Path) -> None:
    *_, last = run(tmp_path, [KernelShape.of("gemm", m=64, n=48, k=32)] * 2000, seconds=0.5)
    assert last["measured"] + len(last["not_reached"]) == 2000
    assert last["not_reached"]


@pytest.mark.slow
def test_out_of_memory_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shape: KernelShape, where: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setitem(KERNELS, "gemm", full)
    row = micro.Bench(device=torch.device("cpu")).measure(ALONE[0])
    assert (row["status"], row["sizes"]) == ("oom", {"k": 32, "m": 64, "n": 48})


def test_every_kind_has_its_kernel() -> None:
    assert set(KERNELS) == set(SIZES)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"kind": "gemm"}', '{"kind": "fft", "sizes": {"n": 1}}', "nonsense"]
)
def test_a_line_that_is_no_shape_is_named(text: str) -> None:
    good = json.dumps(ALONE[0].as_dict())
    with pytest.raises(ValueError, match="line 2 is no shape"):
        micro.read_shapes(f"{good}\n{text}\n")
