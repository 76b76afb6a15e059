"""What all ranks must have alike."""

import math

import pytest

from fxpipe import InputError
from fxpipe.runtime.control.control import check_same


def test_ranks_with_the_same_value_are_named_together() -> None:
    with pytest.raises(InputError, match="must be the same on all ranks, but got ") as caught:
        check_same("step", [1, 2, 1, 1])

    assert str(caught.value).endswith("got 1 on ranks 0 2 3, 2 on rank 1")


def test_what_is_not_a_number_is_like_itself() -> None:
    check_same("scale", [math.nan, math.nan])
