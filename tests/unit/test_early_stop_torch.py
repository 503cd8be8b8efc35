"""Torch's checkpoint leaves out a layer's last product when it recomputes, as we count."""

import pytest

from planner.trainers.registry import TRAINERS
from tests.conftest import needed

torch = needed("torch")
pytestmark = pytest.mark.torch

HIDDEN, FFN, ROWS = 16, 64, 8


def matmuls(use_reentrant: bool, **options: bool) -> int:
    """Products of one pass through a checkpointed residual MLP whose layers keep their input."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    count = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal count
            count += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    up, down = torch.nn.Linear(HIDDEN, FFN, bias=False), torch.nn.Linear(FFN, HIDDEN, bias=False)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    with Counter():
        checkpoint(
            lambda y: y + down(torch.relu(up(y))), x, use_reentrant=use_reentrant, **options
        ).sum().backward()
    return count


def test_the_non_reentrant_form_stops_before_the_last_product() -> None:
    forward, backward = 2, 4
    assert matmuls(use_reentrant=False) == forward + backward + 1


def test_torchtitan_asks_it_to_run_on() -> None:
    """As 0.2 does by default (activation_checkpoint.early_stop)."""
    assert matmuls(use_reentrant=False, early_stop=False) == 2 + 4 + 2
    titan = TRAINERS["torchtitan"]
    assert [titan.at(titan.release(v)).early_stop for v in ("0.1.0", "0.2.2")] == [True, False]


def test_the_reentrant_form_runs_the_whole_layer_again() -> None:
    assert matmuls(use_reentrant=True) == 2 + 4 + 2
