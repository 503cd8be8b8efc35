"""Which package may import which, read off the source with `ast`; and what must not be loaded
where.
"""

import ast
import graphlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT, ran
from tests.unit.test_packaging import declared
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
    "planner/samplers.py": {"optuna"},
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
READERS = (
    "planner/catalog/files.py", "planner/intake/machines.py", "planner/intake/models.py",
    "planner/intake/trainer_files/files.py",
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
# Distributions of names that are imported: spelt otherwise, or brought along by another.
DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client", "pydantic_settings": "pydantic-settings",
    "yaml": "pyyaml", "pythonjsonlogger": "python-json-logger", "starlette": "fastapi",
    "anyio": "fastapi", "PIL": "matplotlib", "h11": "uvicorn",
}  # fmt: skip
# optional, each absence a line of its own; see the probe program
WHERE_A_GPU_IS = {"megatron", "torchao", "pynvml", "torchtitan", "transformers", "triton"}
MISSING_ON_PURPOSE = "a_package_that_nobody_has"


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
            elif isinstance(node, ast.ImportFrom) and (node.level == 0 or package in PACKAGES):
                assert node.level == 0, f"{name}:{node.lineno} is relative; write the whole path"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [Import(path=name, line=node.lineno, module=module) for module in names]
    return tuple(found)


def outside(package: str) -> Iterator[str]:
    """Imports of neither ours nor the standard library that the file's folder may not have."""
    for i in imports(package):
        folder = max((one for one in THIRD_PARTY if i.path.startswith(one)), key=len)
        if i.top not in {*sys.stdlib_module_names, "planner", *THIRD_PARTY[folder]}:
            yield str(i)


