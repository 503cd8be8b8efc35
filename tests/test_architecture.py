"""Which package may import which, read off the source with `ast`; and what must not be loaded
where.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environment
from tests.zygote import module_of

PACKAGES = ("planner", "api", "probes")
# Where each of our packages may reach, and which of the others' are its own (STYLE 1, DESIGN
# "Packages and arrows").
ARROWS = {
    "planner": {"planner"},
    "probes": {"probes", "planner"},
    "api": {"api", "probes", "planner"},
}
# Allowed outside the standard library, by the folder that may; the longest matching prefix decides.
THIRD_PARTY = {
    "planner": {"numpy", "scipy"},
    "planner/specs": {"numpy", "packaging", "pydantic"},
    "planner/charts": set(),  # vl_convert, rich and pandas by name, where they are used
    "planner/catalog": {"yaml", "numpy"},
    "planner/trainers": {"numpy", "packaging"},
    "planner/samplers": {"optuna"},
    "planner/search": {"numpy", "optuna"},
    "planner/study": {"numpy", "optuna"},
    "planner/intake": {"pydantic", "tomlkit", "yaml"},
}
# Of the standard library: clock, environment, processes, network, randomness without a seed.
IMPURE = {
    "time", "os", "subprocess", "socket", "http", "urllib", "random", "secrets", "uuid", "asyncio",
    "threading", "multiprocessing",
    "logging", "sqlite3", "shutil", "tempfile", "platform", "getpass", "signal", "sys", "ssl",
}  # fmt: skip
IMPURE_CALLS = {"print", "open", "input", "exec", "eval", "breakpoint"}
IMPURE_METHODS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "unlink", "now", "utcnow",
    "today",
}  # fmt: skip
READERS = tuple(
    f"planner/{name}.py"
    for name in (
        "catalog/bridge_recipes", "catalog/calibrations", "catalog/clusters",
        "catalog/megatron_arguments",
        "catalog/models", "intake/machines",
        "intake/models",
        "intake/trainer_files/files",
    )
)  # fmt: skip
LIBRARY = "planner/library.py"  # who calls a function has no port for the clock: it asks itself
# The rooms of planner/, from the inside out, as a job walks through them: each reaches itself and
# what stands before it, and `OUTWARD` names every exception with its reason.
ROOMS = (
    "units", "version", "errors", "registry", "charts", "schedules",
    "samplers", "precision", "catalog", "specs", "trainers", "columns", "work", "rules", "cost",
    "calibration", "export", "intake", "estimates",
    "search", "study", "ports", "plan", "library", "__init__",
)  # fmt: skip
OUTWARD: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    path: str
    line: int
    module: str

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def room(self) -> str:
        """The package of ours that it is of; empty for another's."""
        parts = self.module.split(".")
        if parts[0] != "planner":
            return ""
        return parts[1] if parts[1:] and parts[1] in PACKAGES else "planner"

    @property
    def part(self) -> str:
        return self.module.split(".")[1] if self.room == "planner" else ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.fixture(autouse=True, scope="module")
def _trees_are_forgotten() -> Iterator[None]:
    """They take 130 MB."""
    yield
    tree.cache_clear()


