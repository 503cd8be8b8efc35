"""The kinds of pool: one file each, one line each in `BACKENDS`.

A line gives the way users write the pool (`slurm[:PARTITION]`: a partition may follow) and its
class. Classes are imported when a pool is opened, so that naming pools costs nothing.
"""

import re
from dataclasses import dataclass
from pkgutil import resolve_name

from planner.errors import fault
from planner.probes.pools.protocol import Pool, PoolSettings

USAGE = re.compile(r"(?P<name>[a-z][a-z0-9-]*)(?P<option>\[?:[^\[\]:]+\]?)?")


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of pool.

    forms: every way to write it: `slurm[:PARTITION]` is `slurm` and `slurm:PARTITION`.
    pool: the class, or `module:class` of it.
    """

    forms: tuple[str, ...]
    pool: str | type[Pool]

    def load(self) -> type[Pool]:
        found: type[Pool] = resolve_name(self.pool) if isinstance(self.pool, str) else self.pool
        return found


BACKENDS: dict[str, Backend] = {}


def register(usage: str, pool: str | type[Pool]) -> None:
    """Adds a kind of pool. Raises ValueError for a usage that is invalid or taken."""
    found = USAGE.fullmatch(usage)
    if found is None or found["name"] in BACKENDS:
        raise ValueError(f"{usage}: write a new name, name:OPTION or name[:OPTION]")
    name, option = found["name"], found["option"] or ""
    whole = name + option.strip("[]")
    BACKENDS[name] = Backend((name, whole) if option.startswith("[") else (whole,), pool)


register("local", "planner.probes.pools.local:LocalPool")
register("slurm[:PARTITION]", "planner.probes.pools.slurm:SlurmPool")
register("replay:FILE.jsonl", "planner.probes.pools.replay:ReplayPool")


def pool_forms(*, files: bool = True) -> list[str]:
    """The ways to write a pool. files: also those that read a file of this machine."""
    backends = [one for one in BACKENDS.values() if files or not one.load().reads_files]
    return [form for backend in backends for form in backend.forms]


def listed(forms: list[str]) -> str:
    """Joins the forms for a sentence: "a, b or c"."""
    return " or ".join([", ".join(forms[:-1]), forms[-1]] if forms[1:] else forms)


def backend_of(text: str, *, files: bool = True) -> tuple[Backend, str | None]:
    """The kind of pool that a user names, and the option after its colon.

    files: whether pools that read a file of this machine are allowed. Raises SpecError.
    """
    name, colon, rest = text.partition(":")
    option = rest if colon else None
    backend = BACKENDS.get(name)
    fix = f"use {listed(pool_forms(files=files))}"
    known = backend is not None and any((":" in one) == bool(colon) for one in backend.forms)
    if backend is None or not known or option == "" or not text.isprintable():
        raise fault("pool", text, "is no pool", fix)
    if not files and backend.load().reads_files:
        raise fault("pool", text, "reads a file of this machine", fix)
    return backend, option


def open_pool(text: str, settings: PoolSettings, *, files: bool = True) -> Pool:
    """The pool that a user names: local, slurm:PARTITION ... Raises SpecError or ProbeError."""
    backend, option = backend_of(text, files=files)
    return backend.load().open(settings, option)
