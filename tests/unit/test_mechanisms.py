"""The one list of mechanisms: which layouts use each, and what measured runs say of it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.basis import (
    WIDER,
    basis,
    rests_on,
    seen,
    unmeasured,
    unmeasured_mechanisms,
    widening,
)
from planner.calibration.intervals import time_spread
from planner.calibration.mechanisms import MECHANISMS, points, used_by
from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.precision import PRECISIONS
from planner.specs.job import Job
from planner.specs.layout import MOE_DISPATCHERS
from tests.conftest import job_values
from tests.golden.rows import published

LLAMA, V3, HYBRID, OSS, V4 = (
    "llama3.1-8b", "deepseek-v3", "nemotron-h-56b", "gpt-oss-20b", "deepseek-v4-flash",
)  # fmt: skip
NEXT, GEMMA = "qwen3-next-80b-a3b", "gemma4-26b-a4b"
DENSE, MIXTURE = {"model": LLAMA}, {"model": V3}
SHARING = {"base": "glm5", "mixers": ["dsa"] + ["dsa-shared"] * 77}
GATED = {"base": LLAMA, "gated_norm_rank": 16}
# For every mechanism: settings of a job and its layout that use it, and others that do not.
MODELS = {  # only the model differs
    "experts": (V3, LLAMA), "mla": (V3, LLAMA), "attention flex": (V3, LLAMA),
    "sliding window": (OSS, LLAMA), "heads by layer": ("step-3.5-flash", OSS),
    "windows of several lengths": ("k-exaone-2", OSS), "mamba": ("jamba-v0.1", HYBRID),
    "zero experts": ("longcat-flash", V3), "per-layer embeddings": ("gemma4-e4b", LLAMA),
    "attention-shared": ("gemma4-e4b", GEMMA), "norms around experts and router": (GEMMA, OSS),
    "shared-kv": (V4, V3), "csa": (V4, V3), "hca": (V4, V3), "hyper-connections": (V4, V3),
    "msa": ("minimax-m3", V3), "gated-delta": (NEXT, HYBRID), "output gate": (NEXT, HYBRID),
    "latent": ("nemotron-3-super-120b-a12b", HYBRID), "mtp": ("deepseek-v3-mtp", V3),
    "kimi-delta": ("kimi-linear-48b-a3b", HYBRID), "lightning": ("minimax-text-01", HYBRID),
    "attention-mamba2": ("falcon-h1-7b", HYBRID), "short-conv": ("lfm2-1.2b", HYBRID),
    "mamba2": (HYBRID, NEXT), "none": (HYBRID, NEXT), "gated norms": (GATED, LLAMA),
}  # fmt: skip
ALONE: dict[str, dict] = {  # against nothing set
    "precision fp16": {"precision": "fp16"}, "param_dtype float32": {"param_dtype": "float32"},
    "float8 all-gather": {"precision": "float8-tensorwise", "float8_all_gather": True},
    "reduce_dtype bfloat16": {"reduce_dtype": "bfloat16"},
    "master_dtype bfloat16": {"master_dtype": "bfloat16"},
    "ddp": {"dp_replicate": 8, "dp_shard": 1, "zero_stage": 0},
    "zero1": {"zero_stage": 1}, "zero2": {"zero_stage": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 4}, "tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2},
    "cp allgather": {"cp": 2}, "compile": {"compile": True},
    "optimizer in backward": {"optimizer_in_backward": True}, "cpu offload": {"cpu_offload": True},
    "activation offload": {"activation_offload_layers": 8}, "chunked loss": {"chunked_loss": True},
    "attention unfused": {"attention_kernel": "unfused"},
    "attention flash1": {"trainer": "megatron", "trainer_version": "2023-01"},
    "attention ck": {"trainer": "megatron", "gpu": "mi300x-192gb"},
    **{f"cuda graphs {g}": {"cuda_graphs": g} for g in ("partial", "full")},
    **{
        f"optimizer {name}": {"optimizer": name}
        for name in ("adamw-bf16-states", "muon", "adafactor", "sgd")
    },
    **{
        f"schedule {name}": {"pp": 2, "pp_schedule": name, "virtual_stages": v}
        for name, v in {
            "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2,
            "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2, "ZB-1p": 1, "ZB-2p": 1,
        }.items()
    },
}  # fmt: skip
USES: dict[str, tuple[dict, dict]] = {
    **{name: ({"model": one}, {"model": other}) for name, (one, other) in MODELS.items()},
    **{name: (using, {}) for name, using in ALONE.items()},
    "fsdp": ({"zero_stage": 3}, {"zero_stage": 2}),
    "sharded over 256 ranks": ({"num_gpus": 512, "dp_shard": 512}, {"num_gpus": 256}),
    "tp without sp": ({"tp": 2, "sequence_parallel": False}, {"tp": 2}),
    "tp across nodes": ({"tp": 16, "num_gpus": 16}, {"tp": 8, "num_gpus": 16}),
    "async tp": ({"tp": 2, "async_tp": True, "compile": True}, {"tp": 2}),
    "cp alltoall": ({"cp": 2, "cp_method": "alltoall"}, {"cp": 2}),
    "ulysses": ({"cp": 2, "cp_method": "ulysses"}, {"cp": 2}),
    "short cp": ({"cp": 2}, {"cp": 2, "seq_len": 16384}),
    "short ulysses": (
        {"cp": 4, "cp_method": "ulysses"}, {"cp": 2, "cp_method": "ulysses"}),
    "pp over 16": ({"pp": 32, "num_gpus": 32}, {"pp": 16, "num_gpus": 32}),
    "pp of unlike layers": ({"model": HYBRID, "pp": 2}, {"model": HYBRID}),
    "own split": ({"pp": 2, "layers_per_stage": (20, 12)}, {"pp": 2}),
    "ep": ({**MIXTURE, "ep": 8}, MIXTURE),
    "all experts everywhere": (MIXTURE, {**MIXTURE, "ep": 8}),
    "ep across nodes": ({**MIXTURE, "ep": 16, "num_gpus": 16}, {**MIXTURE, "ep": 8}),
    "ep over more than 4 nodes": (
        {**MIXTURE, "ep": 64, "num_gpus": 64}, {**MIXTURE, "ep": 32, "num_gpus": 64}),
    "etp": ({**MIXTURE, "tp": 2, "etp": 2}, {**MIXTURE, "tp": 2}),
    "dsa": ({"model": "glm5", "trainer": "megatron"}, MIXTURE),
    "dsa-shared": ({"model": SHARING, "trainer": "megatron"}, {"model": "glm5"}),
    "optimizer adamw": ({}, {"optimizer": "sgd"}),
    **{
        f"attention {k}": ({"attention_kernel": k}, {"attention_kernel": "unfused"})
        for k in ("flash2", "flash3", "cudnn")
    },
    **{
        f"precision {p}": ({"precision": p}, {"precision": "fp16"})
        for p in PRECISIONS
        if p != "fp16"
    },
    **{
        f"dispatcher {name}": ({**MIXTURE, "ep": 8, "moe_dispatcher": name}, MIXTURE)
        for name in MOE_DISPATCHERS
    },
    **{
        f"ac {kind}": ({"ac": f"{kind}{number}", "compile": True}, {"ac": other})
        for kind, number, other in (
            ("none", "", "full"), ("full", "", "none"), ("selective-op", "", "full"),
            ("selective-layer", "-2", "full"), ("selective-attention", "", "full"),
            ("memory-budget", "-0.5", "full"), ("block", "-2", "full"), ("uniform", "-2", "full"),
            ("modules", "-mlp", "full"),
        )
    },
    **{
        f"more than {name}": ({"num_gpus": 8 * (nodes + 1)}, {"num_gpus": 8 * nodes})
        for name, nodes in {
            "1 node": 1, "4 nodes": 4, "16 nodes": 16, "64 nodes": 64, "256 nodes": 256,
            "1,024 nodes": 1024,
        }.items()
    },
    **{
        f"more than {tokens:,} tokens": ({"seq_len": 2 * tokens}, {"seq_len": tokens})
        for tokens in (8192, 32768, 131072, 524288)
    },
}  # fmt: skip
OF_TRAINING = {"trainer", "trainer_version", "seq_len", "optimizer", "attention_kernel"}
OF_TRAINING |= {"cuda_graphs", "chunked_loss"}


def basis_of(calibration: Calibration, asked: Job) -> Mapping[str, str]:
    return basis(calibration, asked, LayoutBatch.from_layouts([asked.layout]))[0]


def shown_by(*runs: Job) -> Calibration:
    """A calibration by these runs alone."""
    return replace_seen(*seen(runs))


def job(**values: object) -> Job:
    named = {"model": DENSE["model"], "gpu": "h100-sxm-80gb", "num_gpus": 8}
    model, gpu, num_gpus = (values.pop(name, value) for name, value in named.items())
    training = {name: values.pop(name) for name in OF_TRAINING & set(values)}
    return read_job(job_values(model, gpu, num_gpus, 8192, 8192, layout=values, **training))


def names(asked: Job) -> set[str]:
    return {one.name for one in used_by(asked.layout, asked)}


def test_every_mechanism_has_a_name_of_its_own_and_is_tested() -> None:
    every = [one.name for one in MECHANISMS]
    assert len(set(every)) == len(every)
    assert len({one.words for one in MECHANISMS}) == len(every)
    assert set(every) == {"compute", *USES}


@pytest.mark.parametrize("name", USES)
def test_some_layouts_use_it_and_some_do_not(name: str) -> None:
    using, without = USES[name]
    assert name in names(job(**using))
    assert name not in names(job(**without))


def test_columns_say_what_single_layouts_say() -> None:
    """Of all layouts of one job at once, as of each by itself."""
    own = {"model", "num_gpus", "gpu", *OF_TRAINING}
    layouts = [values for pair in USES.values() for values in pair if not own & set(values)]
    jobs = [job(**{**MIXTURE, **values}) for values in layouts]
    batch = LayoutBatch.from_layouts([one.layout for one in jobs])
    used = [used_by(one.layout, jobs[0]) for one in jobs]
    found = unmeasured(batch, jobs[0], replace_seen())
    assert [{MECHANISMS[place] for place in np.flatnonzero(row)} for row in found] == [
        set(one) for one in used
    ]
    assert points(batch, jobs[0]).tolist() == [sum(one.points for one in each) for each in used]


def replace_seen(*triples: tuple[str, str, str]) -> Calibration:
    return replace(shipped_calibration(), seen=frozenset(triples))


@pytest.mark.parametrize("name", USES)
def test_a_run_marks_it_as_measured_and_taking_the_run_away_unmarks_it(name: str) -> None:
    asked = job(**USES[name][0])
    batch, known = LayoutBatch.from_layouts([asked.layout]), seen([asked])
    broken = {triple for triple in known if triple[2] != name}
    for triples, found in (
        (known, ("calibrated", [], 1.0)),
        (broken, ("extrapolated", [name], WIDER)),
    ):
        calibration = replace_seen(*triples)
        missing = [one.name for one in rests_on(asked.layout, asked, calibration)]
        (wider,) = widening(batch, asked, calibration)
        assert (basis_of(calibration, asked)[name], missing, wider) == found


@pytest.mark.parametrize("other", [{"gpu": "a100-sxm-80gb"}, {"trainer": "megatron"}])
def test_runs_elsewhere_or_of_other_trainers_here_count_but_not_all(other: dict[str, str]) -> None:
    asked, calibration = job(tp=2), shown_by(job(tp=2, **other))
    assert basis_of(calibration, asked)["tp"] == "interpolated"
    assert unmeasured_mechanisms(calibration, asked) != ()
    assert "tp" not in {one.name for one in rests_on(asked.layout, asked, calibration)}
    batch = LayoutBatch.from_layouts([asked.layout])
    assert widening(batch, asked, calibration).tolist() == [WIDER]


LOW = {"precision": "float8-tensorwise"}
CUDNN = {"attention_kernel": "cudnn"}


@pytest.mark.parametrize(("name", "asked", "run", "found"), [
    # an attention kernel is the GPU's, whoever ran it
    ("attention cudnn", CUDNN, {**CUDNN, "trainer": "megatron"}, "calibrated"),
    ("attention cudnn", CUDNN, {**CUDNN, "gpu": "a100-sxm-80gb"}, "interpolated"),
    # eight bits on another family of GPUs show nothing
    ("precision float8-tensorwise", LOW, {**LOW, "trainer": "megatron"}, "interpolated"),
    ("precision float8-tensorwise", LOW, {**LOW, "gpu": "l40s"}, "extrapolated"),
    ("precision bf16", {}, {"gpu": "l40s"}, "interpolated"),
])  # fmt: skip
def test_what_a_run_shows_of_a_mechanism_elsewhere(
    name: str, asked: dict[str, str], run: dict[str, str], found: str
) -> None:
    assert basis_of(shown_by(job(**run)), job(**asked))[name] == found


def test_a_run_on_many_nodes_shows_what_happens_on_fewer() -> None:
    calibration = shown_by(job(num_gpus=8 * 128))
    fewer, more = job(num_gpus=8 * 64), job(num_gpus=8 * 512)
    assert set(basis_of(calibration, fewer).values()) == {"calibrated"}
    assert [one.name for one in rests_on(more.layout, more, calibration)] == ["more than 256 nodes"]


def test_own_errors_are_wider_where_a_mechanism_was_not_measured() -> None:
    plain, budget = job(compile=True, ac="full"), job(compile=True, ac="memory-budget-0.5")
    pricer = Pricer.build(plain.model, plain.cluster, plain.training, shown_by(plain))
    batch = LayoutBatch.from_layouts([plain.layout, budget.layout])
    own = time_spread(pricer, batch, pricer.price(batch)).own_sd
    assert own[1] == pytest.approx(WIDER * own[0])


def test_the_shipped_calibration_says_what_its_runs_used() -> None:
    """`seen` is written by benchmarks/calibrate.py from the measured rows."""
    jobs = [read_job(row) for row in published().values()]
    assert shipped_calibration().seen == seen(jobs)
