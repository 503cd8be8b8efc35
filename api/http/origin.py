"""The origin of a browser's request: pages of other sites must not ask in a person's name.

A page elsewhere can make a browser send requests to an address that only this machine reaches. It
is told by the name in `Host` (DNS rebinding: its own name, made to mean our address) or by where
the browser says that the request comes from.
"""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from planner.api.errors import ForbiddenError
from planner.api.http.problems import problem

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
ELSEWHERE = frozenset({"cross-site", "same-site"})


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
