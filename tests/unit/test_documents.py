"""Pages: what is generated is what the code says, every block is run or says why it is not, links
lead somewhere, and the site builds. `tests/e2e/test_pages_run.py` runs the blocks.
"""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.documents import (
    ANY_FENCE,
    GENERATED_BLOCK,
    Block,
    Session,
    alike,
    arguments,
    blocks,
    commands,
    cut,
    generated,
    pages,
    played,
)
from planner.intake.jobs import read_job
from planner.intake.sweeps import read_sweep
from tests.conftest import ROOT, needed, ran

NAMES = [str(page.relative_to(ROOT)) for page in pages()]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
RUN = {"console", "python"}
MARKS = {"title", "lines", "numbers", "exit", "given", "not-run"}
# Blocks that no test of a page runs, each with its reason in the page.
NOT_RUN = {
    "README.md": 3, "CONTRIBUTING.md": 2, "docs/how-to/look-at-a-study.md": 1,
    "docs/how-to/probe-on-slurm.md": 3, "docs/how-to/run-in-containers.md": 5,
    "docs/how-to/run-the-service.md": 5, "docs/how-to/survey-a-gpu.md": 3, "docs/tutorial.md": 1,
}  # fmt: skip
LINK = re.compile(r"(?<!`)\]\((?!https?:)([^)\s#]*)(?:#([\w-]+))?\)")


@pytest.mark.parametrize("name", [name for name in NAMES if "<!-- generated:" in TEXTS[name]])
def test_generated_parts_are_what_the_code_says(name: str) -> None:
    assert GENERATED_BLOCK.search(TEXTS[name]), "an open mark"
    assert generated(TEXTS[name]) == TEXTS[name], "python -m benchmarks.documents --generated"


def test_every_block_is_run_or_says_why_not() -> None:
    counted: Counter[str] = Counter()
    for name, text in TEXTS.items():
        found = blocks(text)
        assert len(found) == len(ANY_FENCE.findall(text)), f"{name}: a fence that is not read"
        assert not re.search(r"\n\n    \S", ANY_FENCE.sub("", text)), f"{name}: an indented block"
        for block in found:
            assert set(block.attributes) <= MARKS, f"{name}: {block.attributes}"
            assert block.language in {*RUN, "text"} or "title" in block.attributes, (name, block)
            assert block.language != "console" or commands(block.text), f"{name}: no command"
            assert block.reason is None or len(block.reason) > 10, f"{name}: {block.reason}"
        counted[name] = sum(block.reason is not None for block in found)
    assert +counted == NOT_RUN


FILES = [
    pytest.param(name, block.attributes["title"], block, id=f"{name}:{block.attributes['title']}")
    for name, text in TEXTS.items()
    for block in blocks(text)
    if "title" in block.attributes
]


@pytest.mark.parametrize(("page", "title", "block"), FILES)
def test_files_are_read_and_used(page: str, title: str, block: Block) -> None:
    """A job or a sweep by its reader; any other file by a command of its page."""
    asked = "".join(other.text for other in blocks(TEXTS[page]) if other.language == "console")
    assert title in asked, "no command of the page uses it"
    if block.language == "ini":  # tests/unit/test_deployment.py reads units
        return
    if title.endswith(".jsonl"):
        assert [read_job(json.loads(line)).layout for line in block.text.splitlines()]
        return
    content: Any = yaml.safe_load(block.text)
    if "trainings" in content:
        assert read_sweep(content).jobs
    elif "model" in content and title != "wrong.json":
        assert read_job({key: content[key] for key in content if key != "measured"})


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_outside_the_site_lead_somewhere(name: str) -> None:
    for path, anchor in LINK.findall((ROOT / name).read_text(encoding="utf-8")):
        target = ROOT / (path or name)
        assert target.exists(), path
        heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, anchor


def test_readme_is_one_screen() -> None:
    assert 50 <= len(TEXTS["README.md"].splitlines()) <= 85


