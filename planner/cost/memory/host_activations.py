"""Activations that are on the host between forward and backward (`activation_offload_layers`).

Transformer Engine copies what the first N of L layers save, each over the forward of about L / N
layers, and back over their backward. Both directions of PCIe are used at different times, so that
a microbatch waits for max(0, copies - forward) and max(0, copies - backward).
All that a layer saves is taken to move, and a kind of layer to be as good as another (judgement:
small tensors stay, and the first layers of a mixture may be dense).
Source: transformer_engine/pytorch/cpu_offload.py (AsyncDoubleBufferGroupOffloadHandler:
    layer_window_map, bulk_offload_group, bulk_reload_group); Megatron-LM core/extensions/
    transformer_engine.py (get_cpu_offload_context).
Letters: N layouts, L loads of ranks (`cost.loads`), K + 2 units (layers by kind, embedding, head).
"""

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.cost_inputs import CostInputs, distinct_rows, units_at
from planner.cost.loads import sums
from planner.cost.prepared_job import PreparedJob

# Layers whose copies are under way: one that leaves or arrives while another one is used.
BUFFERED_LAYERS = 2


def away(batch: LayoutBatch, num_layers: int) -> FloatColumn:
    """Share of the layers whose activations are not on the device at the loss, (N,)."""
    gone = np.maximum(batch.activation_offload_layers - BUFFERED_LAYERS, 0)
    return np.asarray(np.minimum(gone / num_layers, 1.0))


def exposed_copies(
    inputs: CostInputs, forward: FloatColumn, backward: FloatColumn
) -> FloatColumn | float:
    """Seconds of a microbatch that a rank waits for copies, (L,); 0.0 where nothing moves.

    forward, backward (K + 2, L): seconds of every unit.
    """
    load, job = inputs.loads.of_ranks, inputs.job
    offloaded = load.batch.activation_offload_layers
    if not offloaded.any():
        return 0.0
    saved, hides, hides_back = (
        sums(load.units[:-2], column[:-2])
        for column in (inputs.unit.saved_bytes[:, load.at_unit], forward, backward)
    )
    moved = np.minimum(offloaded / job.model.num_hidden_layers, 1.0)
    copies = moved * saved / job.cluster.pcie_bandwidth_bytes_per_second
    return np.asarray(np.maximum(copies - hides, 0.0) + np.maximum(copies - hides_back, 0.0))


def host_bytes(job: PreparedJob, batch: LayoutBatch) -> FloatColumn:
    held = np.zeros(len(batch))
    moved = np.flatnonzero(batch.activation_offload_layers)
    if len(moved):
        rows, inverse = distinct_rows(job, batch.take(moved))
        saved = job.unit_counts[:-2] @ units_at(job, rows).saved_bytes[:-2]
        share = batch.activation_offload_layers[moved] / job.model.num_hidden_layers
        held[moved] = share * saved[inverse] / batch.pp[moved]
    return held
