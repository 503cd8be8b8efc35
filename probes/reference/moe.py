"""Mixture of experts: router, token exchange, grouped experts, combination, shared experts.

Letters: N tokens on this rank, k experts a token, C hidden size, E experts of the model, L experts
of this rank, P expert-parallel ranks.
Copies of tokens are sorted by expert, exchanged over expert-parallel ranks, regrouped by local
expert with groups padded to the alignment of the grouped matrix product, and sent back. This order
is TorchTitan's (models/moe/moe.py, distributed/expert_parallel.py of 0.2.2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from planner.specs.model import ModelSpec
from probes.reference.collectives import (
    Copy,
    Exchange,
    Gather,
    Join,
    Reduce,
    Scatter,
    Split,
    all_to_all,
)

SEQUENCE = 1
# alignment of a group's rows, so that a bf16 row of its transpose has 16 bytes;
# torchtitan TOKEN_GROUP_ALIGN_SIZE_M
ALIGNMENT = 8
GOLDEN = 0.6180339887498949  # multiples of it modulo 1 fill the unit interval evenly
Ints = NDArray[np.int64]
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
        self.shared_gate = (
            nn.Linear(spec.hidden_size, 1, bias=False) if spec.shared_expert_gate else None
        )
        self.axes = ExpertAxes()
        self.load: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        entered = self._enter(x)
        flat = entered.flatten(0, 1)
        weights, chosen = self._route(flat)
        order = chosen.flatten().argsort(stable=True)
        sent = self._exchange_plan(chosen, order.numel())
        routed = flat[order // self.top_k]
        out_rows = self._experts_on(routed, sent)
        copies = torch.zeros_like(routed)
        copies[order] = out_rows.to(copies.dtype)
        combined = (
            torch.bmm(weights[:, None, :], copies.unflatten(0, (-1, self.top_k)).float())
            .squeeze(1)
            .to(x.dtype)
        )
        out = self._leave(combined.view_as(entered))
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
        return weights / (
            weights.sum(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny
        ), chosen

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
        """Weight and bias of a layer that every TP rank holds whole.

        summed: each rank has one part of their gradients.
        """
        if self.axes.tp is None or not summed:
            return linear.weight, linear.bias
        bias = None if linear.bias is None else Copy.apply(linear.bias, self.axes.tp)
        return Copy.apply(linear.weight, self.axes.tp), bias

    def _exchange_plan(self, chosen: torch.Tensor, num_copies: int) -> "Counts | torch.Tensor":
        """Counts the copies sent to and received from each rank, by expert.

        Without expert parallelism the counts of this rank's experts stay on the device.
        """
        ep = self.axes.ep
        ranks = 1 if ep is None else ep.size()
        if self.axes.received_share is not None:
            return Counts.assumed(num_copies, self.num_experts, ranks, self.axes.received_share)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        self.load = counts
        if ep is None:
            return counts
        each = [self.num_experts // ranks] * ranks
        came = all_to_all(counts, each, each, ep)
        both = torch.stack([counts, came]).tolist()
        sent, received = (np.array(part, dtype=np.int64).reshape(ranks, -1) for part in both)
        return Counts(sent=sent, received=received)

    def _experts_on(self, routed: torch.Tensor, counts: "Counts | torch.Tensor") -> torch.Tensor:
        ep = self.axes.ep
        if isinstance(counts, torch.Tensor):
            return cast(torch.Tensor, self.experts(routed, counts))
        if ep is not None:
            routed = Exchange.apply(routed, counts.rows_received, counts.rows_sent, ep)
        out = self.experts(routed, counts.received)
        if ep is not None:
            out = Exchange.apply(out, counts.rows_sent, counts.rows_received, ep)
        return cast(torch.Tensor, out)

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens that this rank routes.

        Under TP it is the rank's part of the sequence, or all of it if experts are cut over TP.
        """
        axes = self.axes
        if axes.tp is None:
            return x
        if axes.etp is None:
            return (
                x
                if axes.sequence_parallel
                else cast(torch.Tensor, Split.apply(x, axes.tp, SEQUENCE))
            )
        if axes.sequence_parallel:
            return cast(torch.Tensor, Gather.apply(x, axes.tp, SEQUENCE))
        return cast(torch.Tensor, Copy.apply(x, axes.tp))

    def _leave(self, out: torch.Tensor) -> torch.Tensor:
        """Returns the output in the form of the block's residual."""
        axes = self.axes
        if axes.tp is None:
            return out
        if axes.etp is None:
            return (
                out
                if axes.sequence_parallel
                else cast(torch.Tensor, Join.apply(out, axes.tp, SEQUENCE))
            )
        if axes.sequence_parallel:
            return cast(torch.Tensor, Scatter.apply(out, axes.tp, SEQUENCE))
        return cast(torch.Tensor, Reduce.apply(out, axes.tp))

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        out = self.shared(x)
        if self.shared_gate is None:
            return out  # type: ignore[no-any-return]
        weight, _ = self._replicated(self.shared_gate, summed=self.axes.sequence_parallel)
        return out * torch.sigmoid(F.linear(x, weight))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Token copies by expert-parallel rank and local expert, (P, L) each.

    The experts are that rank's for sent copies, this rank's for received ones.
    """

    sent: Ints
    received: Ints

    @property
    def rows_sent(self) -> list[int]:
        """Rows to each rank."""
        return [int(n) for n in self.sent.sum(axis=1)]

    @property
    def rows_received(self) -> list[int]:
        """Rows from each rank."""
        return [int(n) for n in self.received.sum(axis=1)]

    @classmethod
    def assumed(
        cls, num_copies: int, num_experts: int, ranks: int, received_share: float
    ) -> "Counts":
        """Balanced routing, as `_route` then does it.

        Received copies are that times the load of the busiest rank.
        """
        each = np.full(num_experts, num_copies // num_experts, dtype=np.int64)
        each[: num_copies % num_experts] += 1
        sent = each.reshape(ranks, -1)
        total = round(num_copies * received_share)
        came = np.full(sent.size, total // sent.size, dtype=np.int64)
        came[: total % sent.size] += 1
        return cls(sent=sent, received=came.reshape(sent.shape))


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
        self.grouped: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = (
            self.with_offsets
        )

    def forward(self, rows: torch.Tensor, counts: Ints | torch.Tensor) -> torch.Tensor:
        """The rows through their experts: (copies, C) -> (copies, C).

        Rows are ordered by source rank, then expert. Counts are (P, L), or (L,) on the device if
        all rows come from this rank.
        """
        grouped = rows.dtype == torch.bfloat16
        if isinstance(counts, torch.Tensor):
            if grouped and not hasattr(self, "b1"):
                return self._without_waiting(rows, counts)
            counts = np.array(counts.tolist(), dtype=np.int64)[None]
        index, sizes = regrouping(counts, ALIGNMENT if grouped else 1)
        at = torch.tensor(index, device=rows.device)
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])[at]
        owner = (
            torch.tensor(np.repeat(np.arange(len(sizes)), sizes), device=rows.device)
            if hasattr(self, "b1")
            else None
        )
        if grouped:
            offsets = torch.tensor(np.cumsum(sizes).astype(np.int32), device=rows.device)
            out = self.grouped(padded, offsets, owner)
        else:
            out = self._through(padded, _looped(sizes), owner)
        unpadded = out.new_empty(rows.shape[0] + 1, out.shape[-1])
        unpadded[at] = out
        return unpadded[:-1]

    def _without_waiting(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Computes the rows with counts that stay on the device, so that the host never waits.

        There is room for every group's padding. Rows behind the last group are neither computed
        nor read.
        """
        padded_counts = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        ends = padded_counts.cumsum(0)
        shift = (ends - padded_counts) - (counts.cumsum(0) - counts)
        total = rows.shape[0]
        at = torch.arange(total, device=rows.device) + shift.repeat_interleave(
            counts, output_size=total
        )
        room = -(-total // ALIGNMENT) * ALIGNMENT + len(counts) * ALIGNMENT
        padded = rows.new_zeros(room, rows.shape[-1]).index_copy(0, at, rows)
        return self.grouped(padded, ends.to(torch.int32), None)[at]

    def with_offsets(
        self, padded: torch.Tensor, offsets: torch.Tensor, owner: torch.Tensor | None
    ) -> torch.Tensor:
        """The rows through grouped products; offsets (L,): end of each expert's rows."""
        return self._through(
            padded,
            lambda x, weight: torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets),
            owner,
        )

    def _through(
        self, padded: torch.Tensor, product: Product, owner: torch.Tensor | None
    ) -> torch.Tensor:
        h = self._with_bias(product(padded, self.w1), "b1", owner)
        if self.kind == "swiglu":
            h = F.silu(h) * self._with_bias(product(padded, self.w3), "b3", owner)
        else:
            h = F.gelu(h) if self.kind == "gelu" else F.relu(h).square()
        return self._with_bias(product(h, self.w2), "b2", owner)

    def _with_bias(self, x: torch.Tensor, name: str, owner: torch.Tensor | None) -> torch.Tensor:
        if owner is None:
            return x
        bias = getattr(self, name)
        if name == "b2" and self.etp is not None:  # the sum over ranks must add it once
            bias = Copy.apply(bias, self.etp) / self.etp.size()
        return x + F.embedding(owner, bias)


def regrouping(counts: Ints, alignment: int) -> tuple[Ints, list[int]]:
    """Regroups copies that are ordered by source rank, then expert; counts (P, L).

    Returns (source row of every row after regrouping, rows of each expert). Groups are padded to a
    multiple of `alignment`; padding rows point behind the last row.
    """
    ranks = len(counts)
    starts = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
    sizes, sources = counts.T.ravel(), starts.T.ravel()
    per_expert = counts.sum(axis=0)
    padded = -(-per_expert // alignment) * alignment
    within = (np.cumsum(counts, axis=0) - counts).T.ravel()
    targets = np.repeat(np.cumsum(padded) - padded, ranks) + within
    steps = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    index = np.full(int(padded.sum()), int(counts.sum()), dtype=np.int64)
    index[np.repeat(targets, sizes) + steps] = np.repeat(sources, sizes) + steps
    return index, [int(n) for n in padded]


def _looped(sizes: list[int]) -> Product:
    """Computes expert by expert, for dtypes without a grouped kernel."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [part @ matrix.T for part, matrix in zip(x.split(sizes), weight.unbind(), strict=True)]
        )

    return product