def test_the_site_builds_and_needs_no_other_host(tmp_path: Path) -> None:
    """Strict: every link and anchor resolves, every page is in the navigation."""
    needed("mkdocs")
    needed("material")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    done = ran(*command, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert {re.sub(r"^docs/(.*)\.md$", r"\1.html", name) for name in NAMES if "/" in name} <= made
    loaded = re.compile(r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+stylesheet[^>]+https?:')
    assert [name for name in made if loaded.search((tmp_path / name).read_text())] == []
    assert "Not run by this page" in (tmp_path / "how-to" / "run-in-containers.html").read_text()


def stale(text: str) -> tuple[str, list[str]]:
    found: list[str] = []
    return played(text, found.append), found


def test_what_is_no_longer_printed_is_found_and_renewed() -> None:
    page = "```console\n$ echo one; echo two\none\nthree\n```\n"
    assert stale(page) == (page.replace("three", "two"), ["console block: $ echo one; echo two"])
    true = page.replace("three", "two")
    assert stale(true) == (true, [])


def test_a_command_that_fails_is_an_error_unless_the_page_says_so() -> None:
    for mark, command, words in (("", "exit 3", "3, not 0"), (' exit="2"', "true", "0, not 2")):
        with pytest.raises(AssertionError, match=f"left with {words}"):
            stale(f"```console{mark}\n$ {command}\n```\n")
    page = '```console exit="3" lines=":"\n$ echo what went wrong >&2; exit 3\n```\n'
    assert stale(page)[0].splitlines()[2] == "what went wrong"


def test_files_commands_and_python_share_the_page() -> None:
    page = (
        '```yaml title="a.yaml"\nn: 3\n```\n```console\n$ cat a.yaml > b.yaml\n```\n'
        '```python\nimport yaml\nwith open("b.yaml") as file:\n'
        '    print(yaml.safe_load(file)["n"] + 1)\n```\n\n```text\n4\n```\n'
    )
    assert stale(page) == (page, [])
    assert stale(page.replace("\n4\n", "\n5\n"))[0] == page


def test_a_text_that_no_python_printed_stands_as_it_is() -> None:
    page = "```text\ny = f(x)\n```\n```python\nprint(1)\n```\nand\n```text\nz\n```\n"
    assert stale(page) == (page, [])


def test_ids_stand_for_the_newest() -> None:
    with Session.opened() as session:
        session.run("echo kept as plan-1m83tnqaa-ky2jcrvm")
        assert session.run("echo show PLAN_ID") == "show plan-1m83tnqaa-ky2jcrvm\n"


def test_a_server_that_dies_is_found() -> None:
    page = (
        "```console\n$ planner-cli worker --no-such-flag\n"
        "$ while pgrep -f 'no-such-[f]lag' > /dev/null; do sleep 0.1; done\n```\n"
    )
    with pytest.raises(AssertionError, match="ended before the page did"):
        stale(page)


@pytest.mark.parametrize(("shown", "printed", "vary", "same"), [
    ("a\n...\nd\n", "a\nb\nc\nd\n", False, True),
    ("a\n...\nd\n", "a\nb\nc\n", False, False),
    ("step 29.1 ms\n", "step 1.2 s\n", True, True),
    ("step 29.1 ms\n", "step 1.2 s\n", False, False),
    ("fsdp 2 fits\n", "ddp 4 fits\n", True, False),
    ("plan-1m83tnqaa-ky2jcrvm\n", "plan-1m83aaaaa-ky2jbbbb\n", False, True),
    ("a.b\n", "acb\n", False, False),
])  # fmt: skip
def test_what_counts_as_the_same(shown: str, printed: str, vary: bool, same: bool) -> None:
    assert alike(shown, printed, numbers_vary=vary) is same


@pytest.mark.parametrize(("lines", "kept"), [
    (None, "1\n2\n3\n4\n5\n"), (":", "1\n2\n3\n4\n5\n"), (":2", "1\n2\n...\n"),
    ("2:3,-1:", "...\n2\n3\n...\n5\n"), ("5", "...\n5\n"),
])  # fmt: skip
def test_lines_are_cut_out(lines: str | None, kept: str) -> None:
    assert cut("1\n2\n3\n4\n5\n", lines) == kept


def test_planner_cli_alone_needs_no_shell() -> None:
    assert arguments("planner-cli x 'a b' \\\n --c  # d|e") == ["x", "a b", "--c"]
    for line in ("ls", "X=1 planner-cli x", "planner-cli x | head", "planner-cli x > f"):
        assert arguments(line) is None


def test_other_lines_than_shown_are_found() -> None:
    page = '```console lines=":1,3"\n$ seq 3\n1\n...\n```\n'
    assert stale(page)[0] == page.replace("...", "...\n3")


def test_rows_of_the_measured_groups_are_explained() -> None:
    rows = (ROOT / "benchmarks" / "measured" / "public.jsonl").read_text().splitlines()
    groups = {json.loads(row)["group"] for row in rows}
    assert all(f"| `{group}` |" in TEXTS["docs/reference/measured-rows.md"] for group in groups)
