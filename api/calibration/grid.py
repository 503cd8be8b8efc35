"""Calibration by command: a small grid of layouts for a pool, and how far knobs moved."""

from typing import Any

from planner.api.storage.records import CalibrationRecord
from planner.api.wiring import Wiring
from planner.catalog.clusters import gpu_names
from planner.cost.machine.knobs import KNOBS
from planner.cost.machine.shipped import from_document, shipped_calibration
from planner.errors import ProbeError, SpecError, fault
from planner.intake.machines import load_gpu, read_cluster

MOST_NAMED = 4  # GPUs that a message lists
MOVED = 0.005  # relative change of a knob that is worth a line
TINY: dict[str, Any] = {
    "name": "calibration-tiny", "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 512, "vocab_size": 2048, "mlp": "swiglu", "tie_word_embeddings": False,
}  # fmt: skip


def gpu_of(wiring: Wiring, pool: str) -> str:
    """The catalogue's name of the GPU that a pool has.

    Raises ProbeError where it has none, SpecError where the pool does not tell.
    """
    found = []
    place = wiring.pool(pool)
    for name in gpu_names():
        try:
            capacity = place.capacity(read_cluster({"gpu": name, "num_gpus": 1}))
        except SpecError:  # it has another
            continue
        if capacity.device != "cuda":
            continue
        if not capacity.num_devices:
            raise ProbeError(
                f"pool {pool} has no GPU ({capacity.why_none}); name another pool, or --gpu cpu to "
                "calibrate the CPU"
            )
        found.append(name)
    if len(found) != 1:
        among = (
            f"may be any of {', '.join(found)}"
            if 0 < len(found) <= MOST_NAMED
            else "is not told by this pool"
        )
        remedy = "name the pool's GPU, for example --gpu h100-sxm-80gb or --gpu cpu"
        raise fault("--gpu", None, among, remedy)
    return found[0]


def grid_of(wiring: Wiring, gpu: str, pool: str) -> dict[str, Any]:
    """A sweep of short jobs on the pool's devices: two models, two lengths.

    Raises SpecError, ProbeError for a pool without devices.
    """
    on_cpu = gpu == "cpu"
    capacity = wiring.pool(pool).capacity(read_cluster({"gpu": gpu, "num_gpus": 1}))
    num_gpus = max(1, min(capacity.num_devices, 2 if on_cpu else 8))
    models: list[Any] = [TINY] if on_cpu else ["llama3.2-1b", "llama3.2-3b"]
    lengths = (64, 128) if on_cpu else (2048, 8192)
    trainings = [{"seq_len": length, "global_batch_size": 4 * num_gpus} for length in lengths]
    anchors = [{"ac": "full", "micro_batch_size": 2}, {"ac": "none", "compile": False}]
    return {
        "name": f"calibrate {gpu}",
        "models": models,
        "clusters": [{"gpu": gpu, "num_gpus": num_gpus}],
        "trainings": trainings,
        "pool": pool,
        "measure": {"top_k": 1, "anchors": anchors},
        "steps": 5,
    }


def knobs_moved(record: CalibrationRecord) -> dict[str, tuple[float, float]]:
    """Knobs whose value differs from the shipped calibration's: name -> (before, after)."""
    family = load_gpu(record.gpu).family
    before, after = (
        calibration.shift(record.trainer, family)
        for calibration in (shipped_calibration(), from_document(record.document))
    )
    pairs = {
        knob.name: (knob.moved(before[index]), knob.moved(after[index]))
        for index, knob in enumerate(KNOBS)
    }
    return {name: pair for name, pair in pairs.items() if abs(pair[1] / pair[0] - 1.0) > MOVED}
