"""Keeps the outputs shown in README.md true: runs each command block's command and rewrites (or
checks) what stands below it.

    python benchmarks/readme.py [--check]

A block is a fenced `console` block whose first line is `$ command`. Ids and durations differ
between runs and are masked when comparing.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(
    r"```console\n\$ (?P<command>[^\n]+(?:\\\n[^\n]+)*)\n(?P<output>.*?)```", re.DOTALL
)
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


def masked(text: str) -> str:
    """Text with ids and durations masked and line breaks folded, because a masked id may have moved
    them.
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
    check = parser.parse_args().check
    text = README.read_text()
    stale = []

    def fresh(match: re.Match[str]) -> str:
        output = run(match["command"])
        if masked(output) != masked(match["output"]):
            stale.append(match["command"])
            return f"```console\n$ {match['command']}\n{output}```"
        return match[0]

    renewed = BLOCK.sub(fresh, text)
    for command in stale:
        print(f"{'differs' if check else 'renewed'}: {command}")
    if not check:
        README.write_text(renewed)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
