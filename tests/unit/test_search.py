"""The search on paper: against brute force, what is shown, what is said, and that it repeats."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.chunks import CHUNK
from planner.cost.layer.unit_costs import MODE
from planner.cost.pipeline.stages import layers_of_stages
from planner.cost.price import Pricer
from planner.estimates import simulated_columns
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.rules import legal_mask, violations
from planner.search import bounds as cell_bounds
from planner.search import screen, space_search
from planner.search.choice import pareto
from planner.search.choice.pareto import STRUCTURE
from planner.search.choice.preference import Weighed, spread_within_stack
from planner.search.fit import OOM_LIMIT
from planner.search.screen import Goal
from planner.search.shortlist import ENOUGH
from planner.search.space.enumerate import Space
from planner.search.variations.floors import with_budget
from planner.search.variations.sensitivity import steps_in
from planner.specs.plan import Plan
from planner.trainers.registry import resolve_layout
from tests.conftest import fixed_now, job_values, one_fast, slow
from tests.pricing import priced_space, pricer_of

NUM_JOBS, TOP = 20, 10
GPUS = ("h100-sxm-80gb", "a100-sxm-40gb", "l4", "rtx-4090", "v100-sxm-32gb", "b200-sxm-180gb")


def plan_of(**changes: Any) -> Plan:
    job: dict[str, Any] = job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 32)
    for key, value in changes.items():
        inner = isinstance(value, dict) and key in ("cluster", "training")
        job[key] = {**job[key], **value} if inner else value
    return recommend(read_job(job), now=fixed_now)


@lru_cache(maxsize=NUM_JOBS)
def random_job(seed: int) -> tuple[Pricer, Space]:
    """A small model on 8 or 16 GPUs of some kind; seeds whose space is empty are drawn again."""
    for attempt in range(10):
        rng = np.random.default_rng([seed, attempt])

        def one_of(*values: Any, rng: np.random.Generator = rng) -> Any:
            return rng.choice(values).item()

        heads, head_dim = one_of(8, 12, 16), one_of(64, 128)
        hidden = heads * head_dim
        given = {"hidden_size": hidden, "head_dim": head_dim, "num_attention_heads": heads}
        depth = {"num_hidden_layers": one_of(6, 8, 12, 16, 24), "num_key_value_heads": one_of(2, 4)}
        ffn, vocab = one_of(3, 4) * hidden, one_of(32000, 65536, 128256)
        widths = {"intermediate_size": ffn, "vocab_size": vocab}
        model: dict[str, Any] = {"name": f"random-{seed}", **given, **depth, **widths}
        if rng.random() < 0.3:
            model |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        gpu = one_of(*GPUS)
        seq_len, batch = one_of(1024, 2048, 8192, 16384), one_of(16, 32, 64)
        num_gpus, trainer = one_of(8, 16), one_of("torchtitan", "torchtitan", "megatron", "fsdp")
        values = job_values(model, gpu, num_gpus, seq_len, batch, trainer=trainer)
        pricer, space = priced_space(read_job(values))
        if 0 < space.num_layouts < 120_000:
            return pricer, space
    raise AssertionError("no space of a testable size in ten draws")


@dataclass(frozen=True, slots=True)
class Whole:
    """All layouts of a space, priced one and all."""

    batch: LayoutBatch
    step: np.ndarray
    device: np.ndarray
    fits: np.ndarray

    @classmethod
    def of(cls, pricer: Pricer, space: Space) -> "Whole":
        batch = space.expand(slice(None))
        starts = range(0, len(batch), CHUNK)
        parts = [pricer.price(batch.take(slice(start, start + CHUNK))) for start in starts]
        step, device, least = (
            np.concatenate([getattr(p, k) for p in parts])
            for k in ("step_seconds", "device_bytes", "least_device_bytes")
        )
        risk = oom_probability(pricer.profile, pricer.cluster, least)
        return cls(batch, step, device, risk <= OOM_LIMIT)


@lru_cache(maxsize=NUM_JOBS)
def whole(seed: int) -> Whole:
    return Whole.of(*random_job(seed))


def structures(batch: LayoutBatch, step: np.ndarray) -> dict[tuple[int, ...], float]:
    """Best step of every structure, fastest first."""
    best: dict[tuple[int, ...], float] = {}
    keys = zip(*(getattr(batch, name).tolist() for name in STRUCTURE), strict=True)
    for key, seconds in zip(keys, step.tolist(), strict=True):
        best[key] = min(best.get(key, np.inf), seconds)
    return dict(sorted(best.items(), key=lambda item: item[1]))


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, NUM_JOBS))])
def test_pruning_keeps_the_winner(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rounds, so that bounds prune nearly everything."""
    monkeypatch.setattr(space_search, "ROUND", 512)
    pricer, space = random_job(seed)
    found, brute = space_search.screen(pricer, space, Goal(count=TOP)), whole(seed)
    assert found.num_priced <= len(brute.batch)
    assert bool(found.num_fitting) == bool(brute.fits.any())
    if brute.fits.any():
        assert found.step_seconds[0] == pytest.approx(brute.step[brute.fits].min(), rel=1e-12)
    else:
        assert found.device_bytes.min() == pytest.approx(brute.device.min())


