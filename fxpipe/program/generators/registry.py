"""Find a schedule by the name that people know it by.

`SCHEDULES` has one `ScheduleInfo` per schedule; the command line, the planner,
the documentation and the runtime list from it. `get_schedule` forgives case,
hyphens, underscores, spaces and a leading "Schedule".
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from fxpipe.errors import ScheduleError
from fxpipe.program.generators.breadth_first import gpipe, looped_bfs
from fxpipe.program.generators.controllable_memory import v_half, v_min
from fxpipe.program.generators.dualpipe_v import dualpipe_v, dualpipe_v_down
from fxpipe.program.generators.forward_only import forward_only
from fxpipe.program.generators.one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from fxpipe.program.generators.sizes import ANY, ONE, SEVERAL, TWO, StagesPerRank
from fxpipe.program.generators.wave import wave
from fxpipe.program.generators.zbv import zbv
from fxpipe.program.generators.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2
from fxpipe.program.program import Placement, Program

__all__ = ["SCHEDULES", "Generator", "ScheduleInfo", "get_schedule"]

Generator = Callable[[int, int, int], Program]
"""`(num_ranks, num_stages, num_microbatches) -> Program`."""


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """What there is to know about a schedule before making a program of it.

    `stages_per_rank` is the least and the greatest number of stages on a rank;
    None means that there is no upper end. `splits_backward` says whether input
    and weight gradients are separate actions, `trains` whether there are backwards at all.
    """

    name: str
    aliases: tuple[str, ...]
    generator: Generator
    placement_style: Literal["loop", "v"]
    stages_per_rank: StagesPerRank
    splits_backward: bool
    description: str
    when_to_use: str
    trains: bool = True

    def __call__(self, num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
        """Make the program."""
        return self.generator(num_ranks, num_stages, num_microbatches)

    def placement(self, num_ranks: int, num_stages: int) -> Placement:
        """Where the schedule's programs place the stages."""
        make = Placement.loop if self.placement_style == "loop" else Placement.v
        return make(num_ranks, num_stages)

    def allows(self, stages_per_rank: int) -> bool:
        """Whether the schedule is defined for so many stages on each rank."""
        least, most = self.stages_per_rank
        return stages_per_rank >= least and (most is None or stages_per_rank <= most)


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


