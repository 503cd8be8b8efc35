"""Fits the communication curves of `planner.cost.network.nccl.LIBRARIES` to nccl-tests sweeps.

    python benchmarks/fit_collectives.py [--csv benchmarks/measured/micro.csv] [--fit hopper]

The sweeps are published; prints the fit and its error. Without --fit: mean absolute error of the
current library, per GPU and operation (and per number of GPUs beyond one node). With --fit FAMILY:
Nelder-Mead over base, hop and share of each protocol, starting from the current library.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
import re
from collections import defaultdict

import numpy as np

from planner.cost.network.collectives import collective_seconds
from planner.cost.network.nccl import LIBRARIES, Library, Protocol
from planner.cost.network.topology import Fabric
from planner.intake.machines import read_cluster
from planner.units import GIGA, parse_quantity

GPUS = {
    "A100-SXM-40GB": "a100-sxm-40gb",
    "A100-SXM-80GB": "a100-sxm-80gb", "H100-SXM-80GB": "h100-sxm-80gb",
    "H200-SXM-141GB": "h200-sxm-141gb",
    "B200-SXM-180GB": "b200-sxm-180gb", "B300-SXM-288GB": "b300-sxm-288gb",
    "MI300X-192GB": "mi300x-192gb",
    "GB200-NVL72": "gb200-nvl72-186gb", "GB300-NVL72": "gb300-nvl72-288gb",
    "A100-PCIe-80GB": "a100-pcie-80gb",
}  # fmt: skip
OPERATIONS = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
# What joins the nodes of a sweep: words of its notes, GPUs that a domain joins, and the network.
# p4de has four adapters of 100 Gb/s for eight GPUs.
NETWORKS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("EFA 4 x 100", "EFA, half a NIC a GPU", {"network": "efa", "bandwidth": "50 Gb/s"}),
    ("EFA", "EFA", {"network": "efa", "bandwidth": "400 Gb/s"}),
    (
        "RoCE 1,600 Gb/s a node",
        "RoCE, 200 Gb/s a GPU",
        {"network": "roce", "bandwidth": "200 Gb/s"},
    ),
    ("RoCE", "RoCE, 400 Gb/s a GPU", {"network": "roce", "bandwidth": "400 Gb/s"}),
    ("SHARP", "InfiniBand with SHARP", {"network": "infiniband", "bandwidth": "400 Gb/s"}),
    ("rack", "NVL72", {"network": "infiniband", "bandwidth": "400 Gb/s"}),
)
BF16_BYTES = 2.0
# Rows that are not NCCL's default choice, or that are a fit by others.
SKIP = ("NVLS off", "nvlstree", "fitted")


@dataclasses.dataclass(frozen=True)
class Sample:
    gpu: str
    operation: str
    size_bytes: float
    ranks: int
    seconds: float
    sweep: str
    network: str


def bus_factor(operation: str, ranks: int) -> float:
    return (2.0 if operation == "all-reduce" else 1.0) * (ranks - 1) / ranks


def read(path: pathlib.Path) -> list[Sample]:
    rows = [row for row in csv.DictReader(path.read_text().splitlines()) if row["gpu"] in GPUS]
    found = [_nccl(row) or _exchange(row) for row in rows]
    return [sample for sample in found if sample is not None]


def _nccl(row: dict[str, str]) -> Sample | None:
    """A collective of nccl-tests, or of torch, by its bus bandwidth."""
    found = re.match(
        r"(?:nccl )?(all_gather|all_reduce|reduce_scatter|alltoall) busbw", row["what"]
    )
    if not found or any(word in row["what"] for word in SKIP):
        return None
    operation, ranks = OPERATIONS[found[1]], int(row["ranks"])
    text = re.sub(r"(\d)([KMG]iB)", r"\1 \2", row["shape_message"].replace("bytes", "B")) or "4 GiB"
    size, rate = parse_quantity(text, "bytes"), float(row["value"]) * GIGA
    return Sample(
        GPUS[row["gpu"]],
        operation,
        size,
        ranks,
        size * bus_factor(operation, ranks) / rate,
        "nccl-tests" if row["what"].startswith("nccl") else "torch",
        next((name for word, name, _ in NETWORKS if word in row["notes"]), ""),
    )


def _exchange(row: dict[str, str]) -> Sample | None:
    """A dispatch of tokens to experts inside one NVLink domain.

    Each token goes once to every rank that holds one of its experts: of n ranks with E / n experts
    each, n (1 - C(E - E / n, k) / C(E, k)) hold one of k drawn evenly.
    """
    if not row["what"].startswith("TRT-LLM alltoall_dispatch"):
        return None
    tokens, hidden, k, experts = (
        int(word) for word in re.findall(r"\d+", row["shape_message"])[:4]
    )
    ranks = int(row["ranks"])
    reached = ranks * (1.0 - math.comb(experts - experts // ranks, k) / math.comb(experts, k))
    return Sample(
        GPUS[row["gpu"]],
        "all-to-all",
        tokens * hidden * BF16_BYTES * reached,
        ranks,
        float(row["value"]),
        "trt-llm dispatch",
        "NVL72",
    )


def fabric_of(gpu: str, ranks: int, network: str, library: Library | None = None) -> Fabric:
    cluster: dict[str, object] = {"gpu": gpu, "num_gpus": max(8, ranks)}
    link = next((link for _, name, link in NETWORKS if name == network), None)
    if link is not None and ranks > read_cluster({"gpu": gpu, "num_gpus": 8}).gpu.scale_up.gpus:
        cluster["fabric"] = [{}, link]
    return Fabric.build(read_cluster(cluster), library=library)


def predicted(samples: list[Sample], library: Library | None = None) -> np.ndarray:
    out = np.zeros(len(samples))
    groups: dict[tuple[str, str, str, int], list[int]] = defaultdict(list)
    for index, s in enumerate(samples):
        groups[s.gpu, s.operation, s.network, s.ranks if s.ranks > 8 else 8].append(index)
    for (gpu, operation, network, most), at in groups.items():
        size, ranks = (
            np.array([getattr(samples[i], name) for i in at], dtype=float)
            for name in ("size_bytes", "ranks")
        )
        fabric = fabric_of(gpu, most, network, library)
        out[at] = collective_seconds(
            operation, size, ranks, np.ones_like(ranks), fabric, base_seconds=0.0
        )
    return out


def rebuilt(library: Library, values: np.ndarray) -> Library:
    rows = iter(values)

    def moved(protocols: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
        return tuple(
            dataclasses.replace(
                p, base_seconds=next(rows), inner_hop=next(rows), inner_share=min(next(rows), 1.0)
            )
            for p in protocols
        )

    collectives, exchange, in_switch = (
        moved(library.collectives),
        moved(library.exchange),
        moved(library.in_switch),
    )
    return dataclasses.replace(
        library,
        collectives=collectives,
        exchange=exchange,
        in_switch=in_switch,
        copy_share=next(rows),
    )


def values_of(library: Library) -> np.ndarray:
    protocols = (*library.collectives, *library.exchange, *library.in_switch)
    return np.array(
        [x for p in protocols for x in (p.base_seconds, p.inner_hop, p.inner_share)]
        + [library.copy_share]
    )


def fit(family: str, samples: list[Sample], evaluations: int) -> Library:
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    start = LIBRARIES[family]
    used = [s for s in samples if s.sweep == "nccl-tests"]
    measured = np.log([s.seconds for s in used])
    weight = np.array([4.0 if s.size_bytes > 2**30 or s.ranks > 8 else 1.0 for s in used])
    weight /= weight.sum()

    def loss(moves: np.ndarray) -> float:
        library = rebuilt(start, values_of(start) * np.exp(moves))
        return float(weight @ np.abs(np.log(predicted(used, library)) - measured)) + 2e-4 * float(
            moves @ moves
        )

    best, moves = loss(np.zeros_like(values_of(start))), np.zeros_like(values_of(start))
    for _ in range(3):
        simplex = np.vstack([moves, moves + np.eye(len(moves)) * 0.25])
        found = minimize(
            loss,
            moves,
            method="Nelder-Mead",
            options={"maxfev": evaluations, "initial_simplex": simplex, "adaptive": True},
        )
        best, moves = found.fun, found.x
        print(f"{family}: loss {best:.4f}")
    return rebuilt(start, values_of(start) * np.exp(moves))


def report(samples: list[Sample], library: Library | None = None) -> None:
    error = predicted(samples, library) / np.array([s.seconds for s in samples]) - 1.0
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for index, s in enumerate(samples):
        large = s.ranks > 8 and s.size_bytes >= 2**26
        where = (
            "one domain"
            if s.ranks <= 8
            else f"{s.ranks} GPUs, from 64 MiB"
            if large
            else f"{s.ranks} GPUs, below 64 MiB"
        )
        groups[s.gpu, s.operation, s.sweep, f"{s.network} {where}".strip()].append(index)
    for key, at in groups.items():
        e = error[at]
        size, worst = np.abs(e).mean(), np.abs(e).max()
        print(
            f"{' '.join(key):62s} rows {len(at):3d}  mean |error| {size:6.1%}  bias "
            f"{e.mean():+6.1%}  worst {worst:6.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--csv", type=pathlib.Path, default=pathlib.Path(__file__).parent / "measured" / "micro.csv"
    )
    parser.add_argument("--fit", choices=sorted(LIBRARIES))
    parser.add_argument("--evaluations", type=int, default=1500)
    given = parser.parse_args()
    samples = read(given.csv)
    if not given.fit:
        report(samples)
        return
    own = [
        s for s in samples if read_cluster({"gpu": s.gpu, "num_gpus": 8}).gpu.family == given.fit
    ]
    library = fit(given.fit, own, given.evaluations)
    for protocol in (*library.collectives, *library.exchange, *library.in_switch):
        print(
            f"  {protocol.name:7s} ({protocol.base_seconds * 1e6:.1f}, {protocol.inner_hop:.2f}, "
            f"{protocol.inner_share:.3f})"
        )
    print(f"  copy_share {library.copy_share:.2f}")
    report(own, library)


if __name__ == "__main__":
    main()
