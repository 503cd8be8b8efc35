"""Plain FSDP: an Accelerate configuration, and a short module that calls `fully_shard` itself.

The module is the layout as it was priced. The configuration is for scripts that use Accelerate or
the Trainer of transformers; notes name what it does in another way.
Sources: accelerate 1.15 commands/config/config_args.py (ClusterConfig), utils/launch.py
    (prepare_simple_launcher_cmd_env, prepare_multi_gpu_env), utils/dataclasses.py
    (FullyShardedDataParallelPlugin.set_mixed_precision, AORecipeKwargs), utils/fsdp_utils.py;
    torch 2.6 to 2.14 distributed/fsdp/_fully_shard, distributed/_composable/checkpoint_activation,
    utils/checkpoint.py (create_selective_checkpoint_contexts); torchao float8.
"""

import json

from planner.catalog.models import model_entry, model_names
from planner.export.base import Draft, Export, imports_for, train_steps
from planner.export.commands import Launch
from planner.specs.layout import Layout, parse_ac
from planner.units import counted, format_bytes

CONFIG, MODULE = "accelerate.yaml", "fully_shard.py"
ACCELERATE = "1.15.0"
"""The release whose configuration we write."""
_MIXED = {"bf16": "bf16", "fp16": "fp16", "float8-tensorwise": "fp8"}
_FLOAT8 = {"float8-tensorwise": "tensorwise", "float8-rowwise": "rowwise",
           "float8-rowwise-gw-hp": "rowwise_with_gw_hp"}  # fmt: skip
_ATTENTION = {"flash": "sdpa", "flash2": "flash_attention_2", "flash3": "flash_attention_3",
              "cudnn": "sdpa", "unfused": "eager"}  # fmt: skip
_WRITTEN_AC = ("none", "full", "selective-op", "selective-layer", "block", "memory-budget")
YOURS = (
    f"Put your data into batches() of {MODULE}; learning rate and number of steps are not part of "
    "a layout."
)


def write(draft: Draft) -> Export:
    """The layout for Accelerate and for plain torch; the release asked for is Accelerate's."""
    layout = draft.layout
    draft.write_known("Accelerate", ACCELERATE)
    draft.check_common()
    _check(draft)
    draft.files[CONFIG] = _config(draft)
    draft.notes.append(
        f"With a script of your own that uses Accelerate: accelerate launch --config_file {CONFIG} "
        f"YOUR_SCRIPT.py, with Accelerator(gradient_accumulation_steps={draft.passes}) and "
        f"{counted(layout.micro_batch_size, 'sequence')} a batch."
    )
    if layout.tp * layout.cp > 1:
        command: tuple[str, ...] = (
            "accelerate", "launch", "--config_file", CONFIG, "YOUR_SCRIPT.py")  # fmt: skip
        draft.notes.append("tp and cp are Accelerate's: your script calls Accelerator.prepare.")
    else:
        draft.files[MODULE] = _module(draft)
        launch = Launch(draft, (MODULE,))
        draft.files.update(launch.files())
        command = launch.command()
        draft.notes.append(YOURS)
        whole = draft.model.total_parameters() * (4 if layout.master_dtype == "float32" else 2)
        draft.notes.append(
            f"Every process of {MODULE} first builds the whole model in host memory, "
            f"{format_bytes(whole * launch.processes_per_node)} a node; {CONFIG} loads it once."
        )
    return draft.finished("accelerate", command)


