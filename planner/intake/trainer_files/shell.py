"""Reads launch scripts as text: variables, arrays, continued lines, simple conditions.

Nothing is run. Every character of a word remembers its position in the script, so that a value
can be changed where it was written. What only a running shell knows (the output of a command, a
variable that nobody sets) reads as empty; the names of such variables are listed in `unset`.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile

from planner.errors import SpecError, fault

Span = tuple[int, int]
MAX_WORDS = 10_000
MAX_SCRIPT = 200_000  # characters of a script, and of what a variable may grow to
NAME = re.compile(r"[A-Za-z_]\w*|\d")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?=)")
BRACED = re.compile(r"\{([A-Za-z_]\w*|\d+|[@*#?])(\[[@*0-9]+\])?(?:(:?[-=?+])(.*))?\}", re.DOTALL)
DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset", "env"})
PREFIXES = frozenset({"!", "time", "exec", "sudo", "nohup"})
OPENING = frozenset({"if", "elif", "else", "then", "do", "{"})
TESTS = frozenset({"[", "[[", "test"})
SOURCING = frozenset({"source", "."})
ARGUMENTS = "$@"  # name, among the files of a script, of the parameters that it is given
PASSED_OVER = TESTS | {"for", "while", "until", "done", "function", "set", "cd", "echo"}
_FLAGS = re.compile(r"(?:[ \t]+-\w+)*\s?")  # the -x and -a of `declare -x`
_SHELL, _COMMAND_OF = re.compile(r"(?:.*/)?(?:ba|da|z)?sh"), re.compile(r"-\w*c")
SBATCH = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")
}
Operators = Mapping[type, Callable[..., object]]
_OPERATORS: Operators = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg,
}  # fmt: skip
_BREAKS = " \t\n;&|()<>"
_RUN, _QUOTED_RUN = re.compile(r"[^ \t\n;&|()<>'\"\\$`]+"), re.compile(r"[^\"\\$`]+")
_REDIRECTS, _VALUE = re.compile(r"\d?[<>]"), re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_SUMS = re.compile(r"[\d+\-*/%() ]+")


def _refused(rule: str) -> SpecError:
    return fault("current", None, rule, "give a plain launch script")


@dataclass(frozen=True, slots=True)
class Chars:
    """Text that remembers where each character comes from.

    at: offset in the script, -1 for a character that is not written there.
    ref: span of the outermost `$NAME` whose value holds the character.
    outer: of a command's word, its span as written, with its quotes; None where what is written
        makes several words.
    """

    text: str = ""
    at: tuple[int, ...] = ()
    ref: tuple[Span | None, ...] = ()
    outer: Span | None = None

    def __add__(self, other: "Chars") -> "Chars":
        if len(self.text) + len(other.text) > MAX_SCRIPT:
            raise _refused("holds a variable that grows without end")
        return Chars(self.text + other.text, self.at + other.at, self.ref + other.ref)

    def cut(self, start: int, end: int) -> "Chars":
        return Chars(self.text[start:end], self.at[start:end], self.ref[start:end])

    @property
    def span(self) -> Span | None:
        """Where the text is written literally; None where it was put together from parts."""
        at = self.at
        whole = bool(at) and at[0] >= 0 and all(b == a + 1 for a, b in pairwise(at))
        return (at[0], at[-1] + 1) if whole else None

    @property
    def reference(self) -> Span | None:
        """The one `$NAME` that the whole text comes from."""
        refs = set(self.ref)
        return next(iter(refs)) if len(refs) == 1 else None

    def through(self, span: Span | None) -> "Chars":
        """Text as the value of a variable at this span.

        Characters that already have a reference keep theirs.
        """
        return Chars(self.text, self.at, tuple(span if old is None else old for old in self.ref))


@dataclass(slots=True)
class Script:
    """Commands and variables read from a script.

    commands: words of every command, in order, with variables replaced by their values.
    ends: where the last word of each command ends in the text.
    variables: their values at the end of the script.
    unset: variables that nobody sets.
    skipped: commands and values in branches that were not read.
    batch: options of #SBATCH lines.
    files: texts of files that it may read in with `source`, by the name it uses.
    sourced: files that it reads in, there or not.
    documents: here-documents that no shell reads, as they are written.
    """

    text: str
    commands: list[list[Chars]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    variables: dict[str, list[Chars]] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    batch: dict[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    sourced: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)

    def value(self, name: str) -> str | None:
        """A variable's text; None where nobody sets it."""
        found = self.variables.get(name)
        return None if found is None else " ".join(part.text for part in found)


