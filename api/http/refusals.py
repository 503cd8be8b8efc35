"""Refused requests of known keys in the audit trail, each kind once a minute for a key."""

import logging
import time

from fastapi import Request

from planner.errors import PlannerError

EVERY_SECONDS = 60.0
log = logging.getLogger("planner.api")


def note_refusal(request: Request, name: str, error: PlannerError) -> None:
    """Stores who was refused what, unless the same was stored within the last minute."""
    noted: dict[tuple[str, str], float] = request.app.state.refusals
    now, kind = time.monotonic(), (name, error.kind)
    if now - noted.get(kind, -EVERY_SECONDS) < EVERY_SECONDS:
        return
    noted[kind] = now
    subject = f"{request.method} {request.url.path}"
    try:
        request.app.state.wiring.audit.add(name, f"refused.{error.kind}", subject, str(error))
    except PlannerError as failure:
        log.warning("%s of %s is not in the audit trail: %s", subject, name, failure)
