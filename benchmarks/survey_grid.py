"""The cases that `gpu_survey.py` runs on one GPU, most informative first.

They are real training runs, and single ranks of large worlds. A `Case` is a job and, for a rank
of a larger world, which rank. About every third real run is a new corner of the space (model,
sequence, microbatch, recomputation, compile, precision, optimizer in backward), so that a
survey that is cut short still spans it. Runs that may not fit are included: the memory limit is
a measurement too. Where most would not fit, most of them have a smaller microbatch, then a shorter
sequence, then a smaller model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.probes.emulate import ranks_of_interest
from planner.specs.cluster import ClusterSpec

LLAMA_05B = {
    "name": "llama-0.5b", "base": "llama3.2-1b", "hidden_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
# experts and latent attention of the real widths; few layers, because only one rank runs and each
# kind of layer counts once
DEEPSEEK_V3_5 = {"base": "deepseek-v3", "name": "deepseek-v3-5-layers", "num_hidden_layers": 5}
TINY = {
    "base": "debug-tiny",
    "name": "debug-tiny",
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One probe.

    rank: the emulated rank of the layout's world; None for a real run on one GPU.
    task: further fields of its `ProbeTask`.
    """

    id: str
    job: dict[str, Any]
    rank: int | None = None
    steps: int = 8
    warmup_steps: int = 3
    labels: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)


def cases(gpu: str, *, tiny: bool = False) -> list[Case]:
    """All cases for a GPU of the catalogue. tiny: a few of each kind, for a CPU."""
    return [*_tiny_train(gpu), *_tiny_ranks(gpu)] if tiny else list(_cases(gpu))


@lru_cache(maxsize=8)
def _cases(gpu: str) -> tuple[Case, ...]:
    train, ranks = list(_train(gpu)), list(_ranks(gpu))
    mixed = (
        case
        for pair in zip_longest(_every(train, 2), ranks)
        for part in pair
        if part is not None
        for case in _as_list(part)
    )
    return tuple(mixed)


def fake_cases(gpu: str) -> list[Case]:
    """The same ranks and runs for fake tensors, which need no GPU and give only memory.

    The tracker cannot see into compiled code, so those cases run eagerly. Memory budgets and
    float8, which exist only compiled, are left out.
    """
    found: dict[str, Case] = {}
    for case in sorted(cases(gpu), key=lambda case: case.rank is None):
        layout = {**case.job["layout"], "compile": False}
        if "budget" in layout["ac"] or layout.get("precision", "bf16") != "bf16":
            continue
        name = f"fake/{case.id.replace('/compile', '/eager')}"
        labels = {**case.labels, "fake_tensors": True}
        case = replace(
            case,
            id=name,
            job={**case.job, "layout": layout},
            rank=case.rank or 0,
            steps=1,
            warmup_steps=1,
            labels=labels,
        )
        found.setdefault(name, case)
    return list(found.values())


