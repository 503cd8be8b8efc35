"""`planner-cli calibrate`: a small grid measured on a pool, then new calibrations."""

from typing import Annotated, Any

import typer

from planner.api.calibration.update import all_measured, update_calibrations
from planner.api.cli.output import note, tell, working
from planner.api.cli.studying import bar, sweep_stand
from planner.api.cli.typed import Json, complete_gpu, complete_pool
from planner.api.jobs.leases import Observer
from planner.api.jobs.sweep_report import failure_in
from planner.api.jobs.sweep_runs import run_sweep
from planner.api.jobs.sweeps import add_sweep, run_now
from planner.api.storage.common import told
from planner.api.storage.tables import CalibrationRecord
from planner.api.wiring import Wiring, wire
from planner.catalog.clusters import gpu_names
from planner.cost.machine.knobs import KNOBS
from planner.cost.machine.shipped import from_document, shipped_calibration
from planner.errors import ProbeError, SpecError, fault
from planner.intake.machines import load_gpu, read_cluster
from planner.probes.pools import listed, pool_forms
from planner.units import counted

MOST_NAMED = 4  # GPUs that a message lists
MOVED = 0.005  # relative change of a knob that is worth a line
TINY: dict[str, Any] = {
    "name": "calibration-tiny", "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 512, "vocab_size": 2048, "mlp": "swiglu", "tie_word_embeddings": False,
}  # fmt: skip


NOTHING = (
    "no stored measurement tells a step time; `planner-cli probe` and `measurements import` supply "
    "them"
)
FORMS = f"First measure a small grid on this pool: {listed(pool_forms())}."


def command(
    gpu: Annotated[str | None, typer.Option(autocompletion=complete_gpu)] = None,
    pool: Annotated[str | None, typer.Option(autocompletion=complete_pool, help=FORMS)] = None,
    json: Json = False,
) -> None:
    """Make the calibration of every measured trainer and GPU anew; plans use the newest.

    gpu: Only from measurements on this GPU; with --pool the GPU to measure.
    """
    wiring = wire()
    if gpu is not None:
        gpu = load_gpu(gpu, field="--gpu").name
    if pool is not None:
        gpu = gpu or gpu_of(wiring, pool)
        sweep = add_sweep(wiring, grid_of(wiring, gpu, pool), allow_files=True, ours=True)
        observer = Observer()
        with bar(observer, "layouts", sweep_stand):
            ended = run_sweep(wiring, run_now(wiring, sweep, ours=True), observer)
        note(ended.message or "")
        assert ended.result is not None, "a run that nothing kept from measuring has a report"
        failure = failure_in(ended.result)
        if failure is not None:
            raise failure
    with working("learning from all measurements", quiet=json):
        made = update_calibrations(wiring, all_measured(wiring, gpu), anew=True)
    rows, lines = [], []
    for one in made:
        stale, knobs = one.document.get("stale"), knobs_moved(one)
        about = {"runs": one.num_runs, "stale": stale, "knobs": knobs}
        rows.append({**told(one, "id", "trainer", "gpu"), **about})
        lines.append(f"{one.id}: {one.trainer} on {one.gpu}, {counted(one.num_runs, 'run')}")
        if stale:
            older = counted(stale["runs"], "older run")
            lines.append(f"  {older} left out as stale: {stale['statement']}")
        lines += [f"  {knob:22s} {old:.3g} -> {new:.3g}" for knob, (old, new) in knobs.items()]
    tell(rows, lines or [NOTHING], json=json)


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