def every_source() -> Iterator[Path]:
    return (path for package in PACKAGES for path in sources(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_reach_inward_and_neither_tests_nor_benchmarks(package: str) -> None:
    assert len(imports(package)) > 300
    wrong = [str(i) for i in imports(package) if i.room and i.room not in ARROWS[package]]
    others = {"tests", "benchmarks"} | ({"alembic"} if package != "api" else set())
    assert wrong + [str(i) for i in imports(package) if i.top in others] == []


def test_a_module_has_one_name() -> None:
    """In a checkout `api` can be imported beside `planner.api`, with classes of its own."""
    other = re.compile(r"^\s*(?:from|import) (?:api|probes)\b", re.MULTILINE)
    files = [path for top in (*PACKAGES, "alembic", "benchmarks", "tests") for path in sources(top)]
    assert [str(path) for path in files if other.search(path.read_text(encoding="utf-8"))] == []


def test_planner_imports_nothing_but_what_each_folder_may() -> None:
    assert list(outside("planner")) == []


@pytest.mark.parametrize(("folders", "extras"), [
    (("planner", "api"), ("client", "postgres", "server")),
    (("probes",), ("probe",)),
    (("tests", "benchmarks"), ("dev", "postgres", "probe", "server")),
])  # fmt: skip
def test_every_import_is_declared(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    """Also of files that a script or a test beside them imports by name."""
    beside = {path.stem for folder in ("tests", "benchmarks") for path in sources(folder)}
    ours = {"planner", "tests", "benchmarks", "alembic", *beside, *sys.stdlib_module_names}
    others = {*ours, *WHERE_A_GPU_IS, MISSING_ON_PURPOSE}
    found = [i for folder in folders for i in imports(folder) if i.top not in others]
    assert len(found) > 50
    names = ((i, DISTRIBUTIONS.get(i.top, i.top.lower())) for i in found)
    assert [str(i) for i, name in names if name not in declared(*extras)] == []


def test_planner_has_no_clock_environment_network_or_processes() -> None:
    assert [str(i) for i in imports("planner") if i.top in IMPURE] == []


def impure_calls(path: Path) -> Iterator[str]:
    where = path.relative_to(ROOT)
    for node in ast.walk(tree(path)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in IMPURE_CALLS:
            yield f"{where}:{called.lineno} calls {called.id}"
        if (
            isinstance(called, ast.Attribute)
            and called.attr in IMPURE_METHODS
            and not ast.unparse(called).endswith("clock.now")  # a port
        ):
            yield f"{where}:{called.lineno} calls .{called.attr}"


def test_planner_prints_nothing_and_files_are_read_where_a_person_names_one() -> None:
    """The catalogue's own files and a user's in its format; a user's config.json."""
    calls = [call for path in sources("planner") for call in impure_calls(path)]
    reads = [
        call
        for call in calls
        if call.startswith(READERS) and call.endswith((".read_text", ".read_bytes"))
    ]
    others = [call for call in calls if call not in reads]
    assert len(reads) >= len(READERS)
    assert [one for one in others if not (one.startswith(LIBRARY) and one.endswith(".now"))] == []


def test_torch_is_imported_only_by_what_runs_inside_a_probe() -> None:
    heavy = ("torch", "torchtitan", "torchao", "triton")
    assert [str(i) for i in imports("planner") + imports("api") if i.top in heavy] == []


def test_optuna_is_imported_where_it_is_used() -> None:
    allowed = (
        "planner/study/", "planner/samplers.py", "planner/search/left_out.py",
        "api/optuna_storage.py",
    )  # fmt: skip
    users = {i.path for package in PACKAGES for i in imports(package) if i.top == "optuna"}
    assert {path for path in users if not path.startswith(allowed)} == set()


def test_inside_the_planner_arrows_point_inward() -> None:
    places = {name: index for index, name in enumerate(ROOMS)}
    pairs = {(i.path, i.part) for i in imports("planner") if i.room == "planner"}
    rooms = {path: path.split("/")[1].removesuffix(".py") for path, _ in pairs}
    homeless = {*rooms.values(), *(part for _, part in pairs)} - places.keys()
    assert homeless == set(), "they stand in no room; add them to ROOMS"
    outward = {(path, part) for path, part in pairs if places[part] > places[rooms[path]]}
    assert outward == set(OUTWARD)


def test_no_file_imports_itself_through_others() -> None:
    """Imports inside functions and for types count too: a circle is a circle to whoever reads."""
    graph: dict[str, set[str]] = {module_of(path): set() for path in every_source()}
    for i in (i for package in PACKAGES for i in imports(package)):
        name = module_of(ROOT / i.path)
        target = i.module if i.module in graph else i.module.rpartition(".")[0]
        graph[name] |= {target} & graph.keys() - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def compared_with(path: Path, names: frozenset[str]) -> Iterator[str]:
    """Comparisons with one of these texts, but for a pipeline's `runtime`, which is no trainer."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Compare) and getattr(node.left, "id", None) != "runtime":
            for side in (node.left, *node.comparators):
                several = isinstance(side, ast.Tuple | ast.Set | ast.List)
                parts = side.elts if several else [side]
                if any(isinstance(part, ast.Constant) and part.value in names for part in parts):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"


# What `measurements import` reads: a log of TorchTitan's is a format, whoever's job it is.
FORMATS_OF_FILES = ("api/input/measurements.py",)


def test_no_code_outside_the_trainers_compares_a_trainers_name() -> None:
    """What differs between trainers is a field of theirs (`planner.trainers.base`)."""
    names = frozenset({"torchtitan", "megatron", "megatron-deepspeed", "internevo"})
    found = [text for path in every_source() for text in compared_with(path, names)]
    assert any(text.startswith(FORMATS_OF_FILES) for text in found), "the reader is blind"
    own = ("planner/trainers/", "probes/trainers/", *FORMATS_OF_FILES)
    assert [text for text in found if not text.startswith(own)] == []


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
    names = [
        node.name
        for path in every_source()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_heavy_packages_stay_out_of_the_start() -> None:
    starts = "planner.plan.recommend, planner.estimates, planner.api.cli"
    program = f"import sys, planner.calibration.drift.replay, {starts}; print(*sys.modules)"
    loaded = set(ran(sys.executable, "-c", program, check=True).stdout.split())
    assert "planner" in loaded
    heavy = {"torch", "optuna", "fastapi", "sqlalchemy", "alembic", "uvicorn", "scipy", "pandas"}
    assert not loaded & (heavy | {"matplotlib", "vl_convert"})
