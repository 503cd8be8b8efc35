"""Weighs the code: lines, and what is long.

    python benchmarks/weight.py            a line a figure
    python benchmarks/weight.py --list     the long files, classes and functions too

Code lines are those without docstrings, comments and blank lines. `tests/unit/test_weight.py` holds
the figures as ceilings. Facts that are data (YAML, TSV, JSON in the catalogue) are a figure of
their own: lines that move there are not gone.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("planner", "api", "probes")
LONG_FILE, LONG_CLASS, LONG_FUNCTION = 400, 250, 80
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DATA, NEWLINE = (".yaml", ".tsv", ".json"), "\n"
TEXTS = (ast.Constant, ast.JoinedStr)


@dataclass
class Weight:
    """Figures of some folders; lengths by where the file, class or function begins."""

    code_lines: int = 0
    files: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    public_classes: int = 0
    import_inside: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, int]:
        """Each figure by its name; smaller is better."""
        lengths = sorted(self.functions.values())
        return {
            "lines": sum(self.files.values()),
            "code lines": self.code_lines,
            f"files over {LONG_FILE} lines": len(over(LONG_FILE, self.files)),
            f"classes over {LONG_CLASS} lines": len(over(LONG_CLASS, self.classes)),
            "p95 of function lines": round(statistics.quantiles(lengths, n=20)[-1]),
            "longest function": lengths[-1],
            "public classes": self.public_classes,
            "functions that import inside": len(self.import_inside),
        }


def over(limit: int, lengths: dict[str, int]) -> dict[str, int]:
    return {name: lines for name, lines in lengths.items() if lines > limit}


def texts(*folders: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each file."""
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def weigh(*folders: str) -> Weight:
    found = Weight()
    for name, text in texts(*folders):
        found.files[name] = text.count("\n")
        nodes = list(ast.walk(ast.parse(text)))
        found.code_lines += len(code_lines(text, nodes) - docstring_lines(nodes))
        for node in nodes:
            if isinstance(node, (ast.ClassDef, *DEFINITIONS)):
                is_class = isinstance(node, ast.ClassDef)
                where = f"{name}:{node.lineno} {node.name}"
                lengths = found.classes if is_class else found.functions
                lengths[where] = (node.end_lineno or node.lineno) - node.lineno + 1
                found.public_classes += is_class and not node.name.startswith("_")
                if not is_class and any(
                    isinstance(n, ast.Import | ast.ImportFrom) for n in inside(node)
                ):
                    found.import_inside.append(where)
    return found


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, DEFINITIONS):
            yield from inside(child)


def code_lines(text: str, nodes: list[ast.AST]) -> set[int]:
    """Lines that are neither blank nor a comment; within a text of several lines all are code."""
    lines = (line.strip() for line in text.split("\n"))
    found = {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    return found.union(*(lines_of(node) for node in nodes if isinstance(node, TEXTS)))


def lines_of(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def docstring_lines(nodes: list[ast.AST]) -> set[int]:
    bodies = [n.body for n in nodes if isinstance(n, (ast.Module, ast.ClassDef, *DEFINITIONS))]
    first = [body[0] for body in bodies if body and isinstance(body[0], ast.Expr)]
    return {line for n in first if isinstance(n.value, ast.Constant) for line in lines_of(n.value)}


def main() -> None:
    rooms, tests = weigh(*ROOMS), weigh("tests")
    print(f"{' + '.join(ROOMS)}:")
    for name, figure in rooms.figures().items():
        print(f"{figure:>9,}  {name}")
    facts = (path for path in (ROOT / "planner" / "catalog").rglob("*") if path.suffix in DATA)
    print(
        f"{sum(path.read_text(encoding='utf-8').count(NEWLINE) for path in facts):>9,}  data lines"
    )
    print(f"tests:\n{sum(tests.files.values()):>9,}  lines\n{tests.code_lines:>9,}  code lines")
    if "--list" in sys.argv:
        for limit, lengths in (
            (LONG_FILE, rooms.files), (LONG_CLASS, rooms.classes), (LONG_FUNCTION, rooms.functions)
        ):  # fmt: skip
            print(
                f"over {limit}:", *(f"  {n} {w}" for w, n in over(limit, lengths).items()), sep="\n"
            )


if __name__ == "__main__":
    main()
