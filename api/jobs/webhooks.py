"""Webhooks: post the report of an ended run of a sweep, signed, until the receiver accepts it.

Only hosts on the operator's list are called, so that nobody can make this service call hosts of
its own network. Redirects are not followed. Signatures follow Standard Webhooks
(https://www.standardwebhooks.com): HMAC-SHA256 of "id.timestamp.body".
"""

import base64
import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from planner.api.errors import need
from planner.api.settings import Settings
from planner.api.storage.common import told
from planner.api.storage.job_records import TaskRecord
from planner.api.wiring import Wiring
from planner.errors import PlannerError, fault
from planner.units import HOUR

log = logging.getLogger("planner.webhooks")
SCHEMES = ("https", "http")
TIMEOUT_SECONDS = 10.0
TAKEN_SECONDS = 60.0  # nobody else tries it meanwhile
FIRST_WAIT_SECONDS, MOST_TRIES = 10.0, 9  # the last one after about an hour and a half
FIELD = "sweep.webhook"


def check_webhook(settings: Settings, url: str) -> str:
    """The URL, where the operator allows its host. Raises SpecError."""
    try:
        parts = urlsplit(url)
        place = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    except ValueError:
        raise fault(FIELD, url, "is no URL", "write https://host/path") from None
    if parts.scheme not in SCHEMES or not parts.hostname or parts.username is not None:
        raise fault(FIELD, url, "is no URL of a web service", "write https://host/path")
    if place.lower() not in settings.webhook_places:
        allowed = ", ".join(sorted(settings.webhook_places)) or "none"
        rule = f"its host {place} is not one of PLANNER_WEBHOOK_HOSTS ({allowed})"
        raise fault(FIELD, url, rule, "ask the operator to add it")
    need("httpx", extra="server")
    return url


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of the header `webhook-signature`."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def deliver_due(wiring: Wiring, stop: threading.Event | None = None) -> int:
    """Calls every webhook that is due, until `stop`; returns how many accepted the report."""
    taken = 0
    while not (stop and stop.is_set()):
        task = wiring.tasks.take_notification(TAKEN_SECONDS)
        if task is None:
            break
        taken += deliver(wiring, task)
    return taken


def deliver(wiring: Wiring, task: TaskRecord) -> bool:
    """Calls the webhook of an ended run once, and schedules another try where that fails."""
    why = _posted(wiring, task)
    if why is None:
        wiring.tasks.notify_again(task, None)
        return True
    left = task.notified < MOST_TRIES
    wait = FIRST_WAIT_SECONDS * 2.0 ** (task.notified - 1)
    log.warning(
        "the webhook of %s did not take its report (%s); %s",
        task.id,
        why,
        f"again in {min(wait, HOUR):.0f} s" if left else "given up",
    )
    wiring.tasks.notify_again(task, min(wait, HOUR) if left else None)
    return False


def _posted(wiring: Wiring, task: TaskRecord) -> str | None:
    """Reason why the webhook did not accept the report; None where it did."""
    url = task.request.get("webhook")
    if not isinstance(url, str):
        return None  # the sweep has none; nobody is to be told
    try:
        check_webhook(wiring.settings, url)  # the operator may have changed the list
    except PlannerError as error:
        return str(error)
    body = json.dumps(body_of(task)).encode()
    timestamp = int(wiring.clock.now().timestamp())
    headers = {
        "content-type": "application/json",
        "webhook-id": task.id,
        "webhook-timestamp": str(timestamp),
    }
    secret = wiring.settings.webhook_secret.get_secret_value()
    if secret:
        headers["webhook-signature"] = signature(secret, task.id, timestamp, body)
    return _refused(url, body, headers)


def _refused(url: str, body: bytes, headers: Mapping[str, str]) -> str | None:
    """Reason why the receiver refused the report; None where it did not. Only the status is read.

    Ends within TIMEOUT_SECONDS, however slowly the receiver answers.
    """
    import anyio
    import httpx

    async def status() -> int:
        with anyio.fail_after(TIMEOUT_SECONDS):
            # no proxy of the environment: the list says which hosts are called
            async with (
                httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as client,
                client.stream("POST", url, content=body, headers=headers) as answer,
            ):
                return answer.status_code

    try:
        found = anyio.run(status)
    except TimeoutError:
        return f"no whole answer in {TIMEOUT_SECONDS:g} s"
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return None if httpx.codes.is_success(found) else f"HTTP {found}"


def body_of(task: TaskRecord) -> Mapping[str, Any]:
    """The body of the POST."""
    return {
        "type": "sweep.run.ended",
        **told(task, "id", "state", "message", "due_at", "finished_at"),
        "sweep": task.parent_id,
        "name": task.request.get("name"),
        "report": task.result,
    }
