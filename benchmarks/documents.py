"""Keeps README.md, CONTRIBUTING.md and docs/ true: what they show is run, lists are written.

    python -m benchmarks.documents [--check] [--generated] [PAGE ...]

Renews the pages (or, with --check, changes nothing and leaves with 1 when one is stale).

- Between `<!-- generated: NAME -->` and `<!-- end -->` stands what `benchmarks.reference` writes.
  --generated renews nothing else, which takes seconds.
- A fence `yaml title="job.yaml"` (or any other language with a title) is a file of that name.
- A fence `console` holds commands after `$ `, each with what it prints. The commands of a page
  share a folder that starts empty and a database that starts empty. A command without output may
  print anything. `...` on a line of its own stands for any lines, `lines=":3,9,-2:"` cuts these
  lines out of what is printed, `numbers="vary"` compares no number, `exit="2"` is the code that a
  command ends with.
- A fence `python` is run, after those before it; a fence `text` right behind it is what it prints.
- `not-run="reason"` marks a block that cannot run here.
- `given="train.toml=examples/train.toml"` copies a file of the repository first; examples/ is there
  under its own name.

PLAN_ID and SWEEP_ID in a command are the newest id that the page printed. Ids, durations and dates
are masked when comparing, and line breaks folded. `planner-cli serve` and `worker` run until the
page ends, unless they have an exit code.
"""

import argparse
import contextlib
import io
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from benchmarks.reference import GENERATED
from tests import zygote

