"""Gemma 4's small models: per-layer embeddings, and layers that share keys and values."""

import pytest

from planner.columns import LayoutBatch
from planner.cost.data_parallel.unit_elements import unit_parameters
from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.intake.models import load_model, read_model
from planner.specs.job import Job
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import release_of, resolve_layout
from planner.trainers.torchtitan import TORCHTITAN
from planner.work import blocks
from planner.work.liveness import saved_tensors
from tests.conftest import job_values

SMALL, WIDE = "gemma4-e4b", "gemma4-e2b"


def job(model: object, **layout: object) -> Job:
    gpu = "h100-sxm-80gb"
    return read_job(job_values(model, gpu, 8, 4096, 64, layout=layout, trainer="fsdp"))


@pytest.mark.parametrize("name", [SMALL, WIDE])
def test_it_is_read_again_from_its_own_keys(name: str) -> None:
    model = load_model(name)
    assert read_model(inline_keys(model)) == model


def test_layers_that_share_have_only_queries_and_may_be_wider() -> None:
    model = load_model(WIDE)
    plain, shared = (
        {op.name: op for op in blocks.layer_ops(model, kind, True)}
        for kind, _ in model.distinct_layers()
        if kind.window
    )
    assert plain.keys() - shared.keys() == {"wk", "wv", "value_norm"}
    missing = saved_tensors(tuple(plain.values())).keys() - saved_tensors(tuple(shared.values()))
    assert {"k", "v"} <= missing
    assert shared["mlp_w1"].cols == ("wide_ffn",)
    counts = {
        (kind.shares_keys, kind.window): model.parameters.layer(kind)
        for kind, _ in model.distinct_layers()
    }
    for window, head in ((512, 256), (0, 512)):
        keys = 2 * 1536 * head + head  # two projections, and the norm of keys
        mlp = 3 * 1536 * 6144
        assert counts[True, window] - counts[False, window] == mlp - keys


def test_tp_divides_tables_and_not_what_reads_the_stream() -> None:
    model = load_model(SMALL)
    cut = [job(SMALL, tp=tp).layout for tp in (1, 2)]
    rows = LayoutBatch.from_layouts([one for one in cut if one is not None])
    (table, halved), expert = unit_parameters(model, rows)[0][-2], unit_parameters(model, rows)[1]
    assert halved == table / 2 + 42 * 256 * 2560 / 2
    layer, other = unit_parameters(model, rows)[0][0]
    assert other == layer / 2 + 256 * 2560
    assert not expert.any()


def test_a_layer_shares_only_what_stands_before_it() -> None:
    keys = inline_keys(load_model(SMALL))
    for mixers, width in (
        (["attention-shared"] + ["attention"] * 41, 262_144),
        (["attention"] * 5 + ["attention-shared"] * 37, 262_144),  # the first full layer shares
        (["attention"] * 42, 0),
    ):
        with pytest.raises(SpecError, match=r"none before it|give both, or neither"):
            read_model({**keys, "mixers": mixers, "vocab_size_per_layer_input": width})


def test_inputs_of_all_layers_stay_whatever_is_recomputed() -> None:
    """42 x 256 inputs of a token, as many before their norm, and the embedding, 16 bits each."""
    for ac in ("full", "none"):
        asked = job(SMALL, ac=ac)
        assert asked.layout is not None
        pricer = Pricer.build(asked.model, asked.cluster, asked.training)
        priced = pricer.price(LayoutBatch.from_layouts([asked.layout]))
        saved = float(priced.stage_seconds.saved_bytes[-2, 0]) / 4096
        assert saved == 2 * (2 * 42 * 256 + 2560) + 4 * 42
        plain = estimate_job(job({"base": SMALL, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0}, ac=ac))  # fmt: skip
        assert 1.03 < estimate_job(asked).step_seconds / plain.step_seconds < 1.5


def test_trainers_without_it_say_so() -> None:
    model = load_model(SMALL)
    for words in (
        TORCHTITAN.lacks(model, release_of("torchtitan", None)),
        lacking(model, release_of("megatron", None)),
    ):
        assert {"per-layer embeddings", "layers that share keys and values"} <= {*words}


def test_an_assistant_reads_keys_of_another_model() -> None:
    config = {"model_type": "gemma4_text", "architectures": [], "num_kv_shared_layers": 42}
    config |= {"num_hidden_layers": 42, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(SpecError, match="keys and values of another model"):
        read_model({**config, "num_key_value_heads": 2, "vocab_size": 128})


@pytest.mark.parametrize("name", [SMALL, WIDE, "longcat-flash", "jamba-v0.1"])
def test_bounds_stay_below_prices_and_batches_are_their_rows(name: str) -> None:
    asked = job(name)
    pricer = Pricer.build(asked.model, asked.cluster, asked.training)
    experts = {"ep": 8} if asked.model.is_moe else {}
    rows = [
        resolve_layout({**one, **experts}, trainer="fsdp", num_gpus=8)
        for one in ({"ac": "none"}, {"ac": "full", "compile": True}, {"ac": "memory-budget-0.5"})
    ]
    together = pricer.price(LayoutBatch.from_layouts(rows), every_rank=True)
    assert sum(together.parts.values()) == pytest.approx(together.step_seconds, rel=1e-9)
    for at, row in enumerate(rows):
        single = LayoutBatch.from_layouts([row])
        found = pricer.price(single, every_rank=True)
        assert found.step_seconds[0] == pytest.approx(together.step_seconds[at], rel=1e-12)
        seconds, device = pricer.lower_bounds(single)
        assert seconds[0] <= found.step_seconds[0] * (1 + 1e-12)
        assert device[0] <= found.device_bytes.max() * (1 + 1e-12)
        assert pricer.layout_lower_bounds(single)[0] <= found.step_seconds[0] * (1 + 1e-12)
