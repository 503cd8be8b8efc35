"""Which attention kernel a trainer's release brings to a GPU, and which ones it may be.

Generations differ by 1.3 to 2 times on Hopper. `training.attention_kernel` names one; `flash` asks
for what the release brings, which the rows below tell, newest first.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planner.specs.gpu import GpuSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.release import Release, torch_release

CUDNN = "cudnn"
TENSOR_CORES = ("ampere", "ada", "hopper", "blackwell", "rtx-blackwell")
DATACENTER = ("hopper", "blackwell")
AMD = ("cdna", "cdna4")
_SAID = re.compile(r"flash[-_ ]?att(?:n|ention)[-_ ]?v?([123])\b", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One kernel, and from when on a trainer uses it.

    kernel: `flash1` (FlashAttention-1, Triton's included), `flash2`, `flex` (FlexAttention), `ck`
        (AMD's Composable Kernel under Transformer Engine), `flash3`, `cudnn`, newer `cudnn-9.17`.
    families: rows of kernel curves (`specs.gpu_families`); empty for all.
    since: day or month of the first release that has it; "" for always.
    perhaps_since: the last release known not to have it. A commit dated in between may have either.
    torch_since: instead of `since`, the release of torch, for jobs that give `torch_version`.
    mla: only for models with latent attention.
    dense: not for sparse attention, whose kernels are others.
    """

    kernel: str
    families: tuple[str, ...] = ()
    since: str = ""
    perhaps_since: str = ""
    torch_since: tuple[int, int] | None = None
    mla: bool = False
    dense: bool = False
    source: str


_FLASH1 = AttentionRow(kernel="flash1", source="FlashAttention-1 came in 2022 (Dao et al.)")
_FLASH2 = AttentionRow(
    kernel="flash2",
    since="2023-08",
    source="flash-attn 2.0 of July 2023 (Dao 2023); trainers took it a month later: judgement",
)
# Ampere and older parts run FlashAttention-2 in both libraries.
TRANSFORMER_ENGINE = (
    AttentionRow(
        kernel="ck", families=AMD, source="ROCm/TransformerEngine README: fused attention by CK"
    ),
    AttentionRow(
        kernel="cudnn-9.17",
        families=DATACENTER,
        since="2026-02",
        perhaps_since="2025-11",
        dense=True,
        source="Megatron-Bridge docs/releases/software-versions.md: cuDNN 9.13 in NeMo 25.11, 9.18 "
        "in 26.02",
    ),
    AttentionRow(
        kernel="cudnn", families=("blackwell",), source="Transformer Engine: as on Hopper"
    ),
    AttentionRow(
        kernel="cudnn",
        families=("hopper",),
        since="2024-01",
        perhaps_since="2023-08",
        source="Transformer Engine prefers cuDNN's attention on Hopper and Tri Dao's on Ampere "
        "(NVIDIA/NeMo pull request 9188, May 2024); the month is a judgement",
    ),
    _FLASH2,
    _FLASH1,
)
FLASH_ATTN = (_FLASH2, _FLASH1)
TORCHTITAN_SDPA = (
    AttentionRow(
        kernel="flex",
        mla=True,
        since="2025-06",
        source="torchtitan 0.2.0 models/deepseek_v3/__init__.py: use_flex_attn=True",
    ),
    AttentionRow(
        kernel="flex",
        since="2026-06-20",
        perhaps_since="2026-06-08",
        source="torchtitan pull request 3571 of 8 June 2026, its merge within days: judgement; "
        "0.3.0 models/common/config_utils.py get_attention_config: no SDPA for "
        'language models; models/llama3/__init__.py: attn_backend = "flex"; 0.2.2 has SDPA',
    ),
    AttentionRow(
        kernel="cudnn-9.17",
        families=DATACENTER,
        since="2026-02",
        perhaps_since="2025-12-22",
        source="pytorch pull requests 173216 of 23 January 2026 (9.17.1 in nightly wheels) and "
        "175672 (9.19 in those of 2.11); 171189: 9.15.1 at most in those of 2.10",
    ),
    AttentionRow(
        kernel="cudnn",
        families=TENSOR_CORES,
        since="2025-10-18",
        perhaps_since="2025-06-18",
        source="torchtitan 0.2.0 models/attention.py: sdpa_backends begins with CUDNN_ATTENTION, "
        "set_priority=True; 0.1.0 has it on compute capability 10.0 alone",
    ),
    AttentionRow(
        kernel="cudnn",
        families=("blackwell",),
        since="2025-05-20",
        source="torchtitan pull request 1196: cuDNN first on B200",
    ),
    AttentionRow(kernel="flash2", source="torch SDPA since 2.2; nightlies before 0.1.0"),
)
SDPA = (
    AttentionRow(
        kernel="cudnn-9.17",
        families=DATACENTER,
        torch_since=(2, 11),
        source="torch sdp_utils.cpp check_prefer_cudnn_attention: sm90 and sm100 with cuDNN above "
        "9.15, which wheels bundle since 2.11 (9.19: pytorch pull request 175672); opt-in from "
        "2.5.1 on (138522)",
    ),
    AttentionRow(kernel="flash2", torch_since=(2, 2), source="torch 2.2 release notes"),
    AttentionRow(kernel="flash1", torch_since=(1, 0), source="torch 2.0: FlashAttention-1"),
    *FLASH_ATTN,
)


def attention_kernels(
    rows: Sequence[AttentionRow],
    training: TrainingSpec,
    release: Release,
    gpu: GpuSpec,
    model: ModelSpec,
) -> tuple[str, ...]:
    """Kernels that fused attention may run with, the likeliest first; one where it is known.

    release: the trainer's, as the job names it; its text may name the kernel ("flash-attn 2").
    """
    asked = training.attention_kernel
    if asked not in ("flash", "unfused", CUDNN):
        return (asked,)
    said = _SAID.search(training.trainer_version or "")
    if said and asked != CUDNN:
        return (f"flash{said[1]}",)
    family = gpu.kernel_family
    fitting = [
        row
        for row in rows
        if (not row.families or family in row.families)
        and (model.uses_mla or not row.mla)
        and not (row.dense and (model.indexed or model.compresses))
        and (asked != CUDNN or library(row.kernel) == CUDNN)
    ]
    if asked == CUDNN and not any(row.torch_since is None for row in fitting):
        return (CUDNN,)
    if training.torch_version is not None:
        torch = torch_release(training.torch_version)
        of_torch = [row for row in fitting if row.torch_since and row.torch_since <= torch]
        if of_torch:
            return (of_torch[0].kernel,)
    fitting = [row for row in fitting if row.torch_since is None]
    days = _days(release)
    found = [
        row.kernel
        for day in days
        for row in (
            next((one for one in fitting if not day or one.since <= day), fitting[-1]),
            *(one for one in fitting if one.perhaps_since and one.perhaps_since < day < one.since),
        )
    ]
    if not days:
        found = [row.kernel for row in fitting]
    return tuple(dict.fromkeys(found))


def library(kernel: str) -> str:
    """Name of a kernel in `training.attention_kernel`: "cudnn" of "cudnn-9.17"."""
    return kernel.partition("-")[0]


def _days(release: Release) -> tuple[str, ...]:
    """Days (or months) that a release may be of: two ends of a bare year, none where unknown."""
    named = release.named
    if named.day or len(named.month) > len("2025"):
        return (named.day or named.month,)
    if named.month:
        return (f"{named.month}-12", f"{named.month}-01")
    if release.known.day and (named.number is not None or not named.text):
        return (release.known.day,)
    return ()
