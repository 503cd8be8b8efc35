"""Who may ask, and what: lists in memory, repeated requests, bodies, keys; in milliseconds."""

from functools import partial
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
from planner.api.storage.idempotency import IdempotencyStore
from planner.errors import ConflictError, PlannerError, SpecError
from tests.conftest import api_keys


def test_a_list_in_memory_is_read_page_by_page() -> None:
    first, cursor = page_of("abcde", str, None, 3)
    second, end = page_of("abcde", str, cursor, 3)
    assert (first, second, end) == (["a", "b", "c"], ["d", "e"], None)
    assert page_of("ab", str, None, 2) == (["a", "b"], None)
    with pytest.raises(SpecError, match="cursor"):
        page_of("ab", str, cursor, 3)


def asked(wiring: Any, *, headers: dict[str, str], body: bytes = b"{}") -> StrictRequest:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    sent = {"content-type": "application/json", **headers}
    scope = {"type": "http", "scheme": "http", "method": "POST", "path": "/plan"}
    scope |= {"query_string": b"", "server": ("testserver", 80)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in sent.items()]
    scope["app"] = SimpleNamespace(state=SimpleNamespace(wiring=wiring, limiters=limiters()))
    return StrictRequest(scope, receive)


def test_only_an_answer_that_is_no_bug_is_kept(memory: Engine) -> None:
    from fastapi.responses import JSONResponse

    wiring = SimpleNamespace(idempotency=IdempotencyStore(memory), settings=Settings())
    key, calls = ApiKey("me", frozenset({"plan"}), ""), [500, 200, 200]

    def post(body: bytes = b"{}") -> int:
        request = asked(wiring, headers={"idempotency-key": "k"}, body=body)
        call = partial(answer_once, request, key, lambda: JSONResponse({}, calls.pop(0)))
        return anyio.run(call).status_code

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


@pytest.mark.parametrize(
    ("secret", "scope"), [("reader", "read"), ("planner", "plan"), ("boss", "probe")]
)
def test_a_key_may_what_its_scopes_say(secret: str, scope: str) -> None:
    key, who = key_for(secret, scope, keys=KEYS)
    assert key.name == who.name == secret
    assert who.admin == (secret == "boss"), "only the scope admin may change what others asked"


@pytest.mark.parametrize(
    ("secret", "scope", "error"),
    [
        ("reader", "plan", ForbiddenError),
        ("planner", "probe", ForbiddenError),
        ("nobody", "read", UnauthenticatedError),
        (" ", "read", UnauthenticatedError),
        (None, "read", UnauthenticatedError),
    ],
)
def test_a_key_may_no_more(secret: str | None, scope: str, error: type[PlannerError]) -> None:
    with pytest.raises(error):
        key_for(secret, scope, keys=KEYS)


def test_without_keys_anyone_on_this_machine_may() -> None:
    assert key_for(None, "probe")[0].name == "anyone"
