"""Random histories of calls keep the promise: right numbers, or an error everywhere."""

import pytest

from tests.distributed.histories import judge, make, run
from tests.distributed.history_rank import play_in_process

# The first seeds, whatever they are; then seeds that failed once.
IN_PROCESS = (*range(16), 34)
ON_PROCESSES = (*range(10), 115, 201)


@pytest.mark.parametrize("seed", IN_PROCESS)
def test_a_history_in_one_process(seed: int) -> None:
    history = make(seed, in_process=True)

    assert judge(history, {0: play_in_process(history)}) == []


@pytest.mark.parametrize("seed", ON_PROCESSES)
def test_a_history_on_real_processes(seed: int) -> None:
    assert run(make(seed)) == []


@pytest.mark.full
@pytest.mark.parametrize("start", range(0, 1000, 20))
def test_a_thousand_histories(start: int) -> None:
    found = {seed: run(make(seed)) for seed in range(start, start + 20)}

    assert {seed: complaints for seed, complaints in found.items() if complaints} == {}
