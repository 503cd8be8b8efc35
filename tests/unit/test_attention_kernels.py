"""Which attention kernel a release brings, which a job may ask for, and what is not known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.calibration.basis import seen
from planner.calibration.kernel_doubt import UNMEASURED_GPU_SD, attention_sd, unmeasured_gpu_sd
from planner.cost.cost_inputs import units_at
from planner.cost.machine.knobs import Calibration
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.intake.machines import load_gpu
from planner.trainers.registry import TRAINERS
from tests.conftest import job_values
from tests.pricing import priced

H100, A100, B200, MI300X = "h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm-180gb", "mi300x-192gb"


def job(trainer: str, gpu: str = H100, model: str = "llama3-8b", **training: Any) -> Any:
    return read_job(
        job_values(model, gpu, 8, 8192, 64, trainer=trainer, layout={"dp_shard": 8}, **training)
    )


@pytest.mark.parametrize(("trainer", "gpu", "version", "expected"), [
    ("megatron", H100, "NeMo 24.09", ("cudnn",)),
    ("megatron", H100, "0.14", ("cudnn",)),
    ("megatron", A100, "NeMo 24.09", ("flash2",)),
    ("megatron", A100, "2022-11", ("flash1",)),
    ("megatron", H100, "2023-10", ("flash2", "cudnn")),
    ("megatron", B200, "NeMo 25.11", ("cudnn",)),
    *(
        ("megatron", gpu, {"attention_kernel": kernel, "trainer_version": version}, found)
        for gpu in (H100, B200)
        for kernel in ("flash", "cudnn")
        for version, found in (("NeMo 26.02", ("cudnn-9.17",)),
            ("2025-12", ("cudnn", "cudnn-9.17")), ("NeMo 25.11", ("cudnn",)))
    ),
    ("megatron", A100, {"attention_kernel": "cudnn"}, ("cudnn",)),
    ("megatron", MI300X, "0.14", ("ck",)),
    ("megatron", A100, "2023", ("flash2", "flash1")),
    ("torchtitan", H100, "torchtitan 2024-05..08", ("flash2",)),
    ("torchtitan", H100, "0.1.0", ("flash2",)),
    ("torchtitan", B200, "0.1.0", ("cudnn",)),
    ("torchtitan", H100, "2025-08-21", ("flash2", "cudnn")),
    ("torchtitan", H100, "0.2.1", ("cudnn", "cudnn-9.17")),
    ("torchtitan", H100, "0.2.2", ("cudnn-9.17",)),
    ("torchtitan", A100, None, ("cudnn",)),
    ("torchtitan", MI300X, "0.2.2", ("flash2",)),
    ("torchtitan", H100, "0.3.0", ("flex",)),
    ("torchtitan", B200, "torchtitan 2026-05-27", ("cudnn-9.17",)),
    ("torchtitan", B200, "torchtitan 2026-06-11 branch", ("cudnn-9.17", "flex")),
    ("internevo", A100, "2023-11..2024-03", ("flash2",)),
    ("fsdp", H100, "torch 2.x era, flash-attn 2 (H100)", ("flash2",)),
    ("fsdp", H100, "2023-05", ("flash1",)),
    ("fsdp", H100, "llm-foundry", ("flash2", "flash1")),
    # plain FSDP attends as its torch does
    ("fsdp", H100, {"torch_version": "2.0.1"}, ("flash1",)),
    ("fsdp", H100, {"torch_version": "2.2.0"}, ("flash2",)),
    ("fsdp", H100, {"torch_version": "2.10.0"}, ("flash2",)),
    ("fsdp", H100, {"torch_version": "2.11.0"}, ("cudnn-9.17",)),
    ("fsdp", A100, {"torch_version": "2.11.0"}, ("flash2",)),
    # what is named is known, and latent attention is FlexAttention
    ("fsdp", H100, {"attention_kernel": "flash3"}, ("flash3",)),
    ("torchtitan", H100, {"model": "deepseek-v2-lite", "trainer_version": "0.2.2"}, ("flex",)),
])  # fmt: skip
def test_the_release_brings_its_kernel(
    trainer: str, gpu: str, version: Any, expected: tuple[str, ...]
) -> None:
    given = version if isinstance(version, dict) else {"trainer_version": version}
    asked = job(trainer, gpu, **given)
    found = TRAINERS[trainer].fused_attention(asked.training, asked.cluster.gpu, asked.model)
    assert found == expected


@pytest.mark.parametrize(("trainer", "gpu", "kernel", "rule"), [
    ("fsdp", A100, "flash3", "flash3 attention has no kernels for a100-sxm-80gb"),
    ("fsdp", B200, "flash3", "flash3 attention has no kernels"),
    ("fsdp", "v100-sxm-32gb", "cudnn", "cudnn attention has no kernels"),
    ("megatron", MI300X, "cudnn", "cudnn attention has no kernels"),
    ("torchtitan", H100, "flash3", "attends with cudnn"),
    ("torchtitan", H100, "unfused", "has no setting for unfused attention"),
    ("torchtitan", H100, "cudnn", None),
    ("megatron", H100, "flash3", None),
    ("megatron", A100, "cudnn", None),
    ("fsdp", MI300X, "flash2", None),
])  # fmt: skip
def test_what_can_be_asked_for_is_priced_and_what_cannot_be_is_said(
    trainer: str, gpu: str, kernel: str, rule: str | None
) -> None:
    estimate = estimate_job(job(trainer, gpu, attention_kernel=kernel))
    if rule is None:
        assert (estimate.valid, estimate.unsupported) == (True, [])
    else:
        assert any(rule in one.rule for one in estimate.unsupported)


def test_a_slower_kernel_makes_a_slower_step_and_only_where_attention_is() -> None:
    gains = []
    for seq in (2048, 8192):
        given = {"seq_len": seq, "global_batch_size": 2**16 // seq}
        jobs = (job("megatron", attention_kernel=one, **given) for one in ("flash2", "cudnn"))
        slow, quick = (estimate_job(one).step_seconds for one in jobs)
        gains.append(slow / quick)
    assert 1.0 < gains[0] < gains[1] < 1.5


def saved(version: str, model: str = "llama3-8b", seq: int = 8192, **layout: Any) -> float:
    """Bytes of activations that the model's last kind of layer saves under selective-op."""
    given = {"dp_shard": 8, "ac": "selective-op", "compile": True, **layout}
    values = {"trainer": "torchtitan", "trainer_version": version, "layout": given}
    p, batch = priced(read_job(job_values(model, B200, 8, seq, 8, moe_imbalance=1.0, **values)))
    return float(units_at(p, batch).saved_bytes[-3, 0])  # embedding and head follow


