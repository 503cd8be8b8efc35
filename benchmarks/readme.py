"""Keeps README.md true: the outputs it shows, and its table of where each kind of change goes.

    python benchmarks/readme.py [--check] [--table]

Outputs: a fenced `console` block whose first line is `$ command` holds what the command prints. Ids
and durations differ between runs and are masked when comparing. The table is that of
docs/extension-points.yaml; --table rewrites (or checks) it alone.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import yaml

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(
    r"```console\n\$ (?P<command>[^\n]+(?:\\\n[^\n]+)*)\n(?P<output>.*?)```", re.DOTALL
)
POINTS = pathlib.Path(__file__).parents[1] / "docs" / "extension-points.yaml"
TABLE = re.compile(r"(?<=<!-- docs/extension-points.yaml -->\n).*?(?=<!-- end -->)", re.DOTALL)
PLACE = re.compile(r"(?<![`\w/])(?:planner|probes|api|benchmarks|tests)/[\w./:]*[\w/]")
MASKS = (
    (re.compile(r"plan-[a-z0-9]+-[a-z0-9]+"), "plan-ID"),
    (re.compile(r"in [0-9.]+ m?s\."), "in TIME."),
)


def run(command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PLANNER_DATABASE_URL": f"sqlite:///{folder}/planner.db",
            "COLUMNS": "110",
        }
        words = shlex.split(command.replace("\\\n", " "))
        binary = pathlib.Path(sys.executable).with_name(words[0])
        done = subprocess.run(
            [str(binary), *words[1:]], capture_output=True, text=True, env=environment, check=True
        )
    return done.stdout.strip("\n") + "\n"


def extension_table() -> str:
    """README's rows: what to add, its file, its line, the test that fails until it is right."""
    rows = ["| to add | file | and one line | held by |", "|---|---|---|---|"]
    for point in yaml.safe_load(POINTS.read_text(encoding="utf-8")):
        held = "; ".join(point[name] for name in ("test", "also") if name in point)
        cells = (point["add"], point["file"], point.get("line", "-"), held)
        rows.append("| " + " | ".join(PLACE.sub(r"`\g<0>`", cell) for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def masked(text: str) -> str:
    """Text with ids and durations masked and line breaks folded.

    A masked id may have moved the line breaks.
    """
    for pattern, name in MASKS:
        text = pattern.sub(name, text)
    return " ".join(text.split())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; leave with 1 when an output differs"
    )
    parser.add_argument("--table", action="store_true", help="the table alone, no outputs")
    arguments = parser.parse_args()
    check = arguments.check
    text = README.read_text(encoding="utf-8")
    renewed = TABLE.sub(lambda _: extension_table(), text)
    stale = [] if renewed == text else ["the table of extension points"]

    def fresh(match: re.Match[str]) -> str:
        output = run(match["command"])
        if masked(output) != masked(match["output"]):
            stale.append(match["command"])
            return f"```console\n$ {match['command']}\n{output}```"
        return match[0]

    if not arguments.table:
        renewed = BLOCK.sub(fresh, renewed)
    for command in stale:
        print(f"{'differs' if check else 'renewed'}: {command}")
    if not check:
        README.write_text(renewed, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
