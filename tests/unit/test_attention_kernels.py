"""Which attention kernel a release brings, which a job may ask for, and what is not known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.calibration.basis import seen
from planner.calibration.kernel_doubt import UNMEASURED_GPU_SD, attention_sd, unmeasured_gpu_sd
from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.intake.machines import load_gpu
from planner.trainers.registry import TRAINERS
from tests.conftest import job_values

H100, A100, B200, MI300X = "h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm-180gb", "mi300x-192gb"


def job(trainer: str, gpu: str = H100, model: str = "llama3-8b", **training: Any) -> Any:
    return read_job(
        job_values(model, gpu, 8, 8192, 64, trainer=trainer, layout={"dp_shard": 8}, **training)
    )


def kernels(*args: Any, **training: Any) -> tuple[str, ...]:
    asked = job(*args, **training)
    return TRAINERS[asked.training.trainer].fused_attention(
        asked.training, asked.cluster.gpu, mla=asked.model.uses_mla
    )


@pytest.mark.parametrize(("trainer", "gpu", "version", "expected"), [
    ("megatron", H100, "NeMo 24.09", ("cudnn",)),
    ("megatron", H100, "0.14", ("cudnn",)),
    ("megatron", A100, "NeMo 24.09", ("flash2",)),
    ("megatron", A100, "2022-11", ("flash1",)),
    ("megatron", H100, "2023-10", ("flash2", "cudnn")),
    ("megatron", B200, "NeMo 25.11", ("cudnn",)),
    ("megatron", MI300X, "0.14", ("ck",)),
    ("megatron", A100, "2023", ("flash2", "flash1")),
    ("torchtitan", H100, "torchtitan 2024-05..08", ("flash2",)),
    ("torchtitan", H100, "0.1.0", ("flash2",)),
    ("torchtitan", B200, "0.1.0", ("cudnn",)),
    ("torchtitan", H100, "2025-08-21", ("flash2", "cudnn")),
    ("torchtitan", H100, "0.2.2", ("cudnn",)),
    ("torchtitan", A100, None, ("cudnn",)),
    ("torchtitan", MI300X, "0.2.2", ("flash2",)),
    ("torchtitan", H100, "0.3.0", ("flex",)),
    ("torchtitan", B200, "torchtitan 2026-05-27", ("cudnn",)),
    ("torchtitan", B200, "torchtitan 2026-06-11 branch", ("cudnn", "flex")),
    ("internevo", A100, "2023-11..2024-03", ("flash2",)),
    ("fsdp", H100, "torch 2.x era, flash-attn 2 (H100)", ("flash2",)),
    ("fsdp", H100, "2023-05", ("flash1",)),
    ("fsdp", H100, "llm-foundry", ("flash2", "flash1")),
])  # fmt: skip
def test_the_release_brings_its_kernel(
    trainer: str, gpu: str, version: str | None, expected: tuple[str, ...]
) -> None:
    named = {} if version is None else {"trainer_version": version}
    assert kernels(trainer, gpu, **named) == expected


@pytest.mark.parametrize(("torch", "gpu", "expected"), [
    ("2.0.1", H100, "flash1"),
    ("2.2.0", H100, "flash2"),
    ("2.10.0", H100, "flash2"),
    ("2.11.0", H100, "cudnn"),
    ("2.11.0", A100, "flash2"),
])  # fmt: skip
def test_plain_fsdp_attends_as_its_torch_does(torch: str, gpu: str, expected: str) -> None:
    assert kernels("fsdp", gpu, torch_version=torch) == (expected,)


def test_latent_attention_is_flexattention_in_torchtitan() -> None:
    assert kernels("torchtitan", H100, "deepseek-v2-lite", trainer_version="0.2.2") == ("flex",)


def test_a_kernel_that_is_named_is_known() -> None:
    assert kernels("fsdp", H100, attention_kernel="flash3") == ("flash3",)


@pytest.mark.parametrize(("trainer", "gpu", "kernel", "rule"), [
    ("fsdp", A100, "flash3", "flash3 attention has no kernels for a100-sxm-80gb"),
    ("fsdp", B200, "flash3", "flash3 attention has no kernels"),
    ("fsdp", "v100-sxm-32gb", "cudnn", "cudnn attention has no kernels"),
    ("megatron", MI300X, "cudnn", "cudnn attention has no kernels"),
    ("torchtitan", H100, "flash3", "attends with cudnn"),
    ("torchtitan", H100, "unfused", "has no setting for unfused attention"),
])  # fmt: skip
def test_what_cannot_be_is_said(trainer: str, gpu: str, kernel: str, rule: str) -> None:
    estimate = estimate_job(job(trainer, gpu, attention_kernel=kernel))
    assert any(rule in one.rule for one in estimate.unsupported)


@pytest.mark.parametrize(("trainer", "gpu", "kernel"), [
    ("torchtitan", H100, "cudnn"),
    ("megatron", H100, "flash3"),
    ("megatron", A100, "cudnn"),
    ("fsdp", MI300X, "flash2"),
])  # fmt: skip
def test_what_can_be_asked_for_is_priced(trainer: str, gpu: str, kernel: str) -> None:
    estimate = estimate_job(job(trainer, gpu, attention_kernel=kernel))
    assert estimate.valid
    assert estimate.unsupported == []


def test_a_slower_kernel_makes_a_slower_step_and_only_where_attention_is() -> None:
    seconds = {
        (kernel, seq): estimate_job(
            job("megatron", attention_kernel=kernel, seq_len=seq, global_batch_size=2**16 // seq)
        ).step_seconds
        for kernel in ("flash2", "cudnn")
        for seq in (2048, 8192)
    }
    gains = [seconds["flash2", seq] / seconds["cudnn", seq] for seq in (2048, 8192)]
    assert 1.0 < gains[0] < gains[1] < 1.5


def doubt(**training: Any) -> float:
    asked = job("fsdp", **training)
    pricer = Pricer.build(asked.model, asked.cluster, asked.training)
    return float(attention_sd(pricer, LayoutBatch.from_layouts([asked.layout]))[0])


def test_a_step_whose_kernel_is_unknown_is_unsure_by_the_share_of_attention() -> None:
    """Half the logarithm between the two kernels' steps, closed form for two of them."""
    short, long = (doubt(seq_len=seq, global_batch_size=2**16 // seq) for seq in (2048, 8192))
    assert 0.0 < short < long
    steps = [
        estimate_job(
            job("fsdp", seq_len=8192, global_batch_size=8, trainer_version=f"flash-attn {number}")
        ).step_seconds
        for number in (1, 2)
    ]
    assert long == pytest.approx(0.5 * np.log(steps[0] / steps[1]), rel=1e-3)


def test_a_known_kernel_and_unfused_attention_leave_no_doubt() -> None:
    assert doubt(attention_kernel="flash2") == doubt(torch_version="2.9.0") == 0.0
    assert doubt(attention_kernel="unfused") == 0.0


def test_a_gpu_is_unsure_until_a_run_on_that_very_product() -> None:
    """Runs on its siblings move the knobs that they share, and leave this."""
    measured = job("megatron", B200)
    calibration = replace(Calibration.prior(), seen=seen([measured]))
    assert unmeasured_gpu_sd(calibration, measured.cluster.gpu) == 0.0
    for other in ("gb200-nvl72-186gb", H100):
        assert unmeasured_gpu_sd(calibration, load_gpu(other)) == UNMEASURED_GPU_SD
    assert unmeasured_gpu_sd(Calibration.prior(), measured.cluster.gpu) == UNMEASURED_GPU_SD


def test_an_unknown_kernel_is_an_error() -> None:
    with pytest.raises(SpecError, match="attention_kernel"):
        job("megatron", attention_kernel="flash9")
