import pytest

from fxpipe.errors import InputError
from fxpipe.runtime.wire.measure_link import measure_link
from tests.distributed.ranks import run_on_ranks


def measured(rank):
    link = measure_link(repeats=3)
    return link.latency, link.bytes_per_time


def alone(rank):
    with pytest.raises(InputError, match="a link needs two processes"):
        measure_link()


def test_all_processes_learn_the_same_link():
    first, second, third = run_on_ranks(3, measured)

    assert first == second == third
    assert 0 < first[0] < 1
    assert first[1] > 1e6


def test_one_process_has_no_link():
    run_on_ranks(1, alone)
