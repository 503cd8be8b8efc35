"""The use case of `simulate`: one layout's pipeline, simulated action by action.

It gives each rank's memory and torch's schedule CSV.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.charts.chart import Chart
from planner.charts.timeline import Span
from planner.charts.timeline import timeline as drawn
from planner.columns import LayoutBatch
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.price import Pricer
from planner.cost.refine import play
from planner.errors import Fault, SpecError, fault
from planner.estimates import estimate_layouts
from planner.export.trace import MICROSECONDS_PER_SECOND, chrome_trace
from planner.schedules import SCHEDULES, to_csv
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.units import counted, format_seconds

MOST_ACTIONS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """One simulated step.

    The estimate, the Chrome trace (Perfetto opens it) and the compute-only CSV that torch loads.
    makespan_seconds: from the first rank's start to the last rank's end.
    pipeline_seconds: the pipeline's share of a step, as the estimate counts it: the makespan, or
        the longest rank's span where ranks go on to the next step without waiting for each other
        (`Schedule.synchronous_end`).
    bubble_share: idle share of it by rank.
    """

    estimate: Estimate
    trace: dict[str, Any]
    csv: str
    bubble_share: tuple[float, ...]
    makespan_seconds: float
    pipeline_seconds: float

    def spans(self) -> list[Span]:
        return [
            Span(
                rank=event["tid"],
                action=event["name"],
                kind=event["cat"],
                stage=event["args"]["stage"],
                microbatch=event["args"]["microbatch"],
                start_seconds=event["ts"] / MICROSECONDS_PER_SECOND,
                end_seconds=(event["ts"] + event["dur"]) / MICROSECONDS_PER_SECOND,
            )
            for event in self.trace["traceEvents"]
            if event["ph"] == "X"
        ]

    def plot(self) -> Chart:
        """Which rank does what when."""
        idle = max(self.bubble_share)
        whole = format_seconds(self.makespan_seconds)
        subtitle = f"{whole}, the idlest rank waits {idle:.1%} of it"
        return Chart(drawn(self.spans(), title="One step of the pipeline", subtitle=subtitle))


def timeline(job: Job) -> PipelineTimeline:
    """Simulates one step of the job's layout.

    Raises SpecError without a legal layout with pp > 1, or for a step too long to draw.
    """
    if job.layout is None or job.layout.pp == 1:
        pp, remedy = None if job.layout is None else 1, "give a layout with pp of 2 or more"
        raise fault("layout.pp", pp, "a timeline needs a pipeline", remedy)
    pricer = Pricer.build(job.model, job.cluster, job.training)
    (estimate,) = estimate_layouts(pricer, [job.layout], [job.id])
    if not estimate.valid:
        raise SpecError(
            [Fault(f"layout.{v.field}", v.value, v.rule, v.remedy) for v in estimate.violations]
        )
    batch = LayoutBatch.from_layouts([job.layout])
    count = int(num_microbatches(batch, job.training)[0])
    if 3 * count * job.layout.pp * job.layout.virtual_stages > MOST_ACTIONS:
        rule = f"makes {counted(count, 'microbatch')}, too many to draw"
        remedy = "use a smaller batch for the drawing; the pattern repeats"
        batch_size = job.training.global_batch_size
        raise fault("training.global_batch_size", batch_size, rule, remedy)
    simulation = play(
        pricer, batch, pricer.price(batch, every_rank=True), np.zeros(1, dtype=np.int64)
    )
    schedule = SCHEDULES[job.layout.pp_schedule]
    joined = schedule.synchronous_end
    pipeline = float(simulation.step_seconds_C(joined)[0])
    return PipelineTimeline(
        estimate=estimate,
        trace=chrome_trace(simulation),
        csv=to_csv(schedule.actions(job.layout.pp, job.layout.virtual_stages, count)),
        bubble_share=tuple(simulation.bubble_seconds_CR(joined)[0] / pipeline),
        makespan_seconds=float(simulation.makespan_seconds_C[0]),
        pipeline_seconds=pipeline,
    )
