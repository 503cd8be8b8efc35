"""Finds what went wrong in a probe: one failure class and its first cause.

Under torchrun every failure is exit 1, and most ranks only report that a peer has ended.
So causes are ranked, and the earliest of the best rank is reported:
1. an error that a rank raised by itself;
2. a rank killed by a signal;
3. ranks that timed out waiting (the healthy ones report this);
4. ranks that lost their connection to a peer.

`planner.probes.causes` has the texts that name their cause. The patterns and exit codes here match
what torch 2.11 to 2.13, NCCL, gloo and the NVIDIA driver print.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.probes.causes import ALLOCATED, CAUSES, OOM, TRIED, Cause, cause_of, size_in
from planner.probes.evidence import Evidence, RankError, raised
from planner.probes.protocol import TAKEN_AWAY, Failed, FailureKind, OutOfMemory

TEXT_CHARACTERS = 20_000
LAST_LINES = 20  # of a log in which no rank reports an error

# Xids caused by the hardware or the driver. 13, 31, 43 and 45 come from the program.
# 144 to 150 are NVLink's since r570. Source: NVIDIA, "XID Errors", r570.
XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+),? ?(?P<text>[^\n]*)")
# newer drivers print this message over several lines, without the Xid
DROPPED = re.compile(r"NVRM: [^\n]*fallen off the bus[^\n]*")
HARDWARE_XIDS = frozenset(
    {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 121, 136, 140, 143, 154}
) | frozenset(range(144, 151))
WAITED = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms|[Ww]ait(?:ing)? "
    r"timeout after"
    r"|Timed out after \d+ seconds waiting|ncclTimeout"
    r"|DistBackendError.*[Tt]imed? ?out|Collective.*timed "
    r"out|HeartbeatMonitor.*(?:hang|stuck|timed out)"
)
WATCHDOG = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
    r"(?P<work>WorkNCCL\([^)]*\))[^\n]*"
)
VICTIM = re.compile(
    r"Connection closed by peer|[Cc]onnection reset by peer|Broken pipe|remote process "
    r"exited|communicator was aborted|ncclRemoteError"
    r"|ncclInternalError.*(?:peer|socket)|SignalException|ChildFailedError|Connection "
    r"refused|[Ff]ailed to recv|Socket closed"
    r"|DistNetworkError|recvValue"
)
REFUSED_TYPES = re.compile(
    r"(?:^|\.)(?:SpecError|UnknownNameError|InvalidLayout\w*|LayoutError"
    r"|Refused\w*)$"
)
RULE_TYPES = frozenset({"AssertionError", "ValueError", "NotImplementedError"})
RULE_FILES = re.compile(r"/(?:torch/distributed|torchtitan|probes)/")
# in these files a RuntimeError is a broken rule too
SETUP_FILES = re.compile(r"/torch/distributed/(?:device_mesh|fsdp|_composable|tensor|pipelining)")

# what torchrun prints about the ranks that ended
# (torch/distributed/elastic/multiprocessing/errors/__init__.py)
ENDED = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s*\n(?:[^\n]*?)exitcode\s*: (?P<code>-?\d+) "
    r"\(pid: (?P<pid>\d+)\)"
)
ENDED_EARLY = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)"
)
HOST_OOM = re.compile(r"(?:[Oo]ut of memory|oom-kill).*?(?:Killed process|pid=) ?(?P<pid>\d+)")
ENDED_BY = {
    "runner-gone": "the runner died; everything that it had started was ended",
    "guardian-gone": "the process that watched over it was killed; everything that it had "
    "started was ended",
}


def classify(evidence: Evidence) -> OutOfMemory | Failed:
    """Returns the failure class and the first cause."""
    errors = evidence.errors or raised(evidence.log)
    root = next((error for error in errors if _weight(error) == 0), None)
    if root is not None:
        return _of_error(root, evidence)
    lost = _hardware(evidence.kernel + "\n" + evidence.log)
    if lost is not None:
        return lost
    if evidence.stopped and evidence.reason in ("exit", "time-limit"):
        return _held(evidence)
    if evidence.reason != "exit":
        return _stopped(evidence)
    killed = None if WATCHDOG.search(evidence.log) else _killed(evidence)
    found = _of_log(evidence.log)
    if killed is not None:
        starved = found if found is not None and found.kind == FailureKind.KILLED else None
        return _advised(killed, cause_of(killed.message) or starved)
    waited = _waited(errors, evidence)
    if waited is not None:
        return _advised(waited, cause_of(waited.message) or found)
    if not errors:
        return _unexplained(evidence)
    victim = _of_error(min(errors, key=_weight), evidence)
    assert isinstance(victim, Failed), "an error that lost its peer is not out of memory"
    kind = victim.kind if found is None else FailureKind(found.kind)
    return _advised(victim.model_copy(update={"kind": kind}), found)


def _weight(error: RankError) -> int:
    """Ranks an error: 0 raised by the rank itself; 1 timed out waiting; 2 lost its peer."""
    found = known_cause(error)
    if error.kind is not None or (found is not None and found.kind != FailureKind.HANG):
        return 0
    if found is not None or WAITED.search(error.said):
        return 1
    return 2 if VICTIM.search(error.said) else 0


def known_cause(error: RankError) -> Cause | None:
    """Looks an error up in the table; the file that raised it counts too."""
    files = re.findall(r'File "([^"]+)"', error.traceback)
    return cause_of("\n".join([*files[-1:], error.said]))


def _of_error(error: RankError, evidence: Evidence) -> OutOfMemory | Failed:
    said, found = error.said, known_cause(error)
    own = error.kind if error.kind in {OOM, *FailureKind} else None
    kind = found.kind if found is not None and own in (None, OOM) else own
    if kind == OOM:
        return OutOfMemory(
            rank=error.rank or 0,
            attempted_bytes=size_in(TRIED, said),
            allocated_bytes=size_in(ALLOCATED, said),
            message=_shown(error.message),
        )
    if kind is None and WAITED.search(said):
        kind = FailureKind.HANG
    if kind is None and (lost := _hardware(evidence.kernel)) is not None:
        return lost
    if kind is None:
        kind = FailureKind.INVALID_LAYOUT if _is_refusal(error) else FailureKind.CRASH
    failed = Failed(
        kind=FailureKind(kind),
        rank=error.rank,
        message=_shown(said),
        traceback=_tail(error.traceback),
    )
    return _advised(failed, found if found is not None and found.kind == kind else None)


def _advised(failed: Failed, found: Cause | None) -> Failed:
    if found is None or not found.remedy:
        return failed
    text = f"{failed.message}; remedy: {found.remedy}"
    return failed.model_copy(update={"message": text, "machine": failed.machine or found.machine})


def _of_log(log: str) -> Cause | None:
    """Looks for failures of the machine in the log, where no rank reported a cause."""
    said = "\n".join(line for line in log.splitlines() if "NCCL INFO" not in line)
    return next((one for one in CAUSES if one.told_by_logs and one.pattern.search(said)), None)


def _is_refusal(error: RankError) -> bool:
    """Whether an error is a rule: of the trainer's own type, or a check of parallel set-up."""
    if REFUSED_TYPES.search(error.type):
        return True
    files = re.findall(r'File "([^"]+)"', error.traceback)
    name, last = error.type.rpartition(".")[2], files[-1] if files else ""
    if name in RULE_TYPES:
        return RULE_FILES.search(last) is not None
    return name == "RuntimeError" and SETUP_FILES.search(last) is not None


