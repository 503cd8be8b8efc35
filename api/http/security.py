"""Who may ask: bearer keys with scopes, and no open door to the network."""

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request

from api.errors import ForbiddenError, UnauthenticatedError, fault
from api.settings import ApiKey, Settings

ANYONE = ApiKey("anyone", frozenset({"admin"}), "")


def refuse_open_door(settings: Settings) -> None:
    """Raises SpecError when an address that others can reach would be served without keys."""
    if not settings.keys and not is_loopback(settings.host):
        remedy = "set PLANNER_API_KEYS=name:read+plan:SHA256-OF-THE-SECRET, or bind 127.0.0.1"
        raise fault(
            "host",
            settings.host,
            "is reachable from other machines, and no API keys are set",
            remedy,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost counts as
    reachable.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def needs(scope: str) -> Callable[[Request], Coroutine[Any, Any, ApiKey]]:
    """Dependency: the key that asks, which must have this scope. Without configured keys anyone on
    this machine may.
    """

    async def check(request: Request) -> ApiKey:
        settings: Settings = request.app.state.wiring.settings
        key = (
            _key_of(request.headers.get("authorization"), settings.keys)
            if settings.keys
            else ANYONE
        )
        demand(key, scope)
        return key

    return check


def demand(key: ApiKey, scope: str) -> None:
    """Raises ForbiddenError for a key without this scope."""
    if not key.may(scope):
        raise ForbiddenError(f"key {key.name} lacks the scope {scope}; ask for a key that has it")


def _key_of(header: str | None, keys: tuple[ApiKey, ...]) -> ApiKey:
    """The key whose secret was sent. Compares with every key in constant time, so that timing tells
    nothing.
    """
    scheme, _, secret = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise UnauthenticatedError(
            "an API key is needed; send the header `Authorization: Bearer SECRET`"
        )
    digest = hashlib.sha256(secret.strip().encode()).hexdigest()
    found = [key for key in keys if hmac.compare_digest(key.secret_sha256, digest)]
    if not found:
        raise UnauthenticatedError("this API key is not known; check the secret")
    return found[0]
