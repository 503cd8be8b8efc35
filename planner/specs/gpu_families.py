"""The GPU families whose kernels are known, and who makes them."""

from collections.abc import Mapping

# Family -> row of `cost.profile.KERNELS` whose curves are its own. The generations of CDNA were
# timed together.
KERNEL_ROWS: Mapping[str, str] = {
    "volta": "volta", "ampere": "ampere", "hopper": "hopper", "blackwell": "blackwell",
    "ada": "ada", "rtx-blackwell": "rtx-blackwell",
    "cdna2": "cdna", "cdna3": "cdna", "cdna4": "cdna", "tpu": "tpu", "cpu": "cpu",
}  # fmt: skip
KNOWN_FAMILIES = tuple(sorted(KERNEL_ROWS))
# Who makes the GPUs of a row: an inline GPU that names its family need not name its vendor, and
#     must not name another.
_MAKERS: Mapping[str, str] = {"cdna": "amd", "tpu": "google", "cpu": "cpu"}
VENDORS: Mapping[str, str] = {
    family: _MAKERS.get(row, "nvidia") for family, row in KERNEL_ROWS.items()
}


def is_known_family(family: str) -> bool:
    """Whether kernels of this GPU family were timed or judged by name; the others are priced with a
    stand-in's curves.
    """
    return family in KERNEL_ROWS