@cache
def imports(package: str) -> tuple[Import, ...]:
    found = []
    for path in sources(package):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(tree(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}:{node.lineno} is relative; write the whole path"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [Import(path=name, line=node.lineno, module=module) for module in names]
    return tuple(found)


def allowed_outside(path: str) -> set[str]:
    return THIRD_PARTY[
        max((folder for folder in THIRD_PARTY if path.startswith(folder + "/")), key=len)
    ]


def test_there_is_something_to_read() -> None:
    assert len(sources("planner")) > 50
    assert len(imports("planner")) > 300


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_reach_inward(package: str) -> None:
    wrong = [str(i) for i in imports(package) if i.room and i.room not in ARROWS[package]]
    assert wrong == []


def test_a_module_has_one_name() -> None:
    """In a checkout `api` can be imported beside `planner.api`, with classes of its own."""
    other = re.compile(r"^\s*(?:from|import) (?:api|probes)\b", re.MULTILINE)
    files = [path for top in (*PACKAGES, "alembic", "benchmarks", "tests") for path in sources(top)]
    assert [str(path) for path in files if other.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_reaches_tests_or_benchmarks(package: str) -> None:
    outside = {"tests", "benchmarks"} | ({"alembic"} if package != "api" else set())
    assert [str(i) for i in imports(package) if i.top in outside] == []


def test_planner_imports_nothing_but_what_each_folder_may() -> None:
    standard = set(sys.stdlib_module_names)
    wrong = [
        str(i)
        for i in imports("planner")
        if i.top not in standard | {"planner"} and i.top not in allowed_outside(i.path)
    ]
    assert wrong == []


def test_planner_has_no_clock_environment_network_or_processes() -> None:
    assert [str(i) for i in imports("planner") if i.top in IMPURE] == []


def impure_calls(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in IMPURE_CALLS:
            yield f"{path.relative_to(ROOT)}:{node.lineno} calls {called.id}"
        port = isinstance(called, ast.Attribute) and ast.unparse(called).endswith("clock.now")
        if isinstance(called, ast.Attribute) and called.attr in IMPURE_METHODS and not port:
            yield f"{path.relative_to(ROOT)}:{node.lineno} calls .{called.attr}"


def test_planner_prints_nothing_and_files_are_read_where_a_person_names_one() -> None:
    """The catalogue's own files and a user's in its format; a user's config.json."""
    calls = [call for path in sources("planner") for call in impure_calls(path)]
    calls = [call for call in calls if not (call.startswith(LIBRARY) and call.endswith(".now"))]
    assert len(calls) >= len(READERS)
    assert [
        call
        for call in calls
        if not call.startswith(READERS) or not call.endswith((".read_text", ".read_bytes"))
    ] == []


def test_torch_is_imported_only_by_what_runs_inside_a_probe() -> None:
    heavy = ("torch", "torchtitan", "torchao", "triton")
    assert [str(i) for i in imports("planner") + imports("api") if i.top in heavy] == []


def test_optuna_is_imported_where_it_is_used() -> None:
    """Not at the start: `recommend` reaches the study inside a function, so that the command line
    starts fast.
    """
    users = {i.path for package in PACKAGES for i in imports(package) if i.top == "optuna"}
    allowed = (
        "planner/study/", "planner/samplers/", "planner/search/left_out.py",
        "api/optuna_storage.py",
    )  # fmt: skip
    assert {path for path in users if not path.startswith(allowed)} == set()
    late = ("planner.study",)
    at_start = [
        i for path in sources("planner") for i in top_level(path) if i.module.startswith(late)
    ]
    assert [str(i) for i in at_start if not i.path.startswith("planner/study/")] == []


def top_level(path: Path) -> Iterator[Import]:
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom):
            yield Import(
                path=path.relative_to(ROOT).as_posix(), line=node.lineno, module=str(node.module)
            )


def test_inside_the_planner_arrows_point_inward() -> None:
    places = {name: index for index, name in enumerate(ROOMS)}
    outward = set()
    for i in imports("planner"):
        here = i.path.split("/")[1].removesuffix(".py")
        if i.room == "planner" and i.part != here:
            assert here in places, f"{i.path} stands in no room; add it to ROOMS"
            assert i.part in places, f"{i} is in no room"
            if places[i.part] > places[here]:
                outward.add((i.path, i.part))
    assert outward == set(OUTWARD)


def modules() -> dict[str, Path]:
    return {module_of(path): path for package in PACKAGES for path in sources(package)}


def test_no_file_imports_itself_through_others() -> None:
    """Imports inside functions and for types count too: a circle is a circle to whoever reads."""
    files = modules()
    graph: dict[str, set[str]] = {name: set() for name in files}
    for package in PACKAGES:
        for i in imports(package):
            name = module_of(ROOT / i.path)
            target = i.module if i.module in files else i.module.rpartition(".")[0]
            if target in files and target != name:
                graph[name].add(target)
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def compared_with(path: Path, names: frozenset[str]) -> Iterator[str]:
    """Comparisons with one of these texts, but for a pipeline's `runtime`, which is no trainer."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) != "runtime":
            sides = [
                part
                for side in (node.left, *node.comparators)
                for part in (
                    side.elts if isinstance(side, ast.Tuple | ast.Set | ast.List) else [side]
                )
            ]
            if any(isinstance(side, ast.Constant) and side.value in names for side in sides):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"


# What `measurements import` reads: a log of TorchTitan's is a format, whoever's job it is.
FORMATS_OF_FILES = ("api/input/measurements.py",)


def test_no_code_outside_the_trainers_compares_a_trainers_name() -> None:
    """What differs between trainers is a field of theirs (`planner.trainers.base`)."""
    names = frozenset({"torchtitan", "megatron", "megatron-deepspeed", "internevo"})
    found = [
        text
        for package in PACKAGES
        for path in sources(package)
        for text in compared_with(path, names)
        if not text.startswith(("planner/trainers/", "probes/trainers/", *FORMATS_OF_FILES))
    ]
    assert found == []
    own = [path for path in sources("api") if path.name == "measurements.py"]
    assert any(list(compared_with(path, names)) for path in own), "the reader of source is blind"


def test_no_code_outside_the_trainers_reads_a_version_as_text() -> None:
    """`planner.trainers.release` parses it once; the others ask `since`, `before`, `names_fork`."""
    versions = {"trainer_version", "torch_version"}

    def unparsed(node: ast.AST) -> Iterator[ast.AST]:
        """Without the arguments of calls: what is parsed is compared as a release."""
        yield node
        inside = [node.func] if isinstance(node, ast.Call) else list(ast.iter_child_nodes(node))
        for child in inside:
            yield from unparsed(child)

    def compared(path: Path) -> list[str]:
        return [
            f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Compare)
            and not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            and versions & {n.attr for n in unparsed(node) if isinstance(n, ast.Attribute)}
        ]

    found = [line for path in sources("planner") for line in compared(path)]
    assert [line for line in found if not line.startswith("planner/trainers/")] == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    """So that a name in a traceback or a search leads to one place."""
    homes: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sources(package):
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


# ---- in a fresh process --------------------------------------------------------------------------

BLOCKED = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None
sys.meta_path.insert(0, Absent())
"""


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module", ["planner", "planner.plan.recommend", "planner.estimates", "planner.api.cli"]
)
def test_heavy_packages_stay_out_of_the_start(module: str) -> None:
    loaded = set(
        fresh(
            f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in "
            "sys.modules}))"
        ).split()
    )
    assert module.partition(".")[0] in loaded
    heavy = {"torch", "optuna", "fastapi", "sqlalchemy", "alembic", "uvicorn", "scipy", "pandas"}
    assert not loaded & (heavy | {"matplotlib", "vl_convert"})


def test_recommend_works_without_torch() -> None:
    code = BLOCKED.format(names=("torch", "torchtitan", "fastapi", "sqlalchemy")) + (
        "from datetime import UTC, datetime\n"
        "from planner.ports import Ports\n"
        "from planner.plan.recommend import recommend\n"
        "from planner.intake.jobs import read_job\n"
        "class Clock:\n    def now(self): return datetime(2026, 1, 1, tzinfo=UTC)\n"
        "class Ids:\n    def new_id(self, prefix): return prefix + '-1'\n"
        "job = read_job({'model': 'llama3-8b', 'cluster': {'gpu': 'h100-sxm-80gb', "
        "'num_gpus': 8},\n"
        "    'training': {'seq_len': 2048, 'global_batch_size': 32}, 'search': {'fix': {'tp': "
        "1, 'cp': 1}}})\n"
        "plan = recommend(job, ports=Ports(clock=Clock(), ids=Ids()))\n"
        "print(plan.ranked[0].layout.num_gpus, 'torch' in sys.modules)\n"
    )
    assert fresh(code).split() == ["8", "False"]


def test_the_blocker_blocks() -> None:
    attempt = (
        "sys.modules.pop('json', None)\ntry:\n    import json\nexcept ImportError:\n    "
        "print('absent')"
    )
    code = BLOCKED.format(names=("json",)) + attempt
    assert fresh(code).strip() == "absent"
