"""Which kernels a plan's candidate layouts will run, and which of them no measurement covers yet.

Shapes come from the same lists of operations that are priced. Worth measuring first are kernels
that take much of the step of many candidates and are far from everything measured. Distance is in
log space, since efficiency changes with orders of magnitude.
Letters: U candidate layouts; every size is a column (U,).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibration.kernels import COLLECTIVES, KernelShape, kernel_seconds
from planner.columns import FloatColumn, LayoutBatch
from planner.cost.data_parallel.unit_elements import kept_shards, unit_parameters
from planner.cost.layer.context import CostContext
from planner.cost.pipeline.schedule_columns import num_microbatches
from planner.cost.price import Pricer
from planner.precision import PRECISIONS
from planner.specs.layout import DTYPES
from planner.work import axes, blocks
from planner.work.heads import TP_DIMS
from planner.work.hyper_connections import stream_dims
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op

# Beyond FAR octaves from anything measured, a shape is as unknown as any; within NEAR it
# is known. Judgement.
FAR, NEAR = 2.0, 0.25
# timed and warm-up runs of one shape; seconds to create its operands. Judgement.
RUNS, OVERHEAD_SECONDS = 20, 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A shape that candidates run.

    seconds: one run, as predicted.
    share: of a step, the mean over all candidates.
    """

    shape: KernelShape
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UncoveredKernel:
    """A kernel that candidates run and no measurement covers.

    octaves: distance to the closest measured shape; infinite if there is none.
    """

    use: Use
    octaves: float

    @property
    def value(self) -> float:
        """The worth of measuring it: its share of a step, weighted by its distance."""
        return self.use.share * min(self.octaves, FAR) / FAR


def uses(pricer: Pricer, batch: LayoutBatch) -> tuple[Use, ...]:
    """Every kernel of these layouts, largest share of a step first."""
    step = pricer.price(batch).step_seconds
    found: dict[KernelShape, tuple[float, float]] = {}
    for run in _runs(pricer, batch):
        each = kernel_seconds(pricer, run.kind, run.name, run.dtypes, run.sizes)
        shares = run.calls * each / step
        for row in np.flatnonzero(run.calls > 0):
            shape = run.shape(int(row))
            seconds, share = found.get(shape, (0.0, 0.0))
            found[shape] = (max(seconds, float(each[row])), share + float(shares[row]) / len(batch))
    ordered = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))
    return tuple(
        Use(shape=shape, seconds=seconds, share=share) for shape, (seconds, share) in ordered
    )


def gaps(used: Iterable[Use], measured: Sequence[KernelShape]) -> tuple[UncoveredKernel, ...]:
    """Uses that are further than NEAR from everything measured, most valuable first."""
    found = [
        UncoveredKernel(use=use, octaves=min(map(use.shape.octaves_to, measured), default=math.inf))
        for use in used
    ]
    far = [gap for gap in found if gap.octaves > NEAR]
    return tuple(sorted(far, key=lambda gap: (-gap.value, gap.use.shape)))


def choose(
    used: Iterable[Use],
    measured: Sequence[KernelShape],
    *,
    budget_seconds: float,
    num_gpus: int = 1,
) -> tuple[UncoveredKernel, ...]:
    """The gaps to measure within a budget of GPU seconds, in the order in which to measure them.

    num_gpus: available GPUs, neighbours in one node; groups that span more are left out.

    Each choice counts as measured for those after it, so that near copies do not crowd out the
    rest. What no longer fits the budget is skipped in favour of smaller kernels.
    """
    open_gaps = list(gaps((use for use in used if use.shape.num_gpus <= num_gpus), measured))
    chosen: list[UncoveredKernel] = []
    while open_gaps:
        best = max(open_gaps, key=lambda gap: gap.value)
        open_gaps.remove(best)
        cost = probe_seconds(best.use)
        if cost > budget_seconds:
            continue
        budget_seconds -= cost
        chosen.append(best)
        open_gaps = [_closer(gap, best.use.shape) for gap in open_gaps]
        open_gaps = [gap for gap in open_gaps if gap.octaves > NEAR]
    return tuple(chosen)


def probe_seconds(use: Use) -> float:
    return RUNS * use.seconds + OVERHEAD_SECONDS


def _closer(gap: UncoveredKernel, measured: KernelShape) -> UncoveredKernel:
    return replace(gap, octaves=min(gap.octaves, gap.use.shape.octaves_to(measured)))


