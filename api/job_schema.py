"""The JSON schema of a job as a person writes it, with a line of help for every field.

The web page makes its form of it; editors complete and check job files with it.
"""

from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from planner.specs.cluster import ClusterRequest
from planner.specs.current import CurrentSpec
from planner.specs.job import ProbeSpec, SearchSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PARTS: dict[str, type[BaseModel]] = {
    "model": ModelSpec, "cluster": ClusterRequest, "training": TrainingSpec, "layout": Layout,
    "search": SearchSpec, "probe": ProbeSpec, "current": CurrentSpec,
}  # fmt: skip
REQUIRED = {"cluster": ("num_gpus",), "training": ("seq_len", "global_batch_size")}
ABOUT = {
    "model": "A catalogue name, a Hugging Face id, or the keys of a config.json.",
    "cluster": "A catalogue name, or its GPU, how many there are, and the fabric between them.",
    "training": "What a search never changes.",
    "layout": "To plan: what runs today, for comparison. To estimate: the layout to price.",
    "search": "How many answers, what is fixed, what may vary, what is optimised.",
    "probe": "Measure the best layouts on a pool of GPUs, within a budget.",
    "current": "What runs today, as text: a TorchTitan TOML or command, a Megatron-LM script.",
}
NUMBER_OR_TEXT = {"type": ["number", "string"]}
GPU = {"type": ["string", "object"], "description": "Name in the catalogue, or its own figures."}
NUM_GPUS = {
    "type": ["integer", "string", "array"],
    "description": "A number, a range such as 64..1024, or a list: how many GPUs?",
}
COUNT = {"type": ["integer", "string"]}
HELP: dict[str, dict[str, str]] = {
    "cluster": {
        "gpus_per_node": "GPUs that share the innermost fabric; 8 unless given.",
        "fabric": "Levels from inner to outer: name, gpus, bandwidth, latency, topology.",
        "power_limit": 'Of one GPU, as "600 W".',
        "reserved_memory": "Device memory that others hold on each GPU.",
        "memory_fraction": "Share of device memory that a plan may use.",
        "host_memory": 'Of a node, as "2 TiB".',
        "pcie_bandwidth": 'Between host and GPU, per GPU and direction, as "64 GB/s".',
        "storage_bandwidth": "For checkpoints, of the whole cluster.",
        "mtbf_gpu_hours": "GPU-hours between failures.",
        "price_per_gpu_hour": "USD.",
        "carbon_intensity": "Grams of CO2 a kWh.",
        "rank_order": "Axes from the innermost out.",
    },
    "training": {
        "seq_len": 'Tokens of a sequence; "8k" is 8,192.',
        "global_batch_size": "Sequences of a step, over all GPUs.",
        "trainer": "The software whose rules and efficiency apply.",
        "trainer_version": "Its release, a date or a commit; the newest known unless given.",
        "torch_version": "PyTorch's release.",
        "attention_kernel": "flash: the generation that the trainer's release brings.",
        "cuda_graphs": "partial captures layers, full the whole step.",
        "chunked_loss": "The loss runs on chunks of tokens: whole logits never exist.",
        "fused_cross_entropy": "The gradient of the loss overwrites its 16-bit logits.",
        "optimizer": "Its states decide memory.",
        "muon_tp_mode": "How Muon orthogonalises a matrix that tensor parallelism cuts.",
        "qk_clip": "Weights of queries and keys are scaled where a head's scores grow too large.",
        "max_grad_norm": "Gradient clipping; null switches it off.",
        "total_tokens": 'Of the whole run, for its time and price: "15T".',
        "checkpoint": "interval_steps, and mode: sync, async or async-pinned.",
        "vocab_parallel_loss": "The loss over a vocabulary split by tensor parallelism.",
        "moe_imbalance": "Load of the busiest expert rank over the mean.",
        "moe_capacity_factor": "Rows of an expert over its mean share; the rest is dropped.",
        "expandable_segments": "PyTorch's allocator grows its segments.",
        "overlap": "Communication under compute: dp, tp, pp unless off; ep as the recipe does.",
    },
    "layout": {
        "dp_replicate": "Replicas; above 1 with dp_shard above 1 it is HSDP.",
        "dp_shard": "Ranks that FSDP or ZeRO shards over; what is left over unless given.",
        "cp": "Context-parallel ranks: a sequence is split.",
        "tp": "Tensor-parallel ranks.",
        "pp": "Pipeline-parallel ranks.",
        "ep": "Expert-parallel ranks.",
        "etp": "Tensor-parallel ranks of experts.",
        "moe_dispatcher": "How tokens reach their experts.",
        "zero_stage": "0 DDP, 1 optimizer, 2 gradients too, 3 parameters too.",
        "sequence_parallel": "Norms and residuals split over the tensor-parallel ranks.",
        "async_tp": "Tensor-parallel communication under its products; needs compile.",
        "cp_method": "How keys and values reach every context-parallel rank.",
        "pp_schedule": "Order of forwards and backwards.",
        "virtual_stages": "Stages of a pipeline rank.",
        "layers_per_stage": "Layers of each stage; the trainer's own split unless given.",
        "micro_batch_size": "Sequences of a microbatch on one data-parallel rank.",
        "ac": "Activation checkpointing: none, full, selective-op, memory-budget-X, ...",
        "precision": "What products are computed in.",
        "float8_all_gather": "FSDP gathers weights in 8 bits; tensorwise only.",
        "param_dtype": "Of parameters in compute.",
        "reduce_dtype": "Of gradients on the wire.",
        "master_dtype": "Of the optimizer's copy.",
        "compile": "torch.compile of each block.",
        "optimizer_in_backward": "The optimizer runs as gradients come.",
        "cpu_offload": "Optimizer states on the host.",
        "optimizer_offload_fraction": "Share of the states on the host.",
        "activation_offload_layers": "Layers whose activations wait on the host.",
    },
    "search": {
        "top_k": "How many layouts to rank.",
        "fix": "Fields of the layout that are given: {tp: 8}.",
        "allow": "The only values of a field: {precision: [bf16, float8-rowwise]}.",
        "objective": "What is best.",
        "sampler": "Of layouts beyond enumeration, and of probes.",
        "seed": "The same seed gives the same plan.",
        "prefer": "Of what cannot be told apart, the simplest or the fastest on paper.",
    },
    "probe": {
        "max_probes": "Layouts to measure at most.",
        "max_gpu_seconds": "Over all GPUs.",
        "pool": "Where they run.",
        "trainer": "The program that is measured.",
        "steps": "Timed in each run.",
        "priority": "Of what waits for the same pool, the highest goes first.",
    },
    "current": {
        "name": "Of the file.",
        "format": "Told by the text unless given.",
        "text": "The file itself.",
        "files": "Other files that it names, by the name it uses.",
        "job": "What was read from a log.",
        "measured": "What that run measured.",
        "notes": "What had to be assumed about it.",
    },
}  # fmt: skip


