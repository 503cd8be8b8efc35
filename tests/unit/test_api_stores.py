"""What the stores share, and who may ask: pages, repeated requests, keys; in milliseconds."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from fastapi import Request
from fastapi.security import HTTPAuthorizationCredentials, SecurityScopes
from sqlalchemy import Engine

from planner.api.asker import Asker, asker
from planner.api.errors import (
    BodyTooLargeError,
    ForbiddenError,
    MediaTypeError,
    UnauthenticatedError,
)
from planner.api.http.bodies import StrictRequest
from planner.api.http.paging import page_of
from planner.api.http.rates import Rates
from planner.api.http.requests import answer_once, limiters
from planner.api.http.security import asking_key
from planner.api.settings import ApiKey, Settings
from planner.api.storage.engine import make_engine, normalise_url
from planner.api.storage.idempotency import KEEP_SECONDS, IdempotencyStore, KeptAnswer
from planner.api.storage.job_records import ProbeFilter, ProbeRecord
from planner.api.storage.paging import MAX_PAGE, cursor_of, read_cursor
from planner.api.storage.probes import SqlProbeStore
from planner.api.storage.tables import Base
from planner.errors import ConflictError, PlannerError, SpecError
from tests.conftest import api_keys
from tests.stand_ins.ageing import age

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
ANSWER = KeptAnswer(200, {"location": "/plans/1"}, "application/json", "{}")


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(normalise_url("sqlite://"))
    Base.metadata.create_all(made)
    yield made
    made.dispose()


def probe(number: int, gpu: str = "cpu") -> ProbeRecord:
    return ProbeRecord(
        id=f"probe-{number}",
        created_at=NOW + timedelta(seconds=number // 2),  # pairs share a moment
        request={},
        job_hash="0" * 64,
        model="m",
        gpu=gpu,
        num_gpus=1,
        layout="fsdp 1",
        pool="local",
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_pages_hold_every_row_once_newest_first(engine: Engine, limit: int) -> None:
    store = SqlProbeStore(engine)
    store.add([probe(number) for number in range(5)])
    seen: list[str] = []
    cursor = None
    while True:
        page = store.list(cursor=cursor, limit=limit)
        assert 1 <= len(page.items) <= limit
        seen += [record.id for record in page.items]
        assert len(seen) <= 5
        cursor = page.next_cursor
        if cursor is None:
            break
        store.add([probe(100 + len(seen))])  # newcomers do not disturb
    assert seen == [f"probe-{number}" for number in reversed(range(5))]


def test_a_filter_names_columns(engine: Engine) -> None:
    store = SqlProbeStore(engine)
    store.add([probe(1), probe(2, gpu="h100"), probe(3)])
    assert [one.id for one in store.list(ProbeFilter(gpu="cpu")).items] == ["probe-3", "probe-1"]
    assert store.list(ProbeFilter(gpu="cpu", state="done")).items == []


@pytest.mark.parametrize("limit", [0, MAX_PAGE + 1])
def test_a_page_is_neither_empty_nor_endless(engine: Engine, limit: int) -> None:
    with pytest.raises(SpecError, match="limit"):
        SqlProbeStore(engine).list(limit=limit)


def test_a_cursor_comes_back_as_it_was_given() -> None:
    assert read_cursor(cursor_of(NOW, "plan-1")) == (NOW, "plan-1")


def test_a_list_in_memory_is_read_page_by_page() -> None:
    first, cursor = page_of("abcde", str, None, 3)
    second, end = page_of("abcde", str, cursor, 3)
    assert (first, second, end) == (["a", "b", "c"], ["d", "e"], None)
    assert page_of("ab", str, None, 2) == (["a", "b"], None)
    with pytest.raises(SpecError, match="cursor"):
        page_of("ab", str, cursor, 3)


def test_a_kept_answer_is_given_to_the_same_request_alone(engine: Engine) -> None:
    store = IdempotencyStore(engine)
    assert store.kept("key", "request") is None
    store.keep("key", "request", ANSWER)
    assert store.kept("key", "request") == ANSWER
    with pytest.raises(ConflictError, match="another request"):
        store.kept("key", "other")


def test_old_answers_are_forgotten(engine: Engine) -> None:
    store = IdempotencyStore(engine)
    store.keep("key", "request", ANSWER)
    age(engine, KEEP_SECONDS - 10)
    assert store.kept("key", "request") == ANSWER
    age(engine, 20)
    assert store.kept("key", "request") is None


def asked(wiring: Any, *, headers: dict[str, str], body: bytes = b"{}") -> StrictRequest:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    sent = {"content-type": "application/json", **headers}
    state = SimpleNamespace(wiring=wiring, limiters=limiters())
    return StrictRequest(
        {
            "type": "http",
            "method": "POST",
            "path": "/plan",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "server": ("testserver", 80),
            "scheme": "http",
            "app": SimpleNamespace(state=state),
        },
        receive,
    )


def test_only_an_answer_that_is_no_bug_is_kept(engine: Engine) -> None:
    from fastapi.responses import JSONResponse

    wiring = SimpleNamespace(idempotency=IdempotencyStore(engine), settings=Settings())
    key, calls = ApiKey("me", frozenset({"plan"}), ""), [500, 200, 200]

    def post(body: bytes = b"{}") -> int:
        async def once() -> int:
            request = asked(wiring, headers={"idempotency-key": "k"}, body=body)
            answer = await answer_once(request, key, lambda: JSONResponse({}, calls.pop(0)))
            return answer.status_code

        return anyio.run(once)

    assert (post(), post(), post(), len(calls)) == (500, 200, 200, 1)
    with pytest.raises(ConflictError, match="another request"):
        post(b'{"id": 1}')


@pytest.mark.parametrize(("body", "headers", "error"), [
    (b"[1, 2, 3]", {"content-type": "text/csv"}, MediaTypeError),
    (b"[" + b"1," * 20 + b"1]", {}, BodyTooLargeError),
    (b'{"a": 1, "a": 2}', {}, SpecError),
    (b"", {}, SpecError),
])  # fmt: skip
def test_a_body_is_json_of_a_sane_size(
    body: bytes, headers: dict[str, str], error: type[SpecError]
) -> None:
    wiring = SimpleNamespace(settings=Settings(max_body_bytes=40))
    with pytest.raises(error) as raised:
        anyio.run(asked(wiring, headers=headers, body=body).body)
    assert type(raised.value) is error
    assert anyio.run(asked(wiring, headers={}, body=b"[1, 2]").body) == b"[1, 2]"


def key_for(secret: str | None, *scopes: str, keys: str = "") -> tuple[ApiKey, Asker]:
    """The key that asks, and who asks for the rest of the request."""
    wiring = SimpleNamespace(settings=Settings(api_keys=cast(Any, keys)))
    app = SimpleNamespace(state=SimpleNamespace(wiring=wiring, rates=Rates(100)))
    bearer = {"scheme": "Bearer", "credentials": secret}
    sent = None if secret is None else HTTPAuthorizationCredentials(**bearer)
    request = Request({"type": "http", "app": app, "headers": []})

    async def ask() -> tuple[ApiKey, Asker]:
        return await asking_key(request, SecurityScopes(list(scopes)), sent), asker()

    return anyio.run(ask)


KEYS = api_keys({"reader": "read", "planner": "plan+read", "boss": "admin"})


@pytest.mark.parametrize(("secret", "scope", "outcome"), [
    ("reader", "read", "reader"),
    ("planner", "plan", "planner"),
    ("boss", "probe", "boss"),
    ("reader", "plan", ForbiddenError),
    ("planner", "probe", ForbiddenError),
    ("nobody", "read", UnauthenticatedError),
    (" ", "read", UnauthenticatedError),
    (None, "read", UnauthenticatedError),
])  # fmt: skip
def test_a_key_may_what_its_scopes_say(
    secret: str | None, scope: str, outcome: str | type[PlannerError]
) -> None:
    if isinstance(outcome, str):
        key, who = key_for(secret, scope, keys=KEYS)
        assert key.name == who.name == outcome
        assert who.admin == (outcome == "boss"), "only the scope admin may change what others asked"
    else:
        with pytest.raises(outcome):
            key_for(secret, scope, keys=KEYS)


def test_without_keys_anyone_on_this_machine_may() -> None:
    assert key_for(None, "probe")[0].name == "anyone"
