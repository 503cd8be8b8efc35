"""What a stored study says about itself, without the programs that run it."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.queues import TaskRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a study is about, for a line about it."""

    model: str
    gpu: str
    num_gpus: int


def named_in(study: TaskRecord) -> Named:
    """What its job names; of a job that no longer parses (another version stored it, a model is
    gone) what was typed, as far as it goes.
    """
    try:
        job = read_job(study.request, allow_files=False)
    except SpecError:
        model, cluster = study.request.get("model"), study.request.get("cluster")
        of_model, of_cluster = (
            each if isinstance(each, Mapping) else {"name": each, "gpu": each}
            for each in (model, cluster)
        )
        sizes = of_cluster.get("num_gpus")
        whole = [
            size
            for size in (sizes if isinstance(sizes, list) else [sizes])
            if isinstance(size, int)
        ]
        return Named(
            model=_word(of_model.get("name")),
            gpu=_word(of_cluster.get("gpu")),
            num_gpus=max(whole, default=0),
        )
    return Named(model=job.model.name, gpu=job.cluster.gpu.name, num_gpus=job.cluster.num_gpus)


def _word(value: object) -> str:
    """A name as it was typed, or that of a thing written out."""
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else "unknown"
