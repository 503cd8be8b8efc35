"""GPU families with known kernels, and who makes them."""

from collections.abc import Mapping

# Family -> its row of kernel curves in `cost.profile.KERNELS`. The generations of CDNA were timed
# together.
KERNEL_ROWS: Mapping[str, str] = {
    "volta": "volta", "ampere": "ampere", "hopper": "hopper", "blackwell": "blackwell",
    "ada": "ada", "rtx-blackwell": "rtx-blackwell",
    "cdna2": "cdna", "cdna3": "cdna", "cdna4": "cdna", "tpu": "tpu", "cpu": "cpu",
}  # fmt: skip
KNOWN_FAMILIES = tuple(sorted(KERNEL_ROWS))
# Who makes the GPUs of a row. An inline GPU that names its family need not name its vendor, and
# must not name another.
_MAKERS: Mapping[str, str] = {"cdna": "amd", "tpu": "google", "cpu": "cpu"}
VENDORS: Mapping[str, str] = {
    family: _MAKERS.get(row, "nvidia") for family, row in KERNEL_ROWS.items()
}


def is_known_family(family: str) -> bool:
    """Whether kernels of this GPU family were timed, or judged under its name.

    Other families are priced with the curves of a similar one.
    """
    return family in KERNEL_ROWS
