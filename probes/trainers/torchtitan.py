"""Runs TorchTitan as a probe's program: turns a task into files and a command.

The planner's own export writes the layout. A probe adds its number of steps, a log line for each,
and its own data. With `emulate_rank` one process is a rank of the whole world over torch's fake
process group (TorchTitan's `comm.mode fake_backend`).
This module imports neither torch nor torchtitan: versions come from package metadata, numbers from
the log and the event files.
"""

import json
import os
import random
import re
import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from planner.errors import ProbeError
from planner.export import export
from planner.export.base import Export
from planner.export.torchtitan import WRITTEN
from planner.probes.evidence import Evidence
from planner.probes.packages import allocator_settings, versions_in
from planner.probes.protocol import Environment, Failed, FailureKind, Outcome, ProbeTask, found_by
from planner.probes.trainers import ProbeTrainer, Program
from planner.probes.trainers.titan_log import read_log
from planner.probes.trainers.titan_outcome import read_outcome
from planner.specs.job import Job

SUGGESTED = "0.2.2"
# first torch release with everything that a TorchTitan release line imports (torchtitan 0.3.0 calls
# torch.distributed.set_timeout, which 2.13 lacks)
NEEDS_TORCH = {"0.3": (2, 14)}
PACKAGES = ("torchtitan", "torch", "triton", "tensorboard", "datasets", "tokenizers", "tyro")
OUTPUTS, ASSETS, DATA = "outputs", "assets", "data"
WORDS, END = string.ascii_letters + string.digits, "<end>"
MIN_VOCAB = len(WORDS) + 1
# text for every data-parallel rank before it repeats; at least one sample
DOCUMENT_TOKENS = 32768
SUBCOMMAND = "activation-checkpoint:"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": f"{OUTPUTS}/huggingface",
    "TOKENIZERS_PARALLELISM": "false",
}


class TitanTrainer(ProbeTrainer):
    """Trains with an installed TorchTitan, which is checked by its version (`unsuited`).

    The export reports what it cannot run, when a task is made.
    """

    def outcome(
        self, task: ProbeTask, folder: Path, evidence: Evidence
    ) -> tuple[Outcome, Environment] | None:
        """Outcome and environment from the log, which names errors better than ranks' files."""
        own = replace(evidence, errors=tuple(one for one in evidence.errors if one.kind))
        environment = self.environment(evidence.log, found_by(folder))
        return read_outcome(task, own, folder / OUTPUTS), environment

    def versions(self) -> dict[str, str]:
        """Versions of the installed packages; none where the interpreter does not answer."""
        try:
            return versions_in(self.python)
        except ProbeError:
            return {}

    def unsuited(self, job: Job, device: str) -> Failed | None:
        """Packages that are missing here, or work that TorchTitan cannot do."""
        return _unsuited(job, self.versions(), on_gpus=device == "cuda")

    def program(self, task: ProbeTask) -> Program | Failed:
        """TorchTitan's training of a task; a failure if it cannot run it, or is not installed."""
        job, versions = task.parsed(), self.versions()
        on_gpus, emulated = task.device == "cuda" and not task.fake_tensors, task.emulate_rank
        refused = _unsuited(job, versions, on_gpus=on_gpus, emulated=emulated is not None)
        if refused is not None:
            return refused
        if job.layout is None:
            message = "a probe needs a layout; add layout to the job"
            return Failed(kind=FailureKind.INVALID_LAYOUT, message=message)
        training = job.training.model_copy(update={"checkpoint": None})
        version = line(versions["torchtitan"])
        exported = export(job.layout, job.model, job.cluster, training, version=version)
        if exported.blockers:
            lines = "; ".join(str(fault) for fault in exported.blockers)
            text = f"torchtitan {exported.version} cannot run this layout: {lines}"
            return Failed(kind=FailureKind.INVALID_LAYOUT, message=text)
        return _program(task, job, exported)

    def environment(self, log_text: str, found: Environment) -> Environment:
        """The environment of the numbers: what the interpreter found, and what the log shows."""
        log = read_log(log_text)
        trainer = log.version or found.trainer_version
        return found.model_copy(update={"trainer_version": trainer, "gpu_name": log.gpu_name})