def read_script(text: str, files: Mapping[str, str] | None = None) -> Script:
    """Reads a script, with the files that it names; #SBATCH lines set Slurm's own variables.

    Raises SpecError where the text is too long or too deeply nested for a launch script.
    """
    if len(text) > MAX_SCRIPT:
        rule = f"is longer than {MAX_SCRIPT:,} characters"
        raise fault("current", None, rule, "give the launch script alone")
    script = Script(text, batch=_batch(text), files=files or {})
    nodes = script.batch.get("nodes")
    per_node = script.batch.get("gpus-per-node") or script.batch.get("gres")
    gpus = re.search(r"(\d+)$", per_node) if per_node else None
    counted = nodes is not None and nodes.isdigit()
    known = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES") if counted else (), nodes or "")
    known |= {f"SLURM_GPUS_{of}": gpus[1] for of in ("ON_NODE", "PER_NODE")} if gpus else {}
    try:
        given = shlex.split(script.files.get(ARGUMENTS, ""))
    except ValueError as error:
        raise _refused(f"has parameters that no shell reads ({error})") from None
    known |= {str(number): value for number, value in enumerate(given, 1)}
    for name, value in known.items():
        script.variables[name] = [_made(value)]
    try:
        source = Chars(text, tuple(range(len(text))), (None,) * len(text))
        _Reader(script, source).statements()
    except RecursionError:
        raise _refused("is nested too deeply") from None
    return script


def _made(text: str, ref: Span | None = None) -> Chars:
    """Text that is not written in the script."""
    return Chars(text, (-1,) * len(text), (ref,) * len(text))


def _batch(text: str) -> dict[str, str]:
    """Options of #SBATCH lines, by their long names."""
    short = {"N": "nodes", "n": "ntasks", "G": "gpus"}
    found: dict[str, str] = {}
    for line in SBATCH.findall(text):
        for option in re.finditer(r"(?:--([\w-]+)|-([NnG]))(?:=|\s+)?([^\s#-][^\s#]*)?", line):
            found[option[1] or short[option[2]]] = option[3] or ""
    return found


@dataclass(slots=True, eq=False)
class _Branch:
    """A part of the script that may not be read.

    end: the word that ends it; empty for the one command after && or ||.
    reading: whether its current branch is read.
    taken: whether this or an earlier branch was read.
    deciding: whether its test, or a pattern of a `case`, is being read.
    unsure: whether that needs a running shell.
    subject: of a `case`.
    """

    end: str
    reading: bool
    taken: bool = True
    deciding: bool = False
    subject: str = ""
    unsure: bool = False


