"""The evaluations of candidates: their costs, which are possible, and how emulated ones went.

A candidate is evaluated by a run of the layout itself or, more cheaply, by emulated ranks.
Letters: N candidates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.specs.layout import Layout
from planner.specs.measurement import Measured
from planner.study.fidelity import Evaluation
from planner.study.knowledge import Knowledge
from planner.study.micro_probes import MicroProbe
from planner.study.records import EMULATED, EMULATED_SD

FULL, MICRO = "probed", "micro"
EMULATED_STAGES = 3  # a rank of the first, the middle and the last stage
# failures in a row; more of them mean that the machine or emulation is broken, not the layout
MOST_FAILURES = 3
# emulations in a row that the pool cannot make, before no more are proposed
MOST_UNABLE = 20
TINY = 1e-6  # least seconds of a launch, so that nothing is free


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """Seconds that a run occupies all its GPUs: start_seconds + steps x step seconds.

    start_seconds: launch, compile and first step; a judgement until the mean of
        results replaces it.
    """

    start_seconds: float = 60.0
    steps: int = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An evaluation to run.

    row, layout: the candidate; None for a micro-probe, which `micro` describes.
    fidelity: `probed` for the layout itself, `emulated` for ranks of it, or `micro`.
    counts: whether it counts against the budget of probes: a run of the layout, or the last
        possible evaluation of it.
    gpu_seconds: expected cost.
    gpu_seconds_limit: most it may use; the runner's time limit follows from it.
    """

    row: int | None = None
    layout: Layout | None = None
    fidelity: str
    counts: bool = False
    reason: str
    gpu_seconds: float
    gpu_seconds_limit: float = 0.0
    repeat: bool = False
    micro: MicroProbe | None = None


class Evaluations:
    """Costs of each candidate's evaluations, and which are still possible. Mutable.

    Emulated ranks run one after the other on one GPU, each as slow as the layout.

    whole: whether the pool can run the layouts themselves.
    emulates: whether it can emulate ranks.
    starts, emulated_starts: seconds besides the steps, of layouts' and of emulated runs.
    emulated (N,): candidates whose emulation was tried, whatever the result.
    timed: names of the micro-probes that ran.
    """

    def __init__(
        self, knowledge: Knowledge, cost: ProbeCost, *, whole: bool, emulates: bool
    ) -> None:
        self.knowledge, self.cost = knowledge, cost
        self.whole, self.emulates = whole, emulates
        self.num_gpus = knowledge.candidates.size.num_gpus
        self.starts: list[float] = []
        self.emulated_starts: list[float] = []
        self.emulated: BoolColumn = np.zeros(len(knowledge.candidates), dtype=np.bool_)
        self.timed: set[str] = set()
        self.failures, self._unable = 0, 0
        self._ranks = np.minimum(knowledge.candidates.batch.pp, EMULATED_STAGES)

    # ---- results -------------------------------------------------------------------------------

    def observe_emulated(self, row: int, *, failed: bool) -> None:
        """Records that the candidate has been emulated."""
        self.emulated[row] = True
        self.failures = self.failures + 1 if failed else 0
        self._unable = 0

    def observe_unable(self, row: int) -> None:
        """Records that the pool cannot emulate the candidate."""
        self.emulated[row] = True
        self._unable += 1

    def observe_start(self, measured: Measured, gpu_seconds: float, *, emulated: bool) -> None:
        """Records the seconds that each run took besides its steps."""
        extra: Mapping[str, Any] = measured.model_extra or {}
        runs = [(1, one["step_seconds"] or 0.0) for one in extra.get("ranks") or ()]
        runs = runs or [(self.num_gpus, measured.step_seconds or 0.0)]
        rest = gpu_seconds - sum(held * self.cost.steps * seconds for held, seconds in runs)
        (self.emulated_starts if emulated else self.starts).append(
            float(max(rest / sum(held for held, _ in runs), 0.0))
        )

    # ---- costs ---------------------------------------------------------------------------------

    def full(self, row: int) -> Evaluation:
        """A run of the layout itself."""
        return Evaluation(name=FULL, gpu_seconds=float(self.full_costs()[row]), sd=0.0)

    def emulation(self, row: int) -> Evaluation:
        """Emulated ranks of the layout."""
        seconds = float(self.emulated_costs()[row])
        return Evaluation(name=EMULATED, gpu_seconds=seconds, sd=EMULATED_SD)

    def full_costs(self) -> FloatColumn:
        """Expected GPU-seconds of a run of every candidate, (N,)."""
        return self.num_gpus * self._run_seconds(self.start_seconds())

    def emulated_costs(self) -> FloatColumn:
        """Expected GPU-seconds of emulating every candidate, (N,)."""
        return self._ranks * self._run_seconds(self.emulated_start_seconds())

    def _run_seconds(self, start_seconds: float) -> FloatColumn:
        step_seconds = np.exp(self.knowledge.posterior().log_seconds)
        return np.asarray(start_seconds + self.cost.steps * step_seconds)

    def start_seconds(self) -> float:
        """Start of a run of the layout itself.

        Emulated runs start faster: until a layout has run, they can only raise the estimate.
        """
        if self.starts:
            return max(float(np.mean(self.starts)), TINY)
        return max([self.cost.start_seconds, *self.emulated_starts])

    def emulated_start_seconds(self) -> float:
        """Start of an emulated run; that of the layouts until there was one."""
        known = self.emulated_starts or self.starts
        return max(float(np.mean(known)), TINY) if known else self.cost.start_seconds

    # ---- what is possible ----------------------------------------------------------------------

    def emulation_works(self) -> bool:
        """Whether ranks can be emulated, and that has not failed too often."""
        return self.emulates and self.failures < MOST_FAILURES and self._unable < MOST_UNABLE

    def runnable(self, gpu_seconds: float) -> BoolColumn:
        """Layouts that can be run for this, (N,)."""
        return np.asarray(self.full_costs() <= gpu_seconds) & self.whole

    def emulable(self, gpu_seconds: float) -> BoolColumn:
        """Layouts that could be emulated for this, also those tried before, (N,)."""
        return np.asarray(self.emulated_costs() <= gpu_seconds) & self.emulation_works()
