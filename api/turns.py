"""Taking turns within one process: one works, one waits for it, and the rest need not."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class Turns:
    """Turns at subjects. Who comes while somebody waits already is covered by that one's turn."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._waiting: set[Hashable] = set()

    @contextmanager
    def turn(self, subject: Hashable) -> Iterator[bool]:
        """Whether it is ours to do, once whoever is at it has ended."""
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
