"""The space holds exactly the legal layouts, once each, and says why the others are not in it."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from space_twin import TINY, TINY_MOE, WANTED, brute_force, context, rows_of, small_domains

from planner.columns import LayoutBatch
from planner.intake.jobs import read_job
from planner.rules import Context, legal_mask
from planner.search.space.domains import CELL_FIELDS, FREE_FIELDS, default_domains, domains_of
from planner.search.space.enumerate import build_space, enumerate_space
from planner.search.space.keeps import KEEPS
from planner.search.space.rows import unique_boolean_rows
from planner.specs.job import SearchSpec
from planner.trainers.registry import TRAINERS, resolve_layout
from tests.conftest import job_values, slow
from tests.unit.conftest import faults_of

MLA = {
    **TINY_MOE, "name": "tiny-mla", "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 48, "num_key_value_heads": 8,
}  # fmt: skip


def search(**values: Any) -> SearchSpec:
    return SearchSpec.model_validate(values)


SEVEN = {"model": TINY | {"num_hidden_layers": 7}, "trainer": "megatron", "num_gpus": 2}
UNFUSED = {"trainer": "megatron", "attention_kernel": "unfused", "gpu": "a100-sxm-80gb"}
JOBS = [
    UNFUSED | {"num_gpus": 12},
    SEVEN,
    SEVEN | {"trainer_version": "0.12.0"},
    {"model": TINY_MOE, "trainer": "megatron", "num_gpus": 4},
    {"max_grad_norm": None, "num_gpus": 2},
    {"trainer": "megatron-deepspeed", "seq_len": 1020},
    {"trainer": "internevo"},
    {"num_gpus": 1, "global_batch_size": 6},
]
LARGER = slow(
    {},
    {"num_gpus": 12, "global_batch_size": 12},
    {"trainer": "megatron"},
    {"model": TINY_MOE, "num_gpus": 4},
    {"model": MLA, "gpu": "b200-sxm-180gb", "num_gpus": 4, "global_batch_size": 4},
    {"max_grad_norm": None, "num_gpus": 4},
    {"trainer": "fsdp", "num_gpus": 4, "seq_len": 1020},
)


@pytest.mark.parametrize("job", JOBS + LARGER, ids=str)
def test_the_space_is_the_brute_force_set(job: dict[str, Any]) -> None:
    c = context(**job)
    few = {}
    if c.cluster.num_gpus == 12 or c.model.is_moe:
        few = {"ac": ("none", "full"), "precision": ("bf16",)}
    elif c.cluster.num_gpus == 8 and c.training.trainer == "torchtitan":
        few = {"precision": ("bf16", "float8-tensorwise")}  # on 4 GPUs all of them
    domains = small_domains(c, **few)
    space = enumerate_space(c, domains)
    expected = rows_of(brute_force(c, domains))
    found = rows_of(space.expand(slice(None)))
    assert len(found) == len(set(found)) == space.num_layouts > 0
    assert set(found) == set(expected)


NARROW: list[Any] = [
    {"fix": {"tp": 2}}, {"fix": {"pp_schedule": "Interleaved1F1B"}},
    {"fix": {"pp": 2, "virtual_stages": 2}},
    {"allow": {"compile": [False, True], "ac": ["full", "memory-budget-0.5"]},
        "fix": {"dp_replicate": 1, "precision": "bf16"}}, {"fix": {"async_tp": True}},
    {"fix": {"zero_stage": [2, 3], "dp_shard": [1, 4]}},
    {"fix": {"sequence_parallel": False}, "allow": {"tp": [2, 4]}},
    {"fix": {"pp": 2, "layers_per_stage": [2, 4]}}, {"fix": {"cpu_offload": True}},
]  # fmt: skip
SPLITS = {"layers_per_stage": [[3, 3], [1, 2, 2, 1]], "param_dtype": ["bfloat16", "float32"]}


@pytest.mark.parametrize("narrow", [*NARROW, *slow({"allow": SPLITS})], ids=str)
def test_fix_and_allow_override_the_domains(narrow: dict[str, Any]) -> None:
    # 0.2 has no TP without it
    split = "sequence_parallel" in narrow.get("fix", {})
    c = context(trainer_version="0.3.0" if split else "0.2.2")
    few = {"ac": ("full", "none"), "micro_batch_size": (1, 2)}
    few = {} if "ac" in narrow.get("allow", {}) else few
    domains = small_domains(c, search(**narrow), **few)
    space = enumerate_space(c, domains)
    assert set(rows_of(space.expand(slice(None)))) == set(rows_of(brute_force(c, domains)))
    assert space.num_layouts > 0
    first, last = space.expand(slice(None)).row(0), space.expand(slice(None)).row(-1)
    for name, value in narrow.get("fix", {}).items():
        given = value if isinstance(value, list) and name != "layers_per_stage" else [value]
        allowed = {tuple(v) if isinstance(v, list) else v for v in given}
        assert {getattr(first, name), getattr(last, name)} <= allowed


def test_cells_are_layouts_and_expand_in_the_order_asked_for() -> None:
    c = context()
    space = build_space(c)
    assert legal_mask(space.cells, c).all()
    assert (space.cell_sizes > 0).all()
    rows = np.array([5, 3, len(space.cells) - 1])
    batch = space.expand(rows)
    assert len(batch) == space.cell_sizes[rows].sum()
    parents = np.repeat(rows, space.cell_sizes[rows])
    degrees = ("tp", "cp", "pp", "dp_replicate", "dp_shard", "ep", "etp")
    for name in (*degrees, "micro_batch_size", "ac_kind", "ac_value", "precision"):
        assert np.array_equal(getattr(batch, name), getattr(space.cells, name)[parents])
    starts = np.cumsum(space.cell_sizes[rows]) - space.cell_sizes[rows]
    assert rows_of(batch.take(starts)) == rows_of(space.cells.take(rows))


@pytest.mark.parametrize(("seq_len", "largest"), [(128, 1), (256, 2), (511, 1), (512, 4)])
def test_a_context_rank_keeps_a_tile_of_attention(seq_len: int, largest: int) -> None:
    assert build_space(context(seq_len=seq_len, trainer="megatron")).cells.cp.max() == largest


def test_offload_is_a_second_pass() -> None:
    c = context()
    batch = build_space(c, offload=True).expand(slice(None))
    assert len(batch) > 0
    assert batch.cpu_offload.all()
    assert (batch.dp_shard * batch.cp > 1).all()


DEGREES = "degrees do not multiply to num_gpus"


@pytest.mark.parametrize(("job", "fix", "reason"), [
    ({}, {"pp": 3}, DEGREES),
    ({}, {"tp": 2, "pp": 2, "cp": 2, "dp_replicate": 2}, DEGREES),
    ({}, {"dp_shard": 2, "tp": 1, "pp": 1, "cp": 1, "dp_replicate": 2}, DEGREES),
    ({}, {"precision": "nvfp4"}, "trainer lacks the precision"),
    ({"gpu": "a100-sxm-80gb"}, {"precision": "float8-rowwise"}, "GPU lacks the precision"),
    ({}, {"tp": 1, "async_tp": True}, "async TP needs sequence-parallel TP"),
    ({}, {"pp": 8, "pp_schedule": "ZBVZeroBubble", "virtual_stages": 2},
        "more pipeline stages than layers"),
    ({}, {"ep": 2}, "expert parallelism without experts"),
    ({}, {"micro_batch_size": 16}, "microbatch does not divide the local batch"),
    ({"trainer": "megatron"}, {"compile": True}, "trainer does not compile"),
], ids=str)  # fmt: skip
def test_an_empty_space_says_why(job: dict[str, Any], fix: dict[str, Any], reason: str) -> None:
    space = build_space(context(**job), search(fix=fix))
    assert (space.num_layouts, len(space.cells), len(space.expand(slice(None)))) == (0, 0, 0)
    assert space.rejected[reason] > 0


def test_fsdp_alone_may_be_cut_into_as_many_pipeline_ranks_as_gpus() -> None:
    assert build_space(context(trainer="fsdp"), search(fix={"pp": 8})).num_layouts > 0


def test_rejections_count_candidates_where_they_fall() -> None:
    rejected = build_space(context()).rejected
    assert rejected["tp does not divide the KV heads"] == 1  # tp 8 of 1, 2, 4, 8, once
    assert list(rejected.values()) == sorted(rejected.values(), reverse=True)
    assert all(count > 0 for count in rejected.values())


WRONG = [
    ({"fix": {"tensor_parallel": 8}}, "search.fix.tensor_parallel"),
    ({"fix": {"tp": "8"}}, "search.fix.tp"),
    ({"fix": {"tp": [1, 0]}}, "search.fix.tp"),
    ({"fix": {"tp": 0}}, "search.fix.tp"),
    ({"fix": {"tp": True}}, "search.fix.tp"),
    ({"allow": {"precision": ["fp9"]}}, "search.allow.precision"),
    ({"allow": {"ac": []}}, "search.allow.ac"),
    ({"fix": {"ac": "sometimes"}}, "search.fix.ac"),
    ({"fix": {"tp": 2}, "allow": {"tp": [2, 4]}}, "search.allow.tp"),
    ({"fix": {"layers_per_stage": ["a"]}}, "search.fix.layers_per_stage"),
]


@pytest.mark.parametrize(("spec", "field"), WRONG, ids=str)
def test_wrong_requests(spec: dict[str, Any], field: str) -> None:
    assert field in [one.field for one in faults_of(build_space, context(), search(**spec))]


def test_all_wrong_values_at_once() -> None:
    asked = search(fix={"tp": 0, "foo": 1}, allow={"pp": ["x"]})
    assert len(faults_of(build_space, context(), asked)) == 3


def test_every_field_has_a_domain() -> None:
    for trainer in TRAINERS:
        for gpu in ("h100-sxm-80gb", "v100-sxm-32gb"):
            domains = default_domains(context(trainer=trainer, gpu=gpu))
            assert set(domains) == {*CELL_FIELDS, *FREE_FIELDS}
            assert all(domain.values for domain in domains.values())


def test_keeps_read_what_they_say() -> None:
    c = context(TINY_MOE)
    batch = build_space(c).cells.take(slice(0, 3))
    for keep in KEEPS.values():
        read: set[str] = set()

        class Spy:
            def __getattr__(self, name: str, read: set[str] = read) -> Any:
                read.add(name)
                return getattr(batch, name)

        keep.mask(Spy(), c)  # type: ignore[arg-type]
        assert read <= keep.reads


def test_values_come_parsed() -> None:
    fix = {"ac": ["selective-layer-02", "selective-layer-2"], "layers_per_stage": None}
    domains = domains_of(context(), search(fix=fix))
    assert domains.by_field["ac"].values == ("selective-layer-2",)
    assert domains.by_field["layers_per_stage"].values == (None,)


@pytest.mark.parametrize(("model", "release", "sets"), [
    ("deepseek-v3", None, ["moe_act", "layernorm+moe_act", "mla_up_proj",
                           "layernorm+moe_act+mla_up_proj"]),
    ("mixtral-8x7b", None, ["moe_act", "layernorm+moe_act"]),
    ("llama3-8b", None, []), ("mixtral-8x7b", "0.11", []), ("llama3-8b", "NeMo 24.07", []),
])  # fmt: skip
def test_domains_are_of_the_model_and_the_release(
    model: str, release: str | None, sets: list[str]
) -> None:
    """Sets of modules, and the dtype in which a distribution of the trainer reduces gradients."""
    of_release = {"trainer": "megatron", "trainer_version": release}
    job = read_job(job_values(model, "h100-sxm-80gb", 64, 4096, 512, **of_release))
    found = default_domains(Context(model=job.model, cluster=job.cluster, training=job.training))
    assert found["ac"].values == ("none", *(f"modules-{one}" for one in sets), "full")
    own = "bfloat16" if release == "NeMo 24.07" else "float32"
    assert found["reduce_dtype"].values == (own,)


SIZES = [{"num_gpus": 16}, {"model": TINY_MOE}, {"trainer": "megatron", "num_gpus": 6}]


@pytest.mark.parametrize("job", SIZES, ids=str)
def test_cells_are_their_first_layouts_and_hold_one_number_once(job: dict[str, Any]) -> None:
    space = build_space(context(**job))
    layouts = space.expand(slice(None))
    first = np.cumsum(space.cell_sizes) - space.cell_sizes
    assert rows_of(space.cells.take(np.arange(len(space.cells)))) == rows_of(layouts.take(first))
    alike = {name for name, column in space.cells.columns() if len(np.unique(column)) == 1}
    free = {name for name in FREE_FIELDS if name in dict(space.cells.columns())}
    assert alike & free
    for name in alike & free:
        column = getattr(space.cells, name)
        assert column.strides == (0,)
        assert getattr(space.cells.take(first[:3]), name).strides == (0,)


def test_batches_behind_each_other_share_one_number_if_it_is_the_same() -> None:
    one, other = (build_space(context(num_gpus=size)).cells for size in (16, 8))
    nothing = np.arange(0)
    places = [np.arange(len(one)), np.arange(len(other))]
    first, second = one.take(places[0]), other.take(places[1])
    params = {"param_dtype": np.broadcast_to(np.int64(first.param_dtype[0] + 1), len(second))}
    changed = dataclasses.replace(second, **params)
    for parts in ([first, second], [first, changed], [first.take(nothing), second]):
        joined = LayoutBatch.concatenate(parts)
        assert rows_of(joined) == [row for part in parts for row in rows_of(part)]
        shared = parts[1] is not changed
        assert (joined.param_dtype.strides == (0,)) is shared


@pytest.mark.parametrize("width", [1, 64, 65, 200])
def test_equal_rows_of_truths_are_one_kind(width: int) -> None:
    rng = np.random.default_rng(width)
    values = rng.random((50, width)) < 0.5
    values = values[rng.integers(0, 50, size=400)]
    values[::2, : width // 2] = False  # the first words of many are equal
    firsts, kinds = unique_boolean_rows(values)
    assert (values[firsts[kinds]] == values).all()
    assert len(firsts) == len(np.unique(values, axis=0))
    assert len(unique_boolean_rows(values[:0])[0]) == 0


SEQ, GLOBAL_BATCH, NUM_GPUS = 65536, 64, 64
WIDE = context("llama3-70b", num_gpus=NUM_GPUS, seq_len=SEQ, global_batch_size=GLOBAL_BATCH)


def test_microbatches_that_pay_are_these() -> None:
    """In a job that is limited by memory and by kernels, as no space small enough for the twin."""
    names = ("micro_batch_size", "pp", "dp_shard", "tp", "cp")
    sizes = itertools.product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8), (1, 4), (1, 2))
    given = [dict(zip(names, size, strict=True)) for size in sizes if size[0] * size[2] <= 64]
    layouts = [resolve_layout(one, trainer="torchtitan", num_gpus=NUM_GPUS) for one in given]
    batch = LayoutBatch.from_layouts(layouts)
    wanted = WANTED["micro_batch_size"](batch, WIDE)
    assert KEEPS["micro_batch_size"].mask(batch, WIDE).tolist() == wanted.tolist()
    assert 0 < wanted.sum() < len(batch)
