"""Counts the core of docs/explanation/core.md, and the code that its job runs.

    python benchmarks/core.py

Lines of functions that are never called are left out of the last figure.
"""

import ast
import re
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "core.md"
MOST_LINES = 5_000


def core() -> list[tuple[str, Path]]:
    """(step, file) of the page, in reading order."""
    text = PAGE.read_text(encoding="utf-8")
    return [
        (step, ROOT / file) for step, file in re.findall(r"^\| (\w+) \| `(.+?)` \|", text, re.M)
    ]


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def plan_of_the_core() -> set[tuple[str, str]]:
    """(file, function) of every call while Llama 3 8B on 8 GPUs is planned."""
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "planner" in frame.f_code.co_filename:
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    import planner

    planner.recommend(
        model="llama3-8b", cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8},
        training={"seq_len": 8192, "global_batch_size": 64},
    )  # fmt: skip
    sys.setprofile(None)
    return called


def uncalled_lines(path: Path, called: set[tuple[str, str]]) -> int:
    """Lines of the functions that were never called."""

    def inside(node: ast.AST, prefix: str) -> int:
        count = 0
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.ClassDef):
                count += inside(child, f"{name}.")
            elif isinstance(child, ast.FunctionDef) and (str(path), name) not in called:
                count += (child.end_lineno or child.lineno) - child.lineno + 1
        return count

    return inside(ast.parse(path.read_text(encoding="utf-8")), "")


def main() -> None:
    called = plan_of_the_core()
    files = [
        Path(str(module.__file__))
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "planner"
    ]
    lines = sum(map(lines_of, files))
    idle = sum(uncalled_lines(path, called) for path in files)
    print(
        f"{sum(lines_of(path) for _, path in core()):>7,} lines in {len(core())} files of the core"
    )
    print(f"{lines:>7,} lines in {len(files)} files that the job loads")
    print(f"{lines - idle:>7,} of them outside functions that it never calls")
    silent = [path.name for _, path in core() if not any(str(path) == file for file, _ in called)]
    print(f"files of the core without a call: {silent or 'none'}")


if __name__ == "__main__":
    main()