@dataclass(slots=True)
class _Words:
    """Words of a source: the script, or a text that one of its commands hands to a shell.

    here: where the next one begins. stop: where the text after `:-` ends, while it is read.
    """

    script: Script
    source: Chars
    here: int = 0
    stop: int | None = None

    @property
    def text(self) -> str:
        return self.source.text

    def word(self) -> list[Chars]:
        """The next word as fields.

        An unquoted variable is split at its blanks, and an array gives one field per element.
        """
        start = self.here
        fields: list[Chars] = [Chars()]
        quoted = False
        plain = True
        while self.here < len(self.text) and self.text[self.here] not in _BREAKS:
            was_quoted = self.text[self.here] in "'\""
            for number, (chars, splits) in enumerate(self.piece()):
                if number:
                    fields.append(Chars())
                parts = _split(chars) if splits else [chars]
                plain = plain and not splits and number == 0
                for index, part in enumerate(parts):
                    if index:
                        fields.append(Chars())
                    fields[-1] = fields[-1] + part
            quoted = quoted or was_quoted
        every = {'"$@"', '"$*"', '"${@}"'}  # the script's own arguments: none when it is only read
        quoted = quoted and self.text[start : self.here] not in every
        outer = self.since(start)
        kept = [chars for chars in fields if chars.text or (quoted and len(fields) == 1)]
        whole = plain or len(kept) == 1
        return [replace(chars, outer=outer if whole else None) for chars in kept]

    def quoted_word(self) -> Chars:
        """The value of an assignment, or of the text up to `stop`, which is never split."""
        value, end = Chars(), len(self.text) if self.stop is None else self.stop
        while self.here < end and (self.stop or self.text[self.here] not in _BREAKS):
            for number, (chars, _) in enumerate(self.piece()):
                value = value + (_made(" ") if number else Chars()) + chars
        return value

    def piece(self) -> list[tuple[Chars, bool]]:
        """One quoted text, variable or run of characters.

        Returns [(its value, whether blanks in it split the word)].
        """
        char = self.text[self.here]
        if char == "'":
            return [(self.until("'"), False)]
        if char == '"':
            return self.double_quoted()
        if char == "\\":
            self.here += 2
            if self.text[self.here - 1 : self.here] == "\n":
                return []
            return [(self.literal(self.here - 1, min(self.here, len(self.text))), False)]
        if char in "$`":
            return [(chars, True) for chars in self.expansion()]
        return [(self.run(_RUN), False)]

    def found(self, sign: str, start: int | None = None) -> int:
        """Where the next such sign is, from here or `start` on; the end of the text without one."""
        at = self.text.find(sign, self.here if start is None else start)
        return len(self.text) if at < 0 else at

    def literal(self, start: int, end: int) -> Chars:
        return self.source.cut(start, end)

    def since(self, start: int) -> Span | None:
        """Where the last part of the source, up to here, is written in the script."""
        return self.source.cut(start, self.here).span

    def run(self, pattern: re.Pattern[str]) -> Chars:
        """The characters here that stand for themselves, at least one."""
        start, stop = self.here, len(self.text) if self.stop is None else self.stop
        found = pattern.match(self.text, start, stop)
        self.here = max(start + 1, start if found is None else found.end())
        return self.literal(start, self.here)

    def until(self, sign: str) -> Chars:
        start, end = self.here + 1, self.found(sign, self.here + 1)
        self.here = end + 1
        return self.literal(start, end)

    def double_quoted(self) -> list[tuple[Chars, bool]]:
        self.here += 1
        found = [Chars()]
        while self.here < len(self.text) and self.text[self.here] != '"':
            char = self.text[self.here]
            if self.text.startswith("\\\n", self.here):
                self.here += 2
            elif char == "\\" and self.text[self.here + 1 : self.here + 2] in ("$", '"', "\\", "`"):
                self.here += 2
                found[-1] = found[-1] + self.literal(self.here - 1, self.here)
            elif char in "$`":
                for number, chars in enumerate(self.expansion()):
                    if number:
                        found.append(Chars())
                    found[-1] = found[-1] + chars
            else:
                found[-1] = found[-1] + self.run(_QUOTED_RUN)
        self.here += 1
        return [(chars, False) for chars in found]

    def expansion(self) -> list[Chars]:
        """The value of the `$...` at this place; several for an array."""
        start = self.here
        if self.text.startswith("$((", start):
            return [self.arithmetic(start)]
        if self.text.startswith("$(", start) or self.text[start] == "`":
            self.skip_command(start)
            return [Chars()]
        braced = self.braces(start)
        if braced is not None:
            return braced
        name = NAME.match(self.text, start + 1)
        if name is not None:
            self.here = name.end()
            return self.lookup(name[0], self.since(start))
        special = self.text[start + 1 : start + 2] in "@*#?!$-"
        self.here = start + (2 if special and start + 1 < len(self.text) else 1)
        return [Chars()] if special else [self.literal(start, start + 1)]

    def braces(self, start: int) -> list[Chars] | None:
        if not self.text.startswith("${", start):
            return None
        depth, end = 0, start + 1
        while end < len(self.text):
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            end += 1
            if not depth:
                break
        self.here = end
        found = BRACED.fullmatch(self.text[start + 1 : end])
        if found is None or found[1] in "@*#?":
            inner = NAME.match(self.text, start + 2) if found is None else None
            return [Chars()] if inner is None else self.lookup(inner[0], self.since(start))
        sign = found[3] or ""
        known = self.script.value(found[1])
        absent = known is None or (sign.startswith(":") and not known)
        if sign.endswith("+"):
            return [Chars()] if absent else [self.nested(start, found)]
        if absent and sign.endswith(("-", "=")):
            default = self.nested(start, found)
            if sign.endswith("="):
                self.script.variables[found[1]] = [default]
            return [default]
        return self.lookup(found[1], self.since(start))

    def nested(self, start: int, found: re.Match[str]) -> Chars:
        """The value of the text after `:-`."""
        after, before = self.here, self.stop
        self.here, self.stop = (start + 1 + place for place in found.span(4))
        value = self.quoted_word()
        self.here, self.stop = after, before
        return value

    def lookup(self, name: str, span: Span | None) -> list[Chars]:
        found = self.script.variables.get(name)
        if found is None:
            if name not in self.script.unset:
                self.script.unset.append(name)
            return [Chars()]
        return [part.through(span) for part in found] or [Chars()]

    def arithmetic(self, start: int) -> Chars:
        end = self.found("))", start)
        self.here = end + 2
        words = _VALUE.sub(lambda one: self.script.value(one[1]) or "?", self.text[start + 3 : end])
        number = _sum(words)
        return _made("" if number is None else str(number), self.since(start))

    def skip_command(self, start: int) -> None:
        """Skips `$(...)` or a text in backquotes."""
        if self.text[start] == "`":
            self.here = min(self.found("`", start + 1) + 1, len(self.text))
            return
        depth, self.here = 0, start + 1
        while self.here < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[self.here], 0)
            self.here += 1
            if not depth:
                return

    def array(self) -> Iterator[Chars]:
        """Words up to the closing bracket, over several lines if need be."""
        while self.here < len(self.text):
            char = self.text[self.here]
            if char == ")":
                self.here += 1
                return
            if char in " \t\n":
                self.here += 1
            elif self.text.startswith("\\\n", self.here):
                self.here += 2
            elif char == "#":
                self.here = self.found("\n")
            else:
                place = self.here
                yield from self.word()
                self.here += self.here == place


