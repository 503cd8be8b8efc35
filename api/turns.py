"""Turns within one process: one caller works, one waits for it, and the rest need not."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class Turns:
    """Serialises work per subject.

    A caller that arrives while another one waits need not work: the waiter will cover its data.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._waiting: set[Hashable] = set()

    @contextmanager
    def turn(self, subject: Hashable) -> Iterator[bool]:
        """True once it is our turn; False at once where a waiting caller covers ours."""
        with self._guard:
            lock = self._locks.setdefault(subject, threading.Lock())
            covered = subject in self._waiting
            self._waiting.add(subject)
        if covered:
            yield False
            return
        with lock:
            with self._guard:
                self._waiting.discard(subject)
            yield True
