"""A small job's candidates and a hidden truth about them, for the tests of probing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from planner.calibration.mechanisms import MECHANISMS
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search.space.enumerate import Space, build_space
from planner.specs.measurement import Measured, Measurement
from planner.study.ask_tell import Event, StudyResult, run
from planner.study.candidates import Candidates, enumerate_candidates
from planner.study.evaluations import Proposal
from planner.study.ledger import Budget, StudySettings
from tests.conftest import job_values

FIXED = {"fix": {"precision": "bf16", "cp": 1}}
REQUEST = job_values("llama3.1-8b", "h100-sxm-80gb", 8, 8192, 64, search=FIXED)
JOB = read_job(REQUEST)
# What is equally unsure everywhere: `test_probing_isolating` has mechanisms that nobody measured.
ALL_SEEN = replace(
    shipped_calibration(), seen=frozenset(("torchtitan", "hopper", one.name) for one in MECHANISMS)
)

MUCH = Budget(probes=1000, gpu_seconds=1e12)


@lru_cache(maxsize=1)
def searched() -> tuple[Pricer, Space]:
    pricer = Pricer.build(JOB.model, JOB.cluster, JOB.training, ALL_SEEN)
    return pricer, build_space(pricer.rules_context, JOB.search)


@lru_cache(maxsize=1)
def small() -> Candidates:
    """All candidates of the job."""
    return enumerate_candidates(*searched())


def subset(rows: np.ndarray) -> Candidates:
    """Only these candidates, in order."""
    every = small()
    memory = {kind: column[rows] for kind, column in every.memory.items()}
    return Candidates.build(every.batch.take(rows), every.prior.take(rows), memory, every.size)


@dataclass
class Machine:
    """Measures by a hidden truth. outcomes: by row, what happens instead of a time.  asked: what
    was run, in order.
    """

    candidates: Candidates
    log_seconds: np.ndarray
    outcomes: dict[int, Measured] = field(default_factory=dict)
    noise_sd: float = 0.0
    asked: list[Proposal] = field(default_factory=list)
    seed: int = 0

    @classmethod
    def wrong_by(cls, candidates: Candidates, error: float, seed: int = 0) -> "Machine":
        """A truth whose error follows tensor parallelism, pipelining and checkpointing."""
        rng = np.random.default_rng(seed)
        by = [
            rng.standard_normal(16)[np.log2(column).astype(int)]
            for column in (candidates.batch.tp, candidates.batch.pp)
        ]
        by.append(rng.standard_normal(8)[candidates.batch.ac_kind])
        truth = candidates.prior.log_seconds + error * np.sum(by, axis=0) / np.sqrt(3.0)
        return cls(candidates, truth, seed=seed)

    def run(self, asked: Proposal) -> Measurement:
        self.asked.append(asked)
        assert asked.row is not None
        measured = self.outcomes.get(asked.row) or self.timed(asked.row, len(self.asked))
        return measurement(asked, measured)

    def timed(self, row: int, number: int) -> Measured:
        noise = self.noise_sd * np.random.default_rng([self.seed, number]).standard_normal()
        seconds = float(np.exp(self.log_seconds[row] + noise))
        memory = float(self.candidates.memory["peak_reserved_bytes"][row])
        times = {"step_seconds": seconds, "step_seconds_sd": 0.001 * seconds, "steps": 10}
        used = {"peak_reserved_bytes": memory, "gpu_seconds": 8 * (30.0 + 13 * seconds)}
        return Measured(rung="probed", **times, **used)

    def regret(self, row: int) -> float:
        return float(np.expm1(self.log_seconds[row] - self.log_seconds.min()))


def measurement(asked: Proposal, measured: Measured) -> Measurement:
    """As a store would give it back."""
    job, name = read_job({**REQUEST, "layout": asked.layout.model_dump()}), asked.row
    when = "2026-01-01T00:00:00Z"
    return Measurement(id=f"measurement-{name}", created_at=when, job=job, measured=measured)


def out_of_memory(**numbers: float) -> Measured:
    said = {"message": "CUDA out of memory", "gpu_seconds": 300.0, **numbers}
    return Measured.model_validate({"status": "oom", "rung": "probed", **said})


def failed(kind: str = "crash") -> Measured:
    said = {"failure": kind, "message": "first rank said so", "gpu_seconds": 200.0}
    return Measured(status="failed", rung="probed", **said)


def settings(probes: int = 6, gpu_seconds: float = 1e12, **changes: Any) -> StudySettings:
    """Of a study that nothing but its budget ends."""
    budget = Budget(probes=probes, gpu_seconds=gpu_seconds)
    return StudySettings(**{"tolerance": -1.0, "budget": budget, **changes})


def play(
    answer: Callable[[Proposal], Measurement], known: Sequence[Measurement] = (),
    on_event: Callable[[Event], None] | None = None, **changes: Any,
) -> tuple[StudyResult, list[Proposal]]:  # fmt: skip
    """A study of all candidates with `settings(**changes)`, and what it asked, in order."""
    asked: list[Proposal] = []

    def measure(one: Proposal) -> Measurement:
        asked.append(one)
        return answer(one)

    more = {"known": known, "on_event": on_event}
    return run(small(), settings(**changes), measure, **more), asked


def told_of(row: int, rung: str, seconds: float) -> Measured:
    return Measured.model_validate({"rung": rung, "step_seconds": seconds, "gpu_seconds": 60.0})
