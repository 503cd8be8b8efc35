"""Use cases of command line and service: parse a job, plan or price it, store the answer."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from planner.api.calibration.read import learned
from planner.api.identity import TimeOrderedIds, hash_of_job
from planner.api.input.jobs import check_one_size, completed, parse_job
from planner.api.input.text import read_json
from planner.api.jobs.plans import entry_of
from planner.api.own_entries import with_own
from planner.api.storage.records import StoredEstimate
from planner.api.wiring import Question, SystemClock, Wiring
from planner.cost.machine.knobs import Calibration
from planner.errors import PlannerError, SpecError, fault
from planner.estimates import CalibrationOf, Estimator
from planner.export import export
from planner.export.base import Export
from planner.intake.jobs import JobReader
from planner.plan.recommend import recommend
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.plan import Plan
from planner.trainers.registry import TRAINERS
from planner.units import MEGA

Answer: TypeAlias = "Estimate | Refusal"
ValueT = TypeVar("ValueT")

ESTIMATE_PREFIX = "estimate"
MAX_LINE_BYTES = int(10 * MEGA)
FIRST_CHUNK = 64  # jobs answered first


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperQuestion:
    """Everything that a plan without probes depends on.

    values: the job as it was sent. calibration: learned for it; None for the shipped one.
    """

    values: object
    job: Job
    job_hash: str
    calibration: Calibration | None

    @property
    def key(self) -> Question:
        return self.job_hash, "" if self.calibration is None else self.calibration.id


def ask_on_paper(
    wiring: Wiring, values: object, *, allow_files: bool, owner: str = ""
) -> PaperQuestion:
    """Reads a job without probes, and finds the calibration to price it with.

    owner: key whose own measurements count besides the shared ones.

    Raises SpecError; StoreError before any work is done.
    """
    values = with_own(wiring, values)
    job = parse_job(values, allow_files=allow_files)
    if job.probe is not None:
        rule = "a plan on paper has no probes"
        raise fault("probe", "given", rule, "remove it, or ask for a study")
    _ = wiring.store
    return PaperQuestion(
        values=values,
        job=job,
        job_hash=hash_of_job(job.request),
        calibration=learned(wiring, job, owner),
    )


def plan_on_paper(values: object, calibration: Calibration | None) -> Plan:
    """Plans a job from the network in any process, without storing it.

    Raises SpecError, InfeasibleError.
    """
    job, plan_id = parse_job(values, allow_files=False), TimeOrderedIds().new_id("plan")
    return recommend(job, now=SystemClock().now, calibration=calibration, plan_id=plan_id)


def known_plan(wiring: Wiring, question: PaperQuestion) -> Plan | None:
    """Looks up an earlier answer of this process and gives it a new id."""
    known = wiring.answered.get(question.key)
    return None if known is None else renamed(wiring, question, known)


def renamed(wiring: Wiring, question: PaperQuestion, plan: Plan) -> Plan:
    """Copies a plan with a new id, the current time and this request's job."""
    own = {"id": wiring.ids.new_id("plan"), "created_at": wiring.clock.now().isoformat()}
    return plan.model_copy(update={**own, "job": question.job.request})


def answer_on_paper(
    wiring: Wiring, question: PaperQuestion, progress: Callable[[str], None] | None = None
) -> Plan:
    """Plans a job, or returns at once what this process answered before. Raises InfeasibleError."""
    return known_plan(wiring, question) or recommend(
        question.job,
        now=wiring.clock.now,
        progress=progress,
        calibration=question.calibration,
        plan_id=wiring.ids.new_id("plan"),
    )


def keep_plan(wiring: Wiring, question: PaperQuestion, plan: Plan) -> None:
    """Remembers and stores the answer. Raises StoreError."""
    wiring.answered.put(question.key, plan)
    wiring.store.save_plan(plan, question.job)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A malformed element of a batch: its id, where it had one, and why."""

    id: object
    error: PlannerError

    def as_dict(self) -> dict[str, object]:
        """The contract's line for a malformed job."""
        return {"id": self.id, "error": self.error.as_dict()}


def refusal(values: object, error: PlannerError) -> Refusal:
    """A Refusal that echoes the id of the malformed job if it has a usable one."""
    job_id = values.get("id") if isinstance(values, Mapping) else None
    usable = isinstance(job_id, str | int) and not isinstance(job_id, bool)
    return Refusal(job_id if usable else None, error)


