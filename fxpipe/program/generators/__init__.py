"""Schedules: pure functions from sizes to programs, and their names."""

from fxpipe.program.generators.breadth_first import gpipe, looped_bfs
from fxpipe.program.generators.controllable_memory import v_half, v_min
from fxpipe.program.generators.dualpipe_v import dualpipe_v, dualpipe_v_down
from fxpipe.program.generators.entry import ScheduleInfo
from fxpipe.program.generators.forward_only import forward_only, forward_only_on
from fxpipe.program.generators.one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from fxpipe.program.generators.registry import SCHEDULES, get_schedule
from fxpipe.program.generators.wave import wave
from fxpipe.program.generators.zbv import zbv
from fxpipe.program.generators.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

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
