"""`Registry`: the named entries of one extension point, in the order in which they were added."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from planner.errors import UnknownNameError


class RegistryEntry(Protocol):
    """Anything with a name of its own."""

    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=RegistryEntry)


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name. Columns of layouts store an entry's index, which is its place in `names`.

    kind, field: what an entry is and the request's field that names it, for error messages.
    names: every name in order; it grows when an entry is added, so keep no copy of it.
    """

    def __init__(self, *entries: Entry, kind: str, field: str) -> None:
        self._kind, self._field = kind, field
        self._entries: list[Entry] = []
        self._names: list[str] = []
        for entry in entries:
            self.add(entry)

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def add(self, entry: Entry) -> None:
        """Add an entry at the end. Raises ValueError where the name is taken."""
        if entry.name in self._names:
            raise ValueError(f"there is a {self._kind} {entry.name} already; choose another name")
        self._entries.append(entry)
        self._names.append(entry.name)

    def remove(self, name: str) -> None:
        """Remove an entry. Codes of later entries change, so do this only between jobs."""
        index = self._names.index(name)
        del self._entries[index], self._names[index]

    def find(self, name: str) -> Entry:
        """The entry of this name. Raises UnknownNameError with the closest names."""
        if name not in self._names:
            raise UnknownNameError(self._field, name, self._names, self._kind)
        return self[name]

    def of_code(self, code: int) -> Entry:
        """The entry whose index a column of layouts stores."""
        return self._entries[code]

    def __getitem__(self, name: str) -> Entry:
        try:
            return self._entries[self._names.index(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