def _unsuited(
    job: Job, versions: Mapping[str, str], *, on_gpus: bool, emulated: bool = False
) -> Failed | None:
    """A failure if this TorchTitan cannot run the job at all, or not as one emulated rank."""
    wrong = clash(versions, emulate=emulated)
    if wrong is not None:
        return Failed(kind=FailureKind.IMPORT, message=wrong)
    if not on_gpus:
        text = "torchtitan trains on GPUs alone; use --trainer reference for a CPU or fake tensors"
    elif job.model.vocab_size < MIN_VOCAB:
        text = (
            f"vocab_size {job.model.vocab_size} is below the {MIN_VOCAB} words of a probe's text; "
            "use --trainer reference"
        )
    elif emulated and job.layout is not None and job.layout.pp > 1:
        text = (
            "torchtitan's fake_backend cannot emulate a pipeline stage: stages tell each other "
            "their shapes; use --trainer reference"
        )
    else:
        return None
    return Failed(kind=FailureKind.INVALID_LAYOUT, message=text)


def _program(task: ProbeTask, job: Job, exported: Export) -> Program:
    assert job.layout is not None
    emulated = task.emulate_rank is not None
    files = {name: text for name, text in exported.files.items() if name.endswith((".toml", ".py"))}
    documents = job.layout.dp_degree * max(1, DOCUMENT_TOKENS // job.training.seq_len)
    files |= data_files(job.training.seq_len, documents, task.seed)
    expandable = job.training.expandable_segments is not False
    env = {**OFFLINE, "PYTHONUNBUFFERED": "1", **allocator_settings(expandable, os.environ)}
    flags = _flags(task, job, exported.version)
    given = exported.arguments
    subcommands = (index for index, item in enumerate(given) if item.startswith(SUBCOMMAND))
    cut = next(subcommands, len(given))
    arguments = (*given[:cut], *flags, *given[cut:])
    if emulated:
        world, rank = str(job.layout.num_gpus), str(task.emulate_rank)
        # 0.2 always runs rank 0; without a pipeline, rank 0 does and holds the same as
        # every other rank.
        env |= {"NGPU": world, "WORLD_SIZE": world, "LOCAL_RANK": "0", "RANK": rank}
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


def clash(versions: Mapping[str, str], *, emulate: bool = False) -> str | None:
    """Packages that are missing or have a wrong version, and the command that fixes it."""
    titan, torch = versions.get("torchtitan"), versions.get("torch", "")
    other = f"pip install torchtitan=={SUGGESTED}"
    if titan is None:
        return f"torchtitan is not installed; {other}, or use --trainer reference"
    if line(titan) is None:
        known = ", ".join(WRITTEN)
        return f"torchtitan {titan} is installed and the planner writes for {known}; {other}"
    missing = [name for name in PACKAGES if name not in versions]
    if missing:
        return f"torchtitan {titan} needs {', '.join(missing)}; pip install {' '.join(missing)}"
    needed = NEEDS_TORCH.get(_line(titan))
    if needed is not None and tuple(map(int, re.findall(r"\d+", torch)[:2])) < needed:
        wanted = ".".join(str(part) for part in needed)
        return (
            f"torchtitan {titan} needs torch {wanted} or a nightly of it, not {torch}; or {other}"
        )
    if emulate and titan.startswith("0.2.0"):
        return f"torchtitan {titan} has no fake_backend mode to emulate a rank; {other}"
    return None


def _line(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def line(version: str) -> str | None:
    """The version whose export serves an installed one: itself or its line; None if none does."""
    short = _line(version)
    lines = {_line(written) for written in WRITTEN}
    return version if version in WRITTEN else short if short in lines else None


def data_files(seq_len: int, documents: int, seed: int) -> dict[str, str]:
    """Files of a tokenizer and of documents, so that a probe downloads nothing.

    A document is one training sample, `seq_len` words and an end mark, so that no attention mask
    cuts a sequence in two. Each data-parallel rank needs one.
    Sources: torchtitan 0.2.2 and 0.3.0 hf_datasets/text_datasets.py (data set `c4_test`: a folder
    that `datasets` reads), components/tokenizer.py (tokenizer.json, tokenizer_config.json).
    """
    return {
        f"{ASSETS}/tokenizer.json": json.dumps(_tokenizer()),
        f"{ASSETS}/tokenizer_config.json": json.dumps(
            {"eos_token": END, "add_bos_token": False, "add_eos_token": True}
        ),
        f"{DATA}/train.jsonl": "".join(_documents(seq_len, documents, random.Random(seed))),
    }


def _tokenizer() -> dict[str, object]:
    vocabulary = {word: index for index, word in enumerate([*WORDS, END])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": WORDS[0]},
    }


def _documents(seq_len: int, documents: int, source: random.Random) -> list[str]:
    """Lines of {"text": words}, rotations of one random text: many long ones are cheap to write."""
    base = "".join(source.choices(WORDS, k=seq_len))
    turns = [source.randrange(seq_len) for _ in range(documents)]
    return [json.dumps({"text": " ".join(base[turn:] + base[:turn])}) + "\n" for turn in turns]
