"""GPUs from recorded answers of nvidia-smi, and leases: never two probes, never beside others."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from planner.errors import ProbeError, SpecError
from planner.intake.machines import load_gpu
from planner.probes.launch import Launcher, LaunchSettings, Watch
from planner.probes.pools.leases import LeaseLocks
from planner.probes.pools.local import LocalPool, LocalSettings
from planner.probes.pools.nvidia import Gpu, Survey, is_same_gpu, parse_apps, parse_gpus, survey
from planner.probes.protocol import ProbeResult, ProbeTask
from planner.probes.variables import DeviceLease
from tests.conftest import job_values, side_by_side

# Answers in the format of nvidia-smi 470 to 580 (--format=csv,noheader,nounits).
GPUS = """\
0, GPU-96ab329d-7a1f-73a8-a9b7-18b4b2855f92, 81559, 1, 550.54.15, Disabled, 00000000:3B:00.0, NVIDIA H100 80GB HBM3
1, GPU-1d2c3b4a-0000-1111-2222-333344445555, 81559, 40123, 550.54.15, Disabled, 00000000:5E:00.0, NVIDIA H100 80GB HBM3
2, GPU-2d2c3b4a-0000-1111-2222-333344445555, 81559, 5, 550.54.15, Enabled, 00000000:86:00.0, NVIDIA H100 80GB HBM3
3, GPU-3d2c3b4a-0000-1111-2222-333344445555, [N/A], [N/A], 550.54.15, [N/A], [N/A], NVIDIA H100 80GB HBM3
"""  # noqa: E501
GPUS_WITH_A_DESKTOP = (
    "0, GPU-4, 24564, 612, 580.1, [N/A], 00000000:01:00.0, NVIDIA GeForce RTX 4090\n"
)
APPS = """\
GPU-1d2c3b4a-0000-1111-2222-333344445555, 4242, /usr/bin/python3, -u, train.py
GPU-1d2c3b4a-0000-1111-2222-333344445555, 4243, [Insufficient Permissions]
"""
BROKEN = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
SOLD = [
    ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm-80gb"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie-80gb"), ("NVIDIA H100 NVL", 95830, "h100-nvl-94gb"),
    ("NVIDIA H200", 143771, "h200-sxm-141gb"), ("NVIDIA A100-SXM4-40GB", 40960, "a100-sxm-40gb"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie-80gb"),
    ("Tesla V100-SXM2-32GB", 32768, "v100-sxm-32gb"), ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA L40S", 46068, "l40s"), ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-96gb"),
    ("NVIDIA RTX A6000", 49140, "a6000-48gb"), ("NVIDIA H20", 97871, "h20-sxm-96gb"),
    ("NVIDIA L20", 46068, "l20"), ("NVIDIA GeForce RTX 3090", 24576, ""),
]  # fmt: skip
H100 = Gpu(
    index=0, uuid="GPU-0", name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * 2.0**20,
    used_bytes=0.0, driver="550", sliced=False,
)  # fmt: skip
IDLE = tuple(replace(H100, index=number, uuid=f"GPU-{number}") for number in range(4))


def answer(gpus: str, apps: str = "") -> Any:
    return lambda arguments: gpus if "--query-gpu" in arguments[0] else apps


class TestSmi:
    def test_gpus_and_who_is_on_them(self) -> None:
        seen = survey(answer(GPUS, APPS))
        assert [gpu.index for gpu in seen.gpus] == [0, 1, 2, 3]
        assert [gpu.sliced for gpu in seen.gpus] == [False, False, True, False]
        assert (seen.gpus[0].memory_bytes, seen.gpus[3].memory_bytes) == (81559 * 2**20, None)
        assert [gpu.bus_id for gpu in seen.gpus] == ["0000:3b:00", "0000:5e:00", "0000:86:00", ""]
        users = "pid 4242 (/usr/bin/python3, -u, train.py), pid 4243 ([Insufficient Permissions])"
        assert [gpu.foreign() for gpu in seen.gpus[:2]] == [None, users]

    def test_memory_without_a_process_is_somebody_too(self) -> None:
        assert survey(answer(GPUS)).gpus[1].foreign() == "an unseen process with 40,123 MiB"

    def test_noise_is_no_gpu(self) -> None:
        assert parse_gpus("Warning: infoROM is corrupted at gpu 0000:3B:00.0\n\n") == ()
        assert parse_apps("No running processes found\n") == ()

    def test_a_machine_without_it_and_a_broken_driver(self) -> None:
        absent, broken = Mock(side_effect=FileNotFoundError), Mock(side_effect=RuntimeError(BROKEN))
        assert survey(absent) == Survey(gpus=(), problem="nvidia-smi is not installed")
        assert "couldn't communicate" in str(survey(broken).problem)

    @pytest.mark.parametrize(("name", "mib", "entry"), SOLD)
    def test_a_name_finds_its_catalogue_entry(self, name: str, mib: int, entry: str) -> None:
        gpu = replace(H100, name=name, memory_bytes=mib * 2.0**20)
        known = [entry for _, _, entry in SOLD if entry]
        assert [one for one in known if is_same_gpu(load_gpu(one), gpu)] == [entry] * bool(entry)


class FakeLauncher(Launcher):
    """Remembers who ran on what, and when."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(LaunchSettings(folder=Path("/nowhere")))
        self.seconds = seconds
        self.spans: list[tuple[float, float, tuple[str, ...]]] = []
        self.leases: list[DeviceLease] = []
        self.running: list[DeviceLease] = []
        self.most_locks = 0
        self.counting, self.two_at_once = threading.Lock(), threading.Event()

    def run(
        self, task: ProbeTask, lease: DeviceLease | None = None, watch: Watch | None = None
    ) -> ProbeResult:
        assert lease is not None
        start, devices = time.monotonic(), lease.devices or ()
        with self.counting:
            self.leases.append(lease)
            self.running.append(lease)
            self.most_locks = max(self.most_locks, sum(len(one.locks) for one in self.running))
            if len(self.running) > 1:
                self.two_at_once.set()
        # the first that leaves GPUs free waits for a second, however slow the machine is
        if self.seconds and 0 < len(devices) < len(IDLE):
            self.two_at_once.wait(60.0)
        time.sleep(self.seconds)
        with self.counting:
            self.running.remove(lease)
        self.spans.append((start, time.monotonic(), devices))
        return None  # type: ignore[return-value]  # nobody looks at it


