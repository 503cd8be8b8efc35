"""Breaks one line at a time and counts how many breaks the fast tests notice.

    python benchmarks/mutations.py                    all; exit 1 below GOAL
    python benchmarks/mutations.py --only sends       those whose name or file contains a word
    python benchmarks/mutations.py --list             the table

Each mutation is applied to a temporary copy of the tree. The tests run are the fast ones that
import the broken module themselves, so a test file for a module takes part without being named.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planner.api.input.text import read_yaml

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("planner", "api", "probes", "tests", "benchmarks", "alembic", "docs", "examples")
SINGLE_FILES = ("pyproject.toml", "alembic.ini", "README.md", "setup.py", "constraints.txt")
RINGS = ("tests/unit", "tests/property", "tests/contract")
TABLE = ROOT / "benchmarks" / "mutations.yaml"
GOAL = 0.9  # share of the table that has to be caught
LIMIT_SECONDS = 300.0


# Tests that reach a file without importing it by name: start of the file's path -> tests.
INDIRECT = {
    "planner/cost/memory/": ("tests/unit/test_memory.py", "tests/unit/test_host_time.py"),
    "planner/cost/layer/forward": ("tests/unit/test_simulate.py", "tests/unit/test_schedules.py"),
    "planner/cost/data_parallel/sharding": ("tests/unit/test_host_time.py",),
    "planner/cost/network/sends": ("tests/unit/test_network.py", "tests/unit/test_simulate.py"),
    "planner/cost/cost_inputs": ("tests/property/test_everything_prices.py",),
    "planner/cost/lower_bounds": ("tests/property/test_price_property.py",),
    "planner/cost/step_seconds": ("tests/property/test_price_property.py",),
    "planner/cost/stage_seconds": ("tests/property/test_price_property.py",),
    "planner/cost/layer/gemm": ("tests/unit/test_utilisation.py",),
    "planner/cost/layer/context": ("tests/unit/test_attention_kernels.py",),
    "planner/cost/layer/trainer_kernels": ("tests/unit/test_memory.py",),
    "planner/cost/layer/unit_work": ("tests/unit/test_memory.py",),
    "planner/work/checkpointing": ("tests/unit/test_attention_kernels.py",),
    "planner/cost/machine/device": ("tests/property/test_price_property.py",),
    "planner/cost/network/collectives": ("tests/property/test_everything_prices.py",),
    "planner/study/policy": ("tests/unit/test_probing_loop.py",),
    "planner/specs/estimate": ("tests/unit/test_megatron_judge.py",),
    "planner/work/gated_delta": ("tests/unit/test_mixers.py",),
    "planner/work/mamba2": ("tests/unit/test_mixers.py",),
    "planner/rules/": ("tests/unit/test_rules.py",),
    "planner/schedules/": ("tests/unit/test_schedules.py", "tests/unit/test_rules.py"),
    "planner/calibration/own_runs": ("tests/unit/test_learn.py",),
    "planner/calibration/drift/": ("tests/unit/test_drift.py",),
    "probes/reference/": ("tests/unit/test_reference_program.py",),
    "probes/causes": ("tests/unit/test_failures.py",),
    "api/http/security": ("tests/e2e/test_who_may.py",),
    "api/jobs/": ("tests/unit/test_leases.py",),
    "api/jobs/sweep_layouts": ("tests/contract/test_sweep_scheduler.py",),
    "api/storage/fence": (
        "tests/unit/test_leases.py",
        "tests/contract/test_measurement_and_probe_stores.py",
    ),
    "api/storage/learning": ("tests/contract/test_task_sweep_calibration_stores.py",),
    "api/storage/queue": (
        "tests/unit/test_leases.py",
        "tests/contract/test_measurement_and_probe_stores.py",
    ),
    "api/storage/tasks": ("tests/contract/test_webhooks.py",),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One broken line.

    name: of the broken behaviour.
    old, new: text of the file, which has `old` exactly once.
    """

    name: str
    file: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """Dotted name of the file."""
        name = self.file.removesuffix(".py").replace("/", ".")
        return name if name.startswith(("planner.", "benchmarks.")) else f"planner.{name}"


