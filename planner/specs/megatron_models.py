"""What Megatron-LM's `pretrain_gpt.py` has no argument for, in words: asked by the rules and by the export alike.

Source: Megatron-LM core 0.14 megatron/training/arguments.py, megatron/core/transformer/transformer_config.py.
"""

from planner.specs.model import ModelSpec


def lacking(model: ModelSpec) -> list[str]:
    """What of the model no argument says; empty for a model that the arguments describe."""
    rows = (
        (model.parallel_residual, "parallel residual"),
        (model.norms_per_layer != 2, "other norms than two a layer"),
        (model.embedding_norm, "a norm after the embedding"),
        (model.qk_norm == "full", "query-key norm over the whole projection"),
        (model.attention_sinks, "attention sinks"),
        (model.shared_expert_gate, "gate on the shared expert"),
        (model.lm_head_bias, "bias on the head"),
        (model.router_bias or model.expert_bias, "biased router or experts"),
        (model.uses_mla and model.attention_bias, "biases with MLA"),
    )
    return [words for broken, words in rows if broken]
