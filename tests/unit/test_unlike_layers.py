"""Layers of Jamba, Mamba and Falcon Mamba; of Gemma 4's small models, which have embeddings of
their own and share keys and values; and of LongCat-Flash, some of whose experts compute nothing.
"""

import pytest

from planner.cost.data_parallel.unit_elements import unit_parameters
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.intake.models import load_model, read_model
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.work import axes, blocks
from planner.work.liveness import saved_tensors
from planner.work.mixers import MIXERS
from planner.work.pieces import PLAIN
from tests.conftest import job_values
from tests.pricing import H100, named_ops, priced, rows

JAMBA = "jamba-v0.1"
PURE = {
    "model_type": "falcon_mamba", "architectures": [], "hidden_size": 64, "num_hidden_layers": 3,
    "vocab_size": 128, "state_size": 16, "expand": 2, "conv_kernel": 4, "time_step_rank": "auto",
}  # fmt: skip


def test_jamba_attends_in_every_eighth_layer_and_has_experts_in_every_second() -> None:
    model = load_model(JAMBA)
    assert [i for i, mixer in enumerate(model.mixers) if mixer == "attention"] == [4, 12, 20, 28]
    assert [kind.moe for kind in model.layer_kinds()][:4] == [False, True, False, True]
    assert (model.mamba_width, model.mamba_dt_rank) == (8192, 256)
    assert 11.9e9 < model.active_parameters() < 12.2e9  # published: 12B


def test_jamba_of_one_expert_is_dense() -> None:
    model = read_model({
        "model_type": "jamba", "architectures": [], "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 65536, "mamba_d_state": 16, "attn_layer_period": 8, "attn_layer_offset": 4,
        "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 1,
    })  # fmt: skip
    assert (model.is_moe, model.intermediate_size) == (False, 14336)


def test_mamba_has_mixers_and_nothing_else() -> None:
    model = read_model(PURE)
    assert model.num_dense_layers == model.num_attention_layers == 0
    assert (model.mamba_width, model.mamba_dt_rank, model.mamba_norm) == (128, 4, False)
    assert read_model(inline_keys(model)) == model
    with pytest.raises(SpecError, match="needed by mamba layers"):
        read_model({**PURE, "state_size": 0})


def test_kernels_one_by_one_save_more_than_one_function() -> None:
    """mamba_ssm: of the values' width, the projection (two) and the scan, or five besides."""
    counts = {}
    for model in (load_model(JAMBA), read_model(PURE)):
        saved = saved_tensors(MIXERS["mamba"].operations(model, PLAIN)).values()
        widths = [one.dims[1:] for one in saved]
        counts[model.mamba_norm] = 2 * widths.count(("mamba_in",)) + widths.count(("mamba_width",))
    assert counts == {True: 8, False: 3}


SMALL, WIDE = "gemma4-e4b", "gemma4-e2b"


def gemma_job(model: object, **layout: object) -> Job:
    return read_job(job_values(model, H100, 8, 4096, 64, layout=layout, trainer="fsdp"))


def test_layers_that_share_have_only_queries_and_may_be_wider() -> None:
    model = load_model(WIDE)
    windowed = (kind for kind, _ in model.distinct_layers() if kind.window)
    plain, shared = (named_ops(model, kind) for kind in windowed)
    assert plain.keys() - shared.keys() == {"wk", "wv", "value_norm"}
    missing = saved_tensors(tuple(plain.values())).keys() - saved_tensors(tuple(shared.values()))
    assert {"k", "v"} <= missing
    assert shared["mlp_w1"].cols == ("wide_ffn",)
    kinds = [kind for kind, _ in model.distinct_layers()]
    counts = {(kind.shares_keys, kind.window): model.parameters.layer(kind) for kind in kinds}
    for window, head in ((512, 256), (0, 512)):
        keys, mlp = 2 * 1536 * head + head, 3 * 1536 * 6144  # two projections, the norm of keys
        assert counts[True, window] - counts[False, window] == mlp - keys


def test_tp_divides_tables_and_not_what_reads_the_stream() -> None:
    model = load_model(SMALL)
    units, expert = unit_parameters(model, rows({"tp": 1}, {"tp": 2}, trainer="fsdp"))
    table, halved = units[-2]
    assert halved == table / 2 + 42 * 256 * 2560 / 2
    layer, other = units[0]
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


