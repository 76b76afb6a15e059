"""Ranks of other hosts are known by signs in the store, which few requests bring."""

from unittest import mock

import torch.distributed as dist

from fxpipe.runtime.control import watch
from fxpipe.runtime.control.store import Store
from fxpipe.runtime.control.watch import SIGN, SILENCE, Life

SIZE = 16


class _Ranks:
    """The lives of all ranks, each on a host of its own, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = Store(dist.HashStore)
        self.lives = [Life({}, [r for r in range(SIZE) if r != rank]) for rank in range(SIZE)]
        self.stopped: set[int] = set()

    def tick(self, seconds: float) -> dict[int, int]:
        """All go on for a while, looking ten times a second; who says that who is gone."""
        found = {}
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            with mock.patch.object(watch.time, "monotonic", return_value=self.now):
                for rank, life in enumerate(self.lives):
                    if rank in self.stopped:
                        continue
                    life.sign(self.store, f"life/{rank}")
                    gone = life.gone(self.store, "life")
                    if gone is not None:
                        found[rank] = gone[0]
        return found


def test_a_rank_that_gives_no_sign_is_gone_for_all_others() -> None:
    ranks = _Ranks()
    assert ranks.tick(2 * SILENCE) == {}

    ranks.stopped = {5}

    assert ranks.tick(SILENCE - SIGN) == {}
    assert ranks.tick(4 * SIGN) == {rank: 5 for rank in range(SIZE) if rank != 5}


def test_a_rank_that_gave_no_sign_at_all_is_named() -> None:
    ranks = _Ranks()
    ranks.stopped = {5}

    assert set(ranks.tick(SILENCE + 4 * SIGN).values()) == {5}


def test_a_rank_that_was_stopped_itself_blames_nobody() -> None:
    ranks = _Ranks()
    ranks.tick(SILENCE)
    ranks.stopped = set(range(SIZE))
    ranks.tick(3 * SILENCE)
    ranks.stopped = set()

    assert ranks.tick(2 * SILENCE) == {}


def test_signs_cost_one_request_a_second_however_many_ranks_there_are() -> None:
    ranks = _Ranks()
    ranks.tick(2 * SIGN)

    with mock.patch.object(Store, "ask", autospec=True, side_effect=Store.ask) as asked:
        ranks.tick(SILENCE)

    assert asked.call_count <= 1.1 * SIZE * SILENCE  # every rank asked 310 times a second
