"""One's own runs read back: TorchTitan's logs and events, rows, CSV; gaps are asked for by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.api.input.measurement_rows import csv_rows, json_rows, row_of, to_csv
from planner.api.input.measurements import (
    filter_of,
    guess_format,
    of_rows,
    read_file,
    read_measurements,
    store_new,
)
from planner.api.wiring import Wiring
from planner.errors import SpecError
from planner.intake.measurements import read_measurement
from planner.intake.models import load_model
from planner.specs.measurement import Measurement
from planner.units import GIB
from tests.conftest import job_values
from tests.unit.conftest import faults_of

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "fixtures" / "titan_logs"
PUBLIC = ROOT / "benchmarks" / "measured" / "public.jsonl"
RUN = job_values("debug-tiny", "h100-sxm-80gb", 4, 256, 4, layout={"dp_shard": 2, "tp": 2})
H100 = {"cluster": {"gpu": "h100-sxm-80gb"}}
TP2, PP2 = "0.2.2-fsdp2-tp2.log", "0.2.2-fsdp2-pp2.log"


def read(wiring: Wiring, path: str | Path, job: dict[str, Any] | None = None) -> Measurement:
    (one,) = read_file(wiring, str(LOGS / path), None, job)
    return one


def faults(wiring: Wiring, path: str | Path, job: dict[str, Any] | None = None) -> dict[str, str]:
    """field -> rule of what a log lacks."""
    return {fault.field: fault.rule for fault in faults_of(read, wiring, path, job)}


class TestTorchTitanLogs:
    def test_what_the_log_does_not_say_is_asked_for_by_name(self, wiring: Wiring) -> None:
        found = faults(wiring, TP2)  # recorded on a CPU, selective-op
        assert found.keys() == {"cluster.gpu", "layout.ac"}
        assert "selective, not which" in found["layout.ac"]
        # 0.2.0 prints no mesh
        fields = {"cluster.gpu", "cluster.num_gpus", "layout"}
        assert faults(wiring, "0.2.0-single.log").keys() == fields

    @pytest.mark.parametrize("text", ["", "hello world\n", "[1, 2]\n"])
    def test_what_is_no_log_is_refused(self, wiring: Wiring, tmp_path: Path, text: str) -> None:
        (tmp_path / "no.log").write_text(text)
        with pytest.raises(SpecError, match="holds no line of TorchTitan"):
            read_file(wiring, str(tmp_path / "no.log"), None, None)

    def test_what_it_says_is_read(self, wiring: Wiring) -> None:
        one = read(wiring, TP2, {**H100, "layout": {"ac": "selective-op"}})
        layout, training, measured = one.job.layout, one.job.training, one.measured
        assert (one.job.model.name, one.job.cluster.num_gpus) == ("debug-tiny", 4)
        degrees = (layout.dp_shard, layout.tp, layout.pp, layout.micro_batch_size)
        assert (*degrees, layout.ac) == (2, 2, 1, 1, "selective-op")
        assert (training.seq_len, training.global_batch_size) == (256, 4)
        assert training.trainer_version == one.software["trainer_version"] == "0.2.2"
        # six logged, two at the start do not count
        assert (measured.status, measured.steps) == ("ok", 4)
        each = 256 * 4 / 4 / measured.step_seconds
        assert measured.tokens_per_second_per_gpu == pytest.approx(each)

    def test_the_numbers_are_those_of_the_lines(self, wiring: Wiring) -> None:
        """Steps 3 to 6 of the log: tps 1,828 1,977 2,149 1,980, 1,024 tokens a step; 0.64 GiB."""
        layout = {"dp_shard": 1, "micro_batch_size": 2}
        job = {"cluster": {"gpu": "cpu", "num_gpus": 1}, "layout": layout}
        measured = read(wiring, "0.2.0-single.log", job).measured
        seconds = sorted(1024 / rate for rate in (1828, 1977, 2149, 1980))
        assert measured.step_seconds == pytest.approx((seconds[1] + seconds[2]) / 2)
        assert measured.peak_reserved_bytes == pytest.approx(0.64 * GIB)

    def test_pipelines_split_the_local_batch(self, wiring: Wiring) -> None:
        layout = read(wiring, PP2, H100).job.layout
        found = (layout.pp, layout.pp_schedule, layout.micro_batch_size, layout.ac)
        assert found == (2, "1F1B", 1, "full")

    def test_a_contradiction_is_named(self, wiring: Wiring) -> None:
        job = {**H100, "layout": {"ac": "none", "tp": 4}, "training": {"seq_len": 512}}
        fields = {"layout.ac", "layout.tp", "training.seq_len"}
        assert faults(wiring, PP2, job).keys() == fields

    def test_a_run_out_of_memory_is_one_too(self, wiring: Wiring) -> None:
        text = (LOGS / PP2).read_text()
        died = text[: text.index("step:  2")].rpartition("\n")[0] + (
            "\n[rank1]:Traceback (most recent call last):\n"
            '[rank1]:  File "/v/torchtitan/train.py", line 1, in main\n'
            "[rank1]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
            "GPU 1 has a total capacity of 79.11 GiB\n"
        )
        (one,) = read_measurements(wiring, died, "torchtitan", job=H100, source="x.log")
        assert one.measured.status == "oom"
        assert one.measured.model_extra["attempted_bytes"] == 2 * GIB

    def test_a_log_without_timed_steps_says_what_is_needed(self, wiring: Wiring) -> None:
        job = job_values("debug-tiny", "cpu", 1, 64, 4, layout={"dp_shard": 1})
        with pytest.raises(SpecError, match=r"has 0 logged steps.*step: 3  loss"):
            read_measurements(wiring, "torchtitan version: 0.2.2\n", "torchtitan", job=job)

    def test_the_gpu_of_the_log_finds_its_entry(self, wiring: Wiring) -> None:
        own = "CPU capacity: CPU with 23.54GiB memory"
        named = "CUDA capacity: NVIDIA H100 PCIe with 79.10GiB memory"
        text = (LOGS / PP2).read_text().replace(own, named)
        (one,) = read_measurements(wiring, text, "torchtitan")
        found = (one.job.cluster.gpu.name, one.software["gpu_name"])
        assert found == ("h100-pcie-80gb", "NVIDIA H100 PCIe")

    def test_a_model_is_known_by_its_parameters(self) -> None:
        from planner.probes.trainers.titan_run import stated_by

        for name in ("llama3.1-8b", "llama3.1-70b"):
            count = load_model(name).total_parameters()
            said, _ = stated_by(f"- Model llama3 x size: {count:,} total parameters\n")
            assert load_model(said["model"]).total_parameters() == count
        assert "model" not in stated_by("- Model llama3 x size: 12,345 total parameters\n")[0]


class TestTensorBoard:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for rank in range(4):
            place = tmp_path / "tb" / "20261121-0716" / f"rank_{rank}"
            place.mkdir(parents=True)
            source = LOGS / f"0.2.2-fsdp2-tp2.rank_{rank}.tfevents"
            (place / "events.out.tfevents.1.host.1.0").write_bytes(source.read_bytes())
        return tmp_path / "tb"

    def test_a_folder_of_event_files_is_a_run(self, wiring: Wiring, folder: Path) -> None:
        one = read(wiring, folder, RUN).measured
        log = read(wiring, TP2, {**H100, "layout": {"ac": "selective-op"}}).measured
        assert one.steps == 4
        assert one.step_seconds == pytest.approx(log.step_seconds, rel=0.02)
        assert one.peak_reserved_bytes == pytest.approx(log.peak_reserved_bytes, rel=0.02)
        assert one.peak_allocated_bytes

    def test_it_tells_nothing_of_the_job(self, wiring: Wiring, folder: Path) -> None:
        asked = {"model", "cluster.gpu", "cluster.num_gpus", "layout"}
        asked |= {"training.seq_len", "training.global_batch_size"}
        assert faults(wiring, folder).keys() == asked

    def test_a_folder_without_events_names_the_tags(self, wiring: Wiring, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"throughput\(tps\)"):
            read_file(wiring, str(tmp_path), "tensorboard", RUN)
        with pytest.raises(SpecError, match="no such file or folder"):
            read_file(wiring, str(tmp_path / "tfevents.nope"), None, RUN)


class TestRows:
    def some(self, wiring: Wiring, number: int = 12) -> list[Measurement]:
        text = "\n".join(PUBLIC.read_text().splitlines()[::31][:number])
        return of_rows(wiring, list(json_rows(text)), allow_files=False)

    def test_csv_says_the_same_as_json(self, wiring: Wiring) -> None:
        some = self.some(wiring)
        back = of_rows(wiring, csv_rows(to_csv(some)), allow_files=False)
        assert [row_of(one) for one in back] == [row_of(one) for one in some]

    def test_text_that_looks_like_a_number_stays_text(self, wiring: Wiring) -> None:
        row = {**row_of(self.some(wiring, 1)[0]), "notes": "true", "source": "1e3"}
        row["training"] = {**row["training"], "trainer_version": "0.2"}
        (one,) = of_rows(wiring, [("row 1", row)], allow_files=False)
        (back,) = of_rows(wiring, csv_rows(to_csv([one])), allow_files=False)
        assert (back.job.training.trainer_version, back.source) == ("0.2", "1e3")
        assert back.job.labels["notes"] == "true"

    def test_a_row_without_an_id_gets_one_from_its_content(self, wiring: Wiring) -> None:
        row = {key: value for key, value in row_of(self.some(wiring, 1)[0]).items() if key != "id"}
        changed = {**row, "measured": {**row["measured"], "step_seconds": 99.0}}
        rows = [("row", one) for one in (dict(row), dict(row), changed)]
        first, second, other = (of_rows(wiring, [one], allow_files=False)[0].id for one in rows)
        assert first == second != other

    def test_an_export_comes_back_as_what_is_there(self, wiring: Wiring) -> None:
        row = {**self.some(wiring, 1)[0].as_row(), "id": "the-job's-own"}
        row["training"] = {**row["training"], "max_grad_norm": None}
        when = "2026-11-21T12:00:00+00:00"
        probed = read_measurement(row, measurement_id="probe-1", created_at=when)
        wiring.measurements.add([probed])
        for text, format in ((json.dumps(row_of(probed)), "rows"), (to_csv([probed]), "csv")):
            back = read_measurements(wiring, text, format)  # type: ignore[arg-type]
            assert store_new(wiring, back, asked_by="me", shared=True).known == ("probe-1",)
            assert back[0].job.training.max_grad_norm is None

    def test_filters_take_any_name_and_refuse_what_is_no_status(self) -> None:
        wanted = filter_of(model="meta-llama/Meta-Llama-3-8B", gpu="H100")
        assert wanted == {"model": "llama3-8b", "gpu": "h100-sxm-80gb"}
        given = {"model": "mine", "gpu": "home-made", "status": "oom", "rung": "probed"}
        assert filter_of(**given) == given
        wrong = faults_of(filter_of, status="fine", rung="guessed")
        assert [fault.field for fault in wrong] == ["status", "rung"]

    def test_every_wrong_line_is_named(self, wiring: Wiring) -> None:
        wrong = faults_of(read_measurements, wiring, '{"model": "llama3-8b"}\n\n7\n', "rows")
        assert {fault.field.rpartition(" ")[0] for fault in wrong} == {"line 1", "line 3"}

    @pytest.mark.parametrize(("name", "text", "format"), [
        ("x.jsonl", '{"model": 1}', "rows"),
        ("x.txt", ' [{"model": 1}]', "rows"),
        ("x.csv", "a,b\n", "csv"),
        ("x.log", "[rank0]:[titan] 2026 - step: 1", "torchtitan"),
        ("x", "[]", "rows"),
        ("tb", None, "tensorboard"),
    ])  # fmt: skip
    def test_formats_are_told_apart(self, name: str, text: str | None, format: str) -> None:
        assert guess_format(Path(name), text) == format

    def test_a_list_and_a_pretty_object_are_rows(self) -> None:
        assert [where for where, _ in json_rows('[{"a": 1}, {"a": 2}]')] == ["row 1", "row 2"]
        row = {"a": {"b": 1}}
        assert list(json_rows(json.dumps(row, indent=2))) == [("row 1", row)]