def task(num_gpus: int, gpu: Any = "h100-sxm-80gb") -> ProbeTask:
    job = job_values("llama3-8b", gpu, num_gpus, 1024, num_gpus, layout={"dp_shard": num_gpus})
    return ProbeTask(id="probe-1", job=job, device="cpu" if gpu == "cpu" else "cuda")


def pool(
    folder: Path, gpus: Sequence[Gpu] | Callable[[], Survey] = IDLE, *, seconds: float = 0.0,
    visible: str | None = None, **more: Any,
) -> tuple[LocalPool, FakeLauncher]:  # fmt: skip
    launcher = FakeLauncher(seconds)
    settings = LocalSettings(
        machine=str(folder),
        leases=folder / "leases",
        survey=gpus if callable(gpus) else lambda: Survey(gpus=tuple(gpus)),
        environment={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible},
        **{"foreign_seconds": 1.0, **more},
    )
    return LocalPool(launcher, settings), launcher


def used(gpu: Gpu, name: str) -> Gpu:
    return replace(gpu, processes=(f"pid 7 ({name})",))


class TestLeases:
    def test_side_by_side_where_they_fit_and_never_two_on_one(self, tmp_path: Path) -> None:
        here, launcher = pool(tmp_path, seconds=0.2)
        side_by_side(here.run, *((task(size),) for size in (2, 1, 1, 2, 4, 1)))
        assert len(launcher.spans) == 6
        at_once = [
            (first[2], second[2])
            for first, second in combinations(launcher.spans, 2)
            if first[0] < second[1] and second[0] < first[1]
        ]
        assert at_once
        assert not any(set(first) & set(second) for first, second in at_once)

    def test_a_gpu_of_a_foreign_process_is_left_alone(self, tmp_path: Path) -> None:
        here, launcher = pool(tmp_path, [used(IDLE[0], "train.py"), *IDLE[1:]])
        here.run(task(2))
        assert launcher.spans[0][2] == ("GPU-1", "GPU-2")
        with pytest.raises(ProbeError, match=r"GPU 0 is used by pid 7 \(train.py\)"):
            here.run(task(4))

    def test_a_desktop_is_tolerated_where_the_operator_says_so(self, tmp_path: Path) -> None:
        here, launcher = pool(tmp_path, [used(parse_gpus(GPUS_WITH_A_DESKTOP)[0], "gnome")])
        asked = task(1, "rtx-4090")
        with pytest.raises(ProbeError, match=r"pid 7 \(gnome\).*PLANNER_PROBE_TOLERATED_GIB"):
            here.run(asked)
        launcher.settings = replace(launcher.settings, tolerated_bytes=2.0**30)
        here.run(asked)
        (lease,) = launcher.leases
        assert lease.others == "GPU 0 is used by pid 7 (gnome)"
        assert lease.bus_ids == ("0000:01:00",)
        launcher.settings = replace(launcher.settings, tolerated_bytes=2.0**28)
        with pytest.raises(ProbeError, match=r"pid 7"):
            here.run(asked)

    def test_memory_of_a_process_that_just_ended_is_waited_for(self, tmp_path: Path) -> None:
        left = replace(H100, used_bytes=40e9)
        looks = Mock(side_effect=[Survey(gpus=(one,)) for one in (left, left, H100)])
        here, launcher = pool(tmp_path, looks, foreign_seconds=60.0)
        here.run(task(1))
        assert (len(launcher.spans), looks.call_count) == (1, 3)

    @pytest.mark.parametrize(
        ("visible", "devices"), [("2,3", ("GPU-2", "GPU-3")), ("GPU-1,GPU-3", ("GPU-1", "GPU-3"))]
    )
    def test_what_we_were_given_is_all_we_use(
        self, tmp_path: Path, visible: str, devices: tuple[str, ...]
    ) -> None:
        here, launcher = pool(tmp_path, visible=visible)
        here.run(task(2))
        assert launcher.spans[0][2] == devices
        with pytest.raises(ProbeError, match="needs 4 GPUs, this machine has 2"):
            here.run(task(4))

    def test_no_gpu_is_one_clear_line_and_slices_are_none(self, tmp_path: Path) -> None:
        sliced = [replace(gpu, sliced=True) for gpu in IDLE]
        for gpus, why in (([], "it has none"), (sliced, "none is visible to us .*")):
            said = rf"^no NVIDIA GPU to probe on: {why}; use --emulate .* gpu: cpu[^\n]*$"
            with pytest.raises(ProbeError, match=said):
                pool(tmp_path, gpus)[0].run(task(1))

    def test_another_gpu_than_the_job_names_is_refused(self, tmp_path: Path) -> None:
        here, _ = pool(tmp_path)
        with pytest.raises(SpecError, match="NVIDIA H100 80GB HBM3"):
            here.run(task(1, gpu="l4"))
        known = load_gpu("h100-sxm-80gb").model_dump(exclude={"aliases", "sources"})
        here.run(task(1, gpu={**known, "name": "our-h100"}))

    def test_cpu_slots_are_shared_and_a_wide_probe_takes_them_all(self, tmp_path: Path) -> None:
        here, launcher = pool(tmp_path, seconds=0.05, cpu_slots=2)
        side_by_side(here.run, *((task(size, "cpu"),) for size in (1, 4, 1, 2)))
        assert sorted(len(lease.locks) for lease in launcher.leases) == [1, 1, 2, 2]
        assert launcher.most_locks == 2

    @pytest.mark.parametrize(
        ("asked", "lock"), [(task(1, "cpu"), "cpu-0"), (task(1), "gpu-GPU-0")], ids=["CPU", "GPU"]
    )
    def test_a_wait_can_be_ended(self, tmp_path: Path, asked: ProbeTask, lock: str) -> None:
        here, launcher = pool(tmp_path, IDLE[:1], cpu_slots=1)
        busy = LeaseLocks(here.settings.leases, machine=here.settings.machine)
        assert busy.lock(lock)
        stop = threading.Event()
        with pytest.raises(ProbeError, match="stopped while waiting"):
            here.run(asked, Watch(stop=stop, progress=lambda _: stop.set()))
        assert launcher.spans == []
        busy.release()
        here.run(asked)
        assert len(launcher.spans) == 1

    def test_a_folder_that_cannot_be_written_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "leases").write_text("a file")
        here, _ = pool(tmp_path)
        with pytest.raises(ProbeError, match="PLANNER_LEASE_FOLDER"):
            here.run(task(1))