@lru_cache(maxsize=1)
def job_schema() -> dict[str, Any]:
    """The schema of `POST /plan`'s body and of a job file."""
    properties: dict[str, Any] = {"id": {"type": ["string", "integer"], "description": "Echoed."}}
    definitions: dict[str, Any] = {}
    for name, spec in PARTS.items():
        part = spec.model_json_schema(ref_template="#/$defs/{model}", by_alias=True)
        definitions |= part.pop("$defs", {})
        shaped = _as_written(name, part)
        properties[name] = {**_or_named(name, shaped), "description": ABOUT[name]}
    return {
        "$schema": DIALECT,
        "title": "Job",
        "type": "object",
        "properties": properties,
        "required": ["model", "cluster", "training"],
        "$defs": definitions,
    }


def _as_written(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """The part with what a person may leave out or write as text."""
    fields: dict[str, Any] = dict(part["properties"])
    if name == "cluster":
        # quantities are written with their units: "400 Gb/s"
        fields = {key: _with_units(field) for key, field in fields.items()}
        fields = {"gpu": GPU, **fields, "num_gpus": NUM_GPUS}
    if name == "training":
        fields |= {"seq_len": COUNT, "total_tokens": NUMBER_OR_TEXT}
    if name == "model":
        fields = {"base": {"type": "string", "description": "Overridden by the rest."}, **fields}
    for key, words in HELP.get(name, {}).items():
        fields[key] = {**fields[key], "description": words}
    required = list(REQUIRED.get(name, ()))
    return {
        "type": "object",
        "properties": fields,
        "additionalProperties": name == "model",
        **({"required": required} if required else {}),
    }


def _with_units(field: dict[str, Any]) -> dict[str, Any]:
    kinds = [one.get("type") for one in field.get("anyOf", [field])]
    if "number" not in kinds:
        return field
    return {**NUMBER_OR_TEXT, **({"default": field["default"]} if field.get("default") else {})}


def _or_named(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A model and a cluster may be named instead of written out."""
    return {"anyOf": [{"type": "string"}, shape]} if name in ("model", "cluster") else shape
