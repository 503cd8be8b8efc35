"""The table of pairs of features is that of today's rules, and says so of every pair."""

from benchmarks.feature_pairs import PAGE, RUNS, TORCH, cell, features, joined, page, pairs


def test_the_page_is_written_from_the_rules() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python benchmarks/feature_pairs.py"


def test_every_pair_runs_or_has_its_reason() -> None:
    assert len({feature.name for feature in features()}) == len(features())
    for run in RUNS:
        for one, other in pairs():
            found = cell(run, one, other)
            assert bool(found.why) == (found.kind in ("refused", "unmet"))
            assert (found.kind == "apart") == (joined(one, other) is None)


def test_what_broke_training_silently_is_refused() -> None:
    named = {feature.name: feature for feature in features()}
    in_backward, accumulation = named["optimizer in backward"], named["gradient accumulation"]
    assert cell("TorchTitan 0.2.2", in_backward, accumulation).kind == "refused"
    assert cell(TORCH, in_backward, accumulation).kind == "runs"  # it steps in the last backward
    assert cell(TORCH, named["DDP"], in_backward).kind == "refused"
    assert cell(TORCH, named["FSDP ZeRO-3"], named["ZBVZeroBubble"]).kind == "refused"
