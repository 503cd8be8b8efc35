"""Parses TorchTitan's log: one record per step and rank, facts about the run, why it failed.

Sources of the format: torchtitan 0.2.0 to 0.3.0 components/metrics.py (MetricsProcessor.log,
build_device_memory_monitor), tools/utils.py (Color), tools/logging.py (the "[titan]" prefix);
torch/distributed/elastic (the "[rank0]:" prefix of --tee).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from planner.probes.evidence import Evidence, RankError, raised
from planner.probes.failures import classify, known_cause
from planner.probes.protocol import Failed, FailureKind, OutOfMemory
from planner.units import GIB

ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"^\[[A-Za-z_]+(\d+)\]:")
_NUMBER = r"([-+]?(?:[\d,]+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_STEP = re.compile(
    rf"(?<!validate )\bstep:\s*(\d+)\s+loss:\s*{_NUMBER}"
    rf"(?:\s+grad_norm:\s*{_NUMBER})?\s+memory:\s*{_NUMBER}GiB\({_NUMBER}%\)\s+tps:\s*{_NUMBER}"
    rf"(?:\s+tflops:\s*{_NUMBER})?(?:\s+mfu:\s*(?:{_NUMBER}%|N/A))?"
)
_TIME = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})")
_VERSION = re.compile(r"torchtitan version: (\S+)")
_DEVICE = re.compile(r"capacity: (.+?) with ([\d.]+)GiB memory")
_STARTED = re.compile(r"Training starts at step")
_FRAME = re.compile(r'^\s+File "([^"]+)", line \d+')
# what tyro prints for a flag that it does not know or cannot read, and TorchTitan 0.2 for an
# unknown key in its TOML
_REFUSED = re.compile(
    r"Unrecognized[^\n]*|invalid choice[^\n]*|Parsing error[^\n]*|Invalid field names in [^\n]*"
)
_RULES = frozenset({"AssertionError", "ValueError", "NotImplementedError", "TypeError", "KeyError"})
_TORCH_LACKS = re.compile(r"module 'torch[\w.]*' has no attribute")
_SHOWN_LINES, _SHOWN_CHARACTERS = 8, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One step as one rank logged it.

    reserved_bytes: the allocator's peak during the step, to a hundredth of a GiB.
    loss: the mean over all ranks; a pipeline stage without the head logs a negative number.
    rank: None if lines carry no rank.
    tokens_per_second: per device, rounded to an integer.
    logged_at: local time, to a millisecond; None if the line has none.
    """

    rank: int | None
    step: int
    loss: float
    gradient_norm: float | None
    reserved_bytes: float
    tokens_per_second: float
    logged_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanLog:
    """Contents of a log. started: the run reached its first training step, so set-up is over."""

    version: str | None
    gpu_name: str | None
    device_bytes: float | None
    started: bool
    steps: tuple[StepLine, ...]

    def by_rank(self) -> dict[int | None, dict[int, StepLine]]:
        """Each rank's lines by step; of a step logged twice (a restart) the last line."""
        found: dict[int | None, dict[int, StepLine]] = {}
        for line in self.steps:
            found.setdefault(line.rank, {})[line.step] = line
        return found

    def losses(self) -> dict[int, float]:
        """Loss by step: the largest over ranks, as stages without the head log a negative one."""
        found: dict[int, float] = {}
        for line in self.steps:
            known = found.get(line.step)
            found[line.step] = (
                line.loss if known is None or line.loss > known or line.loss != line.loss else known
            )
        return found

    def gradient_norms(self) -> dict[int, float]:
        """Gradient norm of the whole model by step, for the steps that logged one."""
        known = ((line.step, line.gradient_norm) for line in self.steps)
        return {step: norm for step, norm in known if norm is not None}


def read_log(text: str) -> TitanLog:
    """Parses the log of a run, of one rank or of all, also with colours and torchrun's prefixes."""
    plain = ANSI.sub("", text)
    version, device = _VERSION.search(plain), _DEVICE.search(plain)
    return TitanLog(
        version=version[1] if version else None,
        gpu_name=device[1] if device else None,
        device_bytes=float(device[2]) * GIB if device else None,
        started=_STARTED.search(plain) is not None,
        steps=tuple(_steps(plain)),
    )


def _steps(plain: str) -> Iterator[StepLine]:
    for line in plain.splitlines():
        found = _STEP.search(line)
        if found is None:
            continue
        rank, time = _RANK.match(line), _TIME.search(line)
        norm = found[3]
        yield StepLine(
            rank=int(rank[1]) if rank else None,
            step=int(found[1]),
            loss=_float(found[2]),
            gradient_norm=None if norm is None else _float(norm),
            reserved_bytes=_float(found[4]) * GIB,
            tokens_per_second=_float(found[6]),
            logged_at=datetime.strptime(time[1], "%Y-%m-%d %H:%M:%S,%f") if time else None,
        )


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def failure(log: TitanLog, evidence: Evidence) -> Failed | OutOfMemory:
    """The failure that a log shows: errors of TorchTitan's own before common ones."""
    plain = ANSI.sub("", evidence.log)
    refused = None if log.started else _REFUSED.search(plain)
    if refused is not None:
        text = _unboxed(plain[refused.start() :])
        return Failed(kind=FailureKind.INVALID_LAYOUT, message=text)
    found_here = (replace(error, kind=_kind(error, log)) for error in raised(plain))
    errors = evidence.errors or tuple(found_here)
    found = classify(replace(evidence, errors=errors, log=plain))
    if isinstance(found, Failed) and found.kind == FailureKind.IMPORT:
        which = f"torchtitan {log.version or '(unknown version)'}"
        said = f"{which} does not run with what is installed: {found.message}"
        return found.model_copy(update={"message": said})
    return found


def _kind(error: RankError, log: TitanLog) -> str | None:
    """The failure class that TorchTitan's code decides; None leaves it to the common rules."""
    if known_cause(error) is not None:
        return None
    name = error.type.rpartition(".")[2]
    if name == "AttributeError" and _TORCH_LACKS.search(error.message):
        return FailureKind.IMPORT
    frames = [frame[1] for line in error.traceback.splitlines() if (frame := _FRAME.match(line))]
    own = bool(frames) and "torchtitan" in frames[-1]
    broken = name in _RULES or (name == "RuntimeError" and own)
    return FailureKind.INVALID_LAYOUT if broken and not log.steps else None


def _unboxed(text: str) -> str:
    """The text inside tyro's box, on one line."""
    words = [
        re.sub(r"^\s*(?:\[[A-Za-z_]+\d+\]:)?|[│╭╮╰╯─|]+", " ", line).strip()
        for line in text.splitlines()[:_SHOWN_LINES]
    ]
    return " ".join(" ".join(words).split())[:_SHOWN_CHARACTERS]
