"""One suite for plans and estimates: in memory, SQLite file, PostgreSQL."""

from typing import Any

import pytest
from sqlalchemy import Engine, text

from planner.api.storage.idempotency import KEEP_SECONDS, AnsweredMeanwhile, IdempotencyStore
from planner.api.storage.records import Page, StoredEstimate
from planner.api.storage.store import SqlStore
from planner.api.storage.tables import KeptAnswer
from planner.api.storage.transactions import one_transaction, writing
from planner.errors import ConflictError, NotFoundError, SpecError
from planner.estimates import estimate_jobs
from planner.intake.jobs import read_job
from planner.specs.plan import Plan
from tests.stand_ins.ageing import age
from tests.stand_ins.records import NOW, PLAN_JOB


@pytest.fixture
def store(engine: Engine) -> SqlStore:
    return SqlStore(engine)


class TestPlans:
    def test_a_plan_of_any_texts_comes_back_as_saved(self, store: SqlStore, plan: Plan) -> None:
        store.save_plan(plan, PLAN_JOB)
        assert store.get_plan(plan.id) == plan
        texts = {"notes": "ünï \0 \U0001f600 'quoted' %s", "n": 2**60, "x": 0.1}
        odd = plan.model_copy(update={"id": "plan-odd", "job": texts})
        model = PLAN_JOB.model.model_copy(update={"name": "m\0\ud800ü" * 100})
        store.save_plan(odd, PLAN_JOB.model_copy(update={"model": model}))
        assert store.get_plan("plan-odd").job == texts

    def test_an_unknown_id_is_not_found(self, store: SqlStore) -> None:
        for unknown in ("plan-nope", "", "\0", "ü", "x" * 10_000, "' OR 1=1 --"):
            with pytest.raises(NotFoundError):
                store.get_plan(unknown)

    def test_an_id_is_taken_once(self, store: SqlStore, plan: Plan) -> None:
        store.save_plan(plan, PLAN_JOB)
        with pytest.raises(ConflictError):
            store.save_plan(plan, PLAN_JOB)
        assert len(store.list().items) == 1

    @pytest.mark.parametrize("slower", [1.0, 2.0], ids=["predicted", "measured"])
    def test_a_line_of_the_list_names_the_winner_with_what_probes_measured(
        self, store: SqlStore, plan: Plan, slower: float
    ) -> None:
        winner, *others = plan.ranked
        assert winner.estimate.step_seconds
        assert winner.estimate.tokens_per_second_per_gpu
        update = {"expected_step_seconds": slower * winner.estimate.step_seconds}
        ranked = [winner.model_copy(update=update if slower > 1.0 else {}), *others]
        changed = {"created_at": NOW.isoformat(), "ranked": ranked}
        store.save_plan(plan.model_copy(update=changed), PLAN_JOB)
        (line,) = store.list().items
        assert (line.created_at, line.num_gpus, line.layout) == (NOW, 8, winner.layout.short())
        speed = winner.estimate.tokens_per_second_per_gpu / slower
        assert line.tokens_per_second_per_gpu == pytest.approx(speed)

    def test_a_cursor_nobody_gave_and_a_wrong_limit_are_refused(self, store: SqlStore) -> None:
        assert store.list() == Page(items=(), next_cursor=None)
        for cursor in ("", "abc", "!!!", "MjAyNg", "ü", "MjAyNi0xMS0yMXxwbGFuLTE", "AA" * 50):
            with pytest.raises(SpecError, match="cursor"):
                store.list(cursor)
        for limit in (0, -1, 201):
            with pytest.raises(SpecError, match="limit"):
                store.list(limit=limit)

    def test_layouts_are_columns_too(self, store: SqlStore, plan: Plan) -> None:
        store.save_plan(plan, PLAN_JOB)
        with store.engine.begin() as connection:
            ranks = connection.scalars(text("SELECT rank FROM plan_layouts ORDER BY rank")).all()
            assert ranks == [entry.rank for entry in plan.ranked]
            connection.execute(text("DELETE FROM plans"))
            assert connection.scalar(text("SELECT count(*) FROM plan_layouts")) == 0


class TestEstimates:
    def kept(self, job: dict[str, Any], name: str) -> StoredEstimate:
        request = {**job, "layout": {"dp_shard": 8}}
        (estimate,) = estimate_jobs([read_job(request)])
        return StoredEstimate(id=name, created_at=NOW, job=request, estimate=estimate)

    def test_an_estimate_comes_back_as_it_was_saved_and_all_are_or_none(
        self, store: SqlStore, job: dict[str, Any]
    ) -> None:
        first = self.kept(job, "estimate-1")
        store.save_estimates([first])
        assert store.get_estimate("estimate-1") == first
        with pytest.raises(ConflictError):
            store.save_estimates([self.kept(job, "estimate-2"), first])
        with pytest.raises(NotFoundError):
            store.get_estimate("estimate-2")
        store.save_estimates([])


def words_of(found: KeptAnswer) -> tuple[Any, ...]:
    return found.status, found.headers, found.body


class TestIdempotency:
    answer = (200, {"location": "/plans/1", "content-type": "application/json"}, '{"ü": 1}')

    @pytest.fixture
    def keys(self, store: SqlStore) -> IdempotencyStore:
        return IdempotencyStore(store.engine)

    def test_an_answer_is_kept_for_its_request(self, keys: IdempotencyStore) -> None:
        assert keys.kept("key", "request") is None
        keys.keep("key", "request", *self.answer)
        assert words_of(keys.kept("key", "request")) == self.answer
        with pytest.raises(ConflictError, match="another request"):
            keys.kept("key", "other")
        with pytest.raises(ConflictError, match="another request"):
            keys.keep("key", "other", *self.answer)

    def test_the_second_of_two_at_the_same_time_gets_the_first_answer_and_stores_nothing(
        self, keys: IdempotencyStore, store: SqlStore, plan: Plan
    ) -> None:
        keys.keep("key", "request", *self.answer)

        def work() -> None:
            with one_transaction(store.engine):
                store.save_plan(plan, PLAN_JOB)
                keys.keep("key", "request", 200, {}, "mine")

        with pytest.raises(AnsweredMeanwhile) as raised:
            work()
        assert words_of(raised.value.answer) == self.answer
        assert store.list().items == []

    def test_a_write_that_fails_inside_leaves_the_others(
        self, keys: IdempotencyStore, store: SqlStore, plan: Plan
    ) -> None:
        with one_transaction(store.engine):
            store.save_plan(plan, PLAN_JOB)
            with pytest.raises(ConflictError):
                store.save_plan(plan, PLAN_JOB)
            keys.keep("key", "request", *self.answer)
        assert len(store.list().items) == 1

    def test_what_older_releases_left_runs(self, keys: IdempotencyStore, store: SqlStore) -> None:
        with writing(store.engine) as session:
            session.add(KeptAnswer(key_hash="key", request_hash="request", created_at=NOW))
        assert keys.kept("key", "request") is None
        keys.keep("key", "request", *self.answer)
        assert words_of(keys.kept("key", "request")) == self.answer

    def test_old_answers_are_forgotten(self, keys: IdempotencyStore, store: SqlStore) -> None:
        keys.keep("key", "request", *self.answer)
        age(store.engine, KEEP_SECONDS - 10)
        assert words_of(keys.kept("key", "request")) == self.answer
        age(store.engine, 20)
        assert keys.kept("key", "other") is None
        keys.keep("key", "other", *self.answer)
        assert words_of(keys.kept("key", "other")) == self.answer