def meant(wiring: Wiring, job: object) -> object:
    """A job of a batch with the user's own catalogue entries filled in, or its Refusal.

    Raises StoreError.
    """
    if isinstance(job, Refusal):
        return job
    try:
        return with_own(wiring, job)
    except SpecError as error:
        return refusal(job, error)


def job_lines(lines: Iterable[bytes]) -> Iterator[Any]:
    """The value of every line; a Refusal of one that is no JSON object."""
    for number, line in enumerate(lines, start=1):
        field = f"line {number}"
        try:
            if len(line) > MAX_LINE_BYTES:
                rule = f"is longer than {MAX_LINE_BYTES:,} bytes"
                raise fault(field, None, rule, "write one job a line")
            value = read_json(line, field)
            if not isinstance(value, dict):
                raise fault(field, value, "is no JSON object", "write one job a line")
            yield value
        except SpecError as error:
            yield Refusal(None, error)


def parse_for_estimate(values: object, reader: JobReader) -> Job:
    """A job with a layout. Raises SpecError. reader: of the batch that it belongs to."""
    job = reader.read(completed(values))
    if job.layout is None:
        remedy = "add layout, for example {tp: 8}, or ask for a plan"
        raise fault("layout", None, "is required to estimate", remedy)
    check_one_size(job)
    return job


class Estimates:
    """Prices batches of jobs; models and clusters that jobs share are read and priced once.

    Nothing is stored.
    allow_files: False for jobs that came over a network.
    calibration_of: calibration to price a job with; None for the shipped one.
    """

    def __init__(
        self, *, allow_files: bool, calibration_of: CalibrationOf = lambda _: None
    ) -> None:
        self._reader = JobReader(allow_files=allow_files)
        self._estimator = Estimator(calibration_of)

    def of(self, jobs: Sequence[object]) -> "list[Estimate | Refusal]":
        """One answer an element, in order; a malformed element does not disturb the others."""
        parsed = [self._parsed(values) for values in jobs]
        answers = iter(self._estimator.estimates([job for job in parsed if isinstance(job, Job)]))
        found = [(one, one if isinstance(one, Refusal) else next(answers)) for one in parsed]
        return [
            Refusal(one.id, answer) if isinstance(answer, PlannerError) else answer
            for one, answer in found
        ]

    def _parsed(self, values: object) -> Job | Refusal:
        if isinstance(values, Refusal):
            return values
        try:
            return parse_for_estimate(values, self._reader)
        except PlannerError as error:
            return refusal(values, error)


def growing(values: Iterable[ValueT], most: int) -> Iterator[list[ValueT]]:
    """The values in chunks, each 4 times the one before, so that the first answers come soon."""
    rest, size = iter(values), FIRST_CHUNK
    while chunk := list(islice(rest, size)):
        yield chunk
        size = min(4 * size, most)


def keep_estimates(
    wiring: Wiring, jobs: Sequence[object], answers: Sequence[Answer]
) -> list[StoredEstimate | Refusal]:
    """The answers to these jobs, each well-formed one stored and named. Raises StoreError.

    The estimate of a job without an id gets the id under which it is kept.
    """
    kept: list[StoredEstimate | Refusal] = []
    for job, answer in zip(jobs, answers, strict=True):
        if isinstance(answer, Refusal):
            kept.append(answer)
            continue
        name, request = wiring.ids.new_id(ESTIMATE_PREFIX), job if isinstance(job, dict) else {}
        named = answer.model_copy(update={"id": name if answer.id is None else answer.id})
        at = wiring.clock.now()
        kept.append(StoredEstimate(id=name, created_at=at, job=request, estimate=named))
    wiring.store.save_estimates([entry for entry in kept if isinstance(entry, StoredEstimate)])
    return kept


def line_of(answer: Answer) -> str:
    """One line of JSON: the estimate, or the error object of a malformed job."""
    if isinstance(answer, Refusal):
        return json.dumps(answer.as_dict(), default=str)
    return answer.model_dump_json()


def export_rank(plan: Plan, rank: int, *, to: str | None, version: str | None) -> Export:
    """Files and launch command of one ranked layout of a stored plan.

    to: format to write; None for the format of the plan's trainer.

    Raises SpecError for an unknown rank or format, and, with every reason, for a layout that the
    trainer cannot run.
    """
    entry = entry_of(plan, rank)
    job = parse_job(plan.job, allow_files=True)
    chosen = to or TRAINERS[job.training.trainer].export_format
    cluster = job.cluster.with_num_gpus(entry.num_gpus)
    made = export(entry.layout, job.model, cluster, job.training, to=chosen, version=version)
    return made.require_runnable()
