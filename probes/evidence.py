"""Reads what a failed probe left: error files, stacks, and the tracebacks in its log."""

import json
import re
import time
import traceback
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
        return cls(
            rank=rank,
            type=f"{module}{kind.__qualname__}",
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
        )

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

    reason: str
    exit_code: int | None
    time_limit_seconds: float
    errors: Sequence[RankError] = ()
    log: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    kernel: str = ""
    stopped: Sequence[int] = ()
    message: str = ""


def read_errors(result: Path) -> tuple[RankError, ...]:
    """Reads the error files beside a result file, earliest first; skips unreadable ones.

    Their names are RESULT.rankN.error.json.
    """
    found = []
    for path in result.parent.glob(f"{result.name}.rank*.error.json"):
        try:
            values = json.loads(read_whole(path))
            rank = int(path.name.removeprefix(f"{result.name}.rank").removesuffix(".error.json"))
            known = {
                field.name: values[field.name]
                for field in fields(RankError)
                if field.name in values
            }
            found.append(
                RankError(
                    **{
                        **known,
                        "rank": rank,
                        "time": float(values["time"]),
                        "traceback": str(values["traceback"]),
                    }
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return tuple(sorted(found, key=lambda error: error.time))


def read_stacks(result: Path) -> dict[int, str]:
    """Reads the stacks that ranks dumped on request, by rank; skips empty files."""
    found = {}
    for path in result.parent.glob(f"{result.name}.rank*.stack"):
        text = ""
        with suppress(OSError):
            text = read_whole(path)
        if text.strip():
            found[int(path.name.removeprefix(f"{result.name}.rank").removesuffix(".stack"))] = text
    return found


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
                found.append(
                    RankError(
                        rank=rank,
                        type=named["type"],
                        message=message,
                        traceback=text,
                        time=float(number),
                    )
                )
        elif rank in last and goes_on(found[last[rank]], plain):
            error = found[last[rank]]
            found[last[rank]] = replace(
                error, message=f"{error.message}\n{plain}", traceback=f"{error.traceback}\n{plain}"
            )
        else:
            last.pop(rank, None)
    return tuple(found)


def goes_on(error: RankError, line: str) -> bool:
    """Whether a line of a log belongs to the message of the error before it."""
    return NEW_LINE.match(line) is None and error.message.count("\n") < MESSAGE_LINES
