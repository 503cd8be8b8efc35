"""Mamba, the first: Jamba, Mamba and Falcon Mamba."""

import pytest

from planner.errors import SpecError
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.models import load_model, read_model
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import release_of
from planner.work.liveness import saved_tensors
from planner.work.mixers import MIXERS
from planner.work.pieces import PLAIN

JAMBA = "jamba-v0.1"
PURE = {
    "model_type": "falcon_mamba", "architectures": [], "hidden_size": 64, "num_hidden_layers": 3,
    "vocab_size": 128, "state_size": 16, "expand": 2, "conv_kernel": 4, "time_step_rank": "auto",
}  # fmt: skip


def test_jamba_attends_in_every_eighth_layer_and_has_experts_in_every_second() -> None:
    model = load_model(JAMBA)
    assert read_model(inline_keys(model)) == model
    assert [i for i, mixer in enumerate(model.mixers) if mixer == "attention"] == [4, 12, 20, 28]
    assert [kind.moe for kind in model.layer_kinds()][:4] == [False, True, False, True]
    assert (model.mamba_width, model.mamba_dt_rank) == (8192, 256)
    assert 11.9e9 < model.active_parameters() < 12.2e9  # published: 12B
    dense = read_model({**_jamba(), "num_experts": 1})
    assert (dense.is_moe, dense.intermediate_size) == (False, 14336)


def _jamba() -> dict[str, object]:
    return {
        "model_type": "jamba", "architectures": [], "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 65536, "mamba_d_state": 16, "attn_layer_period": 8, "attn_layer_offset": 4,
        "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
    }  # fmt: skip


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


def test_no_trainer_of_its_own_kernels_has_it() -> None:
    model = load_model(JAMBA)
    assert "Mamba (state space) layers" in lacking(model, release_of("megatron", None))
