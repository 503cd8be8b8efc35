"""Checks that the real TorchTitan reads what we export.

    python -m benchmarks.parsed_exports [--layouts 3] [--models a,b] [--titan FOLDER]

Covers every catalogue model that it can train, and layouts from all over the space.
Exports a seeded sample of legal layouts of each model on 8, 64 and 512 H100 for TorchTitan 0.2.2.
Then the installed package reads them in one process: its ConfigManager parses the TOML, the model
module is imported, the train spec found, and the flavor taken and updated from the config, as
`torchtitan.train` does before it touches a GPU. FOLDER: where `make test` put torchtitan (`titan`
in the environment). Exits 1 if one cannot be read.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runnable import SIZES, Combination, reason, sample
from planner.catalog.models import model_names
from planner.export import export

GPU, VERSION = "h100-sxm-80gb", "0.2.2"
READ = """
import importlib, json, os, sys
from torchtitan.config import ConfigManager
from torchtitan.protocols import train_spec
for name, folder, arguments in json.load(open(sys.argv[1])):
    os.chdir(folder)
    sys.path.insert(0, folder)
    for own in ("planner_model", "planner_config"):
        sys.modules.pop(own, None)
    importlib.invalidate_caches()
    try:
        train_spec._extra_train_specs.pop("planner_model", None)
        config = ConfigManager().parse_args(arguments)
        if config.experimental.custom_import:
            importlib.import_module(config.experimental.custom_import)
        spec = train_spec.get_train_spec(config.model.name)
        spec.model_args[config.model.flavor].update_from_config(config)
        print(json.dumps([name, ""]), flush=True)
    except (Exception, SystemExit) as error:
        print(json.dumps([name, f"{type(error).__name__}: {error}"[:300]]), flush=True)
    sys.path.remove(folder)
"""


def write_all(
    models: Sequence[str], layouts: int, root: Path
) -> tuple[list[list[object]], Counter[str]]:
    """([name, folder, arguments] of every export, rejected models by reason)."""
    cases: list[list[object]] = []
    refused: Counter[str] = Counter()
    for model in models:
        for num_gpus in SIZES:
            one = Combination(model, GPU, "torchtitan", VERSION, num_gpus)
            context = one.context()
            why = reason(context)
            if why is not None:
                refused[why] += num_gpus == SIZES[0]
                continue
            for index, layout in enumerate(sample(context, layouts, one.seed())):
                made = export(layout, context.model, context.cluster, context.training)
                folder = root / f"{model}-{num_gpus}-{index}"
                folder.mkdir()
                for name, text in made.files.items():
                    (folder / name).write_text(text, encoding="utf-8")
                cases.append(
                    [f"{model} x{num_gpus}: {layout.short()}", str(folder), list(made.arguments)]
                )
    return cases, refused


def read_all(cases: list[list[object]], root: Path, titan: str) -> list[tuple[str, str]]:
    """(name, error; empty if it was read) of every export."""
    listing = root / "cases.json"
    listing.write_text(json.dumps(cases), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([titan, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", READ, str(listing)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    lines = (line for line in done.stdout.splitlines() if line.startswith("["))
    return [(name, fault) for name, fault in map(json.loads, lines)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", type=int, default=3)
    parser.add_argument("--models", default="")
    parser.add_argument(
        "--titan", default=os.environ.get("TORCHTITAN_PATH", str(Path(sys.prefix) / "titan"))
    )
    asked = parser.parse_args(argv)
    models = [name for name in asked.models.split(",") if name] or list(model_names())
    with tempfile.TemporaryDirectory() as folder:
        cases, refused = write_all(models, asked.layouts, Path(folder))
        answers = read_all(cases, Path(folder), asked.titan)
    wrong = [(name, fault) for name, fault in answers if fault]
    print(f"{len(models)} models, {sum(refused.values())} refused before the search")
    print(f"{len(cases)} exports, {len(answers) - len(wrong)} read")
    for why, count in refused.most_common():
        print(f"{count:>5}  {why}")
    for name, fault in wrong[:20]:
        print(f"not read: {name}: {fault}")
    return 1 if wrong or len(answers) != len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