_INFOS = (
    ScheduleInfo(
        name="ForwardOnly",
        aliases=("Inference", "Eval"),
        generator=forward_only,
        placement_style="loop",
        stages_per_rank=ANY,
        splits_backward=False,
        description="Forwards alone, on any placement of stages.",
        when_to_use="Evaluation and inference.",
        trains=False,
    ),
    ScheduleInfo(
        name="GPipe",
        aliases=("AFAB", "FillDrain"),
        generator=gpipe,
        placement_style="loop",
        stages_per_rank=ONE,
        splits_backward=False,
        description="All forwards, then all backwards.",
        when_to_use="Few microbatches, or activations that are checkpointed; simplest to debug.",
    ),
    ScheduleInfo(
        name="1F1B",
        aliases=("OneFOneB", "PipeDreamFlush"),
        generator=one_f_one_b,
        placement_style="loop",
        stages_per_rank=ONE,
        splits_backward=False,
        description="After a warm-up, one forward and one backward in turn.",
        when_to_use="The default with one stage per rank: little memory, few messages.",
    ),
    ScheduleInfo(
        name="Interleaved1F1B",
        aliases=("InterleavedOneFOneB", "VPP"),
        generator=interleaved_one_f_one_b,
        placement_style="loop",
        stages_per_rank=ANY,
        splits_backward=False,
        description="1F1B over several stages per rank, which divides the waiting by their number.",
        when_to_use="Several stages per rank and a backward that cannot be split.",
    ),
    ScheduleInfo(
        name="LoopedBFS",
        aliases=("BFS", "BreadthFirst"),
        generator=looped_bfs,
        placement_style="loop",
        stages_per_rank=ANY,
        splits_backward=False,
        description="All microbatches through one stage of a rank before its next stage.",
        when_to_use="Sharded parameters, since each stage is gathered only twice a step.",
    ),
    ScheduleInfo(
        name="ZBH1",
        aliases=("ZeroBubbleH1",),
        generator=zb_h1,
        placement_style="loop",
        stages_per_rank=ONE,
        splits_backward=True,
        description="1F1B with weight gradients in the holes: a third of the waiting.",
        when_to_use="One stage per rank and the memory of 1F1B.",
    ),
    ScheduleInfo(
        name="ZBH2",
        aliases=("ZeroBubbleH2", "ZB2P"),
        generator=zb_h2,
        placement_style="loop",
        stages_per_rank=ONE,
        splits_backward=True,
        description="A warm-up twice as long, so that no rank waits once it has started.",
        when_to_use="One stage per rank and twice the memory of 1F1B to spare.",
    ),
    ScheduleInfo(
        name="InterleavedZeroBubble",
        aliases=("ZB1P", "InterleavedZB"),
        generator=interleaved_zero_bubble,
        placement_style="loop",
        stages_per_rank=ANY,
        splits_backward=True,
        description="Interleaved 1F1B with weight gradients in the holes, at the memory of 1F1B.",
        when_to_use="Several stages per rank and little waiting at the memory of 1F1B.",
    ),
    ScheduleInfo(
        name="ZBVZeroBubble",
        aliases=("ZBV",),
        generator=zbv,
        placement_style="v",
        stages_per_rank=TWO,
        splits_backward=True,
        description="Stages down the ranks and up again; no rank waits after it has started.",
        when_to_use="The least waiting at the memory of 1F1B, if F, I and W cost alike.",
    ),
    ScheduleInfo(
        name="VHalf",
        aliases=("VHalfMemory",),
        generator=v_half,
        placement_style="v",
        stages_per_rank=TWO,
        splits_backward=True,
        description="Half the memory of 1F1B at half its waiting, if F, I and W cost alike.",
        when_to_use="Activations that do not fit with ZBV.",
    ),
    ScheduleInfo(
        name="VMin",
        aliases=("VMinMemory",),
        generator=v_min,
        placement_style="v",
        stages_per_rank=TWO,
        splits_backward=True,
        description="A third of the memory of 1F1B; waits less only if F, I and W cost alike.",
        when_to_use="Activations that do not fit with V-Half.",
    ),
    ScheduleInfo(
        name="DualPipeVDown",
        aliases=(),
        generator=dualpipe_v_down,
        placement_style="v",
        stages_per_rank=TWO,
        splits_backward=True,
        description="DualPipeV with pairs on the way down the ranks only, at half the waiting.",
        when_to_use="As DualPipeV, when a pair is hardly quicker than its parts in turn.",
    ),
    ScheduleInfo(
        name="DualPipeV",
        aliases=("DualPipeVPaired", "DualPipeVFull"),
        generator=dualpipe_v,
        placement_style="v",
        stages_per_rank=TWO,
        splits_backward=True,
        description="A V with pairs of forward and backward down and up the ranks, as published.",
        when_to_use="Stages that wait for exchanges of their own, when a pair is clearly quicker.",
    ),
    ScheduleInfo(
        name="Wave",
        aliases=("Hanayo",),
        generator=wave,
        placement_style="v",
        stages_per_rank=SEVERAL,
        splits_backward=False,
        description="1F1B on a V that repeats, with fewer messages than a loop.",
        when_to_use="Slow links and a backward that cannot be split.",
    ),
)

SCHEDULES: Mapping[str, ScheduleInfo] = MappingProxyType({info.name: info for info in _INFOS})
"""Every schedule by its name, in the order in which they are best read about."""

_BY_KEY = {_key(name): info for info in _INFOS for name in (info.name, *info.aliases)}
_BY_KEY |= {_key(info.generator.__name__): info for info in _INFOS}
