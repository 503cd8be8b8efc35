"""Capacity and abilities of a pool, and the error for a layout that is too large for it."""

from dataclasses import dataclass

from planner.errors import ProbeError
from planner.units import counted

UNLIMITED = 2**20  # devices of a pool that does not count them
NO_GPU = (
    "use --emulate for memory and counts without one, or a job with cluster gpu: cpu to try the "
    "whole path"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Devices that a pool can give one probe of a job.

    num_devices: devices of the job's kind, free or not.
    device: `cuda` or `cpu`.
    why_none: a sentence, if the pool has no device of this kind.
    spans_nodes: one probe may use several nodes.
    measures: False if results are looked up, so that nothing new can be measured.
    at_once: devices that probes can use at the same time; None is all of them.
    shared: every process that opens the pool uses the same devices, from whatever machine.
    avoids_hosts: it keeps a probe off the hosts that its `Watch` names.
    """

    num_devices: int
    device: str
    why_none: str = ""
    spans_nodes: bool = False
    measures: bool = True
    at_once: int | None = None
    shared: bool = False
    avoids_hosts: bool = False


def too_few(wanted: int, capacity: Capacity) -> ProbeError:
    """The error for a probe that wants more devices than the pool has, in one line."""
    if capacity.num_devices == 0:
        return ProbeError(f"no NVIDIA GPU to probe on: {capacity.why_none}; {NO_GPU}")
    place = "pool" if capacity.spans_nodes else "machine"
    return ProbeError(
        f"the layout needs {counted(wanted, 'GPU')}, this {place} has {capacity.num_devices}; use "
        "--emulate for one rank of it"
    )
