"""Every catalogue model on every GPU under every trainer, schedule and precision: priced in full,
or refused with rule and remedy.

NUM_JOBS x ROWS random layouts, drawn by a seeded generator and checked as columns. Nine values in
ten are drawn from what the trainer knows and the rest from everything that the contract can spell,
so that legal and illegal layouts both abound.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import moved_pricers
from planner.catalog.clusters import gpu_names
from planner.catalog.models import model_names
from planner.columns import BoolColumn, LayoutBatch, schedule_is
from planner.cost.price import Prices
from planner.cost.refine import refine
from planner.cost.step_seconds import PARTS
from planner.estimates import estimate_job, estimate_layouts
from planner.intake.jobs import read_job, read_training
from planner.intake.machines import load_gpu, read_cluster
from planner.intake.models import read_model
from planner.precision import PRECISIONS
from planner.rules import Context, broken_rules, violations
from planner.rules.precisions import gpu_precisions
from planner.schedules import SCHEDULES
from planner.specs.layout import (
    AC_KINDS,
    COUNTED_AC,
    CP_METHODS,
    MOE_DISPATCHERS,
    RECOMPUTE_MODULES,
)
from planner.trainers.registry import TRAINERS
from tests.conftest import job_values, one_fast
from tests.pricing import pricer_of

SEED, NUM_JOBS, ROWS, NUM_ODD, ODD_ROWS = 20261103, 600, 80, 60, 40
FOR_MXFP4 = 8  # two GPUs of the catalogue have it
NUM_GPUS = (1, 8, 16, 24, 64, 128, 256, 1024)
SIMULATED, HALVES = 150, ("bf16", "fp16")


@dataclass(frozen=True)
class Priced:
    """One job's random layouts: which are legal, and what those cost."""

    context: Context
    batch: LayoutBatch
    legal: BoolColumn
    legal_batch: LayoutBatch

    @cached_property
    def prices(self) -> Prices:
        return pricer_of(self.context).price(self.legal_batch)

    @property
    def name(self) -> str:
        c = self.context
        where = f"{c.cluster.num_gpus} {c.cluster.gpu.name} with {c.training.trainer}"
        return f"{c.model.name} on {where}"


