"""Bytes per logit at the peak of a loss: what torch allocates, and what the trainer's row says."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from planner.trainers.registry import TRAINERS
from tests.conftest import needed, needed_compiler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

torch = needed("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TOKENS, VOCAB = 512, 8192


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator["DeviceMesh"]:
    """A mesh of one process: what loss_parallel allocates does not depend on the others."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def peak_bytes_a_logit(*, compiled: bool, mesh: "DeviceMesh | None" = None) -> float:
    """Most bytes alive in forward and backward of TorchTitan's loss, the 16-bit logits included.

    mesh: over which the vocabulary is cut.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.profiler import ProfilerActivity, profile

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    logits = torch.randn(1, TOKENS, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (1, TOKENS))
    run = torch.compile(loss) if compiled else loss

    def step() -> None:
        given = logits if mesh is None else DTensor.from_local(logits, mesh, [Shard(-1)])
        with contextlib.nullcontext() if mesh is None else loss_parallel():
            run(given, labels).backward()
        logits.grad = None

    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(changes, initial=logits.nbytes)) / logits.numel()


@pytest.mark.slow
def test_the_compiled_loss_holds_the_logits_and_their_gradient() -> None:
    needed_compiler()
    titan = TRAINERS["torchtitan"]
    rules = titan.at(titan.release("0.2.2"))
    assert peak_bytes_a_logit(compiled=True) == pytest.approx(rules.fused_loss_bytes, rel=0.02)


def test_the_eager_loss_holds_fp32_copies_besides() -> None:
    titan = TRAINERS["torchtitan"]
    held = titan.loss_bytes + titan.loss_leftover_bytes
    assert peak_bytes_a_logit(compiled=False) == pytest.approx(held, rel=0.02)


# autograd's leaf is the tensor inside of the DTensor
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.slow
def test_a_loss_over_a_cut_vocabulary_is_compiled_too(one_rank: "DeviceMesh") -> None:
    needed_compiler()
    rules = TRAINERS["torchtitan"]
    eager, compiled = (peak_bytes_a_logit(compiled=how, mesh=one_rank) for how in (False, True))
    assert eager == pytest.approx(rules.sharded_loss_bytes + rules.loss_leftover_bytes, rel=0.02)
    assert compiled == pytest.approx(rules.fused_sharded_loss_bytes, rel=0.02)
