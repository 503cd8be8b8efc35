"""Bytes per logit at the peak of a loss: what torch allocates, and what the trainer's row says."""

import pytest

from planner.trainers.registry import TRAINERS
from tests.conftest import needed

torch = needed("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TOKENS, VOCAB = 512, 8192


def peak_bytes_a_logit(*, compiled: bool) -> float:
    """Most bytes alive in forward and backward of TorchTitan's loss, the 16-bit logits included."""
    from torch.profiler import ProfilerActivity, profile

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    logits = torch.randn(1, TOKENS, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (1, TOKENS))
    run = torch.compile(loss) if compiled else loss
    run(logits, labels).backward()
    logits.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run(logits, labels).backward()
    alive = most = logits.nbytes
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most / logits.numel()


@pytest.mark.slow
def test_the_compiled_loss_holds_the_logits_and_their_gradient() -> None:
    titan = TRAINERS["torchtitan"]
    rules = titan.at(titan.release("0.2.2"))
    assert peak_bytes_a_logit(compiled=True) == pytest.approx(rules.fused_loss_bytes, rel=0.02)


def test_the_eager_loss_holds_fp32_copies_besides() -> None:
    titan = TRAINERS["torchtitan"]
    held = titan.loss_bytes + titan.loss_leftover_bytes
    assert peak_bytes_a_logit(compiled=False) == pytest.approx(held, rel=0.02)
