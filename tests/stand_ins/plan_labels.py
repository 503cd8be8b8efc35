"""Labels of a stored plan whose job does not matter to a test."""

from planner.api.storage.records import PlanLabels


def plan_labels(model: str = "llama3-8b", gpu: str = "h100-sxm-80gb") -> PlanLabels:
    """Labels with these names."""
    return PlanLabels(
        job_hash="0" * 64,
        model=model,
        gpu=gpu,
        seq_len=8192,
        global_batch_size=64,
        trainer="torchtitan",
    )