def mutations() -> list[Mutation]:
    """The table."""
    table = read_yaml(TABLE.read_text(encoding="utf-8"), TABLE.name)
    return [
        Mutation(file=file, **row)
        for files in table.values()
        for file, rows in files.items()
        for row in rows
    ]


def occurrences(mutation: Mutation, tree: Path = ROOT) -> int:
    """How often the file holds the old text; anything but once is a stale row of the table."""
    path = tree / mutation.file
    return path.read_text(encoding="utf-8").count(mutation.old) if path.is_file() else 0


@cache
def test_files(tree: Path) -> list[tuple[str, str]]:
    """Names and texts of the test files of all rings."""
    paths = [path for ring in RINGS for path in (tree / ring).glob("test_*.py")]
    return [(str(path.relative_to(tree)), path.read_text(encoding="utf-8")) for path in paths]


def files_of(mutation: Mutation, tree: Path = ROOT) -> list[str]:
    """The test files that import the module, and those that reach it without."""
    package, _, name = mutation.module.rpartition(".")
    imports = re.compile(
        rf"^\s*(?:from {re.escape(mutation.module)} import|import {re.escape(mutation.module)}\b"
        rf"|from {re.escape(package)} import .*\b{name}\b)",
        re.MULTILINE,
    )
    found = {path for path, text in test_files(tree) if package in text and imports.search(text)}
    reached = (names for start, names in INDIRECT.items() if mutation.file.startswith(start))
    indirect = {name for names in reached for name in names if (tree / name).is_file()}
    return sorted(found | indirect, key=lambda path: (name not in path, path))  # its own first


def copy_tree(target: Path) -> None:
    """A copy of what the tests need, without caches."""
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=ignored, symlinks=True)
    for name in SINGLE_FILES:
        shutil.copy(ROOT / name, target / name)


def verdict(mutation: Mutation, tree: Path) -> str:
    """`caught`, `survived`, `stale`, `untested`, `unreadable` or `hung`; the mutation is undone.

    caught: a test failed. A file that cannot be imported, or tests that never end, catch nothing.
    """
    if occurrences(mutation, tree) != 1:
        return "stale"
    tests = files_of(mutation, tree)
    if not tests:
        return "untested"
    path = tree / mutation.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), capture_output=True, text=True, check=False,
            timeout=LIMIT_SECONDS,
        )  # fmt: skip
        if done.returncode not in (0, 1, 2):
            raise SystemExit(f"{mutation.name}: pytest failed\n{done.stdout[-2000:]}{done.stderr}")
        return ("survived", "caught", "unreadable")[done.returncode]
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        path.write_text(whole, encoding="utf-8")


def environment(tree: Path) -> dict[str, str]:
    """The environment for tests of the copy."""
    from tests.conftest import clean_environment

    return {**clean_environment(), "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a word of a name or a file")
    parser.add_argument("--list", action="store_true", help="print the table and its tests")
    arguments = parser.parse_args()
    chosen = [one for one in mutations() if arguments.only in one.name + one.file]
    if arguments.list:
        for one in chosen:
            print(f"{one.name:45} {one.file:45} {len(files_of(one))} test files")
        return 0
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy_tree(Path(folder))
        for one in chosen:
            started = time.monotonic()
            result = verdict(one, Path(folder))
            counts[result] = counts.get(result, 0) + 1
            print(
                f"{result:9} {time.monotonic() - started:6.1f} s  {one.name} ({one.file})",
                flush=True,
            )
    caught = counts.get("caught", 0)
    print(f"{caught} of {len(chosen)} caught, {counts}")
    return int(caught < GOAL * len(chosen))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
