"""Checks of an installation, part by part, each with a remedy.

Nothing here imports torch: a process of its own does, on request.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from planner.api.settings import Settings
from planner.api.storage.engine import is_memory, normalise_url, shown
from planner.api.storage.migrate import HEAD, current_revision
from planner.api.wiring import Wiring
from planner.errors import PlannerError, ProbeError, how_to_install
from planner.probes.folder import free_bytes
from planner.probes.packages import told_by, versions_in
from planner.probes.pools.leases import check_folder
from planner.probes.pools.nvidia import others_on, survey
from planner.probes.preflight import CHECK_SECONDS, ask, problem_in
from planner.units import GIB, format_bytes
from planner.version import VERSION

State = Literal["ok", "warn", "fail"]
OLDEST_PYTHON = (3, 11)
NEEDED = ("planner", "numpy", "pydantic", "optuna", "sqlalchemy", "alembic", "typer", "rich")
SERVICE = ("fastapi", "uvicorn")
TRAINERS = ("torchtitan",)  # packages that bring a trainer
ASK_SECONDS = 5.0  # of a command that should answer at once
# Judgements: room for a hundred plans and the logs of some probes; for those of one probe.
LITTLE_BYTES, LEAST_BYTES = GIB, GIB / 16
PROBING = "only for probes; plans on paper need none"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check, with a remedy where it is not ok."""

    name: str
    state: State
    detail: str
    remedy: str | None = None


def all_checks(wiring: Wiring, *, torch: bool) -> list[Check]:
    """Runs every check. torch: also imports torch in the interpreter that probes use."""
    parts: tuple[Callable[[], Iterable[Check]], ...] = (
        _python,
        _packages,
        lambda: _torch(wiring.settings, imported=torch),
        lambda: _gpus(wiring.settings.probe_tolerated_gib * GIB),
        _slurm,
        lambda: _database(database_report(wiring)),
        lambda: _disks(wiring),
        lambda: _leases(wiring.settings.lease_folder),
        lambda: _door(wiring),
    )
    return [check for part in parts for check in part()]


def _python() -> Iterable[Check]:
    detail = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    if sys.version_info >= OLDEST_PYTHON:
        yield Check("python", "ok", detail)
    else:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Check("python", "fail", detail, f"install Python {oldest}")


def _packages() -> Iterable[Check]:
    """Packages of the planner itself, and those that only the service needs."""
    parts: tuple[tuple[str, tuple[str, ...], State, str], ...] = (
        ("packages", NEEDED, "fail", "pip install . in the checkout"),
        ("service", SERVICE, "warn", how_to_install("server")),
    )
    for name, wanted, state, remedy in parts:
        found = {package: version_of(package) for package in wanted}
        missing = [package for package, value in found.items() if value is None]
        if missing:
            yield Check(name, state, f"{', '.join(missing)} missing", remedy)
        else:
            yield Check(name, "ok", ", ".join(f"{one} {value}" for one, value in found.items()))


def version_of(name: str) -> str | None:
    """Installed version, without importing the package; the planner's own has no other name."""
    if name == "planner":
        return VERSION
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch(settings: Settings, *, imported: bool) -> Iterable[Check]:
    python = settings.probe_python
    try:
        found = versions_in(python)
    except ProbeError as error:
        remedy = "set PLANNER_PROBE_PYTHON to an interpreter that runs"
        yield Check("torch", "warn", str(error), remedy)
        return
    if "torch" not in found:
        detail = f"not installed in {python}; {PROBING}"
        yield Check("torch", "warn", detail, how_to_install("probe"))
        return
    others = "".join(f", {name} {found[name]}" for name in TRAINERS if name in found)
    yield Check("torch", "ok", f"{found['torch']}{others} in {python}")
    build = found["torch"].partition("+")[2] or "its default build"
    problem = _problem(settings) if imported else None
    if problem is not None:
        detail, _, remedy = problem.partition("; ")
        yield Check("cuda", "warn", f"{detail}; {PROBING}", remedy)
    else:
        asked = "as a probe would find it" if imported else "--torch asks torch itself"
        yield Check("cuda", "ok", f"{build}; {asked}")
    shipped = next((value for name, value in found.items() if name.startswith("nvidia-nccl")), None)
    yield Check("nccl", "ok", shipped or "as torch brings it")


def _problem(settings: Settings) -> str | None:
    """Reports why a GPU probe would fail its preflight, with the remedy."""
    python = settings.probe_python
    asking = [python, "-m", "planner.probes.selfcheck", "cuda", settings.probe_program]
    try:
        return problem_in(ask(asking, folder=settings.probe_folder, seconds=CHECK_SECONDS), python)
    except ProbeError as error:
        return str(error)


