"""Waits for a probe in Slurm, and finds out why it ended."""

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.errors import ProbeError
from planner.probes.folder import LOG, NODE_ENDS, NODE_STARTS
from planner.probes.guardian import STOP
from planner.probes.launch import Watch, newest_line
from planner.probes.outcome import End, end_in, read_log
from planner.probes.pools.slurm_allocation import HEARTBEAT, Allocation, ProbeOrder
from planner.probes.pools.slurm_commands import REFUSED, JobState, NoControllerError
from planner.probes.pools.slurm_options import SlurmOptions
from planner.probes.protocol import FailureKind

# Slurm's reasons for which a job waits in vain, as every release spells them
# (src/common/slurm_protocol_defs.c, job_state_reason). Limits of users and QOS in use pass.
IN_VAIN = re.compile(
    r"^(?:Partition(?:Config|NodeLimit|TimeLimit)|BadConstraints|AccountNotAllowed|InvalidAccount"
    r"|InvalidQOS|QOSNotAllowed|DependencyNeverSatisfied|JobHeldAdmin|launch_failed_requeued_held"
    r"|(?:Assoc|QOS)\w*Per(?:Job|Node)(?:Limit)?)$"
)
CAUSES = {
    "PREEMPTED": (FailureKind.PREEMPTED, "was preempted"),
    "NODE_FAIL": (FailureKind.LOST_NODE, "lost a node"),
    "BOOT_FAIL": (FailureKind.LOST_NODE, "has a node that did not boot"),
    "TIMEOUT": (FailureKind.ALLOCATION_ENDED, "came to Slurm's time limit"),
    "DEADLINE": (FailureKind.ALLOCATION_ENDED, "came to its deadline"),
    "COMPLETED": (FailureKind.ALLOCATION_ENDED, "ended before the probe began"),
    "OUT_OF_MEMORY": (FailureKind.KILLED, "took more host memory than Slurm allows it"),
    "CANCELLED": (FailureKind.INTERRUPTED, "was cancelled, not by us"),
    "REVOKED": (FailureKind.INTERRUPTED, "was revoked"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPace:
    """Seconds of a wait.

    files, slurm: between two looks at the files, and two questions to Slurm.
    start: for all nodes to start the probe, once the job runs; a shared disk may be slow.
    end: for the nodes' guardians to end it, and for Slurm to say why it did.
    controller: that a controller may be away while nothing of ours runs.
    """

    files: float = 0.5
    slurm: float = 5.0
    start: float = 180.0
    end: float = 45.0
    controller: float = 900.0


@dataclass
class OrderWait:
    """The wait for one order. state: what Slurm said last of its job."""

    order: ProbeOrder
    allocation: Allocation
    options: SlurmOptions
    pace: SlurmPace
    state: JobState | None = None
    job: int | None = None
    _asked: float | None = None
    _began: int | None = None
    _answered: float = field(default_factory=time.monotonic)
    _unknown: bool = False

    def end(self, limit_seconds: float, num_nodes: int, watch: Watch) -> End:
        """Waits until the probe has ended; returns how. Raises ProbeError if it cannot begin."""
        since = time.monotonic()
        while True:
            self.order.beat()
            if watch.stop.is_set():
                return self.end_it()
            code = self.order.ended
            if code is not None:
                return self._of_exit(code, num_nodes)
            if self._asked is None or time.monotonic() - self._asked >= self.pace.slurm:
                self._ask_slurm()
            found = self._lost() or self._overdue(limit_seconds, num_nodes)
            if found is not None:
                return found
            if self.order.started is None:
                self._check_queue(time.monotonic() - since)
            watch.progress(self._line())
            time.sleep(self.pace.files)

    def end_it(self) -> End:
        """Ends the probe on request: its processes, and its job if they do not end."""
        (self.order.probe / STOP).touch()
        began = self.order.started is not None
        if not (began and self._within(self.pace.end, lambda: self.order.ended is not None)):
            self.allocation.give_up(self.order)
        return End(reason="asked", seconds=self._seconds())

    # ---- what Slurm says -------------------------------------------------------------------------

    def _ask_slurm(self) -> None:
        """Learns the job's state; a controller that is away is waited for."""
        began = self.order.started  # what is said below is of a later moment
        try:
            if self.job is None:
                self.job = self.allocation.submitted(self.order)
            state = self.allocation.slurm.job(self.job)
            # one answer is not enough where the controller has just come back
            self._unknown, self.state = state is None and self._asked is not None, state
            self._began, self._answered = began, time.monotonic()
        except NoControllerError:
            if self.order.started is None and self._silence() > self.pace.controller:
                self.allocation.give_up(self.order)
                raise
        self._asked = time.monotonic()

    def _silence(self) -> float:
        return time.monotonic() - self._answered

    def _lost(self) -> End | None:
        """Why the job ended, or waits again, under an order that has not ended."""
        state = self.state
        if self._is_requeued():
            return self._of_pool(FailureKind.REQUEUED, "was put back into its queue")
        if state is None and self._unknown and self._silence() < self.pace.slurm:
            return self._of_pool(FailureKind.ALLOCATION_ENDED, "is not known to Slurm any more")
        if state is None or not state.has_ended:
            return None
        # its last words may be on their way through the file system
        if self._within(self.pace.files * 4, lambda: self.order.ended is not None):
            return None
        return self._of_state(state)

    def _is_requeued(self) -> bool:
        """Whether the job waits again, or runs again, after it had begun the order."""
        state, began = self.state, self._began
        if state is None or began is None:
            return False
        return state.is_waiting or state.restarts > began

    def _of_state(self, state: JobState) -> End:
        kind, text = CAUSES.get(state.state, (FailureKind.LAUNCH, f"ended as {state.state}"))
        said = self.order.output() if kind == FailureKind.LAUNCH else ""
        because = f" ({state.reason})" if state.reason else ""
        if kind == FailureKind.KILLED:
            return End(reason="exit", seconds=self._seconds(), exit_code=-9)
        return self._of_pool(kind, " ".join(filter(None, [f"{text}{because}", said])))

    def _of_pool(self, kind: FailureKind, text: str) -> End:
        """An end that Slurm brought about. Whatever still runs of the probe is asked to stop."""
        (self.order.probe / STOP).touch()
        nodes = f" on {self.state.nodes}" if self.state is not None and self.state.nodes else ""
        if kind != FailureKind.REQUEUED:
            self.allocation.give_up(self.order)
        reason = "asked" if kind == FailureKind.INTERRUPTED else kind.value
        message = f"Slurm's job {self.job}{nodes} {text}"
        return End(reason=reason, seconds=self._seconds(), message=message)

    # ---- what the files say ----------------------------------------------------------------------

    def _of_exit(self, code: int, num_nodes: int) -> End:
        """How the probe ended whose srun has: by itself, or because Slurm ended it."""
        ends = self._ends()
        reasons = {one.reason for one in ends}
        started = len(list(self.order.probe.glob(NODE_STARTS)))
        if code == 0:
            return End(reason="exit", seconds=self._seconds(), exit_code=code)
        # a node that ended by itself makes srun end the others; unless Slurm ended them all
        itself = started == len(ends) == num_nodes and reasons != {"asked"}
        cause = self._cause(patient=not itself and started > 0)
        if cause is not None:
            return cause
        refused = REFUSED.search(read_log(self.order.probe / LOG))
        if started < num_nodes and refused is not None:
            return self._of_pool(FailureKind.LAUNCH, f"did not start it: {refused['message']}")
        if reasons == {"asked"}:
            return self._of_pool(FailureKind.INTERRUPTED, "was told to end by somebody else")
        return End(reason="exit", seconds=self._seconds(), exit_code=code)

    def _cause(self, *, patient: bool) -> End | None:
        """Why Slurm ended a probe; None if it did not. patient: wait until it says so."""
        deadline = time.monotonic() + self.pace.end
        while time.monotonic() < deadline:
            self.order.beat()
            self._ask_slurm()
            state = self.state
            if self._is_requeued():
                return self._of_pool(FailureKind.REQUEUED, "was put back into its queue")
            if state is not None and state.is_preempted:
                return self._of_pool(*CAUSES["PREEMPTED"])
            if state is not None and state.has_ended:
                return None if state.state in ("COMPLETED", "FAILED") else self._of_state(state)
            if (lost := self._lost_node()) is not None:
                return lost
            if not patient and state is not None and state.state == "RUNNING":
                return None
            time.sleep(min(self.pace.slurm, 1.0))
        return None

    def _overdue(self, limit_seconds: float, num_nodes: int) -> End | None:
        """The end of a probe that its nodes should have ended, or begun, by now."""
        if self.order.started is None:
            return None
        starts = [path.stat().st_mtime for path in self.order.probe.glob(NODE_STARTS)]
        ends = [path.stat().st_mtime for path in self.order.probe.glob(NODE_ENDS)]
        now = (self.order.job / HEARTBEAT).stat().st_mtime
        if ends and now - min(ends) > self.pace.end:
            return self._stuck("did not end on all of its nodes")
        if len(starts) < num_nodes:
            late = self.order.seconds() > self.pace.start
            return self._stuck("did not start it on all of its nodes") if late else None
        if now - max(starts) <= limit_seconds + self.pace.end:
            return None
        return self._stuck(None)

    def _stuck(self, text: str | None) -> End:
        """text: what went wrong, unless a node is lost; None for the probe's own time limit."""
        if (lost := self._lost_node()) is not None:
            return lost
        if text is not None:
            return self._of_pool(FailureKind.LAUNCH, text)
        (self.order.probe / STOP).touch()
        self.allocation.give_up(self.order)
        return End(reason="time-limit", seconds=self._seconds())

    def _lost_node(self) -> End | None:
        """The end where nodes of the job do not answer; None while the controller does not."""
        down: list[str] = []
        if self.state is not None and self.state.nodes:
            with contextlib.suppress(ProbeError):
                down = self.allocation.slurm.down_nodes(self.state.nodes)
        text = f"lost {', '.join(down)}"
        return self._of_pool(FailureKind.LOST_NODE, text) if down else None

    def _ends(self) -> list[End]:
        """How the guardians of nodes ended it."""
        found = (end_in(path) for path in self.order.probe.glob(NODE_ENDS))
        return [one for one in found if one is not None]

    def _seconds(self) -> float:
        """Seconds for which the probe had its nodes."""
        known = [one.seconds for one in self._ends()]
        if self.order.ended is not None and known:
            return max(known)
        held = self.order.seconds()
        if self.state is not None and self.state.ended is not None and self.state.seconds:
            held = min(held, self.state.seconds)
        return max([held, *known])

    # ---- the queue -------------------------------------------------------------------------------

    def _check_queue(self, waited: float) -> None:
        """Raises ProbeError, and cancels the job, if it waits in vain or for too long."""
        state = self.state
        if state is None or not state.is_waiting:
            return
        if IN_VAIN.search(state.reason):
            self.allocation.give_up(self.order)
            raise ProbeError(
                f"Slurm: job {self.job} would wait in vain: the partition, account or QOS never "
                f"allows what it asks for, or has too few nodes ({state.reason}); ask it for what "
                "it has (`sinfo`)"
            )
        if waited > self.options.queue_seconds:
            self.allocation.give_up(self.order)
            raise ProbeError(
                f"Slurm had no nodes for it within {self.options.queue_seconds:g} s "
                f"({state.reason or state.state}); ask it for what waits (`squeue`)"
            )

    def _line(self) -> str:
        if self.order.started is not None:
            return newest_line(self.order.probe)
        if self._silence() > 2 * self.pace.slurm:
            return "Slurm's controller does not answer; waiting for it"
        if self.state is None:
            return "submitted to Slurm"
        reason = f" ({self.state.reason})" if self.state.reason else ""
        return f"Slurm's job {self.job} is {self.state.state.lower()}{reason}"

    def _within(self, seconds: float, so: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not so():
            if time.monotonic() >= deadline:
                return False
            time.sleep(self.pace.files / 2)
        return True