def _check(draft: Draft) -> None:
    """Notes settings that neither file has, and those that Accelerate treats otherwise."""
    layout, training = draft.layout, draft.training
    kind = parse_ac(layout.ac)[0]
    for name in ("pp", "ep"):
        if getattr(layout, name) > 1:
            rule = "needs a model that is written for it, and neither FSDP2 nor Accelerate cuts one"
            draft.gap(name, rule, "use 1, or trainer torchtitan or megatron")
    if kind not in _WRITTEN_AC:
        draft.gap("ac", "is Megatron's", "use none, selective-op or full")
    if layout.precision not in (*_FLOAT8, "bf16"):
        rule = "needs more than a conversion of the model: loss scaling, or another library"
        draft.gap("precision", rule, "use bf16 or float8-rowwise")
    for name in ("optimizer_in_backward", "async_tp"):
        if getattr(layout, name):
            draft.gap(name, "is not written: FSDP2 has no setting for it", "set it to false")
    if training.optimizer not in ("adamw", "sgd"):
        rule = "is no optimizer of torch's; the module is written with AdamW"
        draft.gap("training.optimizer", rule, "put yours in", blocking=False)
    if training.chunked_loss:
        rule = "is your model's own matter: liger-kernel, for example, has such a loss"
        draft.gap("training.chunked_loss", rule, "put it in", blocking=False)
    if layout.dp_shard * layout.cp > 1 and layout.reduce_dtype != layout.param_dtype:
        draft.notes.append(
            f"{CONFIG} reduces gradients in {layout.param_dtype}, as Accelerate's mixed precision "
            f"does; {MODULE} in {layout.reduce_dtype}, as priced."
        )
    if kind not in ("none", "full"):
        draft.notes.append(
            f"{CONFIG} recomputes whole layers: Accelerate has no {layout.ac}, which {MODULE} has."
        )
    if layout.precision in _FLOAT8 and layout.precision not in _MIXED:
        draft.notes.append(
            f"{CONFIG} says bf16: pass AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("
            f'"{_FLOAT8[layout.precision]}")) to Accelerator for {layout.precision}.'
        )
    if layout.precision in _FLOAT8:
        draft.notes.append("Low precision needs torchao.")


