"""Connections to PostgreSQL that do not wait for ever: also a frozen server is given up."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import psycopg

# settings of the server, as multiples of the seconds that we wait: a lock is the clearer reason
LIMITS = {
    "statement_timeout": 1.0,
    "lock_timeout": 0.9,
    "idle_in_transaction_session_timeout": 6.0,  # of a process that was stopped in the middle
}
GIVEN_UP = 1.5  # the same of a server that says nothing
Waiting = Generator[Any, Any, Any]


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed where the server does not answer within `most_seconds`.

    The server's own `statement_timeout` ends a slow statement; a server that is stopped, or that
    the network no longer reaches, does not keep it.
    """

    most_seconds: float | None = None

    def wait(self, gen: Waiting, *args: Any, **named: Any) -> Any:
        """Waits for what the server sends. Raises psycopg.OperationalError."""
        return super().wait(self._within(gen, self.most_seconds), *args, **named)

    def _within(self, gen: Waiting, seconds: float | None) -> Waiting:
        deadline = None if seconds is None else monotonic() + seconds
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and deadline is not None and monotonic() > deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer within {seconds:g} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value


def connect(most_seconds: float, *args: Any, **named: Any) -> BoundedConnection:
    """A new connection, whose statements and waits for locks end after so many seconds."""
    made = BoundedConnection.connect(*args, **named)
    assert isinstance(made, BoundedConnection), "connect makes what it is called on"
    made.most_seconds = GIVEN_UP * most_seconds
    for name, times in LIMITS.items():
        made.execute(f"SET {name} = {int(1000 * times * most_seconds)}".encode())
    made.commit()
    return made


@contextmanager
def unbounded(connection: Any) -> Iterator[None]:
    """Lifts the limits of one transaction: migrations may take long."""
    assert isinstance(connection, BoundedConnection), "every connection of ours is one"
    before, connection.most_seconds = connection.most_seconds, None
    try:
        for name in LIMITS:
            connection.execute(f"SET LOCAL {name} = 0".encode())
        yield
    finally:
        connection.most_seconds = before
