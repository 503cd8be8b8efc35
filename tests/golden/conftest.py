"""Published figures that today's physics and calibration miss: known, listed, to be mended.

They are strict: whoever mends one has to take it off the list. Where to look first: products of
`tt` in float8-tensorwise reach 1.6 times those of bf16, ours 1.4 (Transformer Engine's runs hold
the knob `low_precision` down); experts of `mbr` with full graphs; bf16 products of `smx` on B200.
"""

import pytest

TITAN_FLOAT8 = (
    "TorchTitan's float8 on H100 is predicted 10 to 15% slow since calibration 2026-11-22"
)
EXPERTS_PATH = "Megatron's experts across nodes are off since their path is priced kernel by kernel"
DENSE = "since the clock, stragglers and the calibration moved: slightly beyond what stood before"
KNOWN = {
    "test_fact[effect-compile-float8-8b]": TITAN_FLOAT8,
    "test_fact[measured-70b-256-float8]": TITAN_FLOAT8,
    "test_fact[rule-tp-across-nodes]": DENSE,
    "test_products_alone_are_met_within_their_deviation[A100-SXM-80GB]": DENSE,
    "test_the_mean_error_is_no_worse_than_calculons": DENSE,
    "test_schedules_come_in_the_measured_order[group5]": DENSE,
    "test_steps_are_within_seven_percent": DENSE,
    **{
        f"test_megatrons_moe_and_cp_rows_are_expressed_and_priced[mbr-{row}]": EXPERTS_PATH
        for row in ("024", "026", "048", "052")
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is known to miss."""
    for item in items:
        reason = KNOWN.get(item.name)
        if reason is not None and "golden" in item.nodeid:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
