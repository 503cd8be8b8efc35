"""Helpers of the readers of a config.json: how a key is taken, and the block that they lack."""

from collections.abc import Mapping, Sequence

MAX_LAYERS = 2**16  # more layers of one kind count as a typing error
Values = dict[str, object]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class MissingBlock(Exception):
    """A config asks for a block that we have no operations for.

    key: where the config asks for it.
    """

    def __init__(self, key: str, block: str) -> None:
        super().__init__(block)
        self.key, self.block = key, block


def flag(values: Values, key: str, default: bool) -> bool:
    value = values.get(key, default)
    return value if isinstance(value, bool) else default


def count_of(values: Values, key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def take_flag(values: Values, key: str, default: bool) -> bool:
    """`flag`, with its key taken out."""
    found = flag(values, key, default)
    values.pop(key, None)
    return found


def take_count(values: Values, key: str) -> int:
    """`count_of`, with its key taken out."""
    found = count_of(values, key)
    values.pop(key, None)
    return found


def list_of(value: object) -> Sequence[object]:
    """The value where it is a list; else an empty one."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def one_of_each_layer(values: Values, *keys: str) -> Values:
    """A list of one value per layer as that value. Raises MissingBlock where the layers differ."""
    found = dict(values)
    for key in keys:
        value = list_of(values.get(key))
        if value:
            if any(item != value[0] for item in value):
                raise MissingBlock(key, "layers that differ in width")
            found[key] = value[0]
    return found


def dense_at(places: Sequence[int]) -> Values:
    """The keys of these layers without experts: how many lead, or where they are."""
    leading = list(places) == list(range(len(places)))
    return {"first_k_dense_replace": len(places)} if leading else {"dense_layers": list(places)}


def without(values: Mapping[str, object], *keys: str) -> Values:
    return {key: value for key, value in values.items() if key not in keys}