def _hardware(text: str) -> Failed | None:
    xids = (found for found in XID.finditer(text) if int(found["number"]) in HARDWARE_XIDS)
    said = next((f"the driver reports Xid {found['number']}: {found[0]}" for found in xids), None)
    if said is None:
        gone = DROPPED.search(text)
        said = gone and gone[0]
    if said is None:
        return None
    return _advised(Failed(kind=FailureKind.LOST_GPU, message=_shown(said)), cause_of(said))


def _held(evidence: Evidence) -> Failed:
    """Ranks that a signal stopped and nobody continued: the others only waited for them."""
    who = ", ".join(map(str, evidence.stopped))
    message = (
        f"rank {who} was stopped by a signal (SIGSTOP, or the batch system suspended it), and the "
        "others waited; `kill -CONT` goes on, or run it again"
    )
    kind = FailureKind.TIMEOUT if evidence.reason == "time-limit" else FailureKind.HANG
    return Failed(kind=kind, rank=evidence.stopped[0], message=message)


def _stopped(evidence: Evidence) -> Failed:
    text = _shown(evidence.message)
    if evidence.reason in TAKEN_AWAY:
        return Failed(kind=FailureKind(evidence.reason), message=text)
    if evidence.reason == "time-limit":
        limit = f"not done after its time limit of {evidence.time_limit_seconds:g} s"
        message, suspect = "; ".join([limit, *_places(evidence.stacks)]), _suspect(evidence.stacks)
        stack = None if suspect is None else _tail(evidence.stacks[suspect])
        return Failed(
            kind=FailureKind.TIMEOUT, rank=suspect, message=_shown(message), traceback=stack
        )
    text = text or ENDED_BY.get(evidence.reason, "stopped on request")
    return Failed(kind=FailureKind.INTERRUPTED, message=text)


