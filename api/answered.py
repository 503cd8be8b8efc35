"""Plans on paper that this process made, so that the same question is answered at once."""

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.specs.plan import Plan

MOST_PLANS = 64

Question = tuple[str, str]  # hash of the job, id of the calibration


class Answered:
    """The newest MOST_PLANS plans by what they answer; many threads may ask.

    A plan on paper depends on the job and the calibration alone.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[Question, Plan] = OrderedDict()
        self._lock = Lock()

    def again(self, question: Question) -> "Plan | None":
        """The plan that answered this question before, under its old id; None if not known."""
        with self._lock:
            if question in self._plans:
                self._plans.move_to_end(question)
            return self._plans.get(question)

    def keep(self, question: Question, plan: "Plan") -> None:
        """Keeps a plan, and forgets the one that was not asked for longest."""
        with self._lock:
            self._plans[question] = plan
            while len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
