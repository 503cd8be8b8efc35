"""Reads what a failed probe left: error files, stacks, and the tracebacks in its log."""

import json
import math
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from planner.probes import guardian
from planner.probes.folder import read_whole

# the prefix that --tee adds, and the one of torch's own excepthook
PREFIX = re.compile(r"(?:\[[A-Za-z_]+(?P<rank>\d+)\]:[ ]?)+")
RAISED = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)+[A-Z]\w*|[A-Za-z_][\w.]*(?:Error|Exception|Interrupt))"
    r"(?:: (?P<message>.*))?$"
)
# a line that does not belong to the message of the error before it
NEW_LINE = re.compile(
    r"\s*$|[\[=*+-]|[WEIF]\d{4} |\d{4}-\d\d|[\w.-]+:\d+:\d+ \[|\S+: \w*Warning|srun: |slurmstepd: "
)
STARTS = "Traceback (most recent call last)"
MESSAGE_LINES = 20  # of one error in a log


@dataclass(frozen=True, slots=True)
class RankError:
    """The error that one rank raised.

    time: seconds since the epoch.
    kind: the failure class, if the program that raised it names one.
    """

    rank: int | None
    type: str
    message: str
    traceback: str
    time: float
    kind: str | None = None

    @property
    def said(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "RankError":
        """The error that this process raises now."""
        kind = type(error)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        text = "".join(traceback.format_exception(error))
        return cls(rank, f"{module}{kind.__qualname__}", str(error), text, time.time())

    def write(self, result: Path) -> None:
        """Writes the error file of its rank beside a result file."""
        guardian.write_json(error_path(result, self.rank), asdict(self))


def error_path(result: Path, rank: int | None) -> Path:
    return result.with_name(f"{result.name}.rank{rank}.error.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything left behind by a probe that gave no numbers.

    reason: how it ended: exit, time-limit, asked, runner-gone, one of `TAKEN_AWAY`, or
        guardian-gone if the guardian wrote no reason.
    exit_code: the launcher's; negative for a signal.
    errors: error files of ranks.
    log: output of the launcher and of all ranks.
    stacks: the stack of each rank, by rank.
    kernel: the lines that the kernel logged during the probe.
    stopped: ranks that a signal had stopped at the end.
    message: what the pool says of the end.
    """

    reason: str = "exit"
    exit_code: int | None = None
    time_limit_seconds: float = math.inf
    errors: Sequence[RankError] = ()
    log: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    kernel: str = ""
    stopped: Sequence[int] = ()
    message: str = ""


def read_errors(result: Path) -> tuple[RankError, ...]:
    """Reads the error files RESULT.rankN.error.json, earliest first; skips unreadable ones."""
    found = []
    for rank, path in _of_ranks(result, ".error.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads(read_whole(path))
            known = {one.name: values[one.name] for one in fields(RankError) if one.name in values}
            known |= {"time": float(values["time"]), "traceback": str(values["traceback"])}
            found.append(RankError(**{**known, "rank": rank}))
    return tuple(sorted(found, key=lambda error: error.time))


def read_stacks(result: Path) -> dict[int, str]:
    """Reads the stacks that ranks dumped on request, by rank; skips empty files."""
    found = {}
    for rank, path in _of_ranks(result, ".stack"):
        with suppress(OSError):
            found[rank] = read_whole(path)
    return {rank: text for rank, text in found.items() if text.strip()}


def _of_ranks(result: Path, ending: str) -> Iterator[tuple[int, Path]]:
    """The files beside a result that each rank has one of, RESULT.rankN and this ending."""
    before = f"{result.name}.rank"
    for path in result.parent.glob(f"{before}*{ending}"):
        rank = path.name.removeprefix(before).removesuffix(ending)
        if rank.isdigit():
            yield int(rank), path


def raised(log: str) -> tuple[RankError, ...]:
    """Finds the errors in the tracebacks of a log, in order, with the lines that follow each.

    Used for programs that write no error files. Ranks that wrote at the same time are separated by
    their prefix.
    """
    found: list[RankError] = []
    begun: dict[int | None, list[str]] = {}
    last: dict[int | None, int] = {}  # the error, by rank, that a line may go on with
    for number, line in enumerate(log.splitlines()):
        prefix = PREFIX.match(line)
        rank = int(prefix["rank"]) if prefix else None
        plain = line[prefix.end() :] if prefix else line
        if plain.startswith(STARTS):
            begun[rank] = []
        if rank in begun:
            begun[rank].append(plain)
            named = RAISED.match(plain)
            if named is not None:
                last[rank] = len(found)
                text, message = "\n".join(begun.pop(rank)), named["message"] or ""
                found.append(RankError(rank, named["type"], message, text, float(number)))
        elif rank in last and goes_on(error := found[last[rank]], plain):
            longer = f"{error.message}\n{plain}", f"{error.traceback}\n{plain}"
            found[last[rank]] = replace(error, message=longer[0], traceback=longer[1])
        else:
            last.pop(rank, None)
    return tuple(found)


def goes_on(error: RankError, line: str) -> bool:
    """Whether a line of a log belongs to the message of the error before it."""
    return NEW_LINE.match(line) is None and error.message.count("\n") < MESSAGE_LINES
