"""The first thirty minutes on a GPU, in order: `gpu_survey.py --first-day` runs these cases.

Each part shows one thing that no CPU can: that a probe starts at all, how an out-of-memory run
ends, what a short run misses, how far the reference program is from TorchTitan, what a router does
to a timed step, what torchao, FlexAttention and the fake process group cost, and kernels in both
orders of attention.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.survey_grid import BF16_STATES, EIGHT, ONE, THREE, TINY, Case, _case, _one_gpu

ROOT = Path(__file__).resolve().parents[1]
LONG_RUN = 100  # steps from which a run tells the first from the last
SIXTEEN_EXPERTS = {
    "base": "mixtral-8x7b",
    "name": "moe-16-experts",
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "intermediate_size": 2816,
}
EIGHT_WINDOWS = {"base": "mistral-7b", "name": "mistral-8-layers", "num_hidden_layers": 8}
TINY_EXPERTS = {
    **SIXTEEN_EXPERTS,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "intermediate_size": 64,
    "vocab_size": 512,
}
TINY_WINDOWS = {**TINY, "name": "tiny-windows", "sliding_window": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The models and sequences of the day, full or tiny."""

    one: object = ONE
    three: object = THREE
    eight: object = EIGHT
    experts: Any = None
    windows: Any = None
    seq_len: int = 8192
    long: int = 32768
    steps: int = 300
    batch: int = 8
    worlds: tuple[int, ...] = (8, 512)
    node: int = 8


FULL = Sizes(experts=SIXTEEN_EXPERTS, windows=EIGHT_WINDOWS)
SMALL = Sizes(
    one=TINY, three=TINY, eight=TINY, experts=TINY_EXPERTS, windows=TINY_WINDOWS, seq_len=64,
    long=64, steps=12, batch=2, worlds=(4, 16), node=4,
)  # fmt: skip


PACKAGES = ("torch", "triton", "torchao", "torchtitan", "nvidia-ml-py")
VERSIONS = f"""
import importlib.metadata as m
found = {{d.name.lower(): d.version for d in m.distributions()}}
print({{name: found.get(name) for name in {PACKAGES!r}}})
"""
ENVIRONMENT = (
    ("date",), ("nvidia-smi",), ("nvidia-smi", "topo", "-m"), ("df", "-h", "/dev/shm", "/tmp"),
    ("cc", "--version"), (sys.executable, "-c", VERSIONS),
)  # fmt: skip


def environment(device: str) -> Iterator[str]:
    """Part 0: what each command says of this machine, before time is spent on runs."""
    check = (
        sys.executable,
        "-m",
        "planner.probes.selfcheck",
        device,
        "planner.probes.worker",
        "--compiles",
    )
    for command in (*ENVIRONMENT, check):
        yield f"$ {' '.join(command).strip()}"
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        except OSError as error:
            yield f"{error.strerror}"
        else:
            yield f"{done.stdout}{done.stderr}".rstrip()


def first_day(gpu: str, *, gpus: int = 1, tiny: bool = False) -> list[Case]:
    """The runs of the first day, named by the number of their part; a node's behind part 3."""
    of = SMALL if tiny else FULL
    found = list(_cases(gpu, of))
    if gpus < of.node:
        return found
    later = next(index for index, case in enumerate(found) if case.id.startswith("4/"))
    return [*found[:later], *_node(gpu, of), *found[later:]]


def _node(gpu: str, of: Sizes) -> Iterator[Case]:
    """What several GPUs show first: each way to communicate, and FSDP's rank by itself."""
    half, compiled = of.node // 2, {"compile": True, "ac": "selective-op"}
    fsdp = {"dp_shard": of.node, **compiled}
    tp = {"dp_shard": half, "tp": 2, "async_tp": of is FULL, **compiled}
    for name, model, layout in (
        (f"fsdp-{of.node}", of.eight, fsdp),
        (f"fsdp-{of.node}-alone", of.eight, fsdp),
        ("tp-2", of.eight, tp),
        ("cp-2", of.eight, {"dp_shard": half, "cp": 2, **compiled}),
        ("pp-2", of.eight, {"dp_shard": half, "pp": 2, "pp_schedule": "1F1B", **compiled}),
        (f"ep-{of.node}", of.experts, {"dp_shard": of.node, "ep": of.node}),
        (f"hsdp-2-{half}", of.eight, {"dp_replicate": 2, "dp_shard": half, **compiled}),
    ):
        training = {"seq_len": of.seq_len, "global_batch_size": 2 * of.node}
        emulated = 0 if name.endswith("alone") else None
        yield _case(
            f"3/node/{name}", gpu, of.node, model, training, layout, rank=emulated, steps=5,
            task={"breakdown": True} if emulated is None else {},
        )  # fmt: skip


