"""Random histories of calls keep the promise: right numbers, or an error everywhere."""

import pytest

from tests.distributed.histories import judge, make, run
from tests.distributed.history_rank import play_in_process

IN_PROCESS = (2, 4, 5, 8, 10, 12, 14, 16)
ON_PROCESSES = (3, 7, 11, 13, 24, 27)


@pytest.mark.parametrize("seed", IN_PROCESS)
def test_a_history_in_one_process(seed: int) -> None:
    history = make(seed, in_process=True, accidents=False)

    assert judge(history, {0: play_in_process(history)}) == []


@pytest.mark.parametrize("seed", ON_PROCESSES)
def test_a_history_on_real_processes(seed: int) -> None:
    assert run(make(seed, accidents=False)) == []
