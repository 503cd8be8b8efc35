"""Access: bearer keys with scopes, limits on requests, no open door to the network.

Pages of other sites must not ask in a person's name: a page elsewhere can make a browser send
requests to an address that only this machine reaches. It shows in the name in `Host` (DNS
rebinding: its own name, made to mean our address) or where the browser says that the request comes
from.
"""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Collection
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from limits import RateLimitItem, RateLimitItemPerMinute, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from planner.api.errors import ForbiddenError, TooManyRequestsError, UnauthenticatedError
from planner.api.http.problems import problem
from planner.api.identity import Asker, set_asker
from planner.api.settings import ApiKey, Settings
from planner.errors import fault

WINDOW_SECONDS = 10
GUESSES_PER_MINUTE = 20
ANYONE = ApiKey("anyone", frozenset({"admin"}), "")
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
ELSEWHERE = frozenset({"cross-site", "same-site"})


class Rates:
    """Counts of this process alone.

    requests_per_second: of one key, over WINDOW_SECONDS, so that a burst passes.
    """

    def __init__(self, requests_per_second: int) -> None:
        self._counts = MovingWindowRateLimiter(MemoryStorage())
        most = requests_per_second * WINDOW_SECONDS
        self._requests = RateLimitItemPerSecond(most, WINDOW_SECONDS)
        self._guesses = RateLimitItemPerMinute(GUESSES_PER_MINUTE)

    def note_request(self, key: str) -> None:
        """Counts one of this key. Raises TooManyRequestsError."""
        self._note(self._requests, "key", key, f"key {key} asks too often")

    def note_guess(self, address: str) -> None:
        """Counts a key that is not known. Raises TooManyRequestsError.

        A known key is never refused for what others at its address try.
        """
        self._note(self._guesses, "guess", address, "too many unknown keys")

    def _note(self, limit: RateLimitItem, kind: str, who: str, why: str) -> None:
        if not self._counts.hit(limit, kind, who):
            reset = self._counts.get_window_stats(limit, kind, who).reset_time
            raise TooManyRequestsError(
                f"{why}: more than {limit.amount} in {limit.get_expiry()} s; ask again later",
                retry_after_seconds=max(0.0, reset - time.time()),
            )


def refuse_open_door(settings: Settings) -> None:
    """Raises SpecError when an address that others can reach would be served without keys."""
    if not settings.keys and not is_loopback(settings.host):
        remedy = "set PLANNER_API_KEYS=name:read+plan:SHA256-OF-THE-SECRET, or bind 127.0.0.1"
        rule = "is reachable from other machines, and no API keys are set"
        raise fault("host", settings.host, rule, remedy)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address.

    A name other than localhost counts as reachable.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_bearer = HTTPBearer(auto_error=False)


async def require_key(request: Request) -> None:
    """Raises UnauthenticatedError for a request without a known key, before its body is read."""
    _key_of(request, await _bearer(request))


async def asking_key(
    request: Request,
    scopes: SecurityScopes,
    sent: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> ApiKey:
    """Dependency: the key that asks, which must have the route's scopes."""
    key = _key_of(request, sent)
    request.state.key = key.name
    quota = None if key is ANYONE else request.app.state.wiring.settings.quota_of(key.name)
    set_asker(Asker(key.name, admin=key.may("admin"), quota=quota))
    for scope in scopes.scopes:
        require_scope(key, scope)
    if key is not ANYONE:
        request.app.state.rates.note_request(key.name)
    return key


def require_scope(key: ApiKey, scope: str) -> None:
    """Raises ForbiddenError for a key without this scope."""
    if not key.may(scope):
        raise ForbiddenError(f"key {key.name} lacks the scope {scope}; ask for a key that has it")


def _key_of(request: Request, sent: HTTPAuthorizationCredentials | None) -> ApiKey:
    """The key whose secret was sent; without configured keys anyone on this machine may ask.

    Compares with every key in constant time, so that timing tells nothing.
    """
    settings: Settings = request.app.state.wiring.settings
    if not settings.keys:
        return ANYONE
    secret = "" if sent is None else sent.credentials.strip()
    if not secret:
        needed = "an API key is needed; send the header `Authorization: Bearer SECRET`"
        raise UnauthenticatedError(needed)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    found = [key for key in settings.keys if hmac.compare_digest(key.secret_sha256, digest)]
    if not found:
        rates: Rates = request.app.state.rates
        rates.note_guess("-" if request.client is None else request.client.host)
        raise UnauthenticatedError("this API key is not known; check the secret")
    return found[0]


Reader = Annotated[ApiKey, Security(asking_key, scopes=["read"])]
Planner = Annotated[ApiKey, Security(asking_key, scopes=["plan"])]
Prober = Annotated[ApiKey, Security(asking_key, scopes=["probe"])]
Admin = Annotated[ApiKey, Security(asking_key, scopes=["admin"])]


class OwnSite:
    """ASGI middleware that refuses requests for other names, and changes asked by other sites.

    names: by which this service is asked. Empty: by any where keys are needed, else by names that
        no public DNS can hold (addresses, single words, *.localhost).
    keys: whether keys are needed.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], keys: bool) -> None:
        self.app, self.names, self.keys = app, frozenset(names), keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refused(scope["method"], Headers(scope=scope))
            if error is not None:
                await problem(Request(scope), error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refused(self, method: str, headers: Headers) -> ForbiddenError | None:
        host = headers.get("host", "")
        if not self._is_ours(_name(host)):
            what = f"this service is not asked as {host[:100]!r}; add the name to "
            return ForbiddenError(f"{what}PLANNER_ALLOWED_HOSTS, or ask 127.0.0.1")
        if method not in SAFE and self._from_elsewhere(host, headers):
            return ForbiddenError("a page of another site asks for this; open this service's own")
        return None

    def _from_elsewhere(self, host: str, headers: Headers) -> bool:
        """Whether a page of another site asks. A proxy may have changed `Host`, not the others."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            return site in ELSEWHERE
        if origin is None:
            return False
        asking = origin.partition("://")[2]  # "null" has none
        return asking != host and _name(asking) not in self.names

    def _is_ours(self, name: str) -> bool:
        if self.names:
            return name in self.names
        return self.keys or not name or _never_public(name)


def _name(host: str) -> str:
    """Without the port: "[::1]:80" is "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _never_public(name: str) -> bool:
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
