"""The policy of a study: which candidate to evaluate next, at which fidelity, and when to stop.

It reads knowledge, evaluations and ledger, and changes none of them. Letters: N candidates.
"""

import numpy as np

from planner.columns import BoolColumn
from planner.search.fit import OOM_LIMIT
from planner.study.evaluations import FULL, Evaluations
from planner.study.fidelity import FidelityChoice, Prospect, choose_evaluation, direct
from planner.study.knowledge import Knowledge
from planner.study.ledger import Ledger, StudySettings
from planner.study.micro_probes import MicroProbe, evaluation_rate, most_valuable
from planner.study.records import FULL_FIDELITY
from planner.study.regret import ExpectedRegret
from planner.study.samplers import Pick
from planner.units import counted

# judgement: expected gain (share of a step) below which a low-fidelity evaluation before the
# winner's own run is not worth a launch
LEAST_LOW_FIDELITY_GAIN = 2e-3
# judgement: expected gain (share of a step) below which timing kernels is not worth a launch
LEAST_MICRO_GAIN = 1e-3


class Policy:
    """Chooses the next evaluation by knowledge, costs and the remaining budget."""

    def __init__(
        self, settings: StudySettings, knowledge: Knowledge, evaluations: Evaluations, spent: Ledger
    ) -> None:
        self.settings, self.knowledge = settings, knowledge
        self.evaluations, self.spent = evaluations, spent

    def finished(self) -> str | None:
        """Why the study should stop; None while another evaluation can pay and is affordable."""
        spent, knowledge = self.spent, self.knowledge
        if (
            knowledge.timed()
            and (spent.probes_left() <= 0 or self.unconfirmed() is None)
            and self._isolating() is None
            and self._odd() is None
        ):
            regret = self.regret()
            if regret.expected_share <= self.settings.tolerance:
                return regret.statement(self.settings.tolerance)
        failed = [record for record in knowledge.records.values() if record.status == "failed"]
        exhausted = spent.exhausted(failed[-1].message if failed else "no message")
        if exhausted is not None:
            return exhausted
        left = max(spent.gpu_seconds_left(), 0.0)
        if self.evaluations.runnable(left).any() or self.evaluations.emulable(left).any():
            return None
        if not self.settings.whole and not self.evaluations.emulation_works():
            return (
                f"the pool is smaller than {counted(knowledge.candidates.size.num_gpus, 'GPU')}, "
                "and no scaled-down run on it could stand for a layout"
            )
        return f"the {left:.3g} GPU-seconds left do not pay for another probe"

    def regret(self, of: int | None = None) -> ExpectedRegret:
        """Expected regret of the winner, or of row `of`."""
        return self.knowledge.posterior().regret(seed=self.settings.seed, of=of)

    # ---- which candidate -----------------------------------------------------------------------

    def required(self) -> Pick | None:
        """The layout to run first: one that isolates a mechanism, or one whose run was odd."""
        isolating = self._isolating() if self.knowledge.records else None
        return isolating or self._odd()

    def confirming(self) -> Pick | None:
        """The leader, where it has not run itself and nothing pays before that."""
        leader = self.unconfirmed()
        if leader is None or (
            self.regret(leader).expected_share > self.settings.tolerance
            and self.spent.probes_left() > 1
            and self._low_fidelity_pays(beside=leader)
        ):
            return None
        said = "it leads by a low-fidelity evaluation, and has not run itself"
        return Pick(row=leader, reason=said, repeat=True)

    def unconfirmed(self) -> int | None:
        """The leader, if it has only low-fidelity results and can be run itself."""
        leader = self.knowledge.posterior().leader
        record = self.knowledge.records.get(leader)
        unconfirmed = record is not None and record.fidelity not in FULL_FIDELITY
        return leader if unconfirmed and self.payable(leader) else None

    def _isolating(self) -> Pick | None:
        """The layout that isolates an unmeasured mechanism, while it can still be run."""
        pick, knowledge = self.settings.isolating, self.knowledge
        if pick is None or pick.row in knowledge.records or not self.payable(pick.row):
            return None
        fits = float(knowledge.posterior().risk[pick.row]) <= OOM_LIMIT
        return pick if fits and knowledge.untried()[pick.row] else None

    def _odd(self) -> Pick | None:
        """The layout whose odd run may be repeated."""
        for row, factor in self.knowledge.odd().items():
            if self.payable(row):
                reason = f"again: one run took {factor:.2f} times its prediction"
                return Pick(row=row, reason=reason, repeat=True)
        return None

    def _low_fidelity_pays(self, *, beside: int) -> bool:
        """Whether the most promising candidate should get a low-fidelity evaluation first.

        First means before the leader `beside` is run; enough must be left for that run.
        """
        posterior = self.knowledge.posterior()
        free = self.knowledge.untried()
        free[beside] = False
        rows = posterior.promising(free, 1, risk_limit=OOM_LIMIT)
        if not rows or float(posterior.improvement[rows[0]]) < LEAST_LOW_FIDELITY_GAIN:
            return False
        evaluation = self.choice(rows[0]).evaluation
        after = evaluation.gpu_seconds + self.evaluations.full(beside).gpu_seconds
        return evaluation.name != FULL and after <= self.spent.gpu_seconds_left()

    # ---- at which fidelity ---------------------------------------------------------------------

    def choice(self, row: int, *, itself: bool = False) -> FidelityChoice:
        """The affordable evaluation of this candidate that pays best.

        itself: whether it is a run of the layout in any case.
        """
        full, prospect, payable = self.evaluations.full(row), self._prospect(row), self.payable(row)
        first = payable and not self.knowledge.posterior().measured
        if itself or first or not self.emulable()[row]:
            return direct(prospect, full)
        emulation = self.evaluations.emulation(row)
        return choose_evaluation(prospect, emulation, full if payable else None)

    def payable(self, row: int) -> bool:
        """Whether what is left pays for a run of the layout itself."""
        return bool(self.evaluations.runnable(self.spent.gpu_seconds_left())[row])

    def emulable(self) -> BoolColumn:
        """Candidates that may be emulated now: affordable, and not tried before, (N,)."""
        affordable = self.evaluations.emulable(self.spent.gpu_seconds_left())
        return affordable & ~self.evaluations.emulated & self.spent.low_fidelity_left()

    def _prospect(self, row: int) -> Prospect:
        posterior = self.knowledge.posterior()
        return Prospect(
            gap=float(posterior.log_seconds[row] - posterior.best),
            sd=float(np.sqrt(posterior.time.variance[row])),
            fits=1.0 - float(posterior.risk[row]),
        )

    def micro(self) -> tuple[MicroProbe, str] | None:
        """The micro-probe with the most gain per GPU-second, and why.

        None if the most promising candidate gains more. Both are judged by the knowledge gradient.
        """
        affordable = [
            probe
            for probe in self.settings.micro_probes
            if probe.name not in self.evaluations.timed
            and probe.gpu_seconds <= self.spent.gpu_seconds_left()
        ]
        if not affordable:
            return None
        posterior = self.knowledge.posterior()
        best, rate = most_valuable(affordable, posterior)
        gain = rate * best.gpu_seconds
        if gain < LEAST_MICRO_GAIN:
            return None
        for row in posterior.promising(self.knowledge.untried(), 1, risk_limit=OOM_LIMIT):
            evaluated = self.evaluations.full if self.payable(row) else self.evaluations.emulation
            if evaluation_rate(evaluated(row), row, posterior) >= rate:
                return None
        return best, (
            f"{best.name}: could change the winner, worth {gain:.2%} of a step or more, "
            f"{rate:.2e} a GPU-second"
        )