@dataclass(slots=True)
class _Reader(_Words):
    """Reads the commands of a source, as far as a shell would run them.

    last: where the last word of a command ends in the source.
    sign, joined: how the last command ended, and the one before it.
    status, sure: whether it succeeded, and whether that needs no running.
    open: whether a [[ is still open.
    given: text of the script that the last command reads.
    """

    ending: int = 0
    last: int = 0
    sign: str = ""
    joined: str = ""
    status: bool = True
    sure: bool = True
    open: bool = False
    given: Chars | None = None
    branches: list[_Branch] = field(default_factory=list)

    @property
    def reading(self) -> bool:
        return all(branch.reading for branch in self.branches)

    @property
    def unsure(self) -> bool:
        """Whether a running shell might read the skipped part."""
        return any(branch.unsure and not branch.reading for branch in self.branches)

    def statements(self) -> None:
        while self.here < len(self.text):
            guard = self.guard()
            self.joined, self.sign, self.given = self.sign, "", None
            words = list(self.command())
            if words:
                self.control(words)
            if guard is not None and not guard.end:
                self.branches.remove(guard)
            top = self.branches[-1] if self.branches else None
            if top is None or self.open:
                continue
            if top.end == "fi" and top.deciding and self.sign not in ("&&", "||", "|"):
                top.deciding, top.reading = False, self.status and not top.taken
                top.taken, top.unsure = top.taken or top.reading, top.unsure or not self.sure
            elif top.end == "esac" and self.sign == ";;":
                top.deciding, top.reading = True, False

    def guard(self) -> _Branch | None:
        """The branch of one command after && or ||, by whether the command before succeeded."""
        if self.sign not in ("&&", "||") or self.open:
            return None
        while self.text[self.here : self.here + 1].isspace():
            self.here += 1
        branch = _Branch("", self.status == (self.sign == "&&"), unsure=not self.sure)
        self.branches.append(branch)
        return branch

    # ---- control words ---------------------------------------------------------------------------

    def opening(self, word: str) -> None:
        """A word that stands before a command and decides whether it is read."""
        top = self.branches[-1] if self.branches else None
        if word == "if":
            self.branches.append(_Branch("fi", True, taken=False, deciding=True))
        elif word == "{" and top is not None and not top.end:
            top.end = "}"
        elif word == "{":
            self.branches.append(_Branch("}", True))
        elif word in ("elif", "else") and top is not None:
            top.reading, top.deciding = not top.taken, word == "elif"

    def control(self, words: list[Chars]) -> None:
        first, top = words[0].text, self.branches[-1] if self.branches else None
        if top is not None and first and first == top.end:
            self.branches.pop()
        elif top is not None and top.end == "esac" and top.deciding:
            self.pattern(top, words)
        elif first == "case":
            subject = words[1].text if len(words) > 2 else ""
            # one that only running the script tells leaves every branch unread
            self.branches.append(_Branch("esac", False, not subject, True, subject, not subject))
            self.pattern(self.branches[-1], words[3:])
        elif self.reading:
            self.status = self.succeeds(words)
            while words and words[0].text in PREFIXES:
                words = words[1:]
            if words:
                self.keep(words)
        elif self.unsure and any(word.text.startswith("--") for word in words):
            self.script.skipped.append(" ".join(word.text for word in words))

    def pattern(self, branch: _Branch, words: list[Chars]) -> None:
        """One of the patterns of a `case`, up to its bracket."""
        if any(fnmatchcase(branch.subject, word.text) for word in words) and not branch.taken:
            branch.reading = branch.taken = True
        branch.deciding = branch.deciding and self.sign != ")"

    def succeeds(self, words: list[Chars]) -> bool:
        """Whether a command succeeds: a test where it holds, others outside of an `if`."""
        texts, before = [word.text for word in words], self.status
        first = texts[1] if texts[0] == "!" and len(texts) > 1 else texts[0]
        asked = any(branch.deciding for branch in self.branches if branch.end == "fi")
        succeeded, self.sure = True, True
        if asked or self.open or first in TESTS:
            succeeded, self.sure = _tested(texts, self.open)
        if self.open:
            succeeded = before and succeeded if self.joined == "&&" else before or succeeded
        self.open = (self.open or first == "[[") and "]]" not in texts
        return succeeded

    def keep(self, words: list[Chars]) -> None:
        """Keeps a command that is read, or the commands that it hands to a shell."""
        texts, handed = [word.text for word in words], _handed(words, self.given)
        if texts[0] == "for" and len(words) > 3 and texts[2] == "in":
            self.script.variables[texts[1]] = [words[3]]
        elif texts[0] == "read" and self.given is not None:
            names = [text for text in texts[1:] if not text.startswith("-")]
            parts = _split(self.given, f"[{re.escape(self.script.value('IFS') or ' ')}]")
            values = {name: [part] for name, part in zip(names, parts, strict=False)}
            self.script.variables.update(values)
        elif texts[0] in SOURCING and len(texts) > 1 and texts[1] not in self.script.sourced:
            self.script.sourced.append(texts[1])  # a loop ends, as each is read once
            inner = _made(self.script.files.get(texts[1], "")[:MAX_SCRIPT])
            _Reader(self.script, inner, ending=self.end_of_command()).statements()
        elif handed is not None:
            before, source = handed
            first = len(self.script.commands)
            _Reader(self.script, source, ending=self.end_of_command()).statements()
            for index in range(first, len(self.script.commands)):
                self.script.commands[index] = [*before, *self.script.commands[index]]
        elif texts[0] not in PASSED_OVER | SOURCING and texts[-1] != "]]":
            self.script.documents += [] if self.given is None else [self.given.text]
            self.script.commands.append(words)
            self.script.ends.append(self.end_of_command())

    def end_of_command(self) -> int:
        """Where the last word of the command ends in the script."""
        at = self.source.at[: self.last]
        return at[-1] + 1 if at and at[-1] >= 0 else self.ending

    # ---- one command -----------------------------------------------------------------------------

    def command(self) -> Iterator[Chars]:
        """Words up to the end of the command. Assignments take effect as they are read."""
        starting = True
        while self.here < len(self.text):
            if not self.skip_blanks():
                return
            found = ASSIGNMENT.match(self.text, self.here) if starting else None
            if found is not None:
                self.assign(found)
                continue
            place = self.here
            words = self.word()
            if self.here == place:
                self.here += 1  # a sign that ends a command, or one that cannot be read
                return
            if starting and len(words) == 1 and words[0].text in DECLARING:
                self.run(_FLAGS)
                continue
            if starting and len(words) == 1 and self.text[place : self.here] in OPENING:
                self.opening(words[0].text)
                continue
            self.last, starting = self.here, False
            yield from words

    def skip_blanks(self) -> bool:
        """Goes to the next word. False where the command ends, with its end sign skipped."""
        while self.here < len(self.text):
            char = self.text[self.here]
            if char in " \t":
                self.here += 1
            elif self.text.startswith("\\\n", self.here):
                self.here += 2
            elif char == "#" and self.text[: self.here][-1:] in ("", *" \t\n;"):
                self.here = self.found("\n")
            elif _REDIRECTS.match(self.text, self.here):
                self.redirection()
            elif char in "\n;&|)(":
                twice = self.text.startswith((";;", "&&", "||"), self.here)
                self.sign = 2 * char if twice else char
                self.here += len(self.sign)
                return False
            else:
                return True
        return False

    def redirection(self) -> None:
        """Skips `2>&1` or `> log`, and remembers a here-document or `<<< text`."""
        if self.text.startswith("<<<", self.here):
            self.here += 3
            self.skip_blanks()
            self.given = self.quoted_word()
            return
        found = re.compile(r"\d?(?:<<-?\s*['\"]?(\w+)['\"]?|[<>]{1,3}&?\s*[^\s;&|]*)").match(
            self.text, self.here
        )
        assert found is not None, "it was recognised by the same signs"
        self.here = max(found.end(), self.here + 1)
        if found[1]:
            closing = re.compile(rf"^\s*{re.escape(found[1])}\s*$", re.MULTILINE)
            end = closing.search(self.text, self.here)
            close, here = (len(self.text),) * 2 if end is None else end.span()
            self.given = self.source.cut(self.found("\n") + 1, close)
            self.here = here

    def assign(self, found: re.Match[str]) -> None:
        self.here = found.end()
        name, adding = found[1], found[3] == "+="
        if self.text.startswith("(", self.here):
            self.here += 1
            value = list(self.array())
        else:
            value = [self.quoted_word()]
        if not self.reading or found[2]:
            if self.unsure and any(part.text.startswith("--") for part in value):
                self.script.skipped.append(" ".join(part.text for part in value))
            return
        before = self.script.variables.get(name, [])
        if adding and self.text[found.end() : found.end() + 1] != "(":
            head = before[0] if before else Chars()
            self.script.variables[name] = [head + value[0], *before[1:]]
        else:
            self.script.variables[name] = [*before, *value] if adding else value
        if len(self.script.variables[name]) > MAX_WORDS:
            raise _refused("holds an array that grows without end")


