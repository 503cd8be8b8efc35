"""Runs TorchTitan as a probe's program: turns a task into files and a command.

The planner's own export writes the layout. A probe adds its number of steps, a log line for each,
and its own data. With `emulate_rank` one process is a rank of the whole world over torch's fake
process group (TorchTitan's `comm.mode fake_backend`).
This module imports neither torch nor torchtitan: versions come from package metadata, numbers from
the log and the event files.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from planner.errors import ProbeError
from planner.export import export
from planner.export.base import Export
from planner.probes.evidence import Evidence
from planner.probes.packages import versions_in
from planner.probes.programs import Program, allocator_settings
from planner.probes.protocol import Environment, Failed, FailureKind, Outcome, ProbeTask, found_by
from planner.probes.trainers.titan_data import ASSETS, DATA, MIN_VOCAB, data_files
from planner.probes.trainers.titan_log import read_log
from planner.probes.trainers.titan_outcome import TitanProbe, read_outcome
from planner.probes.trainers.titan_versions import clash, line
from planner.specs.job import Job
from planner.specs.layout import Layout

OUTPUTS = "outputs"
# text for every data-parallel rank before it repeats; at least one sample
DOCUMENT_TOKENS = 32768
SUBCOMMAND = "activation-checkpoint:"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": f"{OUTPUTS}/huggingface",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanTrainer:
    """Trains with an installed TorchTitan. python: its interpreter."""

    times_kernels: ClassVar[bool] = False

    python: str = sys.executable

    @classmethod
    def of(cls, *, python: str, worker: str) -> Self:
        """The TorchTitan of this interpreter; `worker` is not used."""
        return cls(python=python)

    @property
    def imports(self) -> str:
        """Torch. TorchTitan itself is checked by its version (`unsuited`)."""
        return "torch"

    def refusal(self, job: Job, layout: Layout, device: str) -> str | None:
        """None: the export reports what TorchTitan cannot run, when a task is made."""
        return None

    def outcome(
        self, task: ProbeTask, folder: Path, evidence: Evidence
    ) -> tuple[Outcome, Environment] | None:
        """Outcome and environment from TorchTitan's log.

        The log names errors better than the error files do, but for those of a node itself.
        """
        own = replace(evidence, errors=tuple(one for one in evidence.errors if one.kind))
        environment = self.environment(evidence.log, found_by(folder))
        return self.read(task, evidence.log, folder, own), environment

    def versions(self) -> dict[str, str]:
        """Versions of the installed packages; none where the interpreter does not answer."""
        try:
            return versions_in(self.python)
        except ProbeError:
            return {}

    def unsuited(self, job: Job, device: str) -> Failed | None:
        """Why no probe of this job can run here, whatever its layout.

        Names what is missing, or what TorchTitan cannot do.
        """
        wrong = clash(self.versions())
        if wrong is not None:
            return _refusal(FailureKind.IMPORT, wrong)
        return _unsuited_job(job, on_gpus=device == "cuda")

    def program(self, task: ProbeTask) -> Program | Failed:
        """TorchTitan's training of a task; a failure if it cannot run the layout.

        Also a failure if TorchTitan is missing or of another release line. Raises SpecError.
        """
        job = task.parsed()
        versions = self.versions()
        if (refused := _unsuited(task, job, versions)) is not None:
            return refused
        assert job.layout is not None
        exported = _export(job, job.layout, versions["torchtitan"])
        if exported.blockers:
            lines = "; ".join(str(fault) for fault in exported.blockers)
            return _refusal(
                FailureKind.INVALID_LAYOUT,
                f"torchtitan {exported.version} cannot run this layout: {lines}",
            )
        return _program(task, job, exported)

    def read(
        self,
        task: ProbeTask,
        log_text: str,
        folder: Path | None = None,
        evidence: Evidence | None = None,
    ) -> Outcome:
        """Reads the outcome of a run from its log, and from the event files in its folder.

        evidence: how it ended (time limit, signals, kernel log), if the launcher knows; without it,
            a normal exit is assumed.
        """
        job = task.parsed()
        assert job.layout is not None, "a probe's job has a layout"
        asked = TitanProbe(task=task, job=job, layout=job.layout)
        left = evidence or Evidence(
            reason="exit", exit_code=None, time_limit_seconds=task.time_limit_seconds
        )
        return read_outcome(
            asked, replace(left, log=log_text), None if folder is None else folder / OUTPUTS
        )

    def environment(self, log_text: str, found: Environment) -> Environment:
        """The environment of the numbers: what the interpreter found, and what the log shows."""
        log = read_log(log_text)
        trainer = log.version or found.trainer_version
        return found.model_copy(update={"trainer_version": trainer, "gpu_name": log.gpu_name})


def _refusal(kind: FailureKind, message: str) -> Failed:
    return Failed(kind=kind, rank=None, message=message)


def _unsuited(task: ProbeTask, job: Job, versions: Mapping[str, str]) -> Failed | None:
    """Why this TorchTitan cannot run this task at all, in one line; None if it may."""
    wrong = clash(versions, emulate=task.emulate_rank is not None)
    if wrong is not None:
        return _refusal(FailureKind.IMPORT, wrong)
    refused = _unsuited_job(job, on_gpus=task.device == "cuda" and not task.fake_tensors)
    if refused is not None:
        return refused
    if job.layout is None:
        return _refusal(FailureKind.INVALID_LAYOUT, "a probe needs a layout; add layout to the job")
    if job.layout.pp > 1 and task.emulate_rank is not None:
        text = (
            "torchtitan's fake_backend cannot emulate a pipeline stage: stages tell each other "
            "their shapes; use --trainer reference"
        )
        return _refusal(FailureKind.INVALID_LAYOUT, text)
    return None


def _unsuited_job(job: Job, *, on_gpus: bool) -> Failed | None:
    """A failure if this TorchTitan cannot run the job with any layout."""
    if not on_gpus:
        text = "torchtitan trains on GPUs alone; use --trainer reference for a CPU or fake tensors"
    elif job.model.vocab_size < MIN_VOCAB:
        text = (
            f"vocab_size {job.model.vocab_size} is below the {MIN_VOCAB} words of a probe's text; "
            "use --trainer reference"
        )
    else:
        return None
    return _refusal(FailureKind.INVALID_LAYOUT, text)


def _export(job: Job, layout: Layout, version: str) -> Export:
    """The layout for the installed version, without checkpoints."""
    training = job.training.model_copy(update={"checkpoint": None})
    return export(layout, job.model, job.cluster, training, version=line(version))


def _program(task: ProbeTask, job: Job, exported: Export) -> Program:
    assert job.layout is not None
    emulated = task.emulate_rank is not None
    files = {name: text for name, text in exported.files.items() if name.endswith((".toml", ".py"))}
    documents = job.layout.dp_degree * max(1, DOCUMENT_TOKENS // job.training.seq_len)
    files |= data_files(job.training.seq_len, documents, task.seed)
    expandable = job.training.expandable_segments is not False
    env = {**OFFLINE, "PYTHONUNBUFFERED": "1", **allocator_settings(expandable, os.environ)}
    flags = _flags(task, job, exported.version)
    cut = next(
        (index for index, item in enumerate(exported.arguments) if item.startswith(SUBCOMMAND)),
        len(exported.arguments),
    )
    arguments = (*exported.arguments[:cut], *flags, *exported.arguments[cut:])
    if emulated:
        world = str(job.layout.num_gpus)
        # 0.2 always runs rank 0; without a pipeline, rank 0 does and holds the same as
        # every other rank.
        env |= {"NGPU": world, "WORLD_SIZE": world, "LOCAL_RANK": "0"}
        env["RANK"] = str(task.emulate_rank)
    return Program(
        target="torchtitan.train", arguments=arguments, single=emulated, files=files, env=env
    )


def _flags(task: ProbeTask, job: Job, version: str) -> tuple[str, ...]:
    """The flags that a probe adds: its steps, a log line and an event for each, its own data, and
    tokens dealt evenly to experts.
    """
    common = (
        f"--training.steps {task.warmup_steps + task.steps} --metrics.log_freq 1 "
        "--metrics.enable_tensorboard --metrics.save_for_all_ranks "
        "--metrics.disable_color_printing"
    )
    places = (
        f"--job.dump_folder {OUTPUTS} --model.hf_assets_path {ASSETS} "
        f"--training.dataset c4_test --training.dataset_path {DATA}"
        if version.startswith("0.2")
        else f"--dump_folder {OUTPUTS} --hf_assets_path {ASSETS} "
        f"--dataloader.dataset c4_test --dataloader.dataset_path {DATA}"
    )
    fake = "--comm.mode fake_backend" if task.emulate_rank is not None else ""
    dealt = job.model.is_moe and task.routing == "balanced"
    even = "--debug.moe_force_load_balance" if dealt else ""
    return tuple(f"{common} {places} {fake} {even}".split())
