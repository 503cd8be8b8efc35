"""Which kernel curves price a GPU: its own family's, or those of a similar one, with a warning."""

from collections.abc import Mapping

from planner.specs.gpu import GpuSpec
from planner.specs.gpu_families import KERNEL_ROWS, KNOWN_FAMILIES, is_known_family

# The row for a family that nobody timed: by vendor, the newest whose units the GPU has too ("" fits
# every GPU). Judgement.
_STAND_INS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "nvidia": (("fp4", "blackwell"), ("fp8", "hopper"), ("bf16", "ampere"), ("", "volta")),
    "amd": (("fp4", "cdna4"), ("", "cdna")), "google": (("", "tpu"),), "cpu": (("", "cpu"),),
}  # fmt: skip


def kernel_family(gpu: GpuSpec) -> str:
    """The row of `cost.profile.KERNELS` that prices this GPU.

    An unknown family gets the row whose name it continues ("cdna5"), else the vendor's newest with
    the same units.
    """
    if gpu.family in KERNEL_ROWS:
        return KERNEL_ROWS[gpu.family]
    continued = [row for row in KERNEL_ROWS.values() if gpu.family.startswith(row)]
    fitting = (
        row
        for dtype, row in _STAND_INS[gpu.vendor]
        if not dtype or dtype in gpu.peak_flops_per_second
    )
    return continued[0] if continued else next(fitting)


def unknown_family(gpu: GpuSpec) -> str:
    """The warning for a GPU of an unknown family; empty for a known one."""
    if is_known_family(gpu.family):
        return ""
    unset = gpu.family == type(gpu).model_fields["family"].default
    named = f"family {gpu.family!r} of GPU {gpu.name} is unknown"
    if unset:
        named = f"no family is given for GPU {gpu.name}"
    if "vendor" not in gpu.model_fields_set:
        named += f", taken for one of {gpu.vendor}'s as no vendor is given"
    return (
        f"{named}: priced with the kernel curves of {kernel_family(gpu)} and generic "
        "communication curves, intervals widened; "
        f"known families: {', '.join(KNOWN_FAMILIES)}; `planner-cli calibrate` times its kernels"
    )
