import pytest

from fxpipe.errors import InputError
from fxpipe.runtime.wire.measure_link import measure_link, measure_local_link
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


def test_two_processes_are_started_for_the_local_link():
    link = measure_local_link(repeats=3)

    assert 0 < link.latency < 1
    assert link.bytes_per_time > 1e6
