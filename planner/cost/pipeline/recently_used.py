"""An LRU cache."""

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class RecentlyUsed(Generic[KeyT, ValueT]):
    """Values by key, of at most `room` in sum.

    Threads may share it. Each step is one of a dict's own, which are atomic: at worst a value is
    computed twice.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._kept: dict[KeyT, tuple[ValueT, int]] = {}

    def get(self, key: KeyT) -> ValueT | None:
        """The value, which now is the one used last; None where it is not kept."""
        entry = self._kept.pop(key, None)
        if entry is None:
            return None
        self._kept[key] = entry
        return entry[0]

    def put(self, key: KeyT, value: ValueT, size: int = 1) -> None:
        """Keeps a value, and drops those unused for longest where there is no room for all.

        The last one is kept whatever its size.
        """
        self._kept.pop(key, None)
        self._kept[key] = (value, size)
        entries = list(self._kept.items())
        used = sum(size for _, (_, size) in entries)
        for oldest, (_, size) in entries[:-1]:
            if used <= self.room:
                break
            self._kept.pop(oldest, None)
            used -= size

    def clear(self) -> None:
        self._kept.clear()
