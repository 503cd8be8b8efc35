"""Parameters of each unit, counted: on one rank, in its shard, quantised, and as they are gathered.

Letters as in `sharding`: U layouts that differ in its KEY, (K + 2, U).
"""

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.layer.quantisation import gathers_low
from planner.cost.prepared_job import PreparedJob
from planner.precision import Recipe, column
from planner.specs.model import ModelSpec
from planner.work import axes
from planner.work.quantised import quantised_model


def unit_parameters(model: ModelSpec, batch: LayoutBatch) -> tuple[FloatColumn, FloatColumn]:
    """(parameters outside routed experts, in routed experts) of every unit on one rank.

    (K + 2, U) each. TP divides matrices, but for projections to and from the experts' latent,
    per-layer embeddings, and the mixes of hyper-connections. Norms and biases, below 0.1%, are
    counted with them.
    """
    dense, expert = [], []
    tp, ep, etp = (
        batch.tp.astype(np.float64),
        batch.ep.astype(np.float64),
        batch.etp.astype(np.float64),
    )
    for kind, _ in model.distinct_layers():
        routed = model.num_experts * model.parameters.expert() if kind.moe else 0
        narrow = model.moe_latent_size * kind.moe + model.hidden_size_per_layer_input
        uncut = 2 * model.hidden_size * narrow
        uncut += model.stream_parameters(model.hidden_size, kind.mixes + kind.feeds)
        dense.append((model.parameters.layer(kind) - routed - uncut) / tp + uncut)
        expert.append(routed / (ep * etp))
    # A tied head shares the token table on one rank; in a pipeline the last stage holds a copy, as
    # it does where it predicts more tokens.
    tied_copy = np.where(
        (batch.pp > 1) & (model.tie_word_embeddings or model.mtp_num_layers > 0),
        model.vocab_size * model.hidden_size,
        0,
    )
    projected = model.per_layer_width * model.hidden_size
    for whole, uncut in (
        (model.parameters.embedding(), projected),
        (model.parameters.head() + model.hidden_size + tied_copy, 0),
    ):
        dense.append((whole - uncut) / tp + uncut)
        expert.append(np.zeros_like(tp))
    return np.array(dense), np.array(expert)


def kept_shards(
    batch: LayoutBatch, dense: FloatColumn, expert: FloatColumn, rank_order: tuple[str, ...]
) -> FloatColumn:
    """Parameters of every unit that one rank keeps under sharding, (K + 2, U)."""
    sharding = batch.zero_stage > 0
    degrees = [
        np.where(sharding, axes.group(name, batch, rank_order)[0], 1.0)
        for name in ("fsdp", "efsdp")
    ]
    return dense / degrees[0] + expert / degrees[1]


def wire_bytes(
    job: PreparedJob, batch: LayoutBatch, quantised: tuple[FloatColumn, FloatColumn]
) -> tuple[FloatColumn, FloatColumn]:
    """Mean bytes of a gathered parameter (outside routed experts, inside), (K + 2, U) each.

    FSDP gathers experts, head and table in 16 bits.
    """
    compute = batch.param_bytes
    less = compute - column("wire_bytes", batch.precision, job.recipes)
    spared = np.where(gathers_low(batch, job.recipes), less, 0.0)
    return compute - quantised[0] * spared, compute - quantised[1] * spared * (
        job.rules.sharding.gathers_quantised_experts
    )


def gathered_elements(
    job: PreparedJob, batch: LayoutBatch, dense: FloatColumn, expert: FloatColumn
) -> FloatColumn:
    """Parameters of every unit on one rank, counted as elements of the compute dtype, (K + 2, U).

    An element that is gathered in fewer bits counts as its share of one.
    """
    wires = wire_bytes(job, batch, quantised_shares(job.model, batch, job.recipes))
    return (dense * wires[0] + expert * wires[1]) / batch.param_bytes


def quantised_elements(
    job: PreparedJob, batch: LayoutBatch, dense: FloatColumn, expert: FloatColumn
) -> FloatColumn:
    """Parameters of every unit on one rank that GEMMs read quantised, (K + 2, U)."""
    shares = quantised_shares(job.model, batch, job.recipes)
    return dense * shares[0] + expert * shares[1]


def quantised_shares(
    model: ModelSpec, batch: LayoutBatch, recipes: tuple[Recipe, ...]
) -> tuple[FloatColumn, FloatColumn]:
    """Shares (outside routed experts, inside) of a unit's parameters that GEMMs read quantised.

    (K + 2, U) each.
    """
    table, ends = quantised_model(model, recipes), np.zeros((2, len(batch)))
    half = batch.param_dtype == 0
    return np.vstack([table.dense[:, batch.precision] * half, ends]), np.vstack(
        [table.expert[:, batch.precision] * half, ends]
    )
