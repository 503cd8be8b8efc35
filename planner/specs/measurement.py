"""A measurement: the results of one run of one layout.

Rows of `benchmarks/measured/` and results of probes are this object.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.specs.job import Job
from planner.specs.mixers import OF_WINDOWED_MLA
from planner.specs.network import NETWORK_FIELDS
from planner.specs.validation import Value

# Fields that came later: at their default they do not change a hash, so that what was stored before
# is still found.
ADDED_LATER: Mapping[str, object] = {
    **dict.fromkeys((
        "o_groups", "o_lora_rank", "compress_rate_csa", "compress_rate_hca", "num_hash_layers",
        "hidden_size_per_layer_input", "vocab_size_per_layer_input", "hc_mult", "zero_expert_num",
        "mamba_dt_rank", "gated_norm_rank", "sliding_v_head_dim", *OF_WINDOWED_MLA,
    ), 0),
    **dict.fromkeys(
        ("use_double_wide_mlp", "moe_shortcut", "qk_clip", "fused_query_gate", "k_rope_norm"), False
    ),
    "hc_sinkhorn_iters": 20,
    **dict.fromkeys(("cuda_graphs", "chunked_loss", "fused_cross_entropy", "muon_tp_mode"), None),
    "moe_capacity_factor": None,
    "moe_dispatcher": "alltoall",
    "optimizer_offload_fraction": 1.0,
    "activation_offload_layers": 0,
}  # fmt: skip
Status = Literal["ok", "oom", "failed"]
Rung = Literal["emulated", "imitated", "probed", "published"]
# Runs of the layout itself, from which a calibration learns. An emulated rank's communication comes
# from the model, and so does what a proxy run adds to its small runs, which are measurements too.
TEACHING: frozenset[Rung] = frozenset({"probed", "published"})
MACHINE = "machine"  # a crash, or a wait, for which the machine is to blame
# Failures that say nothing of the layout.
BLAMELESS = frozenset({
    MACHINE, "allocation-ended", "backend", "foreign", "launch-failure", "lost-gpu", "lost-node",
    "port-in-use", "preempted", "requeued",
})  # fmt: skip
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Measured(Value, extra="allow"):
    """The numbers of one run; None where it did not report them.

    Keys are those of a row's `measured`; unknown keys of a row are retained.
    step_seconds: median of the timed steps.
    step_seconds_sd: their standard deviation.
    steps: how many steps were timed.
    peak_*_bytes: of the worst rank.
    device_bytes: memory in use on the device.
    allocator_retries: how often the allocator emptied its cache while steps were timed.
    throttled: whether heat or a fault held the GPU's clock down while steps were timed.
    shared: whether other programs held memory of its GPUs, as the operator tolerates.
    intruded: whether another program began to compute on its GPU while steps were timed.
    rung: `emulated`: one rank of a larger world, without communication; `imitated`: extrapolated
        from fewer layers or replicas; `probed`: the layout itself; `published`: somebody else's
        run.
    failure: class of what went wrong (`planner.probes.protocol.FailureKind`, or `MACHINE`);
        `message` has its root cause.
    hosts: names of the hosts that it ran on.
    trainer: the program that ran (`job.PROBE_TRAINERS`); None where nobody says.
    """

    status: Status = "ok"
    rung: Rung = "published"
    step_seconds: Amount | None = None
    step_seconds_sd: Amount | None = None
    steps: int | None = None
    tokens_per_second_per_gpu: Amount | None = None
    peak_allocated_bytes: Amount | None = None
    peak_reserved_bytes: Amount | None = None
    device_bytes: Amount | None = None
    allocator_retries: int | None = None
    throttled: bool | None = None
    shared: bool | None = None
    intruded: bool | None = None
    failure: str | None = None
    message: str | None = None
    gpu_seconds: Amount | None = None
    hosts: list[str] | None = None
    trainer: str | None = None

    @property
    def disturbed(self) -> str | None:
        """Reason for a slow run that lies outside its layout; such a run teaches nothing."""
        if self.throttled:
            return "heat or a fault held the GPU's clock down"
        if self.intruded:
            return "another program began to compute on its GPU while steps were timed"
        if self.allocator_retries:
            return f"the allocator emptied its cache {self.allocator_retries} times between steps"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementKey:
    """Key by which a measurement is found.

    job_hash: of the question (`question_hash`).
    layout_hash: of the layout that ran.
    software_hash: of the versions that it ran under.
    """

    job_hash: str
    model: str
    gpu: str
    num_gpus: int
    layout_hash: str
    software_hash: str


def question_hash(job: Job, num_gpus: int | None = None) -> str:
    """SHA-256 of model, cluster and training after parsing.

    A name, its alias and its shapes give the same hash. Layout, search and probe do not count: they
    are answers and effort. Nor do the model's `network.Network` fields, which change neither time
    nor memory.
    num_gpus: one size of a job that leaves its size open.
    """
    cluster = job.cluster if num_gpus is None else job.cluster.with_num_gpus(num_gpus)
    machines = cluster.model_dump(mode="json", exclude={"request", "num_gpus_choices"})
    del machines["gpu"]["gpus_per_host"]  # the size of a node says it
    model = {**job.model.model_dump(mode="json", exclude=set(NETWORK_FIELDS)), "name": ""}
    asked = {"model": model, "cluster": machines, "training": job.training.model_dump(mode="json")}
    return _hash(_asked(asked))


def _asked(found: Mapping[str, object]) -> dict[str, object]:
    """Without fields that came later and are at their default."""
    return {
        name: _asked(value) if isinstance(value, Mapping) else value
        for name, value in found.items()
        if name not in ADDED_LATER or value != ADDED_LATER[name]
    }


def software_hash(software: Mapping[str, str]) -> str:
    """SHA-256 of the versions that a run ran under."""
    return _hash(dict(software))


def _hash(value: object) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


class Measurement(Value):
    """A job with the layout that ran, and its result.

    software: versions and device that the result holds for (torch, cuda, nccl, driver, gpu_name,
        trainer version).
    created_at: ISO 8601, UTC.
    source: where it comes from (a probe's id, a file, a publication).
    asked_by: who stored it, or asked for the probe. shared: whether it counts for others.
    refused: why its numbers are not believed; it is kept and shown, and counts for nothing.
    confirmed: who vouches for numbers that are far from their prediction.
    """

    id: str
    created_at: str
    job: Job
    measured: Measured
    software: Mapping[str, str] = {}
    source: str = ""
    asked_by: str | None = None
    shared: bool = True
    refused: str | None = None
    confirmed: str | None = None

    @property
    def step_seconds(self) -> float | None:
        """Step seconds, measured or from the measured tokens a second."""
        rate = self.measured.tokens_per_second_per_gpu
        if self.measured.step_seconds or not rate:
            return self.measured.step_seconds or None
        training = self.job.training
        return training.global_batch_size * training.seq_len / rate / self.job.cluster.num_gpus

    def as_row(self) -> dict[str, Any]:
        """The row that `planner.intake.measurements.read_measurement` reads back to the same."""
        row = {
            key: value
            for key, value in self.job.request.items()
            if key not in ("search", "probe", "measured", "source")
        }
        numbers = self.measured.model_dump(mode="json", exclude_none=True)
        return {
            **row,
            "source": self.source,
            "measured": {**numbers, "software": dict(self.software)},
        }

    def key(self) -> MeasurementKey:
        layout = self.job.layout
        return MeasurementKey(
            job_hash=question_hash(self.job),
            model=self.job.model.name,
            gpu=self.job.cluster.gpu.name,
            num_gpus=self.job.cluster.num_gpus,
            layout_hash=_hash(None if layout is None else _asked(layout.model_dump(mode="json"))),
            software_hash=software_hash(self.software),
        )
