"""Reads a log of Megatron-LM: the arguments that it prints at its start, and its step times.

Source: Megatron-LM core 0.14 megatron/training/arguments.py (_print_args), training.py
    (training_log).
"""

import re
from statistics import median

from planner.export.megatron_read import Words

_DUMP = re.compile(r"-{3,} arguments -{3,}\s*\n(.*?)-{3,} end of arguments -{3,}", re.DOTALL)
_LINE = re.compile(r"(\w+) \.{2,} (.*)$", re.MULTILINE)
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
# values as they are kept -> the flags that set them
RENAMED = {
    "fp4": "fp4_format",
    "padded_vocab_size": "vocab_size",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}
SWITCHED_OFF = {
    "add_bias_linear": "disable_bias_linear",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
}
# set by those above, or by Megatron itself for the run
DERIVED = frozenset({"tokenizer_type", "num_layers_per_virtual_pipeline_stage", "overlap_p2p_comm"})


def is_log(text: str) -> bool:
    return _DUMP.search(text) is not None


def dumped(text: str) -> dict[str, str]:
    """Every argument that the log prints, by its name, as text."""
    found = _DUMP.search(text)
    return {} if found is None else {one[1]: one[2].strip() for one in _LINE.finditer(found[1])}


def words_of(values: dict[str, str]) -> Words:
    """Arguments as a command would give them: flag without dashes -> its values."""
    words: dict[str, list[str]] = {}
    interleaved = values.get("virtual_pipeline_model_parallel_size", "None") != "None"
    if interleaved and values.get("overlap_p2p_comm") == "False":
        words["no_overlap_p2p_communication"] = []
    for name, value in values.items():
        if name in SWITCHED_OFF and value == "False":
            words[SWITCHED_OFF[name]] = []
        if value in ("None", "False", "[]") or name in DERIVED or name in SWITCHED_OFF:
            continue
        listed = value.startswith("[") and not value.startswith("[[")
        items = re.sub(r"[\[\]',]", " ", value).split() if listed else [value]
        words[RENAMED.get(name, name)] = [] if value == "True" else items
    return words


def measured_by(text: str) -> dict[str, object]:
    """Numbers of a log: its median step over the later half; empty where it prints none."""
    steps = [float(one) / 1000 for one in _STEP.findall(text)]
    later, values = steps[len(steps) // 2 :], dumped(text)
    sizes = [values.get(name, "") for name in ("global_batch_size", "seq_length", "world_size")]
    if not later or not all(one.isdigit() and int(one) for one in sizes):
        return {}
    batch, seq_len, world = map(int, sizes)
    step = median(later)
    return {
        "status": "ok",
        "step_seconds": step,
        "tokens_per_second_per_gpu": batch * seq_len / world / step,
        "steps": len(later),
    }
