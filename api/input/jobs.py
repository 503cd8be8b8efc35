"""Jobs as both edges read them: a trainer's own text in `current` is read first."""

from collections.abc import Mapping

from planner.errors import fault
from planner.intake.current import complete
from planner.intake.jobs import JobReader
from planner.specs.job import Job


def parse_job(values: object, *, allow_files: bool) -> Job:
    """The job that a person or a program wrote. allow_files: False for what came over a network.
    Raises SpecError.
    """
    return JobReader(allow_files=allow_files).read(completed(values))


def completed(values: object) -> object:
    """A job whose `current` is a trainer's text, with what that text says filled in.

    Every other job as it is. Raises SpecError.
    """
    if not isinstance(values, Mapping) or values.get("current") is None:
        return values
    return complete(values)


def check_one_size(job: Job) -> None:
    """Raises SpecError for a job whose number of GPUs is open.

    A layout is priced on one size; plans choose among several.
    """
    sizes = job.cluster.num_gpus_choices
    if len(sizes) > 1:
        asked, rule = (
            job.request["cluster"]["num_gpus"],
            "is several sizes, a layout is priced on one",
        )
        remedy = f"choose one of {', '.join(map(str, sizes))}, or ask for a plan"
        raise fault("cluster.num_gpus", asked, rule, remedy)