@pytest.mark.parametrize("ac", ["full", "none"])
def test_inputs_of_all_layers_stay_whatever_is_recomputed(ac: str) -> None:
    """42 x 256 inputs of a token, as many before their norm, and the embedding, 16 bits each."""
    asked = gemma_job(SMALL, ac=ac)
    p, batch = priced(asked)
    saved = float(p.price(batch).stage_seconds.costs.saved_bytes[-2, 0]) / 4096
    assert saved == 2 * (2 * 42 * 256 + 2560) + 4 * 42
    none = dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0)
    plain = estimate_job(gemma_job({"base": SMALL, **none}, ac=ac))
    assert 1.03 < estimate_job(asked).step_seconds / plain.step_seconds < 1.5


def test_an_assistant_reads_keys_of_another_model() -> None:
    config = {"model_type": "gemma4_text", "architectures": [], "num_kv_shared_layers": 42}
    config |= {"num_hidden_layers": 42, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(SpecError, match="keys and values of another model"):
        read_model({**config, "num_key_value_heads": 2, "vocab_size": 128})


LONGCAT = "longcat-flash"


def longcat_job(model: object, **layout: object) -> Job:
    given = {"layout": {"ep": 64, **layout}, "trainer": "fsdp"}
    return read_job(job_values(model, "h100-sxm-80gb", 512, 4096, 512, **given))


def sizes(model: ModelSpec) -> dict[str, float]:
    p, batch = priced(longcat_job(inline_keys(model)))
    found = axes.local_sizes(batch, model, p.training, p.rules)
    return {name: float(size[0]) for name, size in found.items()}


def test_a_layer_is_two_of_which_one_has_experts_beside_its_mlp() -> None:
    model = load_model(LONGCAT)
    assert [kind.moe for kind in model.layer_kinds()] == [True, False] * 28
    assert model.shared_expert_intermediate_size == model.intermediate_size == 12288
    assert model.parameters.router() == (512 + 256) * (6144 + 1)
    assert 26e9 < model.active_parameters() < 28.5e9  # published: 27B on average


def test_a_third_of_the_routed_rows_is_neither_computed_nor_sent() -> None:
    model = load_model(LONGCAT)
    every = model.model_copy(update={"zero_expert_num": 0})
    assert (model.num_computing_per_tok, every.num_computing_per_tok) == (8.0, 12)
    one, other = sizes(model), sizes(every)
    assert one["tokens_copied"] / other["tokens_copied"] == pytest.approx(2 / 3)
    assert one["tokens_of_mean_expert"] / other["tokens_of_mean_expert"] == pytest.approx(2 / 3)
    assert one["tokens_routed"] / other["tokens_routed"] == pytest.approx(2 / 3, rel=0.02)
    assert (one["experts"], one["experts_local"]) == (768, 8)
    few, many = (estimate_job(longcat_job(inline_keys(each))) for each in (model, every))
    exchange = [each.time.exposed_communication_seconds["ep"] for each in (few, many)]
    assert exchange[0] < 0.75 * exchange[1]
    assert few.step_seconds < many.step_seconds


def test_zero_experts_scale_the_token_and_are_not_exchanged() -> None:
    model = load_model(LONGCAT)
    kind = model.layer_kinds()[0]
    names = [op.name for op in blocks.layer_ops(model, kind, True)]
    assert names.count("zero_experts") == 1
    assert names.index("scatter") < names.index("zero_experts")
    assert "zero_experts" not in named_ops(model.model_copy(update={"zero_expert_num": 0}), kind)


@pytest.mark.parametrize(("change", "words"), [
    ({"num_experts": 0, "num_experts_per_tok": 0, "moe_shortcut": False}, "beside experts"),
    ({"moe_layer_freq": 1}, "without experts behind each"),
])  # fmt: skip
def test_a_shortcut_without_experts_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelSpec.model_validate({**load_model(LONGCAT).model_dump(), **change})


def test_zero_experts_that_are_not_their_input_are_refused() -> None:
    config = {"model_type": "longcat_flash", "architectures": [], "zero_expert_type": "constant"}
    with pytest.raises(SpecError, match="zero experts that are not their input"):
        read_model({**config, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4})
