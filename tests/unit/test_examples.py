"""examples/ holds what README's commands name, and what the pages that run them show."""

import re
import shlex

import pytest
from typer.main import get_command

from benchmarks.documents import blocks, commands
from planner.api.cli import root
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSOLES = [one for one in blocks(README) if one.language == "console"]
LINES = [one.line for block in CONSOLES for one in commands(block.text)]
PAGES = {
    "cluster.yaml": "docs/how-to/describe-your-cluster.md",
    "job.yaml": "docs/how-to/measure-to-decide.md",
    "pretrain_llama3_70b.sh": "docs/how-to/start-from-your-own-config.md",
    "sweep.yaml": "docs/tutorial.md", "train.toml": "docs/how-to/start-from-your-own-config.md",
}  # fmt: skip


def test_every_example_is_named_by_readme_and_run_by_a_page() -> None:
    files = {path.name for path in (ROOT / "examples").iterdir()}
    assert files == set(PAGES) == set(re.findall(r"examples/(\S+)", "\n".join(LINES)))


@pytest.mark.parametrize(("name", "page"), PAGES.items())
def test_a_page_runs_the_same_file(name: str, page: str) -> None:
    found = blocks((ROOT / page).read_text(encoding="utf-8"))
    ran = "".join(block.text for block in found if block.language == "console" if not block.reason)
    assert re.search(rf"^\$ planner-cli .*{re.escape(name)}", ran, re.MULTILINE)
    given = f"{name}=examples/{name}"
    if any(given in block.attributes.get("given", "") for block in found):
        return
    example = (ROOT / "examples" / name).read_text(encoding="utf-8")
    shown = [block.text for block in found if block.attributes.get("title") == name]
    assert shown == [example.partition("\n")[2]], "below a line that says what it is"


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("planner-cli")])
def test_readme_gives_flags_that_exist(line: str) -> None:
    command = get_command(root.tree())
    words = shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_parser(command.context_class(command)).parse_args(words)
