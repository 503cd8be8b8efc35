"""Flags of Megatron-LM that change time or memory and that nothing here prices."""

from collections.abc import Iterator, Sequence

from planner.catalog.megatron_arguments import unpriced_flags
from planner.export.commands import spelled
from planner.export.megatron_read import Words, word
from planner.export.megatron_settings import CAPACITY, PADDED
from planner.specs.layout import RECOMPUTE_MODULES


def fuses_cross_entropy(words: Words) -> bool:
    """Whether the loss is Transformer Engine's; Megatron's own fusion keeps the fp32 copy."""
    kinds = words.get("cross_entropy_fusion_impl", ())
    return "cross_entropy_loss_fusion" in words and list(kinds) == ["te"]


def unpriced(words: Words) -> Iterator[str]:
    """Sentences on settings of a script that the figures leave out."""
    sparse = list(words.get("experimental_attention_variant", ())) == ["dsa"]
    unfused = sparse or ("multi_latent_attention" in words and word(words, "rope_type") == "rope")
    flags = unpriced_flags()
    found = [
        _spelled(name, values)
        for name, values in words.items()
        if name in flags
        and not (unfused and name == "no_rope_fusion")  # their kernels exclude it
        and not (values and set(values) <= flags[name])
        and not (name.startswith("cross_entropy") and fuses_cross_entropy(words))
        and not (name in (CAPACITY, PADDED) and {CAPACITY, PADDED} <= words.keys())
    ]
    if found:
        yield f"changes time or memory and is not priced: {', '.join(found)}"
    if sparse and list(words.get("dsa_kernel_backend", ["none"])) == ["none"]:
        yield "sparse attention without --dsa-kernel-backend scores all tokens in fp32, unpriced"
    other = [one for one in words.get("recompute_modules", ()) if one not in RECOMPUTE_MODULES]
    if other:
        yield f"recomputing {', '.join(other)} is not priced"


def _spelled(name: str, values: Sequence[str]) -> str:
    return " ".join([spelled(name), *values])
