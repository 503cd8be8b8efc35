"""How close the communication library comes to the links: its protocols and their shares.

They are given per GPU family. `benchmarks/fit_collectives.py` prints the fit to published
nccl-tests sweeps behind each figure that cites micro.csv.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from planner.specs.cluster import ClusterSpec
from planner.specs.gpu_families import KERNEL_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way to move bytes, as a latency and a bandwidth.

    t = base + steps x hop x link latency + bytes / (share x link bandwidth)
    base_seconds: of one collective.
    inner_hop, outer_hop: latency of a step over the fabric's own, inside the innermost level and
        beyond it.
    inner_share, outer_share: of the link's bandwidth.
    """

    name: str
    base_seconds: float
    inner_hop: float
    inner_share: float
    outer_hop: float = 1.0
    outer_share: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A communication library on one kind of link.

    collectives: protocols of rings and trees.
    exchange: protocols of all-to-all and point-to-point.
    in_switch: protocols of reductions in the switch (NVLS).
    copy_share: speed at which a rank copies its own chunk, over the link's bandwidth (0: never
        copied).
    exchange_peers: peers that one rank of an all-to-all serves at the same time.
    most_lanes: GPUs of one domain through whose NICs rings and trees leave it, at most.
    long_chain_hop_seconds: of a tree's chain inside a domain, for each hop after the first seven;
        None where it costs what those cost.
    in_switch_decline: a reduction in the switch of n > 8 GPUs is (8 / n)^decline as fast.
    in_switch_flag_seconds: of its start for each GPU.
    in_switch_tree_nodes: the most nodes over which it goes on as a tree.
    basis: where the figures come from.
    """

    collectives: tuple[Protocol, ...]
    exchange: tuple[Protocol, ...]
    in_switch: tuple[Protocol, ...] = ()
    copy_share: float = 0.0
    exchange_peers: float = 8.0
    most_lanes: float = float("inf")
    long_chain_hop_seconds: float | None = None
    in_switch_decline: float = 0.0
    in_switch_flag_seconds: float = 0.0
    in_switch_tree_nodes: float = float("inf")
    basis: Literal["datasheet", "calibrated", "extrapolated"] = "calibrated"
    source: str


# (latency of a step beyond the node over the catalogue's 4 us of an LL128 ring step, share of the
# NIC's bandwidth).
# Source: NCCL src/graph/tuning.cc, hwLat[NET] ring {LL 2.7, LL128 4.0, Simple 9.6 to 14 us} and
# 120/128 for LL128. Simple's 0.95: micro.csv, 4 nodes of 8 B200 reach 381.8 of 400 GB/s (H200:
# 364.9, where the NVLink ring of 365 limits).
_LL_NET, _LL128_NET, _SIMPLE_NET = (0.68, 0.25), (1.0, 0.88), (2.4, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How a protocol crosses a network that delivers out of order (EFA).

    hop, share: in place of the protocol's `outer_hop` and `outer_share`.
    base_seconds: until its channels are full, once a collective.
    """

    hop: float
    share: float
    base_seconds: float


# NCCL polls flags in the data for LL and LL128, which EFA cannot order; aws-ofi-nccl runs Simple
# for all sizes, on few channels where they are small. Fitted to micro.csv, all-reduce over two
# nodes of p4de and p5 (64 KiB to 16 GiB): a few channels reach 1/4 of the NICs at once, all of them
# 0.93 after a third of a millisecond.
OUT_OF_ORDER: Mapping[str, Crossing] = {
    "LL": Crossing(hop=2.4, share=0.25, base_seconds=0.0),
    "LL128": Crossing(hop=2.4, share=0.5, base_seconds=100e-6),
    "Simple": Crossing(hop=2.4, share=0.93, base_seconds=350e-6),
}
# Beyond two nodes NCCL counts trees at half of the network's rate (src/graph/tuning.cc), and rings
# win: four nodes of H200 take rings at 365 GB/s, and NVLSTree when told reaches 310 (micro.csv).
NVLS_TREE_NODES = 2.0


def _family(
    low_latency: tuple[float, float, float],
    middle: tuple[float, float, float],
    simple: tuple[float, float, float],
    exchange: tuple[tuple[float, float, float], ...],
    in_switch: tuple[float, float, float] | None,
    copy_share: float,
    source: str,
) -> Library:
    """A library from fitted (base in microseconds, hop, share) of each protocol."""

    def protocol(name: str, fit: tuple[float, float, float], net: tuple[float, float]) -> Protocol:
        return Protocol(
            name=name,
            base_seconds=fit[0] * 1e-6,
            inner_hop=fit[1],
            inner_share=fit[2],
            outer_hop=net[0],
            outer_share=net[1],
        )

    names = (
        ("LL", low_latency, _LL_NET),
        ("LL128", middle, _LL128_NET),
        ("Simple", simple, _SIMPLE_NET),
    )
    exchanges = zip(("LL", "Simple"), exchange, (_LL_NET, _SIMPLE_NET), strict=True)
    return Library(
        collectives=tuple(protocol(*row) for row in names),
        exchange=tuple(protocol(*row) for row in exchanges),
        in_switch=(protocol("Simple", in_switch, _SIMPLE_NET),) if in_switch else (),
        copy_share=copy_share,
        in_switch_tree_nodes=NVLS_TREE_NODES,
        source=source,
    )


