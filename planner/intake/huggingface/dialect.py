"""How one family writes its config.json, as one value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.intake.huggingface.dialect_readers import Values

Prepare = Callable[[Values], Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one family writes its keys.

    renames: its name of a key -> the common one.
    parts: nested mappings whose keys belong to the model itself.
    inert: keys that do not affect work or memory, or that repeat another key.
    prepare: translates the rest, on renamed keys.
    """

    renames: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    inert: frozenset[str] = frozenset()
    prepare: Prepare | None = None
