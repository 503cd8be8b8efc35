"""How long it takes to choose the next probe among many candidates.

    python benchmarks/asking.py [--candidates 100000] [--probes 20]

Legal layouts of one real job with the calibration's own posterior and emulated ranks. Results
of probes are the predictions with an error. Prints one line per question: the wall-clock time to
choose it, with the study's book-keeping but without the check whether measuring can still pay.
"""

import argparse
import time

import numpy as np

from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.search.space.enumerate import build_space
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement
from planner.study.candidates import Candidates, enumerate_candidates
from planner.study.evaluations import Proposal
from planner.study.kernel_timings import StudyKernels
from planner.study.ledger import Budget, StudySettings
from planner.study.study import MicroResult, ProbeStudy

JOB = {
    "model": "llama3.1-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 512},
    "training": {"seq_len": 8192, "global_batch_size": 1024},
}
EVERYTHING = 1e9  # times the best step: no candidate is left out for being slow
ERROR = 0.1
LIMIT_SECONDS = 0.1


def candidates_of(job: Job, pricer: Pricer, most: int) -> Candidates:
    """The `most` fastest of the job's legal layouts."""
    space = build_space(pricer.rules_context, job.search)
    return enumerate_candidates(pricer, space, most=most, slack=EVERYTHING)


def answer(job: Job, asked: Proposal, log_seconds: float) -> Measurement:
    """What a probe would have measured."""
    measured = Measured.model_validate(
        {"rung": asked.fidelity, "step_seconds": float(np.exp(log_seconds))}
    )
    return Measurement(id=f"m-{asked.row}", created_at="", job=job, measured=measured)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidates", type=int, default=100_000)
    parser.add_argument("--probes", type=int, default=20)
    options = parser.parse_args()
    job = read_job(JOB)
    pricer = Pricer.build(job.model, job.cluster, job.training)
    candidates = candidates_of(job, pricer, options.candidates)
    micro_probes = StudyKernels.of(pricer, candidates).probes([], num_gpus=8, start_seconds=10.0)
    budget = Budget(probes=options.probes, gpu_seconds=1e15)
    study = ProbeStudy(
        candidates,
        StudySettings(budget=budget, micro_probes=micro_probes, emulates=True, tolerance=0.0),
    )
    truth = candidates.prior.log_seconds + ERROR * np.random.default_rng(0).standard_normal(
        len(candidates)
    )
    print(f"{len(candidates):,} candidates")
    each = []
    while study.finished() is None:
        started = time.perf_counter()
        asked = study.ask()
        each.append(time.perf_counter() - started)
        if asked is None:
            break
        print(f"  {study.spent.probes:3d} results: {1e3 * each[-1]:6.1f} ms, {asked.fidelity}")
        told = (
            MicroResult(observed=(), gpu_seconds=20.0)
            if asked.row is None
            else answer(job, asked, float(truth[asked.row]))
        )
        study.tell(asked, told)
    verdict = "reached" if max(each) < LIMIT_SECONDS else "missed"
    print(
        f"median {1e3 * np.median(each):.1f} ms, longest {1e3 * max(each):.1f} ms; at most "
        f"{1e3 * LIMIT_SECONDS:.0f} ms: {verdict}"
    )


if __name__ == "__main__":
    main()
