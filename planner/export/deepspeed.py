"""Plain FSDP as DeepSpeed's ZeRO: a configuration for a script of transformers' Trainer.

Its ZeRO-2 and ZeRO-3 are the nearest to FSDP2 with `zero_stage` 2 and 3, as the reader of such
files takes them (intake/trainer_files/config_files.py). Microbatch, recomputation and compile are
arguments of the Trainer, which come with it.
Sources: DeepSpeed 0.19 runtime/config.py, runtime/zero/config.py, runtime/constants.py,
    runtime/tensor_parallel/config.py; transformers 5 training_args.py.
"""

import json

from planner.export.base import Draft, Export, train_steps
from planner.export.commands import Launch
from planner.specs.layout import Layout, parse_ac

CONFIG, SCRIPT = "ds_config.json", "YOUR_SCRIPT.py"
DEEPSPEED = "0.19"
"""The release whose configuration we write."""
_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def write(draft: Draft) -> Export:
    """The layout for DeepSpeed; the release asked for is its own."""
    layout, training = draft.layout, draft.training
    draft.write_known("DeepSpeed", DEEPSPEED)
    draft.check_common()
    _check(draft)
    draft.files[CONFIG] = json.dumps(_config(draft), indent=2) + "\n"
    settings = {
        "deepspeed": CONFIG,
        "per_device_train_batch_size": str(layout.micro_batch_size),
        "gradient_accumulation_steps": str(draft.passes),
        "max_steps": str(train_steps(training)),
        "gradient_checkpointing": json.dumps(parse_ac(layout.ac)[0] == "full"),
        "torch_compile": json.dumps(layout.compile),
        "max_grad_norm": f"{training.max_grad_norm or 0:g}",
        **({_sixteen(layout): "true"} if _sixteen(layout) else {}),
    }
    arguments = tuple(word for name, value in settings.items() for word in (f"--{name}", value))
    launch = Launch(draft, (SCRIPT,), arguments)
    draft.files.update(launch.files())
    draft.notes.append(
        f"{SCRIPT} is yours: it parses TrainingArguments of transformers and calls Trainer, with "
        f"sequences of {training.seq_len} tokens."
    )
    draft.notes.append(
        f"The price is FSDP2's with zero_stage {layout.zero_stage}: DeepSpeed's buckets and 16-bit "
        "copies differ."
    )
    return draft.finished("deepspeed", launch.command(), arguments)


def _check(draft: Draft) -> None:
    """Notes values for which neither the configuration nor the Trainer has a setting."""
    layout, training = draft.layout, draft.training
    script = "needs a script that is written for it; no setting of DeepSpeed's turns it on"
    rows = (
        *((getattr(layout, name) > 1, name, script, "use 1, or trainer torchtitan or megatron")
          for name in ("pp", "ep", "cp")),
        (layout.dp_replicate > 1 and layout.dp_shard > 1, "dp_replicate",
         "is none of DeepSpeed's: ZeRO shards over all data-parallel ranks since MiCS went",
         "set it to 1"),
        (layout.sequence_parallel and layout.tp > 1, "sequence_parallel",
         "is not what AutoTP does, which keeps norms and residuals whole", "set it to false"),
        (layout.precision not in ("bf16", "fp16"), "precision",
         "needs a conversion of the model, for which DeepSpeed has no setting",
         "use bf16, or --format accelerate"),
        (parse_ac(layout.ac)[0] not in ("none", "full"), "ac", "is no choice of the Trainer",
         "use none or full"),
        (layout.master_dtype == "bfloat16" and not layout.zero_stage, "master_dtype",
         "is DeepSpeed's under ZeRO alone", "use float32"),
        (layout.optimizer_in_backward, "optimizer_in_backward",
         "is not written: DeepSpeed has no setting for it", "set it to false"),
        (training.optimizer != "adamw", "training.optimizer",
         "is none that DeepSpeed builds; AdamW is written", "pass yours"),
        (bool(training.chunked_loss), "training.chunked_loss",
         "is your model's own matter: liger-kernel, for example, has such a loss", "put it in"),
    )  # fmt: skip
    for lacks, name, rule, remedy in rows:
        if lacks:
            draft.gap(name, rule, remedy, blocking=not name.startswith("training."))


def _config(draft: Draft) -> dict[str, object]:
    layout, training = draft.layout, draft.training
    stage = layout.zero_stage if layout.dp_shard > 1 else 0
    zero: dict[str, object] = {"stage": stage}
    if stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if layout.cpu_offload:
        host = {"device": "cpu", "pin_memory": True}
        zero["offload_optimizer"] = host
        if stage == 3:
            zero["offload_param"] = host
    sixteen, own = _sixteen(layout), {}
    if layout.master_dtype == "bfloat16":
        own = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": draft.passes,
        "gradient_clipping": training.max_grad_norm or 0.0,
        **({sixteen: {"enabled": True, **own}} if sixteen else {}),
        "communication_data_type": _WORDS[layout.reduce_dtype],
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": zero,
        **({"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp > 1 else {}),
    }


def _sixteen(layout: Layout) -> str:
    """DeepSpeed's and transformers' word for the 16-bit format; "" for fp32 throughout."""
    name = "fp16" if layout.precision == "fp16" else "bf16"
    return "" if layout.param_dtype == "float32" else name