def _config(draft: Draft) -> str:
    layout, cluster = draft.layout, draft.cluster
    sharded = layout.dp_shard * layout.cp > 1
    nodes = -(-layout.num_gpus // cluster.gpus_per_node)
    kind = "FSDP" if sharded else "MULTI_GPU" if layout.num_gpus > 1 else "'NO'"
    whole = layout.param_dtype == layout.master_dtype == "float32"
    mixed = "'no'" if whole else _MIXED.get(layout.precision, "bf16")
    lines = [
        f"# {draft.name}: {layout.short()}; Accelerate {draft.version}",
        "# written by planner-cli export",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"mixed_precision: {mixed}",
        f"num_machines: {nodes}",
        f"num_processes: {layout.num_gpus}",
        "machine_rank: 0",
        "main_training_function: main",
        "rdzv_backend: " + ("static" if nodes == 1 else "c10d"),
    ]
    if layout.precision == "float8-tensorwise":
        lines += [
            "fp8_config:",
            "  fp8_backend: AO",
            f"  fp8_enable_fsdp_float8_all_gather: {json.dumps(layout.float8_all_gather)}",
        ]
    if sharded:
        recomputes = parse_ac(layout.ac)[0] not in ("none", "memory-budget")
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {json.dumps(layout.zero_stage == 3)}",
            f"  fsdp_activation_checkpointing: {json.dumps(recomputes)}",
            f"  fsdp_offload_params: {json.dumps(layout.cpu_offload)}",
            "  fsdp_cpu_ram_efficient_loading: true",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
        if layout.dp_replicate * layout.tp * layout.cp > 1:
            degrees = ("dp_replicate", "dp_shard", "cp", "tp")
            lines += [
                "parallelism_config:",
                *(f"  parallelism_config_{name}_size: {getattr(layout, name)}" for name in degrees),
            ]
        if layout.cp > 1:
            lines.append(f"  parallelism_config_cp_comm_strategy: {layout.cp_method}")
    if layout.compile:
        lines += [
            "dynamo_config:",
            "  dynamo_backend: INDUCTOR",
            "  dynamo_use_regional_compilation: true",
        ]
    return "\n".join(lines) + "\n"


# ---- the module ----------------------------------------------------------------------------------

_HEAD = '''"""{title}

Written by planner-cli export. It trains on random tokens, which shows speed and memory: put your
data into batches(). On one node: torchrun --standalone --nproc_per_node={each} {module}
"""

import os

import torch
import torch.distributed as dist
{imports}
MODEL = {model}  # Hugging Face id or folder
SEQ_LEN, MICRO_BATCH, ACCUMULATE, STEPS = {seq_len}, {micro}, {passes}, {steps}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layers_of(model):
    """The list of the model's blocks: of all lists of modules, the one with most parameters."""
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    return max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))

'''
_POLICY = '''
def policy(seen, context, op, *args, **kwargs):
    """Keeps attention and every second product, and recomputes the rest."""
    if op == torch.ops.aten.mm.default:
        seen[context.is_recompute] = seen.get(context.is_recompute, 0) + 1
        return MUST_SAVE if seen[context.is_recompute] % 2 else PREFER_RECOMPUTE
    return MUST_SAVE if op in SAVED else PREFER_RECOMPUTE


def contexts():
    """The two contexts of one block: in the forward, and when it is recomputed."""
    seen = {}
    return create_selective_checkpoint_contexts(lambda *args, **kw: policy(seen, *args, **kw))

'''
_SAVED = """MUST_SAVE = CheckpointPolicy.MUST_SAVE
PREFER_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE
SAVED = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""
_LOOP = '''

def batches():
    """Token ids of one microbatch after another, different on every rank."""
    torch.manual_seed(dist.get_rank())
    while True:
        yield torch.randint(0, 1000, (MICRO_BATCH, SEQ_LEN), device=DEVICE)


def train(model, data, steps=STEPS):
    """Trains a model that returns an object with a loss, as transformers' do."""
    optimizer = {optimizer}
    for step in range(steps):
        for _ in range(ACCUMULATE):
            tokens = next(data)
            {forward}
            (loss / ACCUMULATE).backward()
{clip}        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {{step + 1}}: loss {{loss.item():.3f}}", flush=True)


def main():
    """One process for each GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(None if DEVICE == "cuda" else "gloo")
    config = AutoConfig.from_pretrained(MODEL)
    # random weights; AutoModelForCausalLM.from_pretrained(MODEL, ...) loads the published ones
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.{master}, attn_implementation="{attention}"
    )
    model.config.use_cache = False
    train(shard({moved}), batches())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


_MODULES = {
    "checkpoint_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "init_device_mesh": "torch.distributed.device_mesh",
    **dict.fromkeys(("CPUOffloadPolicy", "MixedPrecisionPolicy", "fully_shard"),
                    "torch.distributed.fsdp"),
    "DistributedDataParallel": "torch.nn.parallel",
    **dict.fromkeys(("CheckpointPolicy", "create_selective_checkpoint_contexts"),
                    "torch.utils.checkpoint"),
    **dict.fromkeys(("Float8LinearConfig", "convert_to_float8_training"), "torchao.float8"),
}  # fmt: skip


def _module(draft: Draft) -> str:
    layout, training = draft.layout, draft.training
    kind, number = parse_ac(layout.ac)
    sharded = layout.dp_shard > 1
    norm = training.max_grad_norm
    forward = "loss = model(input_ids=tokens, labels=tokens).loss"
    if layout.param_dtype != layout.master_dtype and not sharded:  # FSDP casts by itself
        casts = f"with torch.autocast(DEVICE, torch.{layout.param_dtype}):"
        forward = f"{casts}\n                {forward}"
    clip = f"        torch.nn.utils.clip_grad_norm_(model.parameters(), {norm:g})\n" if norm else ""
    loop = _LOOP.format(
        optimizer=(
            "torch.optim.SGD(model.parameters(), lr=1e-2)"
            if training.optimizer == "sgd"
            else "torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)"
        ),
        forward=forward,
        clip=clip,
        master=layout.master_dtype,
        attention=_ATTENTION.get(training.attention_kernel, "sdpa"),
        moved="model" if sharded else "model.to(DEVICE)",
    )
    policies = f"\n{_SAVED}\n{_POLICY}" if kind == "selective-op" else ""
    body = f"{policies}{_shard(draft, kind, number)}{loop}"
    head = _HEAD.format(
        title=f"{draft.name}: {layout.short()} under PyTorch.",
        each=min(layout.num_gpus, draft.cluster.gpus_per_node),
        module=MODULE,
        imports=imports_for(body, _MODULES),
        model=json.dumps(_hugging_face(draft.model.name)),
        seq_len=training.seq_len,
        micro=layout.micro_batch_size,
        passes=draft.passes,
        steps=train_steps(training),
    )
    return head + body


def _shard(draft: Draft, kind: str, number: float) -> str:
    """`shard`: what turns the user's model into the layout."""
    layout = draft.layout
    lines = ["", "def shard(model):", '    """The model with this layout."""']
    if layout.precision in _FLOAT8:
        lines += _float8(layout)
    if kind == "memory-budget":
        lines.append(f"    torch._functorch.config.activation_memory_budget = {number:g}")
    which = {
        "full": "",
        "selective-op": "",
        "selective-layer": f" if index % {int(number or 1)} == 0",
        "block": f" if index < {int(number)}",
    }.get(kind)
    lines.append("    layers = layers_of(model)")
    if which is not None or layout.compile:
        lines.append("    for index, layer in enumerate(layers):")
    if which is not None:
        inside = "layer, context_fn=contexts" if kind == "selective-op" else "layer"
        wrapped = f"checkpoint_wrapper({inside})"
        lines.append(f"        layers[index] = {wrapped}{which}{' else layer' if which else ''}")
    if layout.compile:
        lines.append("        layers[index].compile()")
    return "\n".join([*lines, *_parallel(layout)]) + "\n"


def _float8(layout: Layout) -> list[str]:
    recipe = f'Float8LinearConfig.from_recipe_name("{_FLOAT8[layout.precision]}")'
    if layout.precision == "float8-tensorwise":
        recipe = (
            "Float8LinearConfig(enable_fsdp_float8_all_gather="
            f"{layout.float8_all_gather and layout.dp_shard > 1})"
        )
    return [
        f"    config = {recipe}",
        "    convert_to_float8_training(",
        "        model,",
        "        config=config,",
        "        module_filter_fn=lambda one, name: (",
        '            "lm_head" not in name and not one.in_features % 16 and not '
        "one.out_features % 16",
        "        ),",
        "    )",
    ]


def _parallel(layout: Layout) -> list[str]:
    if layout.dp_shard == 1:
        wrapped = "DistributedDataParallel(model)" if layout.dp_replicate > 1 else "model"
        return [f"    return {wrapped}"]
    shape, names = f"({layout.dp_shard},)", '("shard",)'
    if layout.dp_replicate > 1:
        shape, names = f"({layout.dp_replicate}, {layout.dp_shard})", '("replicate", "shard")'
    options = [
        f"        mesh=init_device_mesh(DEVICE, {shape}, mesh_dim_names={names}),",
        "        mp_policy=MixedPrecisionPolicy(",
        f"            param_dtype=torch.{layout.param_dtype},"
        f" reduce_dtype=torch.{layout.reduce_dtype}",
        "        ),",
        *(["        offload_policy=CPUOffloadPolicy(),"] if layout.cpu_offload else []),
    ]
    return [
        "    options = dict(",
        *options,
        "    )",
        "    for layer in layers:",
        f"        fully_shard(layer, reshard_after_forward={layout.zero_stage == 3}, **options)",
        "    return fully_shard(model, **options)",
    ]


def _hugging_face(name: str) -> str:
    """The Hugging Face id of a catalogue model; the name itself for a user's own."""
    aliases = model_entry(name).aliases if name in model_names() else ()
    return next((alias for alias in aliases if "/" in alias), name)