ROOT = pathlib.Path(__file__).parents[1]
FENCE = re.compile(r"^```(?P<language>\w+)(?P<attributes>[^\n`]*)\n(?P<text>.*?)^```$", re.M | re.S)
ANY_FENCE = re.compile(r"^ *(?:```|~~~)(?P<info>[^\n]*)\n.*?^ *(?:```|~~~)$", re.M | re.S)
ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
GENERATED_BLOCK = re.compile(
    r"(?<=<!-- generated: )(?P<name>[\w-]+) -->\n(?P<text>.*?)(?=<!-- end -->)", re.S
)
ANYTHING = "..."
ID = re.compile(r"(?<![\w-])(?P<kind>plan|sweep|probe|measurement)-[a-z0-9]{6,}-[a-z0-9]{6,}")
MASKS = (
    (ID, r"\g<kind>-ID"),
    (re.compile(r'"request_id": ?"[0-9a-f]{32}"'), '"request_id": "ID"'),
    (re.compile(r"\bin [0-9.]+ m?s\."), "in TIME."),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.\d]*Z)?"), "DATE"),
)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
UNIT = re.compile(r"N (?:[KMGT]i?B|k?B|m?s|us|h|d)\b")
SERVES = re.compile(r"\bplanner-cli (?:serve|worker)\b(?!.*--(?:once|help))")
SHELL = re.compile(r"[][|&;<>$`*?~{}!\n]")  # what a shell would do more with
PORT = "8000"  # what pages write; sessions choose a free one


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fence of a page; `start` and `end` are its place in the page's text."""

    language: str
    attributes: dict[str, str]
    text: str
    start: int
    end: int

    @property
    def reason(self) -> str | None:
        """Why it cannot run here."""
        return self.attributes.get("not-run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A line after `$ ` and what the page shows below it."""

    line: str
    shown: str


def pages() -> list[pathlib.Path]:
    """Every page that is kept true; the decisions are history and stand as they were written."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts),
    ]


def blocks(text: str) -> list[Block]:
    return [
        Block(
            language=found["language"],
            attributes=dict(ATTRIBUTE.findall(found["attributes"])),
            text=found["text"],
            start=found.start(),
            end=found.end(),
        )
        for found in FENCE.finditer(text)
    ]


def commands(text: str) -> list[Command]:
    """The commands of a console block. A line that ends in a backslash goes on in the next."""
    found: list[Command] = []
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        line, _, shown = re.sub(r"\\\n", "\\\0", part).partition("\n")
        found.append(
            Command(line=line.replace("\\\0", "\\\n"), shown=shown.replace("\\\0", "\\\n"))
        )
    return found


def arguments(line: str) -> list[str] | None:
    """What planner-cli is given in a line that is that command alone; None for any other."""
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    alone = words[:1] == ["planner-cli"] and not any(map(SHELL.search, words))
    return words[1:] if alone else None


@dataclass
class Session:
    """What one page does: a folder, a database, the names its Python blocks share."""

    folder: pathlib.Path
    state: pathlib.Path
    names: dict[str, Any] = field(default_factory=dict)
    newest: dict[str, str] = field(default_factory=dict)
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    port: int = 0

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        with tempfile.TemporaryDirectory(prefix="page-") as name:
            top = pathlib.Path(name)
            session = cls(folder=top / "work", state=top / "state")
            session.folder.mkdir()
            session.state.mkdir()
            (session.folder / "examples").symlink_to(ROOT / "examples")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                session.port = probe.getsockname()[1]
            try:
                with contextlib.chdir(session.folder):
                    yield session
            finally:
                gone = []
                for process in session.running:
                    ended = process.poll() is not None
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
                    # one that was just ending as it was asked has a code of its own
                    if process.wait(timeout=60) > 0 or ended:
                        gone.append(process.args)
                assert not gone, f"{gone} ended before the page did"

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("PLANNER_") and key not in ("NO_COLOR", "FORCE_COLOR")
        }
        return {
            **kept,
            "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "110",
            "PLANNER_DATABASE_URL": f"sqlite:///{self.state}/planner.db",
            "PLANNER_PROBE_FOLDER": str(self.state / "probes"),
            "PLANNER_LEASE_FOLDER": str(self.state / "leases"),
            "PLANNER_PORT": str(self.port),
        }

    def save(self, block: Block) -> None:
        path = self.folder / block.attributes["title"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")

    def run(self, line: str, code: int = 0) -> str:
        """What a command prints: stdout, and stderr where it ends with another code than 0.

        Raises AssertionError for another exit code than the page says.
        """
        for kind, found in self.newest.items():
            line = line.replace(f"{kind.upper()}_ID", found)
        line = line.replace(f":{PORT}", f":{self.port}")
        if SERVES.search(line) and not code:
            self._serve(line)
            return ""
        done = self._done(line)
        assert done.returncode == code, (
            f"$ {line}\nleft with {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
        )
        printed = done.stdout + (done.stderr if code else "")
        for found in ID.finditer(printed):
            self.newest[found["kind"]] = found[0]
        return printed.replace(f":{self.port}", f":{PORT}").strip("\n") + "\n"

    def _done(self, line: str) -> "subprocess.CompletedProcess[str]":
        """planner-cli alone is a fork; a line that a shell reads starts as a user's does."""
        words, environment = arguments(line), self.environment
        if words is not None:
            return zygote.run(words, input="", env=environment, timeout=600)
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=600,
        )

    def _serve(self, line: str) -> None:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line.strip().removesuffix('&')}"],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.running.append(process)
        for _ in range(600 if " serve" in line else 0):  # a minute at most
            assert process.poll() is None, f"$ {line}\nleft with {process.returncode}"
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)

    def execute(self, block: Block) -> str:
        """What a Python block prints."""
        printed = io.StringIO()
        text = block.text.replace(f":{PORT}", f":{self.port}")
        for kind, found in self.newest.items():
            text = text.replace(f"{kind.upper()}_ID", found)
        with contextlib.redirect_stdout(printed):
            exec(compile(text, "page", "exec"), self.names)
        return printed.getvalue()


def cut(printed: str, lines: str | None) -> str:
    """The lines that `lines=":3,9,-2:"` names, with `...` for what is left out."""
    if lines is None:
        return printed
    split = printed.splitlines()
    kept: list[str] = []
    last = 0
    for part in lines.split(","):
        first, colon, until = part.partition(":")
        start = int(first or 1)
        stop = int(until) if until else len(split) if colon else start
        start, stop = (place + (len(split) + 1 if place < 0 else 0) for place in (start, stop))
        kept += [ANYTHING] if start > last + 1 else []
        kept += split[start - 1 : stop]
        last = stop
    kept += [ANYTHING] if last < len(split) else []
    return "\n".join(kept) + "\n"


