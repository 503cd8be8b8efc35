"""What pages show is what their commands print: every page is run, in a folder of its own."""

import warnings

import pytest

from benchmarks.documents import blocks, pages, played
from tests.conftest import ROOT, needed_program

CHEAP = "docs/explanation/errors.md"
PAGES = {
    str(page.relative_to(ROOT)): found
    for page in pages()
    if (found := [one for one in blocks(page.read_text(encoding="utf-8")) if one.reason is None])
    and any(one.language in ("console", "python") for one in found)
}


@pytest.mark.parametrize(
    "name",
    [name if name == CHEAP else pytest.param(name, marks=pytest.mark.slow) for name in PAGES],
)
def test_the_page_shows_what_its_commands_print(name: str) -> None:
    if any("curl " in block.text for block in PAGES[name]):
        needed_program("curl", "curl")
    stale: list[str] = []
    with warnings.catch_warnings(action="ignore"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert played(text, stale.append) == text, stale


def test_every_kind_of_page_is_run() -> None:
    assert len(PAGES) >= 14
    assert {"README.md", "docs/tutorial.md", "docs/reference/python.md"} <= set(PAGES)
