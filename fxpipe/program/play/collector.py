"""Pause Python's cyclic collector while a long program is built.

A program is a great number of small tuples without a cycle. While it grows, the
collector would walk all of them again and again: with it, doubling the microbatches
of a long program took up to 2.5 times as long to lower, without it 2.1 times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Turn the collector off inside, and on again afterwards if it was on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