def test_selective_op_saves_the_outputs_that_its_list_names() -> None:
    """What EP sends joined it in September 2025, cuDNN's attention in December; NVFP4's products
    are not on it.
    """
    sent, share = 4096 * 6 * 2048 * 2, 27 / 32  # layers in NVFP4
    before, after = (
        saved(day, "deepseek-v2-lite", 4096, ep=8) for day in ("2025-09-05", "2025-09-06")
    )
    assert after - before == pytest.approx(2 * sent)
    assert saved("0.2.2") - saved("0.2.0") == pytest.approx(8192 * (2 * 4096 + 4 * 32))
    outputs = 4096 + 1024 + 14336 + 4096  # of wq, wv, w1 and w2
    low = saved("0.3.0") - saved("0.3.0", precision="nvfp4")
    assert low == pytest.approx(share * 8192 * 2 * outputs)


def doubt(**training: Any) -> float:
    return float(attention_sd(*priced(job("fsdp", **training)))[0])


def test_a_step_whose_kernel_is_unknown_is_unsure_by_the_share_of_attention() -> None:
    """Half the logarithm between the two kernels' steps, closed form for two of them."""
    short, long = (doubt(seq_len=seq, global_batch_size=2**16 // seq) for seq in (2048, 8192))
    assert 0.0 < short < long
    given = {"seq_len": 8192, "global_batch_size": 8}
    jobs = (job("fsdp", trainer_version=f"flash-attn {n}", **given) for n in (1, 2))
    slow, quick = (estimate_job(one).step_seconds for one in jobs)
    assert long == pytest.approx(0.5 * np.log(slow / quick), rel=1e-3)


def test_a_known_kernel_and_unfused_attention_leave_no_doubt() -> None:
    kernels = [{"attention_kernel": one} for one in ("flash2", "unfused")]
    assert [doubt(**known) for known in (*kernels, {"torch_version": "2.9.0"})] == [0.0] * 3


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