def lost_structures(seed: int) -> list[tuple[int, ...]]:
    """The TOP structures that are an answer at all and that the screen misses or prices higher."""
    pricer, space = random_job(seed)
    found, brute = space_search.screen(pricer, space, Goal(count=TOP)), whole(seed)
    best = structures(brute.batch.take(brute.fits), brute.step[brute.fits])
    kept = structures(found.batch, found.step_seconds)
    limit = ENOUGH * min(best.values())
    sought = [(key, seconds) for key, seconds in list(best.items())[:TOP] if seconds <= limit]
    return [key for key, seconds in sought if not kept.get(key, np.inf) <= seconds * (1 + 1e-12)]


@pytest.mark.parametrize("at_once", one_fast(space_search.ROUND, 512))
def test_the_best_structures_survive(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_search, "ROUND", at_once)
    assert {seed: lost for seed in range(NUM_JOBS) if (lost := lost_structures(seed))} == {}


@pytest.mark.parametrize("smallest", [False, True])
def test_bounds_by_band_give_the_same(smallest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "device_bytes" if smallest else "step_seconds"
    for seed in range(0, NUM_JOBS, 4):
        pricer, space = random_job(seed)
        at_once = space_search.screen(pricer, space, Goal(count=TOP, smallest=smallest))
        with monkeypatch.context() as patch:
            patch.setattr(cell_bounds, "BAND", 512)
            patch.setattr(screen, "BAND", 512)
            by_band = space_search.screen(pricer, space, Goal(count=TOP, smallest=smallest))
        found, expected = (getattr(one, value)[:TOP] for one in (by_band, at_once))
        assert found == pytest.approx(expected, rel=1e-12)
        assert by_band.num_priced <= at_once.num_priced + space_search.ROUND
        not_fitting = by_band.out_of_memory + by_band.num_fitting
        assert by_band.bounded_out + not_fitting == space.num_layouts


def test_bounds_without_checkpointing_are_below_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(NUM_JOBS):
        pricer, space = random_job(seed)
        with monkeypatch.context() as patch:
            patch.setattr(cell_bounds, "BAND", 1)
            bounds = cell_bounds.CellBounds(pricer, space.cells)
        assert np.isnan(bounds.seconds).all()
        bounds.know(np.arange(len(space.cells)))
        own = pricer.time_lower_bounds(space.cells, bounds.idle)
        known = ~np.isnan(bounds.seconds)
        assert np.array_equal(known, bounds.may_fit(np.arange(len(space.cells))))
        assert bounds.seconds[known] == pytest.approx(own[known], rel=1e-12)
        assert (bounds.coarse_bound_seconds <= own * (1 + 1e-12)).all()
        assert (space.cells.ac_kind > 0).any()


def test_floors_are_below_every_layout_of_their_cell() -> None:
    for seed in range(NUM_JOBS):
        pricer, space = random_job(seed)
        seconds, device = pricer.lower_bounds(space.cells)
        for floor, own in ((seconds, whole(seed).step), (device, whole(seed).device)):
            assert (np.repeat(floor, space.cell_sizes) <= own * (1 + 1e-12)).all(), seed


def test_layout_floors_are_below_their_very_layouts() -> None:
    for seed in range(NUM_JOBS):
        pricer, _ = random_job(seed)
        batch = whole(seed).batch.take(slice(0, None, 7))
        own = pricer.layout_lower_bounds(batch)
        step, compute = pricer.step_lower_bounds(batch)
        np.testing.assert_allclose(compute, own, rtol=1e-12)
        assert (own <= step).all()
        assert (step <= whole(seed).step[::7] * (1 + 1e-12)).all()
        assert (own > 0).all()


def test_bounds_do_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the two tests above would compare brute force with itself."""
    monkeypatch.setattr(space_search, "ROUND", 512)
    pruned = 0
    for seed in range(5):
        pricer, space = random_job(seed)
        found = space_search.screen(pricer, space, Goal(count=TOP))
        pruned += found.num_priced < space.num_layouts / 2
    assert pruned >= 3


def test_the_plans_winner_is_the_simulated_best_of_the_whole_space() -> None:
    """None within 15% of the best price, simulated, is faster than what a plan puts first."""
    plan = plan_of(model="llama3.2-1b", training={"seq_len": 2048, "global_batch_size": 16})
    pricer, space = priced_space(read_job(plan.job))
    brute = Whole.of(pricer, space)
    best = brute.step[brute.fits].min()
    near = np.flatnonzero(brute.fits & (brute.step <= 1.15 * best))[:3000]
    simulated = simulated_columns(pricer, brute.batch.take(near).layouts())
    fastest = min(seconds for seconds, _, _ in simulated)
    assert plan.ranked[0].estimate.step_seconds == pytest.approx(fastest, rel=1e-9)


@pytest.fixture(scope="module")
def shown() -> Plan:
    return plan_of()


def test_ranked_layouts_are_legal_fit_and_stand_in_order(shown: Plan) -> None:
    job = read_job(shown.job)
    assert [entry.rank for entry in shown.ranked] == list(range(1, 11))
    for entry in shown.ranked:
        assert violations(entry.layout, job.model, job.cluster, job.training) == []
        assert entry.estimate.fits
        assert entry.reasons
    layouts = LayoutBatch.from_layouts([entry.layout for entry in shown.ranked])
    pricer = pricer_of(job)
    unsure = spread_within_stack(pricer, layouts).sd
    oom = np.array([entry.estimate.oom_probability or 0.0 for entry in shown.ranked])
    steps = np.array([entry.estimate.step_seconds or 0.0 for entry in shown.ranked])
    expected = Weighed.of(layouts, pricer).expected(steps, oom) * np.exp(unsure**2 / 2.0)
    ahead = 1 + (shown.fastest_on_paper is not None)
    # by the mean of a log-normal, with the risk of running out of memory
    assert (np.diff(expected[ahead:]) >= 0.0).all()


def test_ranked_layouts_differ_in_something_that_matters(shown: Plan) -> None:
    batch = LayoutBatch.from_layouts([entry.layout for entry in shown.ranked])
    keys = set(zip(*(getattr(batch, name).tolist() for name in STRUCTURE), strict=True))
    assert len(keys) == len(shown.ranked)
    degrees = attrgetter("cp", "tp", "pp", "ep", "etp", "precision")
    for first, second in combinations(shown.ranked, 2):
        time, memory = (
            abs(getattr(first.estimate, n) / getattr(second.estimate, n) - 1)
            for n in ("step_seconds", "device_bytes")
        )
        alike = time < pareto.SAME_TIME / 2 and memory < pareto.SAME_MEMORY / 2
        assert not (alike and degrees(first.layout) == degrees(second.layout))


def test_front_holds_what_nothing_beats() -> None:
    rng = np.random.default_rng(3)
    step, device = rng.uniform(1, 2, 300), rng.uniform(1e9, 2e9, 300)
    rows = pareto.front(step, device, most=300)
    # no two are equal in either, so that what is no worse in both is better; the fastest first
    as_good = ((step <= step[:, None]) & (device <= device[:, None])).sum(axis=1)
    assert rows.tolist() == [row for row in np.argsort(step).tolist() if as_good[row] == 1]


def test_the_plans_front_is_one(shown: Plan) -> None:
    points = [(point.step_seconds, -point.headroom_bytes) for point in shown.pareto]
    assert points == sorted(points)
    memory = [one for _, one in points]
    assert memory == sorted(memory, reverse=True)


def test_counts_add_up(shown: Plan) -> None:
    searched = shown.searched
    assert searched.fitting <= (searched.priced or 0) <= searched.layouts
    bounded = shown.rejected.get("slower than the best by a proven bound", 0)
    assert searched.fitting + bounded + shown.rejected.get("out of memory", 0) == searched.layouts


def test_fix_and_allow_hold_for_everything_shown() -> None:
    allow = {"precision": ["bf16"], "micro_batch_size": [1, 2]}
    plan = plan_of(search={"fix": {"tp": 2, "ac": "full"}, "allow": allow, "top_k": 5})
    for layout in (one.layout for one in (*plan.ranked, *plan.pareto)):
        assert (layout.tp, layout.ac, layout.precision) == (2, "full", "bf16")
        assert layout.micro_batch_size in (1, 2)


def test_offload_is_tried_before_giving_up() -> None:
    plan = plan_of(
        cluster={"gpu": "rtx-4090", "num_gpus": 4, "host_memory": "1 TiB"},
        training={"seq_len": 2048, "global_batch_size": 8},
    )
    assert plan.ranked[0].layout.cpu_offload


def test_a_range_of_sizes_is_searched_at_each() -> None:
    search = {"top_k": 4, "objective": "time", "fix": {"compile": True}}
    plan = plan_of(cluster={"num_gpus": [8, 16]}, search=search)
    alone = plan_of(cluster={"num_gpus": 16}, search={"top_k": 1, "fix": {"compile": True}})
    assert plan.ranked[0].num_gpus == 16
    assert plan.ranked[0].layout == alone.ranked[0].layout
    assert {entry.num_gpus for entry in plan.ranked} <= {8, 16}


def test_versus_current() -> None:
    plan = plan_of(layout={"dp_shard": 8, "ac": "full"}, search={"top_k": 1})
    current, best = plan.versus_current, plan.ranked[0].estimate
    assert current.speedup == pytest.approx(current.estimate.step_seconds / best.step_seconds)
    assert current.speedup > 1
    assert all(getattr(current.layout, name) == old for name, (old, _) in current.changed.items())
    first = plan.ranked[0].layout
    assert all(getattr(first, name) == new for name, (_, new) in current.changed.items())


def test_versus_a_current_layout_that_cannot_run() -> None:
    current = plan_of(layout={"tp": 3, "dp_shard": 2}, search={"top_k": 1}).versus_current
    assert not current.estimate.valid
    assert current.speedup is None
    assert "cannot run" in current.reasons[0]


def test_splits_with_a_layer_off_an_end_keep_the_number_of_layers() -> None:
    pricer, _ = priced_space(read_job(job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 64)))
    for pp in (2, 4, 8):
        layout = resolve_layout({"pp": pp}, trainer="torchtitan", num_gpus=8)
        plain = layers_of_stages(LayoutBatch.from_layouts([layout]), 0, pricer.model, pricer.rules)
        first, last = (split for split, _ in steps_in(pricer, layout, "layers_per_stage"))
        for split in (first, last):
            assert (sum(split), len(split)) == (32, pp)
        assert first[0] == plain[0] - 1
        if pp > 2:
            assert last[-1] == plain[-1] - 1


@pytest.mark.slow
def test_reasons_offer_no_change_that_the_search_excludes() -> None:
    def offers(**search: Any) -> bool:
        reasons = plan_of(search=search).ranked[0].reasons
        return any(reason.startswith("precision ") for reason in reasons)

    whole = {"zero_stage": 3}
    assert offers(fix=whole)
    assert not offers(fix={**whole, "precision": "bf16"})
    assert not offers(fix=whole, allow={"precision": ["bf16"]})


def test_rules_that_read_what_changed_are_enough_for_layouts_that_were_legal() -> None:
    """Whatever the rest of a legal layout, another budget or split breaks no other rule."""
    refused = 0
    for seed in range(NUM_JOBS):
        pricer, space = random_job(seed)
        batch = space.expand(np.arange(min(len(space.cells), 300)))
        budgets = with_budget(batch, np.full(len(batch), 50))
        split = (1,) * int(batch.pp.max())
        splits = replace(batch, split=np.zeros(len(batch), dtype=np.int64), splits=(split,))
        for changed, columns in ((budgets, MODE), (splits, ("split",))):
            everything = legal_mask(changed, pricer.rules_context)
            assert (legal_mask(changed, pricer.rules_context, columns) == everything).all()
            refused += int((~everything).sum())
    assert refused
