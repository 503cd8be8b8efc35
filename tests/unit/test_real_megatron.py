"""Megatron-LM exports, judged by the real megatron-core 0.16: its configuration and its model."""

import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from export_cases import cluster, model, to_megatron, training
from test_megatron_files import JOBS, legal

from planner.catalog.models import model_names
from planner.cost.pipeline.stages import stage_layers
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import release_of
from tests.conftest import judged

pytestmark = [pytest.mark.torch, pytest.mark.slow]
FOLDER = os.environ.get("MEGATRON_CORE_PATH", str(Path(sys.prefix) / "megatron"))


built = partial(judged, "megatron-core", FOLDER, "benchmarks/megatron_models.py")


# YaRN is an argument from 0.19 on
PLAIN = [f'{{"base":"gpt-oss-{size}b","rope_scaling":null}}' for size in (20, 120)]


def test_each_model_is_built_to_the_last_weight_or_refused_by_name() -> None:
    *rows, _ = built(*model_names(), *PLAIN)
    assert [rows.pop().split()[:2] for _ in PLAIN] == [["equal", name] for name in PLAIN[::-1]]
    counts = Counter(row.split()[0] for row in rows)
    assert counts["equal"] >= 71
    refused = {row.split()[1] for row in rows if row.startswith("refused")}
    core, names = release_of("megatron", "0.16"), [row.split()[1] for row in rows]
    assert refused == {name for name in names if lacking(model(name), core)}
    assert counts["equal"] + len(refused) == len(rows)


def test_two_hundred_exports_are_configurations_with_our_stages() -> None:
    exported, stages = [], []
    for seed, (name, num_gpus, batch) in enumerate(JOBS):
        spec, layouts = model(name), legal(model(name), num_gpus, batch, seed, "0.16")
        job = training(trainer="megatron", global_batch_size=batch, seq_len=4096)
        for _ in range(25):
            chosen = next(layouts)
            made = to_megatron(chosen, spec, cluster(num_gpus), job, "0.16")
            exported.append(json.dumps(made.arguments))
            count = chosen.pp * chosen.virtual_stages
            stages.append(list(stage_layers(spec.num_hidden_layers, count, counts_ends=False)))
    answers = [json.loads(line) for line in built("--arguments", lines="\n".join(exported))]
    assert len(answers) == 25 * len(JOBS) > 200
    for words, answer, sizes in zip(exported, answers, stages, strict=True):
        assert answer == sizes, words


def test_a_stage_saves_what_it_received_and_frees_what_it_sent() -> None:
    """Recomputed whole, two layers save their two inputs, the first of them as it arrived."""
    _, *shown = judged("megatron-core", FOLDER, "benchmarks/megatron_stage.py")
    assert shown == ["full: 2 tensors of the input's size, the input one", "sent: 1 element"]