_FAMILIES: Mapping[str, Library] = {
    "ampere": _family(
        (10.7, 0.44, 0.258), (24.7, 0.16, 0.511), (45.0, 1.86, 0.734),
        ((12.9, 0.29, 0.251), (36.4, 0.43, 0.689)), None, 2.66,
        "micro.csv A100-SXM, NCCL 2.27",
    ),
    "hopper": _family(
        (5.4, 0.43, 0.328), (17.1, 0.36, 0.716), (28.5, 0.76, 0.808),
        ((11.5, 0.09, 0.343), (12.1, 0.29, 0.724)), (70.1, 1.04, 0.678), 1.96,
        "micro.csv H100 and H200 SXM, NCCL 2.29; NVLS above four GPUs: ml-engineering, 8 GiB",
    ),
    "blackwell": _family(
        (8.5, 0.66, 0.302), (14.8, 1.02, 0.381), (12.9, 3.24, 0.813),
        ((15.3, 0.09, 0.509), (24.6, 0.30, 0.660)),
        (79.6, 1.00, 0.603), 1.24,
        "micro.csv B200, B300, GB200, GB300, NCCL 2.29; NVLS above four GPUs: ml-engineering, "
            "8 GiB",
    ),
    "pcie": Library(
        collectives=(
            Protocol(name="LL", base_seconds=6.6e-6, inner_hop=0.4, inner_share=0.25,
                outer_hop=0.68, outer_share=0.25),
            Protocol(name="Simple", base_seconds=8.4e-6, inner_hop=2.3, inner_share=0.52,
                outer_hop=2.4, outer_share=0.95),
        ),
        exchange=(Protocol(name="Simple", base_seconds=20e-6, inner_hop=1.0, inner_share=0.60,
                outer_hop=2.4, outer_share=0.90),),
        source="micro.csv A100-PCIe: 12.5 GB/s with 8 GPUs, 20.8 with 4, of 32; one figure between "
            "them. Latencies: NCCL tuning.cc, PCI",
    ),
    "cdna": Library(
        collectives=(
            Protocol(name="LL", base_seconds=10e-6, inner_hop=0.5, inner_share=0.20, outer_hop=0.68,
                outer_share=0.25),
            Protocol(name="Simple", base_seconds=20e-6, inner_hop=1.5, inner_share=0.72,
                outer_hop=2.4, outer_share=0.90),
        ),
        exchange=(Protocol(name="Simple", base_seconds=20e-6, inner_hop=1.0, inner_share=0.70,
                outer_hop=2.4, outer_share=0.90),),
        source="micro.csv MI300X xGMI, 4 GiB: 312.9 GB/s with 8, 47.7 with 2; latencies: judgement",
    ),
    "other": Library(
        collectives=(Protocol(name="Simple", base_seconds=8e-6, inner_hop=1.0, inner_share=0.80,
                outer_hop=1.0, outer_share=0.90),),
        exchange=(Protocol(name="Simple", base_seconds=8e-6, inner_hop=1.0, inner_share=0.80,
                outer_hop=1.0, outer_share=0.90),),
        basis="extrapolated",
        source="judgement",
    ),
}  # fmt: skip
LIBRARIES: Mapping[str, Library] = {
    **_FAMILIES,
    # micro.csv GB200 NVL72, NCCL 2.26: 841 GB/s with 72 GPUs where 8 reach 845; 0.5 ms before the
    # first byte, 0.13 with 8; 1,440 GPUs approach 434 GB/s, which is 9 NICs of 50 at 0.95, after
    # 5 ms at every size, which a pipeline along 71 GPUs up and down takes at 37 us a hop.
    "blackwell": replace(
        _FAMILIES["blackwell"],
        most_lanes=9.0,
        long_chain_hop_seconds=37e-6,
        in_switch_decline=0.11,
        in_switch_flag_seconds=5.8e-6,
    ),
}
_CLOSED_FORM = Protocol(
    name="closed form", base_seconds=0.0, inner_hop=1.0, inner_share=1.0, outer_share=1.0
)
IDEAL = Library(
    collectives=(_CLOSED_FORM,),
    exchange=(_CLOSED_FORM,),
    in_switch=(_CLOSED_FORM,),
    exchange_peers=float("inf"),
    basis="datasheet",
    source="datasheet bandwidth and latency",
)
# boards that share a PCIe root, whatever their family
_BY_TOPOLOGY: Mapping[str, str] = {"tree": "pcie"}
# Families without a row of their own. CDNA's meshes are priced with the generic figures, as when
# the shipped calibration was fitted.
_NEAREST: Mapping[str, str] = {
    "volta": "ampere", "ada": "pcie", "rtx-blackwell": "pcie", "cdna2": "other", "cdna3": "other",
    "cdna4": "other", "tpu": "other",
    "cpu": "other",
}  # fmt: skip


def library_of(cluster: ClusterSpec) -> Library:
    """The library as measured on this family of GPU; PCIe boards by their bus.

    An unknown family gets the generic figures, whose basis is `extrapolated`. An estimate reports
    the unknown family as well (`specs.gpu.GpuSpec.unknown_family`).
    """
    gpu = cluster.gpu
    key = _BY_TOPOLOGY.get(gpu.scale_up.topology) or _NEAREST.get(gpu.family, gpu.family)
    return LIBRARIES[key] if gpu.family in KERNEL_ROWS or key == "pcie" else LIBRARIES["other"]