@cache
def jobs() -> tuple[Priced, ...]:
    draw = np.random.default_rng(SEED)
    models, gpus, trainers = model_names(), gpu_names(), tuple(TRAINERS)
    places = [
        (models[i % len(models)], gpus[i % len(gpus)], trainers[(i // len(gpus)) % len(trainers)])
        for i in range(NUM_JOBS)
    ]
    places += [(name, "mi355x-288gb", "megatron") for name in models[:FOR_MXFP4]]
    return tuple(priced(draw, *place) for place in places)


@cache
def odd_jobs() -> tuple[Priced, ...]:
    """Custom GPUs, nodes of any size, other power limits, overlaps switched off and on."""
    draw = np.random.default_rng(SEED)
    models, gpus, trainers = model_names(), gpu_names(), tuple(TRAINERS)
    return tuple(
        priced(
            draw,
            str(draw.choice(models)),
            odd_gpu(draw, str(draw.choice(gpus))),
            trainers[i % len(trainers)],
            rows=ODD_ROWS,
            num_gpus=(node := int(draw.integers(1, 17))) * int(draw.choice((1, 2, 8))),
            cluster={"gpus_per_node": node, "power_limit": float(draw.choice((50, 350, 1500)))},
            overlap={axis: bool(draw.random() < 0.5) for axis in ("dp", "tp", "pp", "ep")},
        )
        for i in range(NUM_ODD)
    )


def odd_gpu(draw: np.random.Generator, base: str) -> dict[str, Any]:
    """A catalogue GPU with some figures many times smaller or larger, also against each other."""
    gpu, by = load_gpu(base), (0.1, 0.5, 2.0, 10.0)
    figures = ("memory_bytes", "memory_bandwidth_bytes_per_second", "nominal_power_watts")
    given = {
        name: float(getattr(gpu, name) * draw.choice(by))
        for name in (*figures, "power_limit_watts")
        if draw.random() < 0.3
    }
    if draw.random() < 0.3:
        given |= {"boost_clock_hz": float(draw.choice((2e8, 3e9))), "num_sms": 7}
    if draw.random() < 0.3:
        given["scale_up"] = {"gpus": int(draw.choice((1, 3, 5, 16)))}
    more = draw.choice(by)
    peaks = {dtype: float(rate * more) for dtype, rate in gpu.peak_flops_per_second.items()}
    return {"base": base, "peak_flops": peaks, **given}


def priced(
    draw: np.random.Generator, model: str, gpu: str | dict[str, Any], trainer: str, *,
    rows: int = ROWS, num_gpus: int | None = None,
    cluster: Mapping[str, Any] = MappingProxyType({}), **training: Any,
) -> Priced:  # fmt: skip
    num_gpus = num_gpus or int(draw.choice(NUM_GPUS))
    optimizers = ("adamw", "adamw-bf16-states", "muon", "adafactor", "sgd")
    version = "zero-bubble, main of 2026-06" if trainer == "megatron" else None  # it has nvfp4
    given = {
        "seq_len": int(draw.choice((1024, 4096, 8192, 65536))),
        "global_batch_size": num_gpus * int(draw.choice((1, 2, 4, 16))),
        "trainer": trainer,
        "trainer_version": version,
        "max_grad_norm": None if draw.random() < 0.3 else 1.0,
        "attention_kernel": "unfused" if draw.random() < 0.1 else "flash",
        "optimizer": str(draw.choice(optimizers)),
    }
    context = Context(
        model=read_model(model),
        cluster=read_cluster({"gpu": gpu, "num_gpus": num_gpus, **cluster}),
        training=read_training(given | training),
    )
    batch = random_layouts(draw, context, rows)
    legal = np.ones(rows, dtype=np.bool_)
    for _, mask in broken_rules(batch, context):
        legal &= ~mask
    return Priced(context, batch, legal, batch.take(np.flatnonzero(legal)))


def random_layouts(draw: np.random.Generator, context: Context, count: int) -> LayoutBatch:
    """Random layouts, mostly of what is known. Without a pipeline one stage."""
    known, num_gpus = context.trainer, context.cluster.num_gpus
    own = np.random.default_rng(SEED)  # of the newest fields: the others' draws stay what they were

    def pick(every: tuple[object, ...], sensible: frozenset[object]) -> np.ndarray:
        found = [index for index, name in enumerate(every) if name in sensible]
        inside = np.array(found or range(len(every)))
        often = draw.random(count) < 0.9
        return np.where(often, draw.choice(inside, count), draw.integers(0, len(every), count))

    def flag(chance: float) -> BoolColumn:
        return np.asarray(draw.random(count) < chance)

    axes = {"tp": (1, 1, 2, 4, 8, 3), "cp": (1, 1, 1, 2, 4), "pp": (1, 2, 4, 8, 3)}
    left, degrees = np.full(count, num_gpus), {}
    for axis, values in {**axes, "dp_replicate": (1, 1, 1, 2)}.items():
        wished = draw.choice(values, count)
        degrees[axis] = np.where((left % wished == 0) | flag(0.05), wished, 1)
        left = np.maximum(left // degrees[axis], 1)
    tp, pp = degrees["tp"], degrees["pp"]
    dp_shard = np.where(flag(0.03), draw.integers(1, 9, count), left)
    schedule = pick(SCHEDULES.names, known.schedules)
    single = schedule_is(schedule, lambda entry: entry.single_stage)
    v_shaped = schedule_is(schedule, lambda entry: entry.v_shaped)
    virtual = np.where(single, 1, np.where(v_shaped, 2, draw.choice((2, 2, 2, 4, 5), count)))
    moe = context.model.is_moe
    precision = pick(PRECISIONS, known.precisions & frozenset(gpu_precisions(context)))
    stage = pick((0, 1, 2, 3), known.zero_stages)
    splits = schedule_is(schedule, lambda entry: entry.splits_backward)
    ac_kind = pick(AC_KINDS, known.ac_kinds)
    compiled = flag(0.4 if context.trainer.compiles else 0.03)
    counted = np.isin(ac_kind, [AC_KINDS.index(kind) for kind in COUNTED_AC])
    least = np.array([COUNTED_AC.get(kind, 0) for kind in AC_KINDS])[ac_kind]
    value = np.where(counted, least + draw.integers(0, 4, count), 0.0)
    modules = 2 * own.integers(1, 2 ** (len(RECOMPUTE_MODULES) - 1), count)  # core_attn is bit 0
    value = np.where(ac_kind == AC_KINDS.index("modules"), modules, value)
    ep = draw.choice((1, 2, 4, 8) if moe else (1,) * 30 + (2,), count)
    # one rank keeps its tokens: of the others nearly every draw would be illegal
    dispatcher = pick(MOE_DISPATCHERS, context.released.moe_dispatchers)
    dispatcher[(ep == 1) & ~flag(0.05)] = MOE_DISPATCHERS.index("alltoall")
    batch = LayoutBatch(
        **degrees,
        dp_shard=dp_shard,
        ep=ep,
        etp=np.where(flag(0.1 if moe else 0.02), tp, 1),
        moe_dispatcher=dispatcher,
        # stage 3 with a split backward is refused: all but a few of these take another
        zero_stage=np.where(splits & (pp > 1) & ~flag(0.2), np.minimum(stage, 2), stage),
        sequence_parallel=flag(0.8),
        async_tp=flag(0.3) & compiled & (tp > 1),
        cp_method=pick(CP_METHODS, known.cp_methods),
        pp_schedule=schedule,
        virtual_stages=np.where(
            pp == 1, 1, np.where(flag(0.1), draw.integers(1, 4, count), virtual)
        ),
        split=np.full(count, -1),
        micro_batch_size=draw.choice((1, 1, 1, 1, 2, 2, 4, 3), count),
        ac_kind=ac_kind,
        ac_value=np.where(
            ac_kind == AC_KINDS.index("memory-budget"), np.round(draw.random(count), 2), value
        ),
        precision=precision,
        float8_all_gather=flag(0.5) & (precision == PRECISIONS.names.index("float8-tensorwise")),
        param_dtype=flag(0.1).astype(np.int64),
        reduce_dtype=flag(0.6).astype(np.int64),
        master_dtype=flag(0.8).astype(np.int64),
        compile=compiled,
        optimizer_in_backward=flag(0.05),
        cpu_offload=(offloaded := flag(0.1)),
        optimizer_offload_fraction=np.where(
            offloaded & (own.random(count) < (0.5 if context.released.offloads_partly else 0.05)),
            own.random(count),
            1.0,
        ),
        # few of these are legal: without pipeline and recomputation, where the release has it
        activation_offload_layers=np.where(
            (pp == 1)
            & (own.random(count) < (0.3 if context.released.offloads_activations else 0.01)),
            own.integers(1, 9, count),
            0,
        ),
    )
    # states in 16 bits or on the host ask Megatron-LM for its distributed optimizer
    aware = batch.cpu_offload | (context.training.optimizer == "adamw-bf16-states")
    sharded = aware & (1 in known.zero_stages) & (own.random(count) < 0.8)
    return replace(
        batch, zero_stage=np.where(sharded, np.maximum(batch.zero_stage, 1), batch.zero_stage)
    )


@cache
def legal_rows() -> tuple[tuple[Priced, int], ...]:
    return tuple((job, row) for job in jobs() for row in range(len(job.legal_batch)))


RUN = {(s, p) for rules in TRAINERS.values() for s in rules.schedules for p in rules.precisions}


def test_enough_layouts_of_everything_were_drawn() -> None:
    assert NUM_JOBS * ROWS >= 20_000
    for batch, expected in (
        ("batch", set(itertools.product(SCHEDULES, PRECISIONS))),
        ("legal_batch", RUN),
    ):
        drawn: set[tuple[str, str]] = set()
        dispatchers: set[str] = set()
        for one in (getattr(job, batch) for job in jobs()):
            pairs = np.stack([one.pp_schedule, one.precision])[:, one.pp > 1].T
            drawn |= {(SCHEDULES.names[s], PRECISIONS.names[p]) for s, p in pairs}
            dispatchers |= {MOE_DISPATCHERS[code] for code in one.moe_dispatcher}
        assert (drawn, dispatchers) == (expected, set(MOE_DISPATCHERS)), batch
    named = {read_model(name).name for name in model_names()}
    assert {job.context.model.name for job in jobs()} == named
    places = {(job.context.cluster.gpu.name, job.context.training.trainer) for job in jobs()}
    assert places == set(itertools.product(gpu_names(), TRAINERS))
    num_legal = sum(int(job.legal.sum()) for job in jobs())
    assert max(8_000, 0.2 * NUM_JOBS * ROWS) < num_legal < 0.8 * NUM_JOBS * ROWS


def test_a_dispatcher_is_the_releases_own_and_needs_experts() -> None:
    refused = 0
    for job in jobs():
        c = job.context
        own = c.released.moe_dispatchers if c.model.is_moe else {"alltoall"}
        has = [MOE_DISPATCHERS.index(name) for name in own]
        assert np.isin(job.legal_batch.moe_dispatcher, has).all(), job.name
        refused += int((~np.isin(job.batch.moe_dispatcher, has)).sum())
    assert refused > 100


@pytest.mark.parametrize("every", one_fast(4, 1))
def test_every_legal_layout_is_priced_in_full(every: int) -> None:
    wrong = []
    for job in (*jobs()[::every], *odd_jobs()):
        if len(job.legal_batch):
            bad = ~sound(job, job.prices)
            rows = (job.legal_batch.row(int(row)) for row in np.flatnonzero(bad))
            wrong += [f"{job.name}: {row!r}" for row in rows]
    assert not wrong, f"{len(wrong)} of {len(legal_rows())}; first: {wrong[0]}"


def sound(job: Priced, p: Prices) -> BoolColumn:
    """Finite, above zero, the sum of its parts, and within the peaks."""
    parts = np.array([p.parts[name] for name in PARTS])
    *summed, allocated = p.memory.parts().values()
    memory = np.array(summed)
    found = np.all([np.isfinite(x) & (x > 0) for x in (p.step_seconds, p.device_bytes)], axis=0)
    found &= np.isclose(parts.sum(axis=0), p.step_seconds, rtol=1e-9)
    found &= (parts >= -1e-9 * p.step_seconds).all(axis=0)
    found &= np.isclose(memory.sum(axis=0), allocated, rtol=1e-9).all(axis=0)
    found &= (memory >= 0).all(axis=(0, 1))
    found &= p.peak_allocated_bytes <= p.peak_reserved_bytes
    found &= p.peak_reserved_bytes <= p.device_bytes
    return np.asarray(found & ~does_more_than_the_peak(job))


def does_more_than_the_peak(job: Priced) -> BoolColumn:
    """Whether products and attention in 16 bits beat the datasheet."""
    peak, halves = job.context.cluster.gpu.dense_peak, [PRECISIONS.names.index(n) for n in HALVES]
    if peak is None:
        return np.zeros(len(job.legal_batch), dtype=np.bool_)
    flops, seconds = job.prices.stage_seconds.hardware_flops, job.prices.step_seconds
    alike = (job.legal_batch.param_dtype == 0) & np.isin(job.legal_batch.precision, halves)
    return np.asarray(alike & (flops > peak * seconds))


@pytest.mark.parametrize(("gpu", "training", "layout"), [
    ("v100-sxm-32gb", {"trainer": "megatron", "optimizer": "muon"}, {"precision": "fp16"}),
    ("h100-sxm-80gb", {}, {"pp_schedule": "Interleaved1F1B"}),  # stages without a pipeline
])  # fmt: skip
def test_what_is_not_drawn_is_priced_too(gpu: str, training: dict, layout: dict) -> None:
    job = job_values("llama3-8b", gpu, 8, 2048, 8, layout=layout, **training)
    estimate = estimate_job(read_job(job))
    assert not estimate.valid or 0.0 < (estimate.step_seconds or np.nan) < np.inf


@pytest.mark.parametrize("every", one_fast(4, 1))
def test_every_illegal_layout_says_which_rule_and_what_would_pass(every: int) -> None:
    silent = []
    for job in jobs()[::every]:
        explained = np.zeros(ROWS, dtype=np.bool_)
        layouts = {int(row): job.batch.row(int(row)) for row in np.flatnonzero(~job.legal)}
        for rule, mask in broken_rules(job.batch, job.context):
            explained |= mask
            for row in np.flatnonzero(mask):
                texts = rule.words(layouts[int(row)], job.context)
                if min(map(len, texts)) < len("use bf16") or re.search(r"None|\bnan\b", str(texts)):
                    silent.append((job.name, rule.key, texts))
        assert (explained == ~job.legal).all()
    assert not silent, f"{len(silent)}; first: {silent[0]}"


def test_one_layout_alone_is_judged_like_its_row() -> None:
    draw = np.random.default_rng(SEED)
    for job in draw.choice(np.array(jobs(), dtype=object), 100):
        row, c = int(draw.integers(ROWS)), job.context
        layout, masks = job.batch.row(row), broken_rules(job.batch, c)
        found = violations(layout, c.model, c.cluster, c.training)
        expected = {(rule.field, rule.words(layout, c)[0]) for rule, mask in masks if mask[row]}
        assert {(v.field, v.rule) for v in found} == expected
        assert bool(found) == (not job.legal[row])


@pytest.mark.slow
def test_legal_layouts_survive_the_whole_estimate() -> None:
    """Simulation, intervals and breakdown too, of a sample that leaves no schedule out."""
    seen: Counter[str] = Counter()
    for index in np.random.default_rng(SEED).permutation(len(legal_rows())):
        job, row = legal_rows()[index]
        layout, c = job.legal_batch.row(row), job.context
        key = layout.pp_schedule if layout.pp > 1 else "no pipeline"
        enough = seen[key] >= SIMULATED // (len(SCHEDULES) + 1)
        many = layout.num_microbatches(c.training.global_batch_size) > 64
        if enough or many:
            continue
        seen[key] += 1
        (estimate,) = estimate_layouts(pricer_of(c), [layout])
        assert estimate.valid, (job.name, layout)
        total = pytest.approx(estimate.time.total(), rel=1e-9)
        assert estimate.step_seconds == total, (job.name, layout)
        assert 0.0 < estimate.step_seconds < np.inf
        assert 0 <= estimate.oom_probability <= 1
    assert set(seen) == {*SCHEDULES, "no pipeline"}


def test_simulation_is_finite_for_every_schedule_and_precision() -> None:
    """Refined step of one legal pipelined layout of every pair that some trainer runs."""
    done: set[tuple[str, str]] = set()
    for job in jobs():
        batch, pricer = job.legal_batch, pricer_of(job.context)
        sequences = batch.micro_batch_size * batch.dp_replicate * batch.dp_shard
        m = job.context.training.global_batch_size // sequences
        for row in np.flatnonzero((batch.pp > 1) & (m <= 32)):
            pair = SCHEDULES.names[batch.pp_schedule[row]], PRECISIONS.names[batch.precision[row]]
            if pair not in done:
                done.add(pair)
                one = batch.take(np.array([row]))
                seconds = refine(pricer, one, pricer.price(one)).step_seconds[0]
                assert 0 < seconds < np.inf
    assert done == RUN


@pytest.mark.parametrize("every", one_fast(40, 3))
def test_machines_that_share_their_rows_are_each_machine_alone(every: int) -> None:
    """Also experts under DualPipeV, whose pairs are priced by themselves."""
    paired = SCHEDULES.names.index("DualPipeV")
    for number, job in enumerate(jobs()):
        pairs = (job.legal_batch.pp_schedule == paired) & (job.legal_batch.pp > 1)
        chosen = number % every == 0 or (job.context.model.is_moe and pairs.any())
        if chosen and len(job.legal_batch):
            alone = pricer_of(job.context)
            moved = [alone, *moved_pricers(alone)]
            together = alone.step_seconds_on(moved, job.legal_batch)
            each = [machine.step_seconds(job.legal_batch) for machine in moved]
            assert np.array_equal(together, np.array(each)), job.name
