"""What it takes to make the dataclasses of a plan, with the standard decorator and with ours.

    python benchmarks/class_making.py

Classes are those of all modules that `planner.plan.recommend` imports; each is made again from its
fields, so that nothing but the decorator differs. What is inherited is left out.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import planner.plan.recommend  # noqa: F401
from planner.dataclass import dataclass

REPEATS = 5


def dataclasses_of_a_plan() -> list[type[Any]]:
    """All dataclasses of the planner's modules that are imported."""
    modules = [module for name, module in sys.modules.items() if name.startswith("planner.")]
    found = {id(one): one for module in modules for one in vars(module).values()}
    return [
        one
        for one in found.values()
        if isinstance(one, type)
        and "__dataclass_params__" in vars(one)
        and one.__module__.startswith("planner.")
        and not any("__dataclass_params__" in vars(base) for base in one.__mro__[1:])
    ]


def seconds(classes: list[type[Any]], decorator: Callable[..., Any]) -> float:
    """The least of several times that it takes to make these classes."""
    taken = []
    for _ in range(REPEATS):
        bodies = []
        for one in classes:
            names = [field.name for field in dataclasses.fields(one)]
            body = {"__annotations__": dict.fromkeys(names, "int"), "__doc__": one.__doc__}
            bodies.append((one, {**body, "__module__": __name__}))
        started = time.perf_counter()
        for one, body in bodies:
            frozen = vars(one)["__dataclass_params__"].frozen
            slots = "__slots__" in vars(one)
            decorator(frozen=frozen, slots=slots, kw_only=True)(type(one.__name__, (), body))
        taken.append(time.perf_counter() - started)
    return min(taken)


def main() -> None:
    """Prints both times."""
    classes = dataclasses_of_a_plan()
    standard, ours = seconds(classes, dataclasses.dataclass), seconds(classes, dataclass)
    print(f"{len(classes)} classes: standard {standard * 1e3:.0f} ms, ours {ours * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
