"""The optimizers of `training.optimizer`, stepped after the backward or inside it.

adamw: torch's, fused.
adamw-bf16-states: the same update with both moments in bfloat16.
muon: matrices of the blocks by Newton-Schulz, the rest by AdamW.
adafactor: factored second moments, no momentum.
sgd: with momentum.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from planner.specs.training import Optimizer

MOMENTUM = 0.9
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-8
ADAFACTOR_EPSILON, ADAFACTOR_DECAY = 1e-30, -0.8  # Shazeer and Stern 2018, table 2


class EachAlone(torch.optim.Optimizer):
    """An optimizer that updates one parameter after the other."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        raise NotImplementedError


class AdamWBf16States(EachAlone):
    """AdamW (Loshchilov and Hutter 2019) with moments in bfloat16, widened for the update."""

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["count"] = 0
            state["mean"], state["square"] = (
                torch.zeros_like(parameter, dtype=torch.bfloat16) for _ in range(2)
            )
        state["count"] += 1
        assert parameter.grad is not None
        grad = parameter.grad.float()
        mean = state["mean"].float().lerp_(grad, 1 - BETAS[0])
        square = state["square"].float().mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        state["mean"].copy_(mean)
        state["square"].copy_(square)
        parameter.mul_(1 - lr * WEIGHT_DECAY)
        spread = (square / (1 - BETAS[1] ** state["count"])).sqrt_().add_(EPSILON)
        parameter.addcdiv_(
            mean.to(parameter.dtype),
            spread.to(parameter.dtype),
            value=-lr / (1 - BETAS[0] ** state["count"]),
        )


class Adafactor(EachAlone):
    """Adafactor (Shazeer and Stern 2018, algorithm 4).

    Second moments of a matrix are one row and one column; updates are clipped to RMS 1.
    torch's own Adafactor updates in place where a DTensor cannot. Each expert is a matrix.
    """

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        assert parameter.grad is not None
        state, grad = self.state[parameter], parameter.grad.float()
        square, over = grad.square() + ADAFACTOR_EPSILON, tuple(range(-min(grad.ndim, 2), 0))
        state["count"] = count = state.get("count", 0) + 1
        kept = 1.0 - count**ADAFACTOR_DECAY
        moments = (
            {"row": square.mean(-1, keepdim=True), "column": square.mean(-2, keepdim=True)}
            if grad.ndim >= 2
            else {"all": square}
        )
        for name, value in moments.items():
            state[name] = value if count == 1 else state[name] * kept + value * (1.0 - kept)
        variance = (
            state["row"] * state["column"] / state["row"].mean(-2, keepdim=True)
            if grad.ndim >= 2
            else state["all"]
        )
        update = grad * variance.rsqrt()
        size = update.square().mean(over, keepdim=True).sqrt()
        parameter.add_((update / size.clamp(min=1.0)).to(parameter.dtype), alpha=-lr)


Named = list[tuple[str, nn.Parameter]]
Prepare = Callable[[torch.Tensor], None]


def build(named: Named, kind: Optimizer, lr: float) -> list[torch.optim.Optimizer]:
    """Optimizers over parameters; muon's takes the matrices of blocks, AdamW the rest."""
    parameters = [p for _, p in named]
    if kind == "muon":
        matrices = [p for name, p in named if p.ndim == 2 and name.startswith("layers.")]
        rest = [p for name, p in named if not (p.ndim == 2 and name.startswith("layers."))]
        found: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=lr)] if matrices else []
        return found + ([_adamw(rest, lr)] if rest else [])
    if kind == "adamw":
        return [_adamw(parameters, lr)]
    if kind == "adamw-bf16-states":
        return [AdamWBf16States(parameters, lr=lr)]
    if kind == "adafactor":
        return [Adafactor(parameters, lr=lr)]
    return [torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)]


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW, fused on every device; the others hold copies of all parameters while they step."""
    return torch.optim.AdamW(
        parameters, lr=lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )


def prime(optimizers: list[torch.optim.Optimizer]) -> None:
    """Makes the optimizers' states with an update by zero gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
    _step(optimizers)


class Updates:
    """Updates parameters once the step's gradients are complete, or inside the last backward.

    prepare: makes a gradient ready for an update inside the backward (loss scaling). There each
        parameter is updated as soon as its gradient is complete, which frees that gradient. None
        leaves all updates to `step`.
    """

    def __init__(self, named: Named, kind: Optimizer, lr: float, prepare: Prepare | None) -> None:
        self.inside, self._armed = prepare is not None, False
        if prepare is None:
            self.optimizers = build(named, kind, lr)
            return
        self.optimizers = []
        for name, parameter in named:
            own = build([(name, parameter)], kind, lr)
            self.optimizers += own
            parameter.register_post_accumulate_grad_hook(self._hook(own, prepare))

    def _hook(self, optimizers: list[torch.optim.Optimizer], prepare: Prepare) -> Prepare:
        def update(parameter: torch.Tensor) -> None:
            if self._armed:
                assert parameter.grad is not None
                prepare(parameter.grad)
                _step(optimizers)

        return update

    def arm(self, last: bool) -> None:
        """Sets whether the coming backward completes the gradients."""
        self._armed = last

    def step(self) -> None:
        """Updates what no backward has."""
        if not self.inside:
            _step(self.optimizers)


def _step(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
