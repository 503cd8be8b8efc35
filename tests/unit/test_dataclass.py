"""`planner.dataclass` against the standard one: the same classes, made faster."""

import ast
import copy
import dataclasses
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.dataclass import dataclass

ROOT = Path(__file__).parents[2]
OPTIONS = [
    {"frozen": frozen, "slots": slots, "kw_only": kw_only, "eq": eq}
    for frozen in (False, True)
    for slots in (False, True)
    for kw_only in (False, True)
    for eq in (False, True)
]
Decorator = Callable[..., Any]


def example(decorator: Decorator, options: dict[str, bool]) -> Any:
    class Example:
        """Says what it is."""

        one: int
        two: str = "b"
        many: list[int] = field(default_factory=lambda: [1, 2])
        aside: float = field(default=0.5, compare=False, repr=False)
        known: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)

        def __post_init__(self) -> None:
            if self.one < 0:
                raise ValueError("one is negative")

        def twice(self) -> int:
            return 2 * self.one

    Example.__qualname__ = "Example"
    return decorator(**options)(Example)


def both(options: dict[str, bool]) -> tuple[Any, Any]:
    return example(dataclass, options), example(dataclasses.dataclass, options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_makes_the_standard_class(options: dict[str, bool]) -> None:
    ours, standard = both(options)
    assert str(signature(ours)) == str(signature(standard))
    assert ours.__doc__ == standard.__doc__
    assert ours.__match_args__ == standard.__match_args__
    assert [one.name for one in fields(ours)] == [one.name for one in fields(standard)]
    assert ("__slots__" in vars(ours)) == ("__slots__" in vars(standard)) == options["slots"]
    assert (ours.__hash__ is None) == (standard.__hash__ is None)
    for name in ("frozen", "eq", "init", "repr"):
        told = [getattr(one.__dataclass_params__, name) for one in (ours, standard)]
        assert told[0] == told[1], name
    one, other = ours(one=3, two="c"), standard(one=3, two="c")
    assert repr(one) == repr(other) == "Example(one=3, two='c', many=[1, 2])"
    assert asdict(one) == asdict(other)
    assert one.twice() == 6
    assert one.many is not ours(one=3).many
    changed, standards = (replace(each, one=4, aside=9.0) for each in (one, other))
    assert asdict(changed) == asdict(standards)
    with pytest.raises(ValueError, match="one is negative"):
        replace(one, one=-1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equality_and_hashes_are_the_standard_ones(options: dict[str, bool]) -> None:
    for made in both(options):
        assert (made(one=1) == made(one=1, aside=7.0)) == options["eq"]
        assert made(one=1) != made(one=2)
        assert made(one=1) != 1
        if options["eq"] and options["frozen"]:
            kept = {"many": (1,)}
            assert hash(made(one=1, **kept)) == hash(made(one=1, **kept, aside=7.0))
            assert hash(made(one=1, **kept)) == hash((1, "b", (1,)))


def test_an_array_equals_itself() -> None:
    values = np.arange(3)
    ours, standard = both({"frozen": True, "eq": True})
    for made in (ours, standard):
        assert made(one=1, many=values) == made(one=1, many=values)
        with pytest.raises(ValueError, match="truth value"):
            bool(made(one=1, many=values) == made(one=1, many=values.copy()))


@pytest.mark.parametrize("slots", [False, True])
def test_what_is_frozen_cannot_change(slots: bool) -> None:
    for made in both({"frozen": True, "slots": slots}):
        one = made(one=1)
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'one'"):
            one.one = 2
        with pytest.raises((FrozenInstanceError, TypeError)):  # the standard one's super() fails
            one.new = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'one'"):
            del one.one
        assert one.one == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Goes through a pipe."""

    name: str
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plain:
    name: str

    @cached_property
    def long(self) -> str:
        return 2 * self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extended(Sent):
    """What somebody adds to one of the planner's classes with the standard decorator."""

    more: int = 0


@dataclass(frozen=True, kw_only=True)
class Inherited(Sent):
    more: int = 0


def test_it_can_be_sent_and_copied() -> None:
    for one in (Sent(name="a", values=(1, 2)), Plain("a"), Extended(name="a"), Inherited(name="b")):
        assert pickle.loads(pickle.dumps(one)) == one
        assert copy.copy(one) == copy.deepcopy(one) == one
    assert Plain("ab").long == "abab"
    assert Plain.__doc__ == "Plain"


def test_it_can_be_extended() -> None:
    for extended in (Extended, Inherited):
        one = extended(name="a", values=(1,), more=2)
        assert repr(one) == f"{extended.__name__}(name='a', values=(1,), more=2)"
        assert replace(one, more=3).more == 3
        with pytest.raises(FrozenInstanceError):
            one.more = 4  # type: ignore[misc]
    assert Sent(name="a") != Extended(name="a")


def test_own_methods_stay() -> None:
    @dataclass(frozen=True, slots=True)
    class Own:
        one: int
        known: dict[str, int] = field(default_factory=dict, init=False, compare=False)

        def __init__(self, number: int) -> None:
            object.__setattr__(self, "one", number + 1)

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    assert (Own(1).one, repr(Own(1)), Own(1) == 3, hash(Own(1))) == (2, "own", True, 7)


def test_abstract_methods_stay_abstract() -> None:
    @dataclass(frozen=True)
    class Base(ABC):
        one: int

        @abstractmethod
        def two(self) -> int: ...

    @dataclass(frozen=True)
    class Whole(Base):
        def two(self) -> int:
            return self.one

    with pytest.raises(TypeError, match="abstract"):
        Base(1)  # type: ignore[abstract]
    assert Whole(2).two() == 2


def test_a_wrong_call_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match=r"Sent\.__init__\(\) missing 1 required keyword-only arg"):
        Sent()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        Sent(name="a", other=1)  # type: ignore[call-arg]


def test_the_planner_and_its_service_use_it_alone() -> None:
    """But for classes that have an order."""
    found = []
    for path in (*(ROOT / "planner").rglob("*.py"), *(ROOT / "api").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
                found += [str(path.relative_to(ROOT))] * ("dataclass" in names)
    assert sorted(found) == ["planner/calibration/kernels.py", "planner/dataclass.py"]
