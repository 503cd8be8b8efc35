"""Reads the configuration that TorchTitan prints to its log on request.

The request is job.print_config in 0.2 and debug.print_config in 0.3.
Sources: torchtitan 0.2.2 config/job_config.py maybe_log; 0.3.0 trainer.py Config.maybe_log,
    to_dict; what components/quantization/{float8,mx,nvfp4}.py log.
"""

import json
import re
from collections.abc import Mapping

from planner.errors import PlannerError
from planner.export.base import flatten
from planner.intake.models import read_model
from planner.intake.trainer_files.known_models import model_of
from planner.intake.trainer_files.torchtitan import StatedTitan
from planner.trainers.titan_settings import AC

_PRINTED = re.compile(r"Running with (?:configs|args): (?=\{)")
_PREFIX = re.compile(r"^\[[A-Za-z_]+\d+\]:", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def printed_run(text: str, stated: Mapping[str, object]) -> dict[str, object] | None:
    """The job that a log's other lines give, completed by its printed configuration.

    stated: the job from those other lines.
    Returns None where no configuration is printed, or where it cannot be read.
    """
    tables = _printed(text)
    if tables is None:
        return None
    flat = {key: value for key, value in flatten(tables).items() if value is not None}
    line = "0.3" if "model_spec" in tables else "0.2"
    kind = "model_spec" if line == "0.3" else "model"
    name, flavor = (str(flat.get(f"{kind}.{key}")) for key in ("name", "flavor"))
    found = model_of(name, flavor, str(flat.get("model.hf_assets_path", "")))
    model, cluster = stated.get("model") or found.value, stated.get("cluster")
    gpus = cluster.get("num_gpus") if isinstance(cluster, Mapping) else None
    if model is None or not isinstance(gpus, int):
        return None
    if line == "0.3":
        flat[AC + "mode"] = _mode(tables.get("activation_checkpoint"))
    settings = StatedTitan(line=line, given=flat)
    try:
        run = settings.run(read_model(model), gpus)
    except PlannerError:
        return None
    layout = {**run.layout, **({"precision": words_of_precision(text)} if line == "0.3" else {})}
    others = stated.get("training")
    training = {**run.training, **(others if isinstance(others, Mapping) else {})}
    return {**stated, "model": model, "training": training, "layout": layout}


def _printed(text: str) -> dict[str, object] | None:
    plain = _PREFIX.sub("", _ANSI.sub("", text))
    found = _PRINTED.search(plain)
    if found is None:
        return None
    try:
        tables, _ = json.JSONDecoder().raw_decode(plain, found.end())
    except (ValueError, RecursionError):
        return None
    return tables if isinstance(tables, dict) else None


def _mode(policy: object) -> str:
    """The name of 0.3's policy: it prints the policy's fields only, and each policy has its own."""
    if not isinstance(policy, Mapping):
        return "none"
    if "memory_budget" in policy:
        return "memory_budget"
    return "selective" if "force_recompute_mm_shapes_by_fqns" in policy else "full"


def words_of_precision(text: str) -> str:
    """The precision that TorchTitan's log mentions."""
    rows = (
        ("NVFP4Linear", "nvfp4"),
        ("MXFP8Linear", "mxfp8"),
        ("MX training active", "mxfp8"),
        ("Float8 training active with recipe rowwise_with_gw_hp", "float8-rowwise-gw-hp"),
        ("Float8 training active with recipe rowwise", "float8-rowwise"),
        ("Float8", "float8-tensorwise"),
    )
    return next((precision for words, precision in rows if words in text), "bf16")
