"""Answers kept under an Idempotency-Key, so that a request sent twice is done once.

A key is claimed before the work and filled with the answer after it. A claim whose owner crashed
is taken over after CLAIM_SECONDS; answers are forgotten after KEEP_SECONDS.
"""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Engine, delete, insert, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.storage.engine import store_errors
from api.storage.tables import IdempotencyRow
from planner.errors import ConflictError
from planner.ports import Clock
from planner.units import DAY

CLAIM_SECONDS = 600.0
KEEP_SECONDS = DAY


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The answer that was given: HTTP status, headers beyond the content type, and body as sent."""

    status: int
    headers: dict[str, str]
    content_type: str
    body: str


class IdempotencyStore:
    """Claims keys and keeps answers. All methods raise StoreError when the database fails."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self._writer = engine.execution_options(planner_writes=True)

    def claim(self, key_hash: str, request_hash: str) -> KeptAnswer | None:
        """The kept answer, or None: the key is now ours and the work is to be done.

        Raises ConflictError when the key was used for another request, or its first request is
        still being answered.
        """
        now = self.clock.now()
        with store_errors(self.engine), Session(self._writer, expire_on_commit=False) as session:
            session.execute(
                delete(IdempotencyRow).where(
                    IdempotencyRow.created_at < now - timedelta(seconds=KEEP_SECONDS)
                )
            )
            stale = (
                IdempotencyRow.status.is_(None),
                IdempotencyRow.created_at < now - timedelta(seconds=CLAIM_SECONDS),
            )
            session.execute(
                delete(IdempotencyRow).where(IdempotencyRow.key_hash == key_hash, *stale)
            )
            try:
                with session.begin_nested():
                    session.execute(
                        insert(IdempotencyRow).values(
                            key_hash=key_hash, request_hash=request_hash, created_at=now
                        )
                    )
                session.commit()
                return None
            except IntegrityError:
                row = session.get(IdempotencyRow, key_hash)
                session.commit()
                return _answer(row, request_hash)

    def keep(self, key_hash: str, answer: KeptAnswer) -> None:
        """Fills a claimed key with its answer."""
        headers = {**answer.headers, "content-type": answer.content_type}
        values = {"status": answer.status, "headers": headers, "body": answer.body}
        with store_errors(self.engine), Session(self._writer) as session:
            session.execute(
                update(IdempotencyRow).where(IdempotencyRow.key_hash == key_hash).values(**values)
            )
            session.commit()

    def release(self, key_hash: str) -> None:
        """Gives an unanswered claim back, so that the request may be sent again."""
        with store_errors(self.engine), Session(self._writer) as session:
            session.execute(
                delete(IdempotencyRow).where(
                    IdempotencyRow.key_hash == key_hash, IdempotencyRow.status.is_(None)
                )
            )
            session.commit()


def _answer(row: IdempotencyRow | None, request_hash: str) -> KeptAnswer:
    if row is not None and row.request_hash != request_hash:
        raise ConflictError(
            "this Idempotency-Key was used for another request; use a new key for a new request"
        )
    if row is None or row.status is None:
        raise ConflictError(
            "the first request with this Idempotency-Key is still being answered; repeat it later"
        )
    headers = {str(name): str(value) for name, value in (row.headers or {}).items()}
    return KeptAnswer(
        row.status, headers, headers.pop("content-type", "application/json"), row.body or ""
    )