def _handed(words: list[Chars], given: Chars | None) -> tuple[list[Chars], Chars] | None:
    """Words before a shell, and the text that `eval`, `bash -c` or `sbatch <<EOF` gives it."""
    if words[0].text == "eval":
        blank = _made(" ")
        return [], sum((blank + word for word in words[1:]), Chars())
    program = given is not None and given.text.startswith("#!")
    for at, word in enumerate(words):
        if given is not None and (program or word.text == "sbatch"):
            return words[:at], given
        if _SHELL.fullmatch(word.text):
            rest = words[at + 1 :]
            options = [*takewhile(lambda one: one.text.startswith("-"), rest)]
            if any(_COMMAND_OF.fullmatch(one.text) for one in options):
                return words[:at], rest[len(options)] if rest[len(options) :] else Chars()
            return None if given is None else (words[:at], given)
    return None


def _tested(texts: list[str], open: bool) -> tuple[bool, bool]:
    """(whether a simple test holds, whether that is sure).

    One that needs a running shell does not hold, and is unsure.
    open: it is a part of a [[ that began before.
    """
    pattern = open or texts[:1] == ["[["]
    rest = texts[1:] if texts and texts[0] in TESTS else texts
    rest = rest[:-1] if rest and rest[-1] in ("]", "]]") else rest
    if rest and rest[0] == "!":
        held, sure = _tested([text for text in texts if text not in {"!", *TESTS}], open)
        return not held, sure
    if len(rest) == 2 and rest[0] in ("-n", "-z"):
        return bool(rest[1]) == (rest[0] == "-n"), True
    if rest in (["-z"], ["true"]):
        return True, True
    left, test, right = rest if len(rest) == 3 else ("", "", "")
    if test in COMPARISONS and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
        return COMPARISONS[test](int(left), int(right)), True
    sure = bool(left and right) and test in ("=", "==", "!=")
    if test in ("=", "=="):
        return left == right or (pattern and fnmatchcase(left, right)), sure
    return test == "!=" and left != right, sure


