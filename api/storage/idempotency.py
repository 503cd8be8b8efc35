"""Answers kept under an Idempotency-Key, so that a request sent twice is done once.

An answer is kept in the transaction that stores what the request made (`one_transaction`): after
a crash both are there, and the repeated request gets the answer, or neither is, and it is done
anew. Of two that are done at the same time one is stored; the other gets its answer. Answers are
forgotten after KEEP_SECONDS.
"""

from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from planner.api.storage.clock import database_time
from planner.api.storage.common import Store
from planner.api.storage.tables import KeptAnswer
from planner.api.storage.transactions import reading, writing
from planner.errors import ConflictError
from planner.units import DAY

KEEP_SECONDS = DAY


class AnsweredMeanwhile(Exception):
    """A twin request was answered while we worked on it. answer: what it was given."""

    def __init__(self, answer: KeptAnswer) -> None:
        super().__init__("answered meanwhile")
        self.answer = answer


class IdempotencyStore(Store):
    """Keeps answers. All methods raise StoreError when the database fails."""

    def kept(self, key_hash: str, request_hash: str) -> KeptAnswer | None:
        """The kept answer; None where the work is to be done.

        Raises ConflictError where the key was used for another request.
        """
        with reading(self.engine) as session:
            return _kept(session, key_hash, request_hash)

    def keep(
        self, key_hash: str, request_hash: str, status: int, headers: dict[str, str], body: str
    ) -> None:
        """Keeps an answer, with all that an open transaction has written.

        Raises AnsweredMeanwhile, and ConflictError as `kept` does; what was written is then to be
        undone.
        """
        old = KeptAnswer.created_at < database_time(-KEEP_SECONDS)
        left = (KeptAnswer.key_hash == key_hash, KeptAnswer.status.is_(None))
        row = KeptAnswer(
            key_hash=key_hash,
            request_hash=request_hash,
            created_at=database_time(),
            status=status,
            headers=headers,
            body=body,
        )
        with writing(self.engine) as session:
            session.execute(delete(KeptAnswer).where(old))
            session.execute(delete(KeptAnswer).where(*left))
            try:
                with session.begin_nested():
                    session.add(row)
            except IntegrityError:
                other = _kept(session, key_hash, request_hash)
                if other is None:  # forgotten in this very moment
                    raise
                raise AnsweredMeanwhile(other) from None


def _kept(session: Session, key_hash: str, request_hash: str) -> KeptAnswer | None:
    fresh = KeptAnswer.created_at >= database_time(-KEEP_SECONDS)
    found = session.query(KeptAnswer).where(KeptAnswer.key_hash == key_hash, fresh).first()
    # an older version noted a request before it was answered; its process is gone
    if found is None or found.status is None:
        return None
    if found.request_hash != request_hash:
        raise ConflictError(
            "this Idempotency-Key was used for another request; use a new key for a new request"
        )
    return found
