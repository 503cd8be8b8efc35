"""Clusters: completed from the GPU's defaults, units, directions, every way to get them wrong."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.clusters import cluster_document, cluster_names
from planner.errors import SpecError, UnknownNameError
from planner.intake.machines import load_cluster, load_gpu, read_cluster
from planner.specs.cluster import RANK_ORDER
from planner.specs.fabric import balanced_shape
from planner.units import GIB, GIGA, TERA
from tests.unit.conftest import faults_of

H100 = {"gpu": "h100-sxm-80gb", "num_gpus": 64}


def cluster(**changes):
    return read_cluster({**H100, **changes})


def sizes(spec):
    return [level.gpus for level in spec.fabric]


def faults(value):
    return {fault.field: fault for fault in faults_of(read_cluster, value)}


def test_a_bare_cluster_gets_every_default_of_its_gpu():
    spec, gpu = cluster(), load_gpu("h100")
    assert (spec.num_gpus, spec.gpus_per_node, spec.num_nodes) == (64, 8, 8)
    speeds = [(one.name, one.gpus, one.bandwidth_bytes_per_second) for one in spec.fabric]
    assert speeds == [("intra-node", 8, 450 * GIGA), ("inter-node", 64, 50 * GIGA)]
    assert spec.power_limit_watts == gpu.power_limit_watts
    assert spec.host_memory_bytes == 8 * gpu.host_memory_bytes_per_gpu
    assert (spec.rank_order, spec.num_gpus_choices) == (RANK_ORDER, (64,))
    assert spec.usable_memory_bytes == pytest.approx(0.95 * gpu.memory_bytes)


@pytest.mark.parametrize("gpu", ["gb200-nvl72", "gb300-nvl72"])
def test_a_tray_of_nvl72_is_a_node_of_four(gpu):
    assert cluster(gpu=gpu, num_gpus=72).gpus_per_node == 4
    assert cluster(gpu=gpu, num_gpus=72, gpus_per_node=8).gpus_per_node == 8
    assert cluster(gpu=gpu, num_gpus=2).gpus_per_node == 2


def test_partial_levels_are_completed_and_bits_become_bytes():
    outside = {"name": "inter-node", "bandwidth": "200 Gb/s", "latency": "7 us"}
    inner, outer = cluster(fabric=[{"name": "intra-node"}, outside]).fabric
    assert (inner.bandwidth_bytes_per_second, inner.topology) == (450 * GIGA, "switch")
    assert (outer.bandwidth_bytes_per_second, outer.oversubscription) == (25 * GIGA, 1.0)
    assert outer.latency_seconds == pytest.approx(7e-6)


def test_strings_with_units_and_bare_si_numbers_agree():
    pairs = {
        "power_limit": ("500 W", 500), "host_memory": ("1 TB", TERA),
        "pcie_bandwidth": ("64 GB/s", 64 * GIGA), "storage_bandwidth": ("1 GB/s", GIGA),
        "reserved_memory": ("2 GiB", 2 * GIB),
    }  # fmt: skip
    typed, bare = (cluster(**{key: pair[i] for key, pair in pairs.items()}) for i in (0, 1))
    assert typed == bare
    assert typed.usable_memory_bytes == pytest.approx(0.95 * typed.gpu.memory_bytes - 2 * GIB)


GB200 = {"gpu": "gb200", "gpus_per_node": 4}
NVL72 = [{"name": "nvlink", "gpus": 72}, {"bandwidth": "400 Gb/s"}]
RING = {"topology": "ring", "bandwidth": "10 GB/s", "latency": "1 us"}
TORUS = {"topology": "torus", "shape": [4, 16]}
THREE = [{}, {"name": "leaf", "gpus": 128}, {"oversubscription": 3}]


@pytest.mark.parametrize(("typed", "gpus", "own"), [
    ({"num_gpus": 512, "fabric": THREE}, [8, 128, 512],
        {"name": ["intra-node", "leaf", "inter-node"], "oversubscription": [1.0, 1.0, 3.0]}),
    # a job of one node has one level, and no level exceeds the cluster
    ({"num_gpus": 8, "fabric": [{"name": "intra-node"}, {"name": "inter-node"}]}, [8], {}),
    ({"num_gpus": 4}, [4], {}),
    ({"num_gpus": 1}, [1], {}),
    ({"fabric": [{}, {"name": "leaf", "gpus": 256}, {}]}, [8, 64], {}),
    # one level alone is flat, or gets the network around it
    ({"fabric": [RING]}, [64], {"topology": ["ring"]}),
    ({"fabric": [{"gpus": 8}]}, [8, 64], {}),
    # the NVLink domain of a rack
    ({**GB200, "num_gpus": 72}, [72], {}),
    ({**GB200, "num_gpus": 144}, [72, 144], {}),
    ({**GB200, "num_gpus": 256}, [64, 256], {}),
    ({**GB200, "fabric": NVL72}, [64], {"bandwidth_bytes_per_second": [900 * GIGA]}),
    ({"gpu": "tpu-v5p", "gpus_per_node": 4}, [64], {"shape": [(4, 4, 4)]}),
    ({"fabric": [TORUS]}, [64], {"shape": [(4, 16)]}),
    ({"fabric": [{}, {"shape": [2, 4]}]}, [8, 64], {"topology": ["switch", "torus"]}),
    ({"fabric": [{"topology": "mesh"}, {}]}, [8, 64], {"shape": [None, None]}),
])  # fmt: skip
def test_levels_of_a_fabric(typed, gpus, own):
    spec = cluster(**typed)
    assert sizes(spec) == gpus
    assert {name: [getattr(level, name) for level in spec.fabric] for name in own} == own
    assert spec.num_nodes == math.ceil(spec.num_gpus / spec.gpus_per_node)
    assert spec.gpus_per_node == min(typed.get("gpus_per_node", 8), spec.num_gpus)


@given(num_gpus=st.integers(1, 5000), num_dims=st.integers(1, 4))
def test_balanced_shape_covers_all(num_gpus, num_dims):
    shape = balanced_shape(num_gpus, num_dims)
    assert (math.prod(shape), len(shape)) == (num_gpus, num_dims)


@given(
    num_nodes=st.integers(1, 600),
    gpu=st.sampled_from(["h100", "gb200", "tpu-v5p", "mi300x", "l4"]),
    per_node=st.sampled_from([1, 4, 8, 16]),
)
def test_every_size_resolves_to_nested_levels(num_nodes, gpu, per_node):
    spec = read_cluster({"gpu": gpu, "num_gpus": num_nodes * per_node, "gpus_per_node": per_node})
    joined = sizes(spec)
    assert joined[-1] == spec.num_gpus
    assert all(outer > inner and outer % inner == 0 for inner, outer in pairwise(joined))
    assert all(math.prod(level.shape) == level.gpus for level in spec.fabric if level.shape)


@pytest.mark.parametrize(("typed", "choices"), [
    (64, (64,)), ("64", (64,)), ("64..1024", (64, 128, 256, 512, 1024)), ("8..8", (8,)),
    ("8..100", (8, 16, 32, 64)), ([128, 64, 96], (64, 96, 128)),
])  # fmt: skip
def test_ranges_and_lists_of_sizes(typed, choices):
    spec = cluster(num_gpus=typed)
    assert spec.num_gpus_choices == choices
    assert spec.num_gpus == max(choices)


def test_another_size_resolves_the_fabric_anew():
    spec = cluster(num_gpus="4..64", host_memory="1 TB")
    small = spec.with_num_gpus(4)
    assert (sizes(small), small.gpus_per_node, small.host_memory_bytes) == ([4], 4, TERA)
    assert small.num_gpus_choices == spec.num_gpus_choices
    assert small.with_num_gpus(64) == spec
    assert spec.storage_bandwidth_bytes_per_second == 16 * small.storage_bandwidth_bytes_per_second
    for wrong in (12, 0, True):
        with pytest.raises(SpecError):
            spec.with_num_gpus(wrong)


@pytest.mark.parametrize(("change", "field"), [
    *(
        ({key: value}, f"cluster.{key}")
        for key, values in {
            "num_gpus": (0, -8, 1.5, math.nan, math.inf, True, 10**7, None, "x", "64..8", "8..",
                [], [8, 0], "²", 65, [64, 12]),
            "gpus_per_node": (0, -1, 2.0, True, "8"),
            "power_limit": (0, "-5 W", "5 GB", math.nan, True, 1e9),
            "memory_fraction": (0, 1.01, -1, math.nan, True, "0.9"),
            "reserved_memory": (-1, "90 GiB", math.inf), "mtbf_gpu_hours": (0, -1, math.inf),
            "price_per_gpu_hour": (-1,), "carbon_intensity": (math.nan,), "host_memory": (0,),
            "storage_bandwidth": ("5 s",), "rank_order": (["tp", "tp"],),
            "gpu": ("h101", None, 3), "fabric": ("x", [], {}, 3),
        }.items()
        for value in values
    ),
    ({"fabric": [3]}, "cluster.fabric.0"),
    ({"fabric": [{"bandwidth": 450}]}, "cluster.fabric.0.bandwidth"),
    ({"fabric": [{}, {"latency": -1}]}, "cluster.fabric.1.latency"),
    ({"fabric": [{"topology": "star"}]}, "cluster.fabric.0.topology"),
    ({"fabric": [{"oversubscription": 0.5}]}, "cluster.fabric.0.oversubscription"),
    ({"fabric": [{"gpus": 8}, {"gpus": 4}]}, "cluster.fabric.1.gpus"),
    ({"fabric": [{"gpus": 8}, {"gpus": 8}]}, "cluster.fabric.1.gpus"),
    ({"fabric": [{"gpus": 8}, {"gpus": 12}, {}]}, "cluster.fabric.1.gpus"),
    ({"fabric": [{}, {}, {}]}, "cluster.fabric.1.gpus"),
    ({"fabric": [{}, {"gpus": 32}]}, "cluster.fabric.1.gpus"),
    ({"fabric": [{"gpus": 24}, {}]}, "cluster.fabric.0.gpus"),
    ({"fabric": [{"topology": "torus"}]}, "cluster.fabric.0.shape"),
    ({"fabric": [{"topology": "torus", "shape": [4, 4]}]}, "cluster.fabric.0.shape"),
    ({"fabric": [{"topology": "ring", "shape": [64]}]}, "cluster.fabric.0.shape"),
])  # fmt: skip
def test_bad_values_are_named(change, field):
    assert field in faults({**H100, **change})


def test_unknown_keys_name_the_closest():
    assert "num_gpus" in faults({**H100, "num_gpu": 1})["cluster.num_gpu"].remedy
    found = faults({**H100, "fabric": [{"bandwith": 1}]})
    assert "bandwidth" in found["cluster.fabric.0.bandwith"].remedy
    assert "h100" in faults({**H100, "gpu": "h10"})["cluster.gpu"].remedy


def test_a_wrong_size_says_what_would_pass():
    remedies = (faults({**H100, "num_gpus": n})["cluster.num_gpus"].remedy for n in (65, 100))
    assert [*remedies] == ["use 64 or 72 GPUs", "use 96 or 104 GPUs, or gpus_per_node: 4"]


def test_all_faults_arrive_at_once():
    wrong = {"gpu": "nope", "num_gpus": -1, "power_limit": "x"}
    found = faults({**wrong, "fabric": [{"latency": "x"}, {"nmae": 1}]})
    names = {*wrong, "fabric.0.latency", "fabric.1.nmae"}
    assert found.keys() == {f"cluster.{name}" for name in names}


@pytest.mark.parametrize("value", [None, 5, [], True])
def test_not_a_cluster_at_all(value):
    assert "cluster" in faults(value)


def test_unknown_catalogue_name():
    with pytest.raises(UnknownNameError, match="h100-8"):
        read_cluster("h100-9")


def test_files_of_a_user(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: a100\nnum_gpus: 16\nfabric:\n  - {}\n  - {bandwidth: 100 Gb/s}\n")
    assert read_cluster(str(path)).fabric[1].bandwidth_bytes_per_second == 12.5 * GIGA
    with pytest.raises(UnknownNameError):
        read_cluster(str(path), allow_files=False)
    for text in ("[1, 2]", "a: [", ""):
        path.write_text(text)
        assert "cluster" in faults(str(path))
    assert "cluster" in faults(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize("name", cluster_names())
def test_clusters_of_the_catalogue(name):
    spec = load_cluster(name)
    assert read_cluster(name.upper()) == spec
    assert spec.fabric[-1].gpus == spec.num_gpus > 0
    assert cluster_document(name)["source"]