def _killed(evidence: Evidence) -> Failed | None:
    """Returns the rank, or the launcher, that a signal ended.

    Ranks ended by SIGTERM count where all that ended were: else torchrun stopped them because
    another rank had ended.
    """
    _, _, root = evidence.log.rpartition("Root Cause")
    told = (
        *ENDED.finditer(root),
        *ENDED.finditer(evidence.log),
        *ENDED_EARLY.finditer(evidence.log),
    )
    ended = [(int(m["rank"]), int(m["code"]), int(m["pid"])) for m in told]
    by_signal = [entry for entry in ended if entry[1] < 0 and entry[1] != -signal.SIGTERM]
    by_signal = by_signal or [entry for entry in ended if {one[1] for one in ended} == {-15}]
    if by_signal:
        rank, code, pid = by_signal[0]
        starved = any(int(m["pid"]) == pid for m in HOST_OOM.finditer(evidence.kernel))
        cause = " (killed by hand, or for want of host memory)" if code == -9 else ""
        if starved:
            cause = ": the kernel ran out of host memory"
        stack = evidence.stacks.get(rank)
        message = f"rank {rank} was ended by {_signal_name(-code)}{cause}"
        return Failed(
            kind=FailureKind.KILLED, rank=rank, message=message, traceback=stack and _tail(stack)
        )
    if evidence.exit_code is not None and evidence.exit_code < 0:
        message = f"the launcher was ended by {_signal_name(-evidence.exit_code)}"
        return Failed(kind=FailureKind.KILLED, message=message)
    return None


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _waited(errors: Sequence[RankError], evidence: Evidence) -> Failed | None:
    """The failure for a collective that never returned: ranks that do not report it are suspect."""
    watchdog = WATCHDOG.search(evidence.log)
    waited = [error for error in errors if _weight(error) == 1]
    if watchdog is None and not waited:
        return None
    reported = {int(found["rank"]) for found in WATCHDOG.finditer(evidence.log)}
    healthy = sorted({error.rank for error in waited if error.rank is not None} | reported)
    stuck = {rank: stack for rank, stack in evidence.stacks.items() if rank not in healthy}
    said = watchdog["work"] if watchdog else waited[0].said
    message = f"rank {', '.join(map(str, healthy))} waited in vain: {said}"
    message = "; ".join([message, *_places(stuck)])
    told = waited[0].traceback if waited else watchdog[0] if watchdog else ""
    return Failed(
        kind=FailureKind.HANG,
        rank=min(stuck, default=None),
        message=_shown(message),
        traceback=_tail(next(iter(stuck.values()), None) or told),
    )


def _unexplained(evidence: Evidence) -> OutOfMemory | Failed:
    """The failure when no rank reported an error: shows the end of the log."""
    text = f"{evidence.log}\n"
    stripped = map(str.strip, text.splitlines())
    lines = [line for line in stripped if line and not set(line) <= set("=-*+")]
    last = lines[-1] if lines else "it left no output"
    unknown = evidence.exit_code is None
    code = "without an exit code" if unknown else f"with exit code {evidence.exit_code}"
    message = f"the program ended {code} and without its result: {last}"
    said = next(((line, found) for line in lines[-LAST_LINES:] if (found := cause_of(line))), None)
    if said is not None and said[1].kind == OOM:
        tried, text = size_in(TRIED, said[0]), _shown(said[0])
        return OutOfMemory(rank=0, attempted_bytes=tried, message=text)
    failed = Failed(
        kind=FailureKind.CRASH if said is None else FailureKind(said[1].kind),
        message=_shown(message if said is None else said[0]),
        traceback=_tail(text.strip()) or None,
    )
    return _advised(failed, said and said[1])


def _places(stacks: Mapping[int, str]) -> list[str]:
    """The innermost frame of each rank's main thread, which faulthandler prints last."""
    found = []
    for rank, stack in sorted(stacks.items()):
        main = stack[max(stack.rfind("Current thread"), stack.rfind("\nThread "), 0) :]
        frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
        where = frame and f"{frame[3]} ({Path(frame[1]).name}:{frame[2]})"
        found.append(f"rank {rank} was in {where or 'an unknown place'}")
    return found


def _suspect(stacks: Mapping[int, str]) -> int | None:
    """Returns the first rank that was not waiting for the others; None if there is no such rank."""
    if len(stacks) == 1:
        return min(stacks)
    waiting = re.compile("distributed_c10d|_functional_collectives")
    busy = [rank for rank, stack in sorted(stacks.items()) if not waiting.search(stack)]
    return busy[0] if 0 < len(busy) < len(stacks) else None


def _shown(text: str) -> str:
    return " ".join(text.split())[:2000]


def _tail(text: str) -> str:
    return text[-TEXT_CHARACTERS:]
