"""Hugging Face models split into stages do what the plain models do.

Each architecture has a tiny random configuration and is cut between its blocks;
`check` then compares outputs and the gradient of every parameter with the plain
model: in eval and train mode, with other values, another batch size and another
length. A short list runs always, everything that is known to pass in the full run.
"""

import pytest

from tests.graph.hf.check import Report, check
from tests.graph.hf.known import FIXED_SIZES, FULL, FULL_IN_FOUR, IN_FOUR, IN_TWO, REFUSED
from tests.graph.hf.registry import case


def measured(model_type: str, num_stages: int) -> Report:
    report = check(case(model_type), num_stages)
    assert report.runs, f"the plain model does not run: {report.results['eager']}"
    assert report.results["trace"] == "ok", report.results
    return report


@pytest.mark.parametrize("model_type", IN_TWO)
def test_two_stages_equal_plain(model_type):
    assert measured(model_type, 2).failures == {}


@pytest.mark.parametrize("model_type", IN_FOUR)
def test_four_stages_equal_plain(model_type):
    assert measured(model_type, 4).failures == {}


@pytest.mark.full
@pytest.mark.parametrize("model_type", [*IN_FOUR, *FULL])
def test_two_stages_equal_plain_everywhere(model_type):
    assert measured(model_type, 2).failures == {}


@pytest.mark.full
@pytest.mark.parametrize("model_type", [*IN_TWO, *FULL_IN_FOUR])
def test_four_stages_equal_plain_everywhere(model_type):
    assert measured(model_type, 4).failures == {}


@pytest.mark.full
@pytest.mark.parametrize("model_type", FIXED_SIZES)
def test_other_sizes_are_right_or_refused(model_type):
    # These ask for a size as a plain number, or for values, somewhere. With the traced sizes
    # they must be right; with others a clear refusal is allowed, a wrong result is not.
    failures = measured(model_type, 2).failures

    assert set(failures) <= {"values", "batch", "row", "length"}
    assert all(
        reason.startswith(("PipeliningShapeError", "InputError")) for reason in failures.values()
    )


@pytest.mark.full
@pytest.mark.parametrize("model_type", REFUSED)
def test_state_that_no_stage_can_follow_is_refused(model_type):
    report = check(case(model_type), 2)

    assert report.runs
    reasons = [reason.partition(" ")[0] for reason in report.failures.values()]
    assert "TraceError" in reasons
    assert set(reasons) <= {"TraceError", "PipeliningShapeError"}
