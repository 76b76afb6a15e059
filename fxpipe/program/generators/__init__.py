"""Schedules: pure functions from sizes to programs, and the names that people know them by.

`SCHEDULES` has one `ScheduleInfo` per schedule; the command line, the planner,
the documentation and the runtime list from it. `get_schedule` forgives case,
hyphens, underscores, spaces and a leading "Schedule".
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from fxpipe.errors import ScheduleError
from fxpipe.program.generators.controllable_memory import v_half, v_min
from fxpipe.program.generators.dualpipe_v import dualpipe_v, dualpipe_v_down
from fxpipe.program.generators.entry import ENTRIES, ScheduleInfo
from fxpipe.program.generators.forwards_first import (
    forward_only,
    forward_only_on,
    gpipe,
    looped_bfs,
)
from fxpipe.program.generators.one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from fxpipe.program.generators.wave import wave
from fxpipe.program.generators.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2, zbv

__all__ = [
    "SCHEDULES",
    "ScheduleInfo",
    "dualpipe_v",
    "dualpipe_v_down",
    "forward_only",
    "forward_only_on",
    "get_schedule",
    "gpipe",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "wave",
    "zb_h1",
    "zb_h2",
    "zbv",
]


def get_schedule(name: str) -> ScheduleInfo:
    """Return the schedule of that name.

    Raises:
        ScheduleError: no schedule has that name; the closest names are listed.
    """
    key = _key(str(name))
    if key in _BY_KEY:
        return _BY_KEY[key]
    close = difflib.get_close_matches(key, _BY_KEY, cutoff=0.5) if isinstance(name, str) else []
    names = list(dict.fromkeys(_BY_KEY[match].name for match in close))
    hint = f"did you mean {' or '.join(names)}? " if names else ""
    raise ScheduleError(f"there is no schedule {name!r}; {hint}known: {', '.join(SCHEDULES)}")


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("schedule")


_GENERATORS = (
    *(forward_only, gpipe, one_f_one_b, interleaved_one_f_one_b, looped_bfs),
    *(zb_h1, zb_h2, interleaved_zero_bubble, zbv, v_half, v_min),
    *(dualpipe_v_down, dualpipe_v, wave),
)

SCHEDULES: Mapping[str, ScheduleInfo] = MappingProxyType(
    {ENTRIES[made].name: ENTRIES[made] for made in _GENERATORS}
)
"""Every schedule by its name, in the order in which they are best read about."""

_BY_KEY = {_key(n): info for info in SCHEDULES.values() for n in (info.name, *info.aliases)}
_BY_KEY |= {_key(info.generator.__name__): info for info in SCHEDULES.values()}
