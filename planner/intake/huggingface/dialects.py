"""Translates a family's config.json into the common keys, as its row in `families` says.

A config with a block that we cannot express is refused, and the message names the block
(`missing_blocks`): a wrong count is worse than none.
"""

from collections.abc import Callable, Mapping

from planner.intake.huggingface import dialect_readers, hybrid_readers, layer_readers
from planner.intake.huggingface.dialect import MissingBlock, Values, dense_at, flag, without
from planner.intake.huggingface.families import SAME_NETWORK, Keys, family_of
from planner.intake.huggingface.missing_blocks import check_blocks, missing

READERS: Mapping[str, Callable[[Values], Values]] = {
    name: reader
    for module in (dialect_readers, hybrid_readers, layer_readers)
    for name, reader in vars(module).items()
    if getattr(reader, "__module__", "") == module.__name__
}
"""Readers by the names in `Family.prepare`."""


def translated(raw: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """The config in common keys.

    raw: the language model's own keys, as written.
    prefix: field of the mapping, such as "model".
    Raises SpecError for a block that we have no operations for.
    """
    model_type = raw.get("model_type")
    check_blocks(raw, prefix)
    if isinstance(model_type, str) and model_type in SAME_NETWORK:
        model_type = SAME_NETWORK[model_type]
        raw = {**raw, "model_type": model_type}
    raw = _by_kinds_of_mlp(raw, prefix)
    family = family_of(model_type)
    if family is None:
        return raw
    values = without(raw, *family.parts)
    for part in family.parts:
        if isinstance(inner := raw.get(part), Mapping):
            values |= without(inner, "model_type")
    values = {
        family.renames.get(key, key): value
        for key, value in values.items()
        if key not in family.inert
    }
    values = {**_switched(values, family.switches), **family.fixed}
    try:
        return READERS[family.prepare](values) if family.prepare else values
    except MissingBlock as found:
        raise missing(prefix, found.key, raw.get(found.key), found.block) from None


def _switched(values: Values, switches: Mapping[str, tuple[bool, Keys, Keys]]) -> Values:
    """The config with each switch replaced by its keys."""
    found = without(values, *switches)
    for key, (default, on, off) in switches.items():
        found |= on if flag(values, key, default) else off
    return found


def _by_kinds_of_mlp(raw: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """The config with `mlp_layer_types`, a list of kinds of each layer, as the layers it means."""
    kinds = raw.get("mlp_layer_types")
    if not isinstance(kinds, (list, tuple)):
        return raw
    hashed = sum(kind == "hash_moe" for kind in kinds)
    known = ("dense", "sparse", "moe", *["hash_moe"] * all(k == "hash_moe" for k in kinds[:hashed]))
    odd = next((kind for kind in kinds if kind not in known), None)
    if odd is not None:
        raise missing(prefix, "mlp_layer_types", odd, f"an MLP of the kind {str(odd)[:40]!r}")
    dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
    others = ("mlp_layer_types", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")
    return {
        **without(raw, *others),
        **dense_at(dense),
        **({"num_hash_layers": hashed} if {"moe", "hash_moe"} & {*kinds} else {}),
    }
