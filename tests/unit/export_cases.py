"""Layouts, models and jobs that the export tests share."""

from functools import partial
from typing import Any

from hypothesis import strategies as st

from planner.export import export
from planner.export.base import Export
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.precision import PRECISIONS
from planner.schedules import SCHEDULES
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import CP_METHODS, DTYPES, MOE_DISPATCHERS, Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.registry import resolve_layout

MODELS = (
    "llama3-8b", "llama3-70b", "llama3.1-405b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b",
    "kimi-k2", "llama3.2-1b", "gpt3-175b",
)  # fmt: skip


def model(name: str = "llama3.1-70b") -> ModelSpec:
    return read_model(name)


def cluster(num_gpus: int = 256, **more: object) -> ClusterSpec:
    return read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": num_gpus, **more})


def training(**more: object) -> TrainingSpec:
    return read_training({"seq_len": 8192, "global_batch_size": 512, **more})


def layout(num_gpus: int = 256, trainer: str = "torchtitan", **values: object) -> Layout:
    return resolve_layout(values, trainer=trainer, num_gpus=num_gpus)


def _written(to: str, *job: Any) -> Export:
    """The export of layout, model, cluster and training, for a release behind them or the job's."""
    return export(*job[:4], to=to, version=next(iter(job[4:]), None))


to_titan, to_megatron = partial(_written, "torchtitan"), partial(_written, "megatron")


def _splits(draw: Any, layers: int, stages: int) -> tuple[int, ...] | None:
    if draw(st.integers(0, 2)) or stages > layers:
        return None
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return tuple(high - low for low, high in zip([0, *cuts], [*cuts, layers], strict=True))


@st.composite
def layouts(draw: Any, num_layers: int) -> Layout:
    """Any layout of the contract's domains, legal or not, whose splits fit the model or not."""
    degree, flag = st.sampled_from([1, 2, 3, 4, 8]), st.booleans()
    pp, virtual = draw(degree), draw(st.sampled_from([1, 2, 3, 4, 8]))
    good = _splits(draw, num_layers, pp * virtual)
    split = draw(st.sampled_from([good, good, good, (1, 2, 3)]))
    ac = st.one_of(
        st.sampled_from(["none", "full", "selective-op", "selective-attention"]),
        st.integers(1, 9).map(lambda n: f"selective-layer-{n}"),
        *(
            st.integers(2, 9).map(lambda n, kind=kind: f"{kind}-{n}")
            for kind in ("block", "uniform")
            if num_layers // (pp * virtual) > 9  # fewer layers of a stage are read as full
        ),
        st.integers(0, 1000).map(lambda n: f"memory-budget-{n / 1000:g}"),
    )
    return Layout(
        dp_replicate=draw(degree), dp_shard=draw(degree), cp=draw(degree), tp=draw(degree), pp=pp,
        ep=draw(degree), moe_dispatcher=draw(st.sampled_from(MOE_DISPATCHERS)), etp=draw(degree),
        zero_stage=draw(st.integers(0, 3)), sequence_parallel=draw(flag), async_tp=draw(flag),
        cp_method=draw(st.sampled_from(CP_METHODS)),
        pp_schedule=draw(st.sampled_from(SCHEDULES.names)), virtual_stages=virtual,
        layers_per_stage=split, micro_batch_size=draw(degree), ac=draw(ac),
        precision=draw(st.sampled_from(PRECISIONS.names)), float8_all_gather=draw(flag),
        param_dtype=draw(st.sampled_from(DTYPES)), reduce_dtype=draw(st.sampled_from(DTYPES)),
        master_dtype=draw(st.sampled_from(DTYPES)), compile=draw(flag),
        optimizer_in_backward=draw(flag), cpu_offload=draw(flag),
        optimizer_offload_fraction=draw(st.integers(1, 20)) / 20,
        activation_offload_layers=draw(st.integers(0, 40)),
    )  # fmt: skip
