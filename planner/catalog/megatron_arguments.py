"""The arguments of Megatron-LM by release, as its own parser declares them.

Sources: planner/catalog/megatron_arguments.tsv, whose head says how it was made, and
    megatron_unpriced.tsv and megatron_pairs.tsv beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from planner.catalog.files import rows_of

TABLES = ("0.14", "0.16", "0.18", "0.19", "0.20")  # the releases in the file, oldest first
ALIKE = 0.8  # of difflib's ratio: a misspelt flag; judgement
_KINDS = {"int": int, "float": float}
_WORDS = {"int": "a whole number", "float": "a number"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag in some releases, `since` to `until`.

    values: how many it takes: "0", "1", "3", "+" or "*".
    kind: "int", "float" or "-" for any text.
    choices: the only values; empty for any.
    """

    flag: str
    since: str
    until: str
    values: str
    kind: str
    choices: tuple[str, ...]

    def refusal(self, words: Sequence[str]) -> str | None:
        """Why the parser refuses these values; None where it takes them."""
        count = len(words)
        wanted = {"+": "one value or more", "0": "no value", "1": "one value"}
        if (self.values == "+" and not count) or (
            self.values.isdigit() and count != int(self.values)
        ):
            return f"takes {wanted.get(self.values, f'{self.values} values')}, not {count}"
        if self.choices and (other := [word for word in words if word not in self.choices]):
            return f"knows no {other[0]}; it is one of {', '.join(self.choices)}"
        if self.kind in _KINDS and (other := [word for word in words if not self._reads(word)]):
            return f"takes {_WORDS[self.kind]}, not {other[0]!r}"
        return None

    def _reads(self, word: str) -> bool:
        try:
            _KINDS[self.kind](word)
        except ValueError:
            return False
        return True


@cache
def arguments() -> Mapping[str, tuple[Argument, ...]]:
    """Every flag of the file, with a row for each way in which releases declare it."""
    found: dict[str, tuple[Argument, ...]] = {}
    for flag, since, until, values, kind, choices in rows_of("megatron_arguments"):
        allowed = () if choices == "-" else tuple(choices.split(","))
        row = Argument(flag, since, until, values, kind, allowed)
        found[flag] = (*found.get(flag, ()), row)
    return found


@cache
def unpriced_flags() -> Mapping[str, frozenset[str]]:
    """Argument, named with _, that changes time or memory -> its values that are priced."""
    return {name: frozenset(priced.split(",")) for name, priced in rows_of("megatron_unpriced")}


@dataclass(frozen=True, slots=True)
class _Pair:
    """Arguments that need, or exclude, others: conditions, of which the first names the culprit.

    since, until: the releases of which it is true; "-" for every one.
    """

    given: tuple[str, ...]
    excludes: bool
    others: tuple[str, ...]
    since: str
    until: str

    def holds_in(self, number: str | None) -> bool:
        """Whether the pair holds in a release, or in every release where none is named."""
        if number is None:
            return self.since == self.until == "-"
        late = self.since == "-" or _parts(self.since) <= _parts(number)
        return late and (self.until == "-" or _parts(number) <= _parts(self.until))


@cache
def pairs() -> tuple[_Pair, ...]:
    return tuple(
        _Pair(tuple(given.split(" and ")), kind == "excludes", tuple(others.split(" or ")), *ages)
        for given, kind, others, *ages in rows_of("megatron_pairs")
    )


def argument(flag: str, number: str) -> Argument | None:
    """The flag as a release declares it; None where it does not have it.

    A release between two of the file has what either has. One before them has all that the oldest
    has.
    """
    ages = [_parts(known) <= _parts(number) for known in TABLES]
    newest = max(0, sum(ages) - 1)
    after = newest if not any(ages) or TABLES[newest] == number else min(newest + 1, len(ages) - 1)
    rows = [
        row
        for row in arguments().get(flag, ())
        if TABLES.index(row.since) <= after and TABLES.index(row.until) >= newest
    ]
    return rows[-1] if rows else None


def _parts(number: str) -> list[int]:
    return [int(part) for part in number.split(".")]


def releases_of(flag: str) -> str:
    """The releases of the file that have a flag, in words."""
    rows = arguments()[flag]
    since, until = rows[0].since, rows[-1].until
    if until != TABLES[-1]:
        return f"core {since}" if since == until else f"core {since} to {until}"
    return f"core {since} or later" if since != TABLES[0] else "every release"


def alike(flag: str) -> str | None:
    """The flag that a misspelt one most resembles; None where none does."""
    found = get_close_matches(flag, arguments(), n=1, cutoff=ALIKE)
    return found[0] if found else None
