"""Published numbers on checkpoints, failures and energy, reproduced. Tolerances only tighten."""

import math

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.run import goodput as run
from planner.cost.run import whole_run
from planner.cost.run.whole_run import JOULES_PER_KWH, REST_OF_NODE_SHARE, bill, gpu_watts
from planner.intake.jobs import read_job
from planner.intake.machines import read_cluster
from planner.specs.cluster import DEFAULT_CARBON_INTENSITY
from planner.units import HOUR
from tests.conftest import job_values
from tests.pricing import H100, priced

MINUTE = 60.0


def column(*values: float) -> np.ndarray:
    return np.array(values)


def test_young_daly_and_goodput_by_hand() -> None:
    # sqrt(2 x 5 min x 1440 min) = 120 min; sqrt(2 x 8 s x 10,000 s) = 400 s.
    young = run.young_interval_seconds(column(5 * MINUTE, 8.0), column(1440 * MINUTE, 10_000.0))
    assert young == pytest.approx([120 * MINUTE, 400.0], rel=1e-12)
    # d = 2, M = 100: sqrt(400) (1 + sqrt(0.01)/3 + 0.01/9) - 2 = 20 x 1.034444 - 2 = 18.68889.
    # Dumps as long as twice the mean time between failures: the interval is that time.
    daly = run.daly_interval_seconds(column(2.0, 300.0), column(100.0, 100.0))
    assert daly == pytest.approx([20 * (1 + 0.1 / 3 + 0.01 / 9) - 2, 100.0], rel=1e-12)
    # t = 90, d = 10, M = 1000, R = 50: 90 / (1000 e^0.05 (e^0.1 - 1)).
    share = run.goodput(column(90.0), column(10.0), column(1000.0), column(50.0))
    expected = 90.0 / (1000.0 * math.exp(0.05) * (math.exp(0.1) - 1.0))
    assert share == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mtbf_minutes", "published", "digits"), [(24 * 60, 117, 0), (6 * 60, 57, 0), (15, 9.1, 1)]
)
def test_daly_2006_figures_3_to_5(mtbf_minutes: float, published: float, digits: int) -> None:
    # Captions of figures 3 to 5: dump time 5 min, restart 10 min, solution 500 h; "the new model
    #     predicts" 117, 57 and 9.1 min.
    (found,) = run.daly_interval_seconds(column(5 * MINUTE), column(mtbf_minutes * MINUTE)) / MINUTE
    assert round(found, digits) == published


def test_llama3_interruptions_give_the_default_mtbf() -> None:
    # Table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs; "one every three hours" in
    #     the press.
    assert sum(run.LLAMA3_INTERRUPTIONS.values()) == 419
    gpu_hours = run.LLAMA3_GPUS * run.LLAMA3_SECONDS / HOUR / 419
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 16384})
    assert cluster.mtbf_gpu_hours == pytest.approx(gpu_hours, rel=0.02)
    assert run.job_mtbf_seconds(cluster) / HOUR == pytest.approx(54 * 24 / 419, rel=0.02)


def test_over_30_percent_of_interruptions_are_gpu_faults() -> None:
    # The project's source documents; the paper itself: 58.7% GPU issues altogether.
    causes = run.LLAMA3_INTERRUPTIONS
    gpu = sum(count for cause, count in causes.items() if "GPU" in cause)
    assert causes["faulty GPU"] / 419 > 0.30
    assert gpu / 419 == pytest.approx(0.587, abs=0.06)


def llama3_405b() -> tuple[Pricer, LayoutBatch]:
    """Tectonic: 2 TB/s sustained (section 3.3.1)."""
    layout = {"dp_shard": 128, "tp": 8, "pp": 16}
    job = job_values("llama3.1-405b", H100, 16384, 8192, 2048, layout=layout)
    job["cluster"]["storage_bandwidth"] = "2 TB/s"
    return priced(read_job(job))


def test_llama3_trains_over_90_percent_of_the_time() -> None:
    # Section 3.3.4: "higher than 90% effective training time" while interrupted 419 times in 54
    # days. Stated tolerance: 0.90 to 0.97.
    pricer, batch = llama3_405b()
    columns = whole_run.run_columns(pricer, batch, column(8.0), column(6.0))
    assert 0.90 < columns.progress.goodput[0] < 0.97
    # With the 47 planned interruptions besides it still holds.
    share = run.progress(columns.saves, column(8.0), run.LLAMA3_SECONDS / 466, None).goodput[0]
    assert 0.90 < share < 0.97


def test_llama3_saves_1_mb_to_4_gb_a_gpu() -> None:
    # Section 3.3.1: "checkpoints ... saving each GPU's model state, ranging from 1 MB to 4 GB per
    # GPU".
    pricer, batch = llama3_405b()
    found = run.save_costs(pricer, batch, column(8.0), "sync")
    assert 1e6 < found.gpu_bytes[0] < 4e9
    assert found.saved_bytes[0] == pytest.approx(405.85e9 * 12, rel=0.01)


def test_async_cuts_the_overhead_5_to_24_times() -> None:
    # TorchTitan (arXiv 2410.06511): 5 to 15 times for Llama 3.1 8B;
    # pytorch.org/blog/reducing-checkpointing-times: 23.6 times for a 7B model (148.8 s to 6.3 s).
    # The ratio depends on the storage: ours is the default of 0.25 GB/s a GPU. Stated tolerance: 5
    #     to 24.
    job = job_values("llama3.1-8b", H100, 64, 8192, 64, layout={"dp_shard": 64})
    pricer, batch = priced(read_job(job))
    modes = ("sync", "async", "async-pinned")
    saves = (run.save_costs(pricer, batch, column(1.5), mode) for mode in modes)
    plain, apart, pinned = (save.blocking_seconds[0] for save in saves)
    assert 5 < plain / apart < 24
    assert pinned < apart


def test_h100_node_draws_what_was_measured() -> None:
    # Latif et al. 2025: at most 8.4 kW; Newkirk et al. 2025 (arXiv 2506.14551): intensive training
    # at 76% of 10.2 kW.
    rest = REST_OF_NODE_SHARE * 700.0
    assert 8 * (gpu_watts(700.0, column(1.0))[0] + rest) == pytest.approx(8400.0, rel=0.01)
    assert 8 * (gpu_watts(700.0, column(0.8))[0] + rest) == pytest.approx(0.76 * 10_200.0, rel=0.03)


def test_llama31_emissions() -> None:
    # Model card of Llama 3.1: 39.3 million H100 hours at 700 W, 11,390 t CO2 (location-based).
    # GPUs alone; tolerance 10%: their grid is not ours.
    kwh = gpu_watts(700.0, column(1.0))[0] * 39.3e6 * HOUR / JOULES_PER_KWH
    assert kwh * DEFAULT_CARBON_INTENSITY / 1e6 == pytest.approx(11_390, rel=0.10)


def test_bill_by_hand() -> None:
    # 100 h on 8 GPUs at 2.5 USD, always busy: 800 GPU-hours, 2,000 USD, 1.1 x 8.4 kW x 100 h = 924
    # kWh, at 445 g 411 kg.
    cluster = read_cluster({"gpu": H100, "num_gpus": 8, "price_per_gpu_hour": 2.5})
    found = bill(cluster, column(100 * HOUR), column(1.0))
    figures = (found.gpu_hours, found.cost, found.joules / JOULES_PER_KWH, found.grams)
    by_hand = [800.0, 2000.0, 924.0, 924.0 * 445.0]
    assert [figure[0] for figure in figures] == pytest.approx(by_hand)