def alike(shown: str, printed: str, *, numbers_vary: bool, cut_out: bool = False) -> bool:
    """Whether a page's output is what was printed, but for what differs between runs.

    cut_out: `printed` is cut already, so that `...` in both is the same place.
    """
    pieces = [shown] if cut_out else re.split(rf"^ *{re.escape(ANYTHING)}$", shown, flags=re.M)
    pattern = ".*".join(re.escape(_masked(piece, numbers_vary)) for piece in pieces)
    return re.fullmatch(pattern, _masked(printed, numbers_vary), re.S) is not None


def _masked(text: str, numbers_vary: bool) -> str:
    for pattern, name in MASKS:
        text = pattern.sub(name, text)
    if numbers_vary:
        text = UNIT.sub("N", NUMBER.sub("N", text))
        text = re.sub(r"─+", "─", text)
    return " ".join(text.split())  # a masked id may have moved the line breaks


def play(text: str, session: Session) -> Iterator[tuple[Block, str]]:
    """Runs a page. Yields every block that shows what is not so, with what it should show."""
    python_end, python_printed = 0, ""  # of the last Python block
    for block in blocks(text):
        if block.reason is not None:
            continue
        for given in block.attributes.get("given", "").split():
            name, _, source = given.partition("=")
            shutil.copyfile(ROOT / source, session.folder / name)
        if "title" in block.attributes:
            session.save(block)
        elif block.language == "console":
            renewed = "".join(_ran(block, session))
            if renewed != block.text:
                yield block, renewed
        elif block.language == "python":
            python_end, python_printed = block.end, session.execute(block)
        elif block.language == "text" and python_end and not text[python_end : block.start].strip():
            vary = block.attributes.get("numbers") == "vary"
            if not alike(block.text, python_printed, numbers_vary=vary):
                yield block, python_printed


def _ran(block: Block, session: Session) -> Iterator[str]:
    """The text of a console block, command by command, renewed where it differs."""
    attributes = block.attributes
    code = int(attributes.get("exit", 0))
    for command in commands(block.text):
        printed = cut(session.run(command.line, code), attributes.get("lines"))
        vary = attributes.get("numbers") == "vary"
        free = not command.shown.strip() and "lines" not in attributes
        true = free or alike(
            command.shown, printed, numbers_vary=vary, cut_out="lines" in attributes
        )
        yield f"$ {command.line}\n{command.shown if true else printed}"


def generated(text: str) -> str:
    """A page with its generated parts written anew."""
    return GENERATED_BLOCK.sub(
        lambda found: f"{found['name']} -->\n{GENERATED[found['name']]()}", text
    )


def played(text: str, stale: Callable[[str], None]) -> str:
    """A page with what its commands print today."""
    with Session.opened() as session:
        changes = list(play(text, session))
    for block, renewed in reversed(changes):
        stale(f"{block.language} block: {block.text.splitlines()[0]}")
        at = text.index(block.text, block.start)
        text = text[:at] + renewed + text[at + len(block.text) :]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=pathlib.Path, metavar="PAGE")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; 1 when a page is stale"
    )
    parser.add_argument("--generated", action="store_true", help="run no block")
    arguments = parser.parse_args()
    stale: list[str] = []
    for page in [path.resolve() for path in arguments.pages] or pages():
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(ROOT)
        renewed = generated(text)
        if renewed != text:
            stale.append(f"{name}: generated parts")
        if not arguments.generated:
            renewed = played(renewed, lambda what, name=name: stale.append(f"{name}: {what}"))
        if not arguments.check and renewed != text:
            page.write_text(renewed, encoding="utf-8")
    for line in stale:
        print(f"{'differs' if arguments.check else 'renewed'}: {line}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