def _split(chars: Chars, blanks: str = r"\s+") -> list[Chars]:
    """Splits at blanks, as the shell splits an unquoted variable.

    Blanks at either end separate it from its neighbours.
    """
    parts, start = [], 0
    for found in re.finditer(blanks, chars.text):
        parts.append(chars.cut(start, found.start()))
        start = found.end()
    return [*parts, chars.cut(start, len(chars.text))]


def _sum(words: str) -> int | None:
    """The value of integer arithmetic as the shell computes it; None for anything else."""
    if not _SUMS.fullmatch(words) or "**" in words:
        return None
    # the first of three brackets that end "$(((1 + 1)))" was taken for the end
    whole = words + ")" * (words.count("(") - words.count(")"))
    try:
        value = computed(re.sub(r"\b0+(?=\d)", "", whole).strip(), _OPERATORS)
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError):
        return None
    return value if isinstance(value, int) else None


def computed(source: str | ast.expr, operators: Operators) -> object:
    """The value of literals that these operators join. Raises ValueError for anything else."""
    node = ast.parse(source, mode="eval").body if isinstance(source, str) else source
    if isinstance(node, ast.BinOp) and type(node.op) in operators:
        sides = (computed(side, operators) for side in (node.left, node.right))
        return operators[type(node.op)](*sides)
    if isinstance(node, ast.UnaryOp) and type(node.op) in operators:
        return operators[type(node.op)](computed(node.operand, operators))
    value: object = ast.literal_eval(node)
    return value
