"""Words of docstrings and names that say too little: those left only become fewer."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.conftest import ROOT

BANNED = (
    "place", "kept", "held", "holder", "alone", "told", "tell", "said", "say", "rung", "floor",
    "floors", "doubt", "unfit", "moment", "site", "bare", "apart", "imitate",
)  # fmt: skip
BEGINNING = re.compile(r"(That|Those|The same|Of|What|Who|It|Its|See)\b")
CLUMSY = re.compile(r"\b(those of|that of|for who|to who)\b", re.IGNORECASE)
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Lower a ceiling in the commit that mends some; nothing raises one.
CEILINGS = {
    "alone": 101, "apart": 36, "bare": 7, "docstrings that begin with a pronoun": 0,
    "doubt": 18, "floor": 20, "floors": 13, "held": 86, "holder": 9, "kept": 123, "moment": 11,
    "place": 237, "rung": 18, "said": 55, "say": 38, "site": 7, "tell": 18,
    "those of, that of, for who, to who": 106, "told": 51, "unfit": 10, "what": 775,
}  # fmt: skip


def texts_and_names() -> Iterator[tuple[str, list[str]]]:
    """(docstring or "", words of the names) of each definition."""
    for folder in ("planner", "api", "probes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, DOCUMENTED):
                    name = getattr(node, "name", path.stem)
                    yield ast.get_docstring(node) or "", name.lower().split("_")
                elif isinstance(node, ast.arg):
                    yield "", node.arg.split("_")
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield "", node.id.lower().split("_")


def found() -> dict[str, int]:
    counts: Counter[str] = Counter()
    for text, names in texts_and_names():
        counts["docstrings that begin with a pronoun"] += bool(BEGINNING.match(text))
        counts["those of, that of, for who, to who"] += len(CLUMSY.findall(text))
        counts["what"] += len(WHAT.findall(text))
        words = re.findall(r"[a-z]+", text.lower())
        counts.update(word for word in (*words, *names) if word in BANNED)
    return dict(counts)


def test_words_to_avoid_become_fewer() -> None:
    assert {word: n for word, n in found().items() if n > CEILINGS.get(word, 0)} == {}
