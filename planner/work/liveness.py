"""Tensors alive while one unit runs backward: saved ones until they are used, and gradients.

The order is autograd's, the reverse of forward. A gradient lives from its first consumer's backward
to its producer's. A saved tensor lives until the backward of the first operation that saves it.
Gradients of weights live until the unit ends.
Letters: U rows of a batch, C distinct tensors, M points in time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op, Tensor

Alive = Counter[int]  # how many tensors of each size are alive, by the size's number


class _Sizes:
    """Numbers of sizes: tensors that differ in their name alone have one."""

    def __init__(self) -> None:
        self.numbers: dict[Tensor, int] = {}

    def count(self, tensors: Iterable[Tensor]) -> Alive:
        """How many of these tensors have each size."""
        return Counter(
            self.numbers.setdefault(_size(tensor), len(self.numbers)) for tensor in tensors
        )


def saved_tensors(ops: Sequence[Op]) -> dict[str, Tensor]:
    """Every tensor that the operations save for backward, once, by name."""
    return {
        tensor.name: tensor for op in ops if not isinstance(op, Collective) for tensor in op.saves
    }


def weight_gradients(ops: Sequence[Op]) -> list[Tensor]:
    """Gradients of the weights that these operations multiply by."""
    return [
        Tensor(op.name, (*op.batch, *op.depth, *op.cols), width="weight")
        for op in ops
        if isinstance(op, Gemm)
    ]


def tensor_bytes(
    tensor: Tensor, bytes_of: Callable[[Tensor], FloatColumn], fused: BoolColumn
) -> FloatColumn:
    """Bytes of a saved tensor (U,), 0 where eager or fused kernels do not save it."""
    if tensor.eager_only:
        return np.where(fused, 0.0, bytes_of(tensor))
    return np.where(fused, bytes_of(tensor), 0.0) if tensor.fused_only else bytes_of(tensor)


def backward_peak(
    ops: tuple[Op, ...], bytes_of: Callable[[Tensor], FloatColumn], fused: BoolColumn
) -> FloatColumn:
    """Most bytes alive at once in the unit's backward, (U,).

    The backward begins with all saved tensors in memory. The peak is the maximum over time of
    M_MC @ bytes_CU.
    Source: torch/csrc/autograd/engine.cpp (order, accumulation in place, release of what is saved).
    """
    return _most(_backward_instants(ops), bytes_of, fused)


def recomputation_peak(
    ops: tuple[Op, ...],
    bytes_of: Callable[[Tensor], FloatColumn],
    fused: BoolColumn,
    stops: BoolColumn,
) -> FloatColumn:
    """Most bytes alive at once while the unit's forward is repeated for its backward, (U,).

    They are all that it saves, its gradient and workspace.
    stops (U,): it stops once it has what backward needs; otherwise it runs to the unit's end.
    """
    short = _most(_recomputation_instants(ops, False), bytes_of, fused)
    if stops.all():
        return short
    return np.where(stops, short, _most(_recomputation_instants(ops, True), bytes_of, fused))


def _most(
    instants: tuple[tuple[Tensor, ...], FloatColumn],
    bytes_of: Callable[[Tensor], FloatColumn],
    fused: BoolColumn,
) -> FloatColumn:
    tensors, counts = instants
    alive, one = np.zeros((2, len(counts), len(fused)))
    for tensor, count in zip(tensors, counts.T, strict=True):
        alive += np.multiply(count[:, None], tensor_bytes(tensor, bytes_of, fused), out=one)
    return np.asarray(alive.max(axis=0))


@lru_cache(maxsize=512)
def _backward_instants(ops: tuple[Op, ...]) -> tuple[tuple[Tensor, ...], FloatColumn]:
    replay = _Replay(ops)
    for index in reversed(range(len(ops))):
        replay.step(index)
    return _table(replay.instants, replay.sizes)


@lru_cache(maxsize=512)
def _recomputation_instants(
    ops: tuple[Op, ...], runs_on: bool
) -> tuple[tuple[Tensor, ...], FloatColumn]:
    last, sizes = next(op for op in reversed(ops) if results(op)), _Sizes()
    always = sizes.count((*saved_tensors(ops).values(), *results(last)))
    instants = [
        always + sizes.count((*op.forward_workspace, *(op.forward_results if runs_on else ())))
        for op in ops
        if isinstance(op, Elementwise)
    ]
    return _table(instants, sizes)


def _table(instants: Sequence[Alive], sizes: _Sizes) -> tuple[tuple[Tensor, ...], FloatColumn]:
    """(C distinct sizes, how often each is alive at each point in time (M, C)).

    Points in time that another one covers are left out.
    """
    alive = tuple(dict.fromkeys(number for instant in instants for number in instant))
    distinct = {tuple(instant[number] for number in alive) for instant in instants}
    table = np.array(sorted(distinct), dtype=np.float64)
    covers = np.asarray((table[:, None] >= table).all(axis=2))
    np.fill_diagonal(covers, False)
    tensors = list(sizes.numbers)
    return tuple(tensors[number] for number in alive), table[~covers.any(axis=0)]


def _size(tensor: Tensor) -> Tensor:
    """The tensor without its name: tensors of one size share a column."""
    return Tensor(
        "",
        tuple(sorted(tensor.dims)),
        width=tensor.width,
        eager_only=tensor.eager_only,
        fused_only=tensor.fused_only,
    )


class _Replay:
    """The backward of a list of operations, step by step.

    owner: the buffer that holds a tensor's gradient, by the tensor's name.
    """

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self.ops = ops
        self.instants: list[Alive] = []
        self.sizes = _Sizes()
        self.kept = self.sizes.count(saved_tensors(ops).values())
        self.last_use = self._last_uses()
        self.buffers: dict[int, Tensor] = {}
        self.owner: dict[str, int] = {}
        self.weights: Alive = Counter()
        last = next(op for op in reversed(ops) if results(op))
        for tensor in results(last):
            self._grant(tensor)

    def _last_uses(self) -> dict[int, list[Tensor]]:
        first: dict[str, int] = {}
        uses: dict[int, list[Tensor]] = {}
        saved = saved_tensors(self.ops)
        for index, op in enumerate(self.ops):
            for tensor in () if isinstance(op, Collective) else op.saves:
                if first.setdefault(tensor.name, index) == index:
                    uses.setdefault(index, []).append(saved[tensor.name])
        return uses

    def step(self, index: int) -> None:
        op = self.ops[index]
        incoming = [tensor.name for tensor in results(op) if tensor.name in self.owner]
        if isinstance(op, Elementwise) and op.shares:
            for tensor in op.reads:
                self.owner[tensor.name] = self.owner[incoming[0]]
        elif incoming:
            self._compute(op, incoming)
        elif isinstance(op, Collective):
            self._note(op.exchanged)
        for name in incoming:
            self.owner.pop(name, None)
        self.kept.subtract(self.sizes.count(self.last_use.get(index, ())))
        self._collect()

    def _compute(self, op: Op, incoming: Sequence[str]) -> None:
        if isinstance(op, Gemm):
            self.weights.update(self.sizes.count(weight_gradients((op,))))
        if isinstance(op, Collective):
            self._note(op.exchanged)
            for name in incoming:
                self.owner.pop(name, None)
            self._collect()
            incoming = ()
        fresh = [tensor for tensor in op.reads if tensor.name in self.owner]
        for tensor in op.reads:
            if tensor not in fresh:
                self._grant(tensor)
        if isinstance(op, Elementwise) and op.casts:
            given = self.sizes.count(self.buffers[self.owner[name]] for name in incoming)
            read = self.sizes.count(_gradient(one) for one in op.reads if one not in fresh)
            self._note(op.workspace, less=given + read)
        extra = (
            op.workspace
            if isinstance(op, Attention) or (isinstance(op, Elementwise) and not op.casts)
            else ()
        )
        self._note((*extra, *(_gradient(tensor) for tensor in fresh)))
        for tensor in fresh:
            self._grant(tensor)

    def _grant(self, tensor: Tensor) -> None:
        number = max(self.buffers, default=0) + 1
        self.buffers[number] = _gradient(tensor)
        self.owner[tensor.name] = number

    def _collect(self) -> None:
        owned = set(self.owner.values())
        self.buffers = {
            number: tensor for number, tensor in self.buffers.items() if number in owned
        }

    def _note(self, extra: Sequence[Tensor], less: Alive | None = None) -> None:
        alive = self.kept + self.weights + self.sizes.count((*self.buffers.values(), *extra))
        self.instants.append(alive - less if less else alive)


def _gradient(tensor: Tensor) -> Tensor:
    """The gradient of a tensor has its shape, in fp32 or in the compute dtype.

    The gradient of a low-precision copy is in the compute dtype. The gradient of an eager-only
    tensor exists in any case.
    """
    return Tensor("", tensor.dims, width="fp32" if tensor.width == "fp32" else "compute")


def results(op: Op) -> tuple[Tensor, ...]:
    """Tensors that an operation returns, as far as they get a gradient."""
    if isinstance(op, Collective):
        return op.makes
    if isinstance(op, Elementwise):
        return op.makes
    return (op.output,)
