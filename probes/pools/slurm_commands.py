"""Slurm's commands: sbatch, scontrol, squeue, scancel and, where there is accounting, sacct."""

import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from planner.errors import ProbeError
from planner.probes.packages import told_by

COMMANDS = ("sbatch", "srun", "scancel", "squeue", "scontrol")
COMMAND_SECONDS = 60.0
# what the commands say while the controller is away (src/common/slurm_errno.c, all releases)
RUNS_JOBS = "alloc,comp,idle,mix"  # states of nodes that may take a job, now or later
NO_CONTROLLER = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were "
    r"transmitted|slurm_receive_msg|backup controller"
)
UNKNOWN_JOB = re.compile(r"Invalid job id")
# of srun and sbatch; what follows the last colon of a rejected submission is the reason
REFUSED = re.compile(r"^(?:srun|sbatch): (?:error|fatal): (?P<message>.*)$", re.MULTILINE)
FIELD = re.compile(r"(?:^|\s)(?P<name>\w+)=(?P<value>\S*)")
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset(
    {"CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "SIGNALING", "STAGE_OUT"}
)


class NoControllerError(ProbeError):
    """Slurm's controller does not answer for now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job as Slurm reports it.

    state: Slurm's word, such as PENDING or NODE_FAIL.
    reason: Slurm's word for why it waits, or ended.
    restarts: how often Slurm has put it back into the queue.
    is_preempted: it has been told to make room, and may still run for a while.
    ended: seconds since the epoch; None while it has not.
    seconds: how long it has run, or ran.
    """

    state: str
    reason: str = ""
    restarts: int = 0
    nodes: str = ""
    is_preempted: bool = False
    ended: float | None = None
    seconds: float = 0.0

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more and will not run again."""
        return self.state not in WAITING | RUNNING


class Slurm:
    """The cluster that this machine submits to."""

    def check(self) -> None:
        """Raises ProbeError if a command is missing."""
        missing = [name for name in COMMANDS if shutil.which(name) is None]
        if missing:
            raise ProbeError(
                f"Slurm's {missing[0]} is not installed here; use --pool local, or a machine that "
                "submits to the cluster"
            )

    def has_option(self, name: str) -> bool:
        """Whether srun knows an option. Plugins add theirs to its help."""
        return re.search(rf"{re.escape(name)}\b", self._ask(["srun", "--help"])) is not None

    def submit(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Submits a batch job. Raises ProbeError in Slurm's words, NoControllerError."""
        told = self._ask(["sbatch", "--parsable", *arguments], environment)
        return int(told.strip().splitlines()[-1].partition(";")[0])

    def find(self, name: str) -> int | None:
        """The newest of our jobs of this name that has not ended. Raises NoControllerError."""
        told = self._ask(["squeue", "--noheader", "--me", "--name", name, "--format=%A"])
        return max(map(int, told.split()), default=None)

    def job(self, job_id: int) -> JobState | None:
        """State of a job; None if Slurm has forgotten it. Raises NoControllerError."""
        try:
            return job_state(self._show("job", str(job_id)))
        except ProbeError as error:
            if isinstance(error, NoControllerError) or not UNKNOWN_JOB.search(str(error)):
                raise
            return self._accounted(job_id)

    def _show(self, *what: str) -> str:
        return self._ask(["scontrol", "show", *what, "--oneliner"])

    def cancel(self, job_id: int) -> None:
        """Cancels a job; one that has ended stays as it is. Raises NoControllerError."""
        self._ask(["scancel", "--quiet", str(job_id)])

    def longest_seconds(self, partition: str | None) -> float:
        """The time limit of a partition, or of the default one. Raises NoControllerError."""
        named = [] if partition is None else [partition]
        told = self._show("partition", *named)
        found = [dict(FIELD.findall(line)) for line in told.splitlines() if line.strip()]
        known = [_duration(one["MaxTime"]) for one in found if named or one["Default"] == "YES"]
        return next((one for one in known if one), math.inf)

    def down_nodes(self, nodes: str) -> list[str]:
        """Names of those nodes that are down, or do not answer. Raises NoControllerError."""
        told = self._show("node", nodes)
        found = [dict(FIELD.findall(line)) for line in told.splitlines() if line.strip()]
        return [one["NodeName"] for one in found if re.search(r"\*|DOWN|FAIL", one["State"])]

    def hosts(self, partition: str | None, constraint: str | None = None) -> set[str]:
        """Names of a partition's nodes that run jobs, or of all. Raises NoControllerError.

        constraint: only those with this feature. Where it names several, all nodes are told.
        """
        where = [] if partition is None else ["--partition", partition]
        command = ["sinfo", "--Node", "--noheader", "--format=%N %f", f"--states={RUNS_JOBS}"]
        told = self._ask([*command, *where])
        nodes = [line.split(maxsplit=1) for line in told.splitlines() if line.strip()]
        known = {feature for _, features in nodes for feature in features.split(",")}
        return {
            name
            for name, features in nodes
            if constraint not in known or constraint in features.split(",")
        }

    def _accounted(self, job_id: int) -> JobState | None:
        """State of a job from the accounting; None where there is none (slurmdbd)."""
        if shutil.which("sacct") is None:
            return None
        fields = "State,ElapsedRaw,End,NodeList"
        command = ["sacct", "--jobs", str(job_id), "--allocations", "--noheader", "--parsable2"]
        try:
            told = self._ask([*command, "--duplicates", f"--format={fields}"])
        except ProbeError:
            return None
        lines = [line.split("|") for line in told.splitlines() if line.count("|") == 3]
        if not lines:
            return None
        state, seconds, end, nodes = lines[-1]
        return JobState(
            state=state.partition(" ")[0],  # CANCELLED by 1000
            restarts=len(lines) - 1,
            nodes=nodes,
            ended=_time(end),
            seconds=float(seconds or 0.0),
        )

    def _ask(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        self.check()
        try:
            done = told_by(command, COMMAND_SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            raise NoControllerError(f"{command[0]}: no answer in {COMMAND_SECONDS:g} s") from None
        if done.returncode == 0:
            return done.stdout
        if NO_CONTROLLER.search(done.stderr):
            raise NoControllerError(" ".join(done.stderr.split()))
        refused = REFUSED.findall(done.stderr)
        raise refusal(refused[-1] if refused else " ".join(done.stderr.split()) or command[0])


def refusal(message: str) -> ProbeError:
    """The error for what Slurm does not accept, in its own words."""
    return ProbeError(f"Slurm: {message}; ask it for what it has (`sinfo`)")


def job_state(told: str) -> JobState:
    """Reads `scontrol show job --oneliner`."""
    fields = dict(FIELD.findall(told))
    state = fields["JobState"]
    return JobState(
        state=state,
        reason="" if fields.get("Reason") in (None, "None") else fields["Reason"],
        restarts=int(fields.get("Restarts", 0)),
        nodes="" if fields.get("NodeList") in (None, "(null)") else fields["NodeList"],
        is_preempted=_time(fields.get("PreemptTime", "")) is not None,
        ended=_time(fields.get("EndTime", "")) if state not in WAITING | RUNNING else None,
        seconds=_duration(fields.get("RunTime", "")),
    )


def _time(text: str) -> float | None:
    """Seconds since the epoch of Slurm's local time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _duration(text: str) -> float:
    """Seconds of Slurm's `days-hours:minutes:seconds`."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
