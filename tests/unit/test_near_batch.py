"""A batch near the one asked for that is much faster: tried, promised, and the promise kept."""

from math import gcd
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner.plan.recommend
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.search.infeasible import near_batch as near
from planner.search.infeasible.near_batch import NEAR, TRIED, WORTH, nearby
from planner.specs.job import SearchSpec
from planner.specs.plan import Plan
from planner.trainers.registry import resolve_layout
from tests.conftest import fixed_now, job_values

WORDS = "global_batch_size "


def plan_of(batch: int, **search: object) -> Plan:
    job = job_values("llama3-8b", "h100-sxm-80gb", 64, 8192, batch, search={"top_k": 2, **search})
    return recommend(read_job(job), now=fixed_now)


def hints(plan: Plan) -> list[str]:
    return [line for line in plan.warnings if line.startswith(WORDS)]


@pytest.fixture(scope="module")
def odd() -> Plan:
    return plan_of(63)


@pytest.mark.parametrize(("asked", "num_gpus", "sizes"), [
    (63, 64, [64]), (64, 64, []), (512, 256, []), (100, 64, [96, 104]), (7, 8, [8]), (1, 64, []),
    (9, 48, [8]),
])  # fmt: skip
def test_batches_more_ranks_divide_are_near(asked: int, num_gpus: int, sizes: list[int]) -> None:
    assert nearby(asked, num_gpus) == sizes


@given(asked=st.integers(1, 5000), num_gpus=st.integers(1, 2048))
def test_only_near_sizes_that_share_more_with_the_gpus_are_tried(asked: int, num_gpus: int) -> None:
    found = nearby(asked, num_gpus)
    assert len(found) <= TRIED
    assert all(abs(size - asked) <= NEAR * asked for size in found)
    assert all(gcd(size, num_gpus) > gcd(asked, num_gpus) for size in found)


@pytest.mark.parametrize(("gains", "size"), [
    ({64: 2.0, 72: 1.5}, 64),
    ({64: 2.0, 72: 1.98}, 72),  # within 2% of the largest, and nearer to 70
    ({64: 2.0, 72: 1.95}, 64), ({64: 1.11}, 64), ({64: 1.09, 72: 1.09}, None), ({}, None),
])  # fmt: skip
def test_the_nearest_of_the_best_is_named_if_it_is_worth_it(
    monkeypatch: pytest.MonkeyPatch, gains: dict[int, float], size: int | None
) -> None:
    """gains: tokens a second over the winner's, of the batches of which a layout fits."""
    assert nearby(70, 64) == [64, 72]

    def best(pricer: Any, winner: Any, batch: int, search: Any) -> Any:
        return (2.0 * batch / (70 * gains[batch]), None) if batch in gains else None

    monkeypatch.setattr(near, "_points", lambda pricer, layout: 3)
    monkeypatch.setattr(near, "_best", best)
    batch, gpus = SimpleNamespace(global_batch_size=70), SimpleNamespace(num_gpus=64)
    pricer: Any = SimpleNamespace(training=batch, cluster=gpus)
    found = near.near_batch(pricer, cast(Any, None), 2.0, SearchSpec())
    assert (found and found.global_batch_size) == size
    assert found is None or found.speedup == pytest.approx(gains[found.global_batch_size])


def test_a_plainer_layout_at_the_same_speed_is_worth_a_word() -> None:
    """64 sequences on 24 GPUs need a pipeline; 72 do with FSDP."""
    values = job_values("llama3.1-8b", "h100-sxm-80gb", 24, 8192, 64, search={"top_k": 1})
    plan = recommend(read_job(values), now=fixed_now)
    assert plan.ranked[0].layout.pp == 3
    (hint,) = hints(plan)
    assert hint.startswith("global_batch_size 72 instead of 64 would be at least 1.")
    assert "with the plainer fsdp/zero2 24" in hint


def test_the_users_choices_go_before_the_winners() -> None:
    values = {"tp": 4, "pp": 2, "precision": "bf16", "ac": "selective-op"}
    winner = resolve_layout(values, trainer="torchtitan", num_gpus=64)
    asked = SearchSpec(fix={"tp": 2}, allow={"ac": ["full", "none"], "precision": ["bf16"]})
    found = near._narrowed(asked, winner)
    assert (found.fix["tp"], found.fix["param_dtype"]) == (2, winner.param_dtype)
    assert "precision" not in found.fix
    assert "tp" not in found.allow
    assert [*found.allow["ac"]] == ["full", "none"]
    assert [*found.allow["pp"]] == [1, 2]
    assert list(near._narrowed(SearchSpec(), winner).allow["tp"]) == [1, 2, 4]


@pytest.mark.parametrize(("ep", "tried"), [(1, [1]), (2, [1, 2, 4]), (8, [4, 8, 16])])
def test_half_and_twice_the_experts_degree_are_open(ep: int, tried: list[int]) -> None:
    winner = resolve_layout({"ep": ep, "dp_shard": 64}, trainer="torchtitan", num_gpus=64)
    assert near._open(winner)["ep"] == tried


def test_a_batch_that_does_not_divide_is_pointed_out_and_the_promise_is_kept(odd: Plan) -> None:
    (hint,) = hints(odd)
    assert hint.startswith("global_batch_size 64 instead of 63 would be at least ")
    promised = float(hint.partition("at least ")[2].split()[0])
    before = odd.ranked[0].estimate.tokens_per_second_per_gpu
    after = max(entry.estimate.tokens_per_second_per_gpu for entry in plan_of(64).ranked)
    assert WORTH < promised <= after / before + 0.005


def test_nothing_is_said_where_degrees_are_fixed_or_speed_is_not_what_counts(odd: Plan) -> None:
    """With the degrees fixed no other batch is faster a token."""
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    degrees = {name: getattr(odd.ranked[0].layout, name) for name in names}
    assert hints(plan_of(63, fix=degrees)) == []
    assert hints(plan_of(63, objective="memory")) == []


def test_it_is_asked_of_the_winner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(planner.plan.recommend, "near_batch", lambda *given: asked.append(given))
    plan = plan_of(64)
    assert [given[1] for given in asked] == [plan.ranked[0].layout]
