"""`Registry`: the named entries of one extension point, in the order in which they were added."""

from typing import Protocol, TypeVar

from planner.errors import UnknownNameError


class RegistryEntry(Protocol):
    """Anything with a name of its own."""

    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=RegistryEntry)


class Registry(dict[str, Entry]):
    """Entries by name. Columns of layouts store an entry's index, which is its place in `names`.

    kind, field: what an entry is and the request's field that names it, for error messages.
    names: every name in order; it grows when an entry is added, so keep no copy of it.
    """

    def __init__(self, *entries: Entry, kind: str, field: str) -> None:
        self._kind, self._field = kind, field
        self.names: list[str] = []
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry at the end. Raises ValueError where the name is taken."""
        if entry.name in self:
            raise ValueError(f"there is a {self._kind} {entry.name} already; choose another name")
        self[entry.name] = entry
        self.names.append(entry.name)

    def remove(self, name: str) -> None:
        """Remove an entry. Codes of later entries change, so do this only between jobs."""
        del self[name]
        self.names.remove(name)

    def find(self, name: str) -> Entry:
        """The entry of this name. Raises UnknownNameError with the closest names."""
        if name not in self:
            raise UnknownNameError(self._field, name, self.names, self._kind)
        return self[name]

    def of_code(self, code: int) -> Entry:
        """The entry whose index a column of layouts stores."""
        return self[self.names[code]]