def _gpus(tolerated_bytes: float) -> Iterable[Check]:
    seen = survey()
    if not seen.gpus:
        detail = f"none ({seen.problem or 'nvidia-smi lists none'}); {PROBING}"
        remedy = "probe on a machine with GPUs or through --pool slurm"
        yield Check("gpus", "warn", detail, remedy)
        return
    kinds = sorted({gpu.name for gpu in seen.gpus})
    detail = f"{len(seen.gpus)} x {', '.join(kinds)}, driver {seen.gpus[0].driver}"
    if used := others_on(seen.gpus, tolerated_bytes):
        detail += f"; {used}"
        remedy = "a probe waits for free GPUs; CUDA_VISIBLE_DEVICES says which it may take"
        yield Check("gpus", "warn", detail, remedy)
    else:
        yield Check("gpus", "ok", detail)


def _slurm() -> Iterable[Check]:
    if shutil.which("sinfo") is None or shutil.which("srun") is None:
        yield Check("slurm", "ok", "not here; only --pool slurm needs it")
        return
    try:
        done = told_by(["sinfo", "--noheader", "--format=%P %D %T"], ASK_SECONDS)
        problem = done.stderr.strip().partition("\n")[0] if done.returncode else ""
        told = "; ".join(line.strip() for line in done.stdout.splitlines())
    except subprocess.TimeoutExpired:
        problem, told = f"sinfo did not answer within {ASK_SECONDS:g} s", ""
    if told and not problem:
        yield Check("slurm", "ok", told)
    else:
        remedy = "ask `sinfo` by hand; --pool local needs no Slurm"
        yield Check("slurm", "warn", problem or "sinfo lists no partition", remedy)


def database_report(wiring: Wiring) -> dict[str, str | None]:
    """Checks the database: its address without the password, its revision, its state."""
    try:
        url = normalise_url(wiring.settings.database_url)
        on_disk = url.get_backend_name() == "sqlite" and not is_memory(url)
        if on_disk and not Path(str(url.database)).exists():
            state = "not created yet; the first plan creates it"
            return {"url": url.render_as_string(), "state": state, "revision": None}
        revision = current_revision(wiring.engine)
    except PlannerError as error:
        return {"url": None, "state": "unreachable", "detail": " ".join(str(error).split())}
    how = "the next command brings it there" if on_disk else "run `planner-cli db upgrade`"
    state = "ready" if revision == HEAD else f"needs revision {HEAD}: {how}"
    return {"url": shown(wiring.engine), "state": state, "revision": revision}


def _database(found: Mapping[str, str | None]) -> Iterable[Check]:
    if found["state"] == "unreachable":
        remedy = "start the database, or correct PLANNER_DATABASE_URL"
        yield Check("database", "fail", str(found["detail"]), remedy)
        return
    detail = f"{found['url']} at revision {found['revision'] or 'none'}: {found['state']}"
    if "db upgrade" in str(found["state"]):
        yield Check("database", "fail", detail, "run `planner-cli db upgrade`")
    else:
        yield Check("database", "ok", detail)


def _disks(wiring: Wiring) -> Iterable[Check]:
    settings = wiring.settings
    yield disk("probe folder", settings.probe_folder, "PLANNER_PROBE_FOLDER")
    try:
        url = normalise_url(settings.database_url)
    except PlannerError:  # said of the database already
        return
    if url.get_backend_name() == "sqlite" and not is_memory(url):
        yield disk("database folder", Path(str(url.database)).parent, "PLANNER_DATABASE_URL")


def disk(name: str, folder: Path, setting: str) -> Check:
    """Checks that a folder is writable or can be created, and has room."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    elsewhere = f"free some room, or set {setting} to another disk"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{folder} cannot be written", f"set {setting} elsewhere")
    free = free_bytes(folder)
    state: State = "fail" if free < LEAST_BYTES else "warn" if free < LITTLE_BYTES else "ok"
    remedy = None if state == "ok" else elsewhere
    return Check(name, state, f"{folder}, {format_bytes(free)} free", remedy)


def _leases(folder: Path) -> Iterable[Check]:
    try:
        if folder.exists() or folder.is_symlink():
            check_folder(folder)
        yield Check("leases", "ok", str(folder))
    except PlannerError as error:
        remedy = "set PLANNER_LEASE_FOLDER to a folder of yours, mode 700"
        yield Check("leases", "fail", str(error), remedy)


def _door(wiring: Wiring) -> Iterable[Check]:
    settings = wiring.settings
    address = f"{settings.host}:{settings.port}"
    from planner.api.http.security import refuse_open_door  # needs the extra server

    try:
        refuse_open_door(settings)
        keys = ", ".join(f"{key.name} ({'+'.join(sorted(key.scopes))})" for key in settings.keys)
    except PlannerError as error:
        remedy = "set PLANNER_API_KEYS, or PLANNER_HOST=127.0.0.1"
        yield Check(name="keys", state="fail", detail=" ".join(str(error).split()), remedy=remedy)
        return
    detail = f"{address}, keys: {keys}" if keys else f"{address}, no keys: for this machine alone"
    yield Check("keys", "ok", detail)
