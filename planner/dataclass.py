"""`dataclasses.dataclass`, whose classes are made in less than a third of the time.

The standard one writes and compiles six methods for each class, which a short command notices
(`benchmarks/class_making.py`). Here one of them is compiled, `__init__`; the others are the same
few lines for every class and read its fields. Fields, slots, defaults and inheritance are the
standard one's, and so are `fields`, `replace` and `asdict`. What it is told means the same; what
has an order, or a frozen base, is left to the standard one.
"""

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

ClassT = TypeVar("ClassT", bound=type[Any])


class _Factory:
    """Stands for a default that is made for each object."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # what type checkers know
else:

    def dataclass(
        cls: ClassT | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        kw_only: bool = False,
        eq: bool = True,
    ) -> ClassT | Callable[[ClassT], ClassT]:
        """See `dataclasses.dataclass`."""

        def made(plain: ClassT) -> ClassT:
            if any(_is_frozen(base) for base in plain.__mro__[1:]):
                return dataclasses.dataclass(frozen=frozen, slots=slots, kw_only=kw_only, eq=eq)(
                    plain
                )
            return _made(plain, frozen=frozen, slots=slots, kw_only=kw_only, eq=eq)

        return made if cls is None else made(cls)


def _is_frozen(cls: type[Any]) -> bool:
    params = vars(cls).get("__dataclass_params__")
    return params is not None and bool(params.frozen)


def _made(plain: Any, *, frozen: bool, slots: bool, kw_only: bool, eq: bool) -> Any:
    own = dict(vars(plain))
    if plain.__doc__ is None:  # else the standard one reads signatures to write one
        plain.__doc__ = plain.__name__
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(
        plain
    )
    params, all_fields = vars(cls)["__dataclass_params__"], fields(cls)
    params.init = params.repr = True
    params.frozen, params.eq = frozen, eq
    methods: dict[str, object] = {}
    if "__init__" not in own:
        methods["__init__"] = _init(cls, all_fields, frozen)
    methods["__repr__"] = _repr([one.name for one in all_fields if one.repr])
    compared = [one.name for one in all_fields if one.compare]
    if eq:
        methods["__eq__"] = _eq(compared)
        if "__eq__" not in own or own.get("__hash__") is None:
            methods["__hash__"] = _hash(compared) if frozen else None
    if frozen:
        names = frozenset(one.name for one in all_fields)
        methods["__setattr__"], methods["__delattr__"] = _setattr(cls, names), _delattr(cls, names)
        if slots:
            methods["__getstate__"], methods["__setstate__"] = _getstate, _setstate
    for name, method in methods.items():
        if name not in own or (name == "__hash__" and own[name] is None):
            setattr(cls, name, method)
    return abc.update_abstractmethods(cls)


def _init(cls: type[Any], all_fields: tuple[Field[Any], ...], frozen: bool) -> object:
    """The `__init__` of these fields, compiled."""
    positional, keywords, lines = ["self"], list[str](), list[str]()
    names: dict[str, object] = {"_set": object.__setattr__, "_FACTORY": _FACTORY}
    for one in all_fields:
        name, value = one.name, one.name
        default = ""
        if one.default_factory is not MISSING:
            names[f"_make_{name}"] = one.default_factory
            default = "=_FACTORY"
            value = f"_make_{name}()"
            if one.init:
                value += f" if {name} is _FACTORY else {name}"
        elif one.default is not MISSING:
            names[f"_default_{name}"] = one.default
            default = f"=_default_{name}"
        elif not one.init:
            continue
        if one.init:
            (keywords if one.kw_only else positional).append(name + default)
        elif one.default_factory is MISSING:
            continue  # the class has it
        lines.append(f"_set(self,{name!r},{value})" if frozen else f"self.{name}={value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    arguments = [*positional, *(["*", *keywords] if keywords else [])]
    body = "\n ".join(lines or ["pass"])
    exec(f"def __init__({','.join(arguments)}):\n {body}", names)
    init: Any = names["__init__"]
    init.__module__, init.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    init.__annotations__ = {one.name: one.type for one in all_fields if one.init} | {"return": None}
    return init


def _values(names: list[str]) -> Callable[[object], tuple[object, ...]]:
    """What reads these attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda of: tuple(getattr(of, name) for name in names)


def _repr(names: list[str]) -> object:
    @recursive_repr()
    def __repr__(self: Any) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({shown})"

    return __repr__


def _eq(names: list[str]) -> object:
    values = _values(names)

    def __eq__(self: Any, other: object) -> bool:
        if other.__class__ is self.__class__:
            return values(self) == values(other)
        return NotImplemented

    return __eq__


def _hash(names: list[str]) -> object:
    values = _values(names)

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _setattr(cls: type[Any], names: frozenset[str]) -> object:
    def __setattr__(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    return __setattr__


def _delattr(cls: type[Any], names: frozenset[str]) -> object:
    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __delattr__


def _getstate(self: Any) -> list[object]:
    return [getattr(self, one.name) for one in fields(self)]


def _setstate(self: Any, state: list[object]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
