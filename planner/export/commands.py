"""Starts the trainer: one torchrun line, launch.sh for a node, slurm.sbatch for several nodes."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.export.base import Draft
from planner.units import counted

RENDEZVOUS_PORT = 29500
EXPANDABLE: Mapping[str, str] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def allocator(draft: Draft) -> Mapping[str, str]:
    """Variables of torch's allocator that the job asks for."""
    return EXPANDABLE if draft.training.expandable_segments else {}


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a draft's layout.

    program: what torchrun starts.
    arguments: the trainer's settings.
    subcommand: arguments that must come last, after anything the user appends.
    environment: variables of every process; the allocator's unless given.
    root_variable: environment variable for the folder of the program, where that is in a checkout
        of the trainer and not in an installed package. Unset, it means the current folder.
    """

    draft: Draft
    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    subcommand: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    root_variable: str = ""

    @property
    def variables(self) -> Mapping[str, str]:
        return allocator(self.draft) if self.environment is None else self.environment

    @property
    def own_modules(self) -> bool:
        """Whether the folder holds Python modules of ours, besides the program."""
        return any(name.endswith(".py") for name in {*self.draft.files}.difference(self.program))

    @property
    def processes_per_node(self) -> int:
        return min(self.draft.layout.num_gpus, self.draft.cluster.gpus_per_node)

    @property
    def num_nodes(self) -> int:
        return -(-self.draft.layout.num_gpus // self.processes_per_node)

    def command(self) -> tuple[str, ...]:
        """The command to paste in the export's folder.

        On one node torchrun or launch.sh, on several sbatch.
        """
        if self.num_nodes > 1:
            return ("sbatch", "slurm.sbatch")
        if self.root_variable:
            return ("bash", "launch.sh")
        variables = [f"{name}={value}" for name, value in self.variables.items()] + [
            "PYTHONPATH=."
        ] * self.own_modules
        prefix = ["env", *variables] if variables else []
        torchrun = ["torchrun", "--standalone", f"--nproc_per_node={self.processes_per_node}"]
        return (*prefix, *torchrun, *self.program, *self.arguments, *self.subcommand)

    def files(self) -> dict[str, str]:
        """launch.sh, and slurm.sbatch where there are several nodes."""
        scripts = {"launch.sh": self._launch_script()}
        if self.num_nodes > 1:
            scripts["slurm.sbatch"] = self._slurm_script()
        return scripts

    def _rendezvous(self) -> str:
        if self.num_nodes == 1:
            return f"torchrun --standalone --nproc_per_node={self.processes_per_node}"
        where = (
            f'--rdzv_backend=c10d --rdzv_id="${{SLURM_JOB_ID:-{self.draft.name}}}" '
            f'--rdzv_endpoint="$HEAD_NODE:{RENDEZVOUS_PORT}"'
        )
        return (
            f"torchrun --nnodes={self.num_nodes} --nproc_per_node={self.processes_per_node} {where}"
        )

    def _launch_script(self) -> str:
        head = (
            ': "${HEAD_NODE:?set HEAD_NODE to the first host, then run this script on each host}"'
        )
        lines = [
            "#!/usr/bin/env bash",
            f"# {self.draft.name} on {counted(self.draft.layout.num_gpus, 'GPU')} "
            f"({self.num_nodes} x {self.processes_per_node}). Further flags may be appended.",
            "set -euo pipefail",
            *self._place(),
            *([head] if self.num_nodes > 1 else []),
            *(f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()),
            *(['export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"'] if self.own_modules else []),
            "",
            f"exec {self._rendezvous()} \\",
            f"  {self._program()} \\",
            *(f"  {shlex.join(group)} \\" for group in flag_groups(self.arguments)),
            f'  "$@"{" " + shlex.join(self.subcommand) if self.subcommand else ""}',
        ]
        return "\n".join(lines) + "\n"

    def _place(self) -> list[str]:
        """Lines that change to the export's folder, or that find the trainer's."""
        if not self.root_variable:
            return ['cd "$(dirname "${BASH_SOURCE[0]}")"']
        name, program = self.root_variable, self.program[0]
        missing = f"set {name} to the folder of {program}, or start this script there"
        return [
            f'{name}="${{{name}:-$PWD}}"',
            f'[ -f "${name}/{program}" ] || {{ echo "{missing}" >&2; exit 2; }}',
        ]

    def _program(self) -> str:
        if not self.root_variable:
            return shlex.join(self.program)
        return f'"${self.root_variable}"/{shlex.join(self.program)}'

    def _slurm_script(self) -> str:
        lines = [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={self.draft.name}",
            f"#SBATCH --nodes={self.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={self.processes_per_node}",
            "#SBATCH --exclusive",
            "#SBATCH --output=%x-%j.log",
            "# Add your own --partition, --account and --time.",
            "set -euo pipefail",
            "# The folder of this script: Slurm runs a copy of it elsewhere.",
            'SCRIPT="$(scontrol show job "$SLURM_JOB_ID" | sed -n "s/^ *Command=//p")"',
            'FOLDER="${SCRIPT%/slurm.sbatch*}"',
            '[ -f "$FOLDER/launch.sh" ] || FOLDER="$SLURM_SUBMIT_DIR"',
            'HEAD_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"',
            "export HEAD_NODE",
            'srun --kill-on-bad-exit=1 bash "$FOLDER/launch.sh"',
        ]
        return "\n".join(lines) + "\n"


def flag_groups(arguments: Sequence[str]) -> list[list[str]]:
    """Arguments grouped as each flag with its values, for one line of a script per group."""
    groups: list[list[str]] = []
    for item in arguments:
        if item.startswith("--") or not groups:
            groups.append([item])
        else:
            groups[-1].append(item)
    return groups


def read_flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> its values, from arguments as `flag_groups` groups them."""
    return {group[0]: group[1:] for group in flag_groups(arguments)}


def plain_name(flag: str) -> str:
    """--tensor-model-parallel-size -> tensor_model_parallel_size."""
    return flag.lstrip("-").partition("=")[0].replace("-", "_")


def spelled(name: str) -> str:
    """tensor_model_parallel_size -> --tensor-model-parallel-size; inverse of `plain_name`."""
    return f"--{name.replace('_', '-')}"


def written_flags(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Settings, named with _, as arguments: True is a flag without values, False is not written."""
    words: list[str] = []
    for name, value in settings.items():
        if value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [spelled(name), *map(str, values)]
    return tuple(words)


def plain_value(word: str) -> object:
    """A word of a command line as the value it stands for."""
    if word in ("True", "true", "False", "false"):
        return word in ("True", "true")
    if word in ("None", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