# ---- the kernels of layouts ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One kernel at U layouts.

    dtypes: one per layout.
    calls: per step and rank, mean over ranks; 0 if the layout does not run it.
    """

    kind: str
    name: str
    dtypes: Sequence[str]
    sizes: Mapping[str, FloatColumn]
    calls: FloatColumn

    def shape(self, row: int) -> KernelShape:
        return KernelShape.of(
            self.kind,
            self.name,
            self.dtypes[row],
            **{key: float(column[row]) for key, column in self.sizes.items()},
        )


def _runs(pricer: Pricer, batch: LayoutBatch) -> Iterator[_Run]:
    kernels = _Kernels(pricer, pricer.context(batch))
    microbatches = num_microbatches(batch, pricer.training)
    passes = microbatches / batch.pp
    flash = pricer.training.attention_kernel != "unfused"
    for kind, count in pricer.model.distinct_layers():
        for op in blocks.layer_ops(pricer.model, kind, flash):
            yield from kernels.of(op, passes * count)
    for op in (*blocks.embedding_ops(pricer.model), *blocks.head_ops(pricer.model)):
        yield from kernels.of(op, passes)
    yield from kernels.data_parallel(microbatches)
    yield kernels.sends(microbatches)
    yield kernels.optimizer()


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Turns operations into kernels with their sizes."""

    pricer: Pricer
    context: CostContext

    @property
    def batch(self) -> LayoutBatch:
        return self.context.batch

    def of(self, op: Op, passes: FloatColumn) -> Iterator[_Run]:
        """Kernels of one operation, run in `passes` layers and microbatches of a step. (U,)."""
        if isinstance(op, Gemm):
            yield from self._products(op, passes)
        elif isinstance(op, Attention) and op.heads in TP_DIMS:  # no survey has sparse kernels
            yield from self._attention(op, passes)
        elif isinstance(op, Elementwise):
            yield self._moved(op, passes)
        elif isinstance(op, Collective):
            yield from self._exchanged(op, passes)

    def _products(self, op: Gemm, passes: FloatColumn) -> Iterator[_Run]:
        """Forward, gradient of the input, gradient of the weight.

        Grouped products have the same number of groups in all three. The weight gradient of grouped
        products has its groups in the depth: m = depth, k = rows a group.
        """
        batch = self.batch
        rows, cols, depth, groups = (
            self.context.product(dims) for dims in (op.rows, op.cols, op.depth, op.batch)
        )
        low = op.role in ("linear", "expert")
        names = [PRECISIONS.names[code] if low else "bf16" for code in batch.precision]
        dtypes = [
            name if DTYPES[width] == "bfloat16" else "float32"
            for name, width in zip(names, batch.param_dtype, strict=True)
        ]
        for m, n, k in ((rows, cols, depth), (rows, depth, cols), (depth, cols, rows)):
            sizes = {"m": m, "n": n, "k": k} | ({"groups": groups} if op.batch else {})
            yield _Run(
                kind="grouped-gemm" if op.batch else "gemm",
                name="",
                dtypes=dtypes,
                sizes=sizes,
                calls=passes,
            )

    def _attention(self, op: Attention, passes: FloatColumn) -> Iterator[_Run]:
        """Attention, forward and backward.

        Context parallelism runs `cp` pieces of a shorter sequence; Ulysses runs fewer heads of
        the whole sequence.
        """
        batch, training = self.batch, self.pricer.training
        model = self.pricer.model.at(op.window)
        ulysses = batch.cp_method == axes.ULYSSES
        cp = batch.cp.astype(np.float64)
        pieces = np.where(ulysses, 1.0, cp)
        seq = training.seq_len / pieces
        window = float(op.window) if op.window and op.window < training.seq_len else 0.0
        shared = op.heads.replace("heads", "kv_heads")
        heads = self.context.sizes[op.heads] / np.where(ulysses, cp, 1.0)
        kv_heads = np.maximum(self.context.sizes[shared] / np.where(ulysses, cp, 1.0), 1.0)
        one = np.ones(len(batch))
        sizes = {
            "batch": batch.micro_batch_size * one,
            "heads": heads,
            "kv_heads": heads if model.uses_mla else kv_heads,
            "seq": seq,
            "head_dim": model.qk_head_dim * one,
            "v_head_dim": model.v_dim * one,
            "window": window * one,
        }
        dtypes = [
            "bf16" if DTYPES[width] == "bfloat16" else "float32" for width in batch.param_dtype
        ]
        for kind in ("attention", "attention-backward"):
            yield _Run(kind=kind, name="", dtypes=dtypes, sizes=sizes, calls=passes * pieces)

    def _moved(self, op: Elementwise, passes: FloatColumn) -> _Run:
        """Memory-bound operations by the bytes of one tensor, as copies."""
        width = 4.0 if op.width == "fp32" else self.batch.param_bytes
        num_bytes = self.context.product(op.dims) * width
        moves = np.where(
            self.context.fused,
            op.moves.fused_forward + op.moves.fused_backward,
            op.moves.forward + op.moves.backward,
        )
        return self._run("memory", "copy", {"bytes": num_bytes}, passes * moves / 2.0)

    def _run(
        self,
        kind: str,
        name: str,
        sizes: Mapping[str, FloatColumn],
        calls: FloatColumn,
        dtype: str = "bf16",
    ) -> _Run:
        """A kernel that runs in one dtype in all layouts."""
        dtypes = [dtype] * len(self.batch)
        return _Run(kind=kind, name=name, dtypes=dtypes, sizes=sizes, calls=calls)

    def _exchanged(self, op: Collective, passes: FloatColumn) -> Iterator[_Run]:
        payload = self.context.product(op.tensor.dims) * self.batch.param_bytes
        for rule in axes.SITES[op.site]:
            applies = rule.applies(self.batch)
            degree, stride = self.context.group(rule.axis)
            for operation in (rule.forward, rule.backward):
                if operation in COLLECTIVES and applies.any():
                    yield self._collective(
                        str(operation), payload, degree, stride, np.where(applies, passes, 0.0)
                    )

    def data_parallel(self, microbatches: FloatColumn) -> Iterator[_Run]:
        """Collectives on every unit's parameters, over shards, replicas or both."""
        batch, model = self.batch, self.pricer.model
        counts = [count for _, count in model.distinct_layers()] + [1, 1]
        sharded = batch.zero_stage > 0
        gathers = np.where(batch.zero_stage == 3, 2.0 * microbatches, 1.0)
        groups = (("fsdp", "ddp"), ("efsdp", "eddp"))
        for parameters, names in zip(unit_parameters(model, batch), groups, strict=True):
            shards, whole = map(self.context.group, names)
            for unit, count in zip(parameters, counts, strict=True):
                held = np.where(unit > 0, count / batch.pp, 0.0)
                of_shard, of_whole = np.where(sharded, held, 0.0), np.where(sharded, 0.0, held)
                for operation, width, group, calls in (
                    ("all-gather", batch.param_bytes, shards, of_shard * gathers),
                    ("reduce-scatter", batch.reduce_bytes, shards, of_shard),
                    ("all-reduce", batch.reduce_bytes, whole, of_whole),
                ):
                    yield self._collective(operation, unit * width, *group, calls)

    def _collective(
        self,
        operation: str,
        payload: FloatColumn,
        degree: FloatColumn,
        stride: FloatColumn,
        calls: FloatColumn,
    ) -> _Run:
        sizes = {"bytes": payload, "ranks": degree, "stride": stride}
        return self._run("collective", operation, sizes, np.where(degree > 1.0, calls, 0.0))

    def sends(self, microbatches: FloatColumn) -> _Run:
        """Activations to the next pipeline rank, and their gradients back."""
        batch = self.batch
        payload = self.context.product(stream_dims(self.pricer.model)) * batch.param_bytes
        _, stride = self.context.group("pp")
        sizes = {"bytes": payload, "ranks": np.full(len(batch), 2.0), "stride": stride}
        calls = np.where(batch.pp > 1, 2.0 * microbatches * batch.virtual_stages, 0.0)
        return self._run("collective", "send", sizes, calls)

    def optimizer(self) -> _Run:
        """The optimizer's step on the device of one rank, mean over pipeline ranks."""
        batch, pricer = self.batch, self.pricer
        dense, expert = unit_parameters(pricer.model, batch)
        counts = np.array([count for _, count in pricer.model.distinct_layers()] + [1.0, 1.0])
        owned = counts @ kept_shards(batch, dense, expert, pricer.cluster.rank_order) / batch.pp
        owned = owned * (1.0 - batch.host_share)
        calls = np.where(batch.host_share < 1.0, 1.0, 0.0)
        return self._run(
            "optimizer", pricer.training.optimizer, {"parameters": owned}, calls, "float32"
        )
