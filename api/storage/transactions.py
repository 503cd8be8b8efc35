"""Sessions of the stores, and several stores' writes in one transaction.

A store reads in `reading(engine)` and writes in `writing(engine)`: a transaction of its own, or
within `one_transaction(engine)` the one of all. The rows of either are detached at its end, and
change no more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from planner.api.storage.engine import store_errors


@dataclass
class _Open:
    """A transaction that several stores write in; it begins with the first write."""

    engine: Engine
    session: Session | None = field(default=None)


_open: ContextVar[_Open | None] = ContextVar("open transaction", default=None)


@contextmanager
def one_transaction(engine: Engine) -> Iterator[None]:
    """All that is written inside, by whatever store, is committed at the end or not at all.

    Inside another one it belongs to that. What runs long comes before the first write, because
    others cannot write to SQLite meanwhile.
    """
    outer = _open.get()
    if outer is not None and outer.engine is engine:
        yield
        return
    ours = _Open(engine)
    token = _open.set(ours)
    try:
        yield
        if ours.session is not None:
            with store_errors(engine):
                ours.session.commit()
    finally:
        _open.reset(token)
        if ours.session is not None:
            ours.session.close()


@contextmanager
def writing(engine: Engine) -> Iterator[Session]:
    """A session that commits at the end, or leaves nothing behind. Raises StoreError."""
    ours = _open.get()
    writer = engine.execution_options(planner_writes=True)
    if ours is None or ours.engine is not engine:
        with store_errors(engine), Session(writer, expire_on_commit=False) as session:
            yield session
            session.commit()
        return
    if ours.session is None:
        ours.session = Session(writer, expire_on_commit=False)
    with store_errors(engine):
        with ours.session.begin_nested():
            yield ours.session
        ours.session.expunge_all()


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A session that writes nothing; it sees what an open transaction of ours has written."""
    ours = _open.get()
    if ours is not None and ours.engine is engine and ours.session is not None:
        with store_errors(engine):
            yield ours.session
            ours.session.expunge_all()
        return
    with store_errors(engine), Session(engine) as session:
        yield session