def _every(items: list[Case], size: int) -> list[list[Case]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _as_list(part: Case | list[Case]) -> list[Case]:
    return part if isinstance(part, list) else [part]


def _case(
    name: str,
    gpu: str,
    num_gpus: int,
    model: object,
    training: dict[str, Any],
    layout: dict[str, Any],
    **rest: Any,
) -> Case:
    job = {
        "model": model,
        "cluster": {"gpu": gpu, "num_gpus": num_gpus},
        "training": {"trainer": "torchtitan", **training},
        "layout": layout,
    }
    return Case(id=name, job=job, **rest)


# ---- real runs on one GPU ------------------------------------------------------------------------

# model, sequence, microbatch, recomputation, compile, further fields
Run = tuple[object, int, int, str, bool, dict[str, Any]]
EIGHT, THREE, ONE, HALF = "llama3-8b", "llama3.2-3b", "llama3.2-1b", LLAMA_05B
BF16_STATES = {"master_dtype": "bfloat16"}
EARLY = {"optimizer_in_backward": True}
CORE: tuple[Run, ...] = (
    (ONE, 8192, 1, "none", False, {}), (ONE, 8192, 1, "selective-op", True, {}),
    (EIGHT, 8192, 1, "full", True, BF16_STATES),
    (HALF, 2048, 16, "none", True, {}), (THREE, 8192, 2, "full", False, {}),
    (ONE, 32768, 1, "full", True, {}),
    (EIGHT, 4096, 1, "selective-op", False, BF16_STATES),
    (THREE, 4096, 4, "selective-op", True, {}),
    (ONE, 8192, 4, "none", True, {"precision": "float8-rowwise"}),
    (HALF, 512, 8, "none", False, {}), (EIGHT, 8192, 1, "full", True, EARLY),
    (ONE, 8192, 8, "selective-op", True, {}), (THREE, 8192, 8, "none", True, {}),
    (ONE, 2048, 4, "full", False, {}),
)  # fmt: skip
REST: tuple[Run, ...] = (
    (ONE, 8192, 1, "full", False, {}), (ONE, 8192, 1, "none", True, {}),
    (ONE, 8192, 2, "selective-layer-2", True, {}),
    (THREE, 8192, 1, "none", True, {}), (EIGHT, 8192, 1, "full", True, {}),
    (HALF, 1024, 4, "none", False, {}),
    (ONE, 16384, 1, "selective-op", True, {}), (THREE, 8192, 2, "selective-op", True, {}),
    (ONE, 4096, 4, "full", True, {}),
    (EIGHT, 8192, 2, "full", True, BF16_STATES),
    (ONE, 8192, 4, "none", True, {"precision": "float8-tensorwise"}),
    (HALF, 1024, 32, "none", True, {}), (ONE, 8192, 16, "none", True, {}),
    (THREE, 4096, 4, "full", False, {}),
    (ONE, 8192, 4, "selective-op", False, {}), (EIGHT, 4096, 4, "full", True, BF16_STATES | EARLY),
    (THREE, 8192, 4, "full", True, EARLY),
    (ONE, 2048, 16, "selective-op", True, {}), (HALF, 8192, 4, "full", True, {}),
    (ONE, 65536, 1, "full", True, {}),
    (EIGHT, 16384, 1, "full", True, BF16_STATES), (THREE, 16384, 1, "selective-op", True, {}),
    (ONE, 8192, 8, "selective-layer-2", True, {}),
    (EIGHT, 8192, 1, "none", True, BF16_STATES),
    (THREE, 8192, 4, "full", True, {"precision": "float8-rowwise"}),
    (ONE, 8192, 2, "memory-budget-0.5", True, {}), (HALF, 2048, 64, "full", True, {}),
    (ONE, 8192, 16, "full", True, {}),
    (EIGHT, 8192, 1, "full", True, BF16_STATES | {"precision": "float8-rowwise"}),
    (THREE, 2048, 8, "none", False, {}),
    (ONE, 8192, 1, "none", False, {"param_dtype": "float32"}),
    (ONE, 4096, 4, "selective-op", True, {"reduce_dtype": "bfloat16"}),
    (EIGHT, 8192, 4, "none", True, BF16_STATES),
)  # fmt: skip


LADDER: tuple[object, ...] = (EIGHT, THREE, ONE, HALF)  # largest first
# Share of runs that may be too large for the GPU, and how much too large.
MISFITS, FAR = 0.5, 2.0
FITS = 0.85  # of the GPU's memory, allocated: what fragmentation and contexts leave; judgement


def _train(gpu: str) -> Iterator[Case]:
    runs = (*CORE, *REST)
    needs = [need_of(_one_gpu(gpu, run)) for run in runs]
    many = sum(need > FITS for need in needs) > MISFITS * len(runs)
    seen = set()
    for place, (run, need) in enumerate(zip(runs, needs, strict=True)):
        most = FITS if many and place % 4 else FAR
        while need > most and (smaller := _smaller(run)) is not None:
            run, need = smaller, need_of(_one_gpu(gpu, smaller))
        case = _one_gpu(gpu, run)
        if case.id not in seen:
            seen.add(case.id)
            yield case


def need_of(case: Case) -> float:
    """Memory that a rank of the case needs by the model's prediction, over its GPU's."""
    job = read_job(case.job)
    assert job.layout is not None
    prices = Pricer.build(job.model, job.cluster, job.training).price(
        LayoutBatch.from_layouts([job.layout])
    )
    return float(prices.peak_allocated_bytes[0]) / job.cluster.gpu.memory_bytes


def _smaller(run: Run) -> Run | None:
    """The next smaller run; None for the smallest."""
    model, seq_len, microbatch, *rest = run
    if microbatch > 1:
        return (model, seq_len, microbatch // 2, *rest)
    if seq_len > 2048:
        return (model, seq_len // 2, 1, *rest)
    below = LADDER.index(model) + 1
    return (LADDER[below], 4096, 1, *rest) if below < len(LADDER) else None


def _one_gpu(gpu: str, run: Run, steps: int = 8) -> Case:
    model, seq_len, microbatch, ac, compiled, further = run
    short = model if isinstance(model, str) else model["name"]  # type: ignore[index]
    words = [
        str(short),
        f"s{seq_len}",
        f"b{microbatch}",
        ac,
        "compile" if compiled else "eager",
        *(f"{k}-{v}" for k, v in further.items()),
    ]
    training = {"seq_len": seq_len, "global_batch_size": microbatch}
    if further.get("optimizer_in_backward"):
        training["max_grad_norm"] = None
    layout = {"micro_batch_size": microbatch, "ac": ac, "compile": compiled, **further}
    return _case("train/" + "/".join(words), gpu, 1, model, training, layout, steps=steps)


# ---- single ranks of large worlds ----------------------------------------------------------------

# name, GPUs, model, training, layout
World = tuple[str, int, object, dict[str, Any], dict[str, Any]]
LONG = {"seq_len": 131072, "global_batch_size": 1}
WORLDS: tuple[World, ...] = (
    ("8b-on-8", 8, "llama3.1-8b", {"seq_len": 8192, "global_batch_size": 16},
        {"micro_batch_size": 2, "ac": "selective-op"}),
    ("70b-on-256", 256, "llama3-70b", {"seq_len": 8192, "global_batch_size": 512},
     {"dp_shard": 32, "tp": 8, "micro_batch_size": 16, "ac": "full", "compile": True}),
    ("405b-on-512", 512, "llama3.1-405b", {"seq_len": 8192, "global_batch_size": 64},
     {"dp_shard": 4, "tp": 8, "pp": 16, "ac": "full", "compile": True}),
    ("8b-on-8-full", 8, "llama3.1-8b", {"seq_len": 8192, "global_batch_size": 16},
        {"micro_batch_size": 2, "ac": "full", "compile": True}),
    ("mixtral-on-64", 64, "mixtral-8x7b", {"seq_len": 4096, "global_batch_size": 64},
        {"ep": 8, "ac": "full"}),
    ("8b-131k-cp8", 8, "llama3.1-8b", LONG, {"cp": 8, "dp_shard": 1, "ac": "full"}),
    ("8b-on-64", 64, "llama3.1-8b", {"seq_len": 8192, "global_batch_size": 64},
        {"ac": "none", "compile": True}),
    ("deepseek-v3-on-256", 256, DEEPSEEK_V3_5, {"seq_len": 4096, "global_batch_size": 256},
        {"ep": 64, "ac": "full"}),
    ("70b-on-256-selective", 256, "llama3-70b", {"seq_len": 8192, "global_batch_size": 64},
     {"dp_shard": 32, "tp": 8, "micro_batch_size": 2, "ac": "selective-op"}),
    ("8b-on-64-hsdp-zero2", 64, "llama3.1-8b", {"seq_len": 8192, "global_batch_size": 128},
     {"dp_replicate": 8, "dp_shard": 8, "zero_stage": 2, "micro_batch_size": 2,
         "ac": "selective-op", "compile": True}),
    ("8b-on-64-tp8", 64, "llama3.1-8b", {"seq_len": 8192, "global_batch_size": 96},
     {"dp_shard": 8, "tp": 8, "micro_batch_size": 12, "ac": "selective-op", "compile": True}),
    ("70b-on-256-pp4", 256, "llama3-70b", {"seq_len": 8192, "global_batch_size": 128},
     {"dp_shard": 8, "tp": 8, "pp": 4, "pp_schedule": "Interleaved1F1B", "ac": "full"}),
    ("deepseek-v2-lite-on-8", 8, "deepseek-v2-lite", {"seq_len": 4096, "global_batch_size": 16},
     {"ep": 8, "micro_batch_size": 2, "ac": "selective-op"}),
    ("8b-262k-cp16", 16, "llama3.1-8b", {"seq_len": 262144, "global_batch_size": 1},
        {"cp": 16, "dp_shard": 1, "ac": "full"}),
    ("8b-on-8-float8", 8, "llama3.1-8b", {"seq_len": 8192, "global_batch_size": 16},
     {"micro_batch_size": 2, "ac": "selective-op", "precision": "float8-rowwise", "compile": True}),
)  # fmt: skip


def _ranks(gpu: str) -> Iterator[Case]:
    for world in WORLDS:
        yield from (case for case in _emulated(gpu, world) if need_of(case) <= FAR)


def _emulated(gpu: str, world: World, steps: int = 3) -> Iterator[Case]:
    """The ranks of a world that differ.

    They are the first ranks of the first, the middle and the last pipeline stage.
    """
    name, num_gpus, model, training, layout = world
    job = read_job(_case(name, gpu, num_gpus, model, training, layout).job)
    assert job.layout is not None
    cluster: ClusterSpec = job.cluster
    for rank in ranks_of_interest(job.layout, cluster):
        stage = rank * job.layout.pp // num_gpus
        labels = {"emulated_rank": rank, "pipeline_rank": stage}
        yield _case(
            f"rank/{name}/{rank}",
            gpu,
            num_gpus,
            model,
            training,
            layout,
            rank=rank,
            steps=steps,
            warmup_steps=2,
            labels=labels,
        )


# ---- for a CPU -----------------------------------------------------------------------------------

TINY_RUNS: tuple[Run, ...] = (
    (TINY, 64, 2, "none", False, {}), (TINY, 64, 2, "full", False, {}),
    (TINY, 128, 1, "selective-op", False, {}),
    (TINY, 64, 4, "selective-layer-2", False, {}), (TINY, 64, 1, "none", False, EARLY),
    (TINY, 64, 2, "none", True, {}),
)  # fmt: skip
TINY_WORLDS: tuple[World, ...] = (
    ("tiny-on-8", 8, TINY, {"seq_len": 64, "global_batch_size": 8},
        {"dp_shard": 4, "tp": 2, "ac": "full"}),
    ("tiny-pp3", 6, TINY | {"num_hidden_layers": 4}, {"seq_len": 64, "global_batch_size": 8},
        {"dp_shard": 2, "pp": 3, "ac": "none"}),
)  # fmt: skip


def _tiny_train(gpu: str) -> list[Case]:
    return [_one_gpu(gpu, run, steps=3) for run in TINY_RUNS]


def _tiny_ranks(gpu: str) -> list[Case]:
    return [case for world in TINY_WORLDS for case in _emulated(gpu, world, steps=2)]
