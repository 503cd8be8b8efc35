"""Mixture of experts: router, token exchange, grouped experts, combination, shared experts.

Letters: N tokens on this rank, k experts a token, C hidden size, E experts of the model, L experts
of this rank, P expert-parallel ranks.
Copies of tokens are sorted by expert, exchanged over expert-parallel ranks, regrouped by local
expert with groups padded to the alignment of the grouped matrix product, and sent back. This order
is TorchTitan's (models/moe/moe.py, distributed/expert_parallel.py of 0.2.2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from planner.probes.reference.collectives import (
    Copy,
    Exchange,
    Gather,
    Join,
    Reduce,
    Scatter,
    Split,
    all_to_all,
)
from planner.specs.model import ModelSpec

SEQUENCE = 1
# alignment of a group's rows, so that a bf16 row of its transpose has 16 bytes;
# torchtitan TOKEN_GROUP_ALIGN_SIZE_M
ALIGNMENT = 8
GOLDEN = 0.6180339887498949  # multiples of it modulo 1 fill the unit interval evenly
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAxes:
    """How experts and their tokens are spread.

    tp, sequence_parallel: how the block's input is cut.
    ep: ranks between which experts are divided.
    etp: ranks between which an expert's width is divided.
    received_share: token copies received per copy sent, if nothing real can be exchanged
        (one emulated rank).
    assigned_imbalance: load of the busiest rank over the mean, if tokens are assigned to experts;
        None where the router decides.
    """

    tp: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    ep: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    received_share: float | None = None
    assigned_imbalance: float | None = None


class MixtureOfExperts(nn.Module):
    """One layer's experts. `axes` and the experts' parameters are set by `expert_parallel`."""

    def __init__(self, spec: ModelSpec, shared: nn.Module | None) -> None:
        super().__init__()
        self.top_k, self.num_experts = spec.num_experts_per_tok, spec.num_experts
        self.router = nn.Linear(spec.hidden_size, spec.num_experts, bias=spec.router_bias)
        if spec.router_correction_bias:
            self.register_buffer("correction", torch.zeros(spec.num_experts, dtype=torch.float32))
        self.correction: torch.Tensor
        self.sigmoid = spec.router_correction_bias
        self.experts = GroupedExperts(spec)
        self.shared = shared
        gated = spec.shared_expert_gate
        self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False) if gated else None
        self.axes = ExpertAxes()
        self.load: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        entered = self._over_tp(x, Split, Gather, Copy)
        flat = entered.flatten(0, 1)
        weights, chosen = self._route(flat)
        order = chosen.flatten().argsort(stable=True)
        sent = self._exchange_plan(chosen, order.numel())
        routed = flat[order // self.top_k]
        out_rows = self._experts_on(routed, sent)
        copies = torch.zeros_like(routed)
        copies[order] = out_rows.to(copies.dtype)
        rows = copies.unflatten(0, (-1, self.top_k)).float()
        combined = torch.bmm(weights[:, None, :], rows).squeeze(1).to(x.dtype)
        out = self._over_tp(combined.view_as(entered), Join, Scatter, Reduce)
        return out if self.shared is None else out + self._shared(x)

    def _route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes each token: weights (N, k) in fp32, and chosen experts (N, k)."""
        logits = F.linear(flat, *self._replicated(self.router, summed=True)).float()
        scores = torch.sigmoid(logits) if self.sigmoid else torch.softmax(logits, dim=-1)
        if self.axes.assigned_imbalance is not None:
            chosen = self._assigned(flat)
        else:
            favoured = scores + self.correction if self.sigmoid else scores
            chosen = favoured.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        total = weights.sum(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny
        return weights / total, chosen

    def _assigned(self, flat: torch.Tensor) -> torch.Tensor:
        """Chosen experts (N, k) in turn; the first rank's come up more often if imbalance is asked.

        A copy's place in the golden-ratio sequence picks its expert, so that any run of tokens has
        nearly these shares.
        """
        ranks = 1 if self.axes.ep is None else self.axes.ep.size()
        copies = torch.arange(flat.shape[0] * self.top_k, device=flat.device)
        imbalance = min(self.axes.assigned_imbalance or 1.0, float(ranks))
        if imbalance == 1.0:
            return (copies % self.num_experts).view(-1, self.top_k)
        at = (copies.double() * GOLDEN) % 1.0
        busiest = imbalance / ranks
        rest = torch.clamp((at - busiest) / (1.0 - busiest), min=0.0)
        own, others = self.num_experts // ranks, self.num_experts - self.num_experts // ranks
        first = (at / busiest * own).long()
        spread = own + (rest * others).long()
        return torch.where(at < busiest, first, spread).view(-1, self.top_k)

    def _replicated(
        self, linear: nn.Linear, *, summed: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias that TP ranks hold whole. summed: each has a part of their gradients."""
        if self.axes.tp is None or not summed:
            return linear.weight, linear.bias
        bias = None if linear.bias is None else Copy.apply(linear.bias, self.axes.tp)
        return Copy.apply(linear.weight, self.axes.tp), bias

    def _exchange_plan(self, chosen: torch.Tensor, num_copies: int) -> "Counts":
        """Copies to and from each rank, by expert; the host waits only where rows are exchanged."""
        ep = self.axes.ep
        ranks = 1 if ep is None else ep.size()
        if self.axes.received_share is not None:
            share = self.axes.received_share
            return Counts.assumed(num_copies, self.num_experts, ranks, share, chosen.device)
        self.load = load_of(chosen, self.num_experts)
        if ep is None:
            return Counts(received=self.load.view(1, -1))
        each = [self.num_experts // ranks] * ranks
        came = all_to_all(self.load, each, each, ep)
        sent, received = torch.stack([self.load, came]).view(2, ranks, -1).sum(-1).tolist()
        return Counts(received=came.view(ranks, -1), rows_sent=sent, rows_received=received)

    def _experts_on(self, routed: torch.Tensor, counts: "Counts") -> torch.Tensor:
        ep = self.axes.ep
        if ep is not None:
            routed = Exchange.apply(routed, counts.rows_received, counts.rows_sent, ep)
        out = self.experts(routed, counts.received)
        if ep is not None:
            out = Exchange.apply(out, counts.rows_sent, counts.rows_received, ep)
        return cast(torch.Tensor, out)

    def _over_tp(self, x: torch.Tensor, uncut: Any, cut: Any, whole: Any) -> torch.Tensor:
        """Moves tokens between TP ranks: from the block's residual to the router, or back.

        A rank routes its part of the sequence, or all of it if experts are cut over TP.
        uncut: for experts that TP does not cut, where each rank holds the whole sequence.
        cut, whole: for those that it cuts, where a rank holds its part of it, or all of it.
        """
        axes = self.axes
        if axes.tp is None or (axes.etp is None and axes.sequence_parallel):
            return x
        if axes.etp is None:
            return cast(torch.Tensor, uncut.apply(x, axes.tp, SEQUENCE))
        if axes.sequence_parallel:
            return cast(torch.Tensor, cut.apply(x, axes.tp, SEQUENCE))
        return cast(torch.Tensor, whole.apply(x, axes.tp))

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        out = self.shared(x)
        if self.shared_gate is None:
            return out  # type: ignore[no-any-return]
        weight, _ = self._replicated(self.shared_gate, summed=self.axes.sequence_parallel)
        return out * torch.sigmoid(F.linear(x, weight))  # type: ignore[no-any-return]


def load_of(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Token copies of each expert (E,), by histc as TorchTitan: bincount makes the host wait."""
    return torch.histc(chosen.flatten().float(), num_experts, 0, num_experts).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sizes of an exchange of token copies.

    received: copies by source rank and own expert (P, L), on the device.
    rows_sent, rows_received: rows to and from each rank; empty without expert parallelism.
    """

    received: torch.Tensor
    rows_sent: list[int] = field(default_factory=list)
    rows_received: list[int] = field(default_factory=list)

    @classmethod
    def assumed(
        cls, num_copies: int, num_experts: int, ranks: int, share: float, device: torch.device
    ) -> "Counts":
        """Balanced routing. share: received copies per copy sent, on the busiest rank."""
        sent, came = (
            np.array([total // num_experts + (i < total % num_experts) for i in range(num_experts)])
            for total in (num_copies, round(num_copies * share))
        )
        sent, came = (part.reshape(ranks, -1) for part in (sent, came))
        return cls(
            received=torch.tensor(came, device=device),
            rows_sent=sent.sum(1).tolist(),
            rows_received=came.sum(1).tolist(),
        )


def activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """GELU or squared ReLU."""
    return F.gelu(x) if kind == "gelu" else F.relu(x).square()


class GroupedExperts(nn.Module):
    """The experts of one rank: weights (L, out, in).

    cuts: by parameter, (dimension, parts, own part), in the order in which they were made.
    grouped: `with_offsets`, or its compiled form.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        e, width, h = spec.num_experts, spec.moe_intermediate_size, spec.hidden_size
        self.kind = spec.mlp
        shapes: dict[str, tuple[int, ...]] = {"w1": (e, width, h), "w2": (e, h, width)}
        if spec.mlp == "swiglu":
            shapes["w3"] = (e, width, h)
        if spec.expert_bias:
            shapes |= {f"b{name[1]}": shape[:2] for name, shape in shapes.items()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(*shape)))
        self.w1: torch.Tensor
        self.w2: torch.Tensor
        self.w3: torch.Tensor
        self.cuts: dict[str, tuple[tuple[int, int, int], ...]] = {}
        self.etp: dist.ProcessGroup | None = None
        self.grouped: Callable[..., torch.Tensor] = self.with_offsets

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The rows through their experts: (copies, C) -> (copies, C).

        Rows are ordered by source rank, then expert; counts (P, L) say how many of each. They stay
        on the device, so that the host never waits, and there is room for every group's padding:
        rows behind the last group are neither computed nor read.
        """
        grouped, total, experts = rows.dtype == torch.bfloat16, rows.shape[0], counts.shape[1]
        at, ends = regrouping(counts, total, ALIGNMENT if grouped else 1)
        room = -(-total // ALIGNMENT) * ALIGNMENT + experts * ALIGNMENT if grouped else total
        padded = rows.new_zeros(room, rows.shape[-1]).index_copy(0, at, rows)
        owner = None
        if hasattr(self, "b1"):
            places = torch.arange(room, device=rows.device)
            owner = torch.bucketize(places, ends, right=True).clamp(max=experts - 1)
        if grouped:
            return self.grouped(padded, ends.to(torch.int32), owner)[at]
        return self._through(padded, _looped(counts.sum(0).tolist()), owner)[at]

    def with_offsets(
        self, padded: torch.Tensor, offsets: torch.Tensor, owner: torch.Tensor | None
    ) -> torch.Tensor:
        """The rows through grouped products; offsets (L,): end of each expert's rows."""

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets)

        return self._through(padded, product, owner)

    def _through(
        self, padded: torch.Tensor, product: Product, owner: torch.Tensor | None
    ) -> torch.Tensor:
        h = self._with_bias(product(padded, self.w1), "b1", owner)
        if self.kind == "swiglu":
            h = F.silu(h) * self._with_bias(product(padded, self.w3), "b3", owner)
        else:
            h = activated(h, self.kind)
        return self._with_bias(product(h, self.w2), "b2", owner)

    def _with_bias(self, x: torch.Tensor, name: str, owner: torch.Tensor | None) -> torch.Tensor:
        if owner is None:
            return x
        bias = getattr(self, name)
        if name == "b2" and self.etp is not None:  # the sum over ranks must add it once
            bias = Copy.apply(bias, self.etp) / self.etp.size()
        return x + F.embedding(owner, bias)


def expert_parameters(model: nn.Module) -> Iterator[tuple[GroupedExperts, str, nn.Parameter]]:
    """Every parameter of experts, with its module and its name there."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            for name, parameter in module.named_parameters(recurse=False):
                yield module, name, parameter


def regrouping(
    counts: torch.Tensor, total: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each of `total` copies goes, and where each expert's rows end; counts (P, L).

    Copies come by source rank, then expert. Groups are padded to a multiple of `alignment`.
    """
    sizes = (counts.sum(0) + alignment - 1) // alignment * alignment
    ends = sizes.cumsum(0)
    targets = ends - sizes + counts.cumsum(0) - counts
    sources = counts.flatten().cumsum(0).view_as(counts) - counts
    moved = (targets - sources).flatten().repeat_interleave(counts.flatten(), output_size=total)
    return torch.arange(total, device=counts.device) + moved, ends


def _looped(sizes: list[int]) -> Product:
    """Computes expert by expert, for dtypes without a grouped kernel."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(sizes), weight.unbind(), strict=True)
        return torch.cat([part @ matrix.T for part, matrix in parts])

    return product