def _cases(gpu: str, of: Sizes) -> Iterator[Case]:
    def run(part: str, *run: Any, **task: Any) -> Case:
        case = _one_gpu(gpu, run)  # type: ignore[arg-type]
        return replace(case, id=f"{part}/{case.id.removeprefix('train/')}", task=task)

    base = (of.one, of.seq_len, 1, "selective-op", True, {})
    yield run("1", of.one, of.seq_len, 1, "none", False, {})
    yield run("2", *base)
    full = run("3", of.eight, of.seq_len, of.batch, "none", False, BF16_STATES)
    yield full
    yield replace(full, id=f"{full.id}/again")
    yield run("4", *base, spread_below=0.0, steps=of.steps)
    for layout in (base, (*base[:2], 4, *base[3:]), (of.three, of.seq_len, 2, "full", True, {})):
        for trainer in ("torchtitan", "reference"):
            case = run(
                "5", *layout, trainer=trainer, spread_below=0.0, steps=20,
                breakdown=trainer == "reference",
            )  # fmt: skip
            yield replace(case, id=f"{case.id}/{trainer}")
    for name, rate, routing in (
        ("learned-1e-3", 1e-3, "learned"),
        ("learned-0", 0.0, "learned"),
        ("balanced", 0.0, "balanced"),
    ):
        case = run("6", of.experts, of.seq_len // 2, 4, "none", False, {}, breakdown=True, steps=40,
                   spread_below=0.0, learning_rate=rate, routing=routing)  # fmt: skip
        yield replace(case, id=f"6/{name}")
    for precision in ("float8-rowwise", "float8-tensorwise"):
        yield run("7", *base[:5], {"precision": precision})
    for compiled in (False, True):
        yield run("8", of.windows, of.long, 1, "full", compiled, {})
    for world in of.worlds:
        yield _case(f"9/8b-on-{world}/0", gpu, world, of.eight,
                    {"seq_len": of.seq_len, "global_batch_size": 2 * world},
                    {"micro_batch_size": 2, "ac": "selective-op"},
                    rank=0, steps=5, warmup_steps=2)  # fmt: skip


def kernels() -> str:
    """Shapes of the tenth part, one JSON object a line (`planner.probes.micro`)."""
    return "".join(json.dumps(shape) + "\n" for shape in _shapes())


def _shapes() -> Iterator[dict[str, Any]]:
    def attention(kind: str, seq: int, batch: int, heads: int, kv_heads: int) -> dict[str, Any]:
        sizes = {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "seq": seq, "head_dim": 128,
            "v_head_dim": 128, "window": 0,
        }  # fmt: skip
        return {"kind": kind, "name": "", "dtype": "bf16", "sizes": sizes}

    for seq, batch in ((2048, 4), (8192, 1), (32768, 1)):
        for heads, kv_heads in ((32, 8), (8, 1)):
            for kind in ("attention", "attention-backward"):
                yield attention(kind, seq, batch, heads, kv_heads)
    for groups, m, n, k in ((8, 2048, 14336, 4096), (16, 1024, 2816, 2048), (128, 128, 1536, 4096)):
        sizes = {"groups": groups, "m": m, "n": n, "k": k}
        yield {"kind": "grouped-gemm", "name": "", "dtype": "bf16", "sizes": sizes}
    for size in (2**20, 2**24, 2**28, 2**32):
        yield {"kind": "memory", "name": "copy", "dtype": "bf16", "sizes": {"bytes": size}}
    for m, n, k in ((8192, 14336, 4096), (8192, 4096, 14336), (8192, 6144, 4096)):
        for dtype in ("bf16", "float8-rowwise", "float8-tensorwise"):
            yield {"kind": "gemm", "name": "", "dtype": dtype, "sizes": {"m": m, "n": n, "k": k}}


def orders_and_masks(device: Any) -> Iterator[dict[str, Any]]:
    """Attention by torch's own choice of kernel and in the trainers' order, and the bytes of a
    sliding window's block mask built eagerly and compiled.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from planner.probes.kernels.base import num_runs, random, time_runs, warm_up
    from planner.probes.reference.attention_kernels import fused

    for seq, batch, heads, kv in ((2048, 4, 32, 8), (8192, 1, 32, 8), (32768, 1, 8, 1)):
        q, k, v = (
            random(batch, n, seq, 128, dtype=torch.bfloat16, device=device).requires_grad_()
            for n in (heads, kv, kv)
        )
        for name in ("torch", "trainers"):

            def run(name: str = name, q: Any = q, k: Any = k, v: Any = v) -> Any:
                if name == "trainers":
                    out = fused(q, k, v)
                else:
                    out = torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
                    )
                return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

            count = num_runs(warm_up(run, device), 0.5)
            each = sorted(time_runs(run, device, count))
            yield {"order": name, "seq": seq, "heads": heads, "kv_heads": kv, "batch": batch,
                   "seconds_forward_backward": each[len(each) // 2]}  # fmt: skip

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 4096)

    for seq in (8192, 32768):
        for compiled in (False, True):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            build = torch.compile(create_block_mask) if compiled else create_block_mask
            build(seen, None, None, seq, seq, device="cuda")
            peak = torch.cuda.max_memory_allocated() - before
            yield {"block_mask": seq, "compiled": compiled, "peak_bytes": peak}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a run: what a first day showed."""
    for row in rows:
        measured = row["measured"]
        if measured["status"] != "ok":
            yield f"{row['id']:70} {measured['status']}: {measured['message'][:80]}"
            continue
        each, here = measured["steps_seconds"], measured["environment"]
        cells = [f"{row['id']:70} {measured['step_seconds']:8.4f} s"]
        if len(each) >= LONG_RUN:
            early, late = statistics.median(each[:13]), statistics.median(each[-100:])
            cells.append(f"first 13 steps {early:.4f}, last 100 {late:.4f}")
        if clock := here.get("sm_clock_hertz"):
            cells.append(f"{clock / 1e9:.2f} GHz {here['power_watts']:.0f} W")
        if routed := measured.get("expert_imbalance"):
            cells.append(f"busiest expert {routed[0]:.2f} -> {routed[-1]:.2f}")
        yield "  ".join(cells)


def main() -> None:
    """Prints the table of the committed first days, or times what needs a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", action="store_true", help="attention orders, masks; on a GPU")
    if parser.parse_args().orders:
        import torch

        for row in orders_and_masks(torch.device("cuda")):
            print(json.dumps(row), flush=True)
        return
    for path in sorted((Path(__file__).parent / "measured" / "first-day").glob("*.runs.jsonl")):
        print(path.name)
        print("\n".join(table([json.loads(line) for line in path.read_text().splitlines()])))


if __name__ == "__main__":
    main()
