"""One candidate with everything that was found out about it.

An `Option` has the prediction, the numbers of its stages and the nodes in them, so that it can
be shown, saved, simulated again and built without the search that made it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.stage_numbers import EdgeBytes, StageNumbers
from fxpipe.planner.order.improve import improve
from fxpipe.planner.order.orders import Objective
from fxpipe.planner.search.candidates import Candidate
from fxpipe.planner.search.estimate import Memory, Prediction, edges_of, predict, stage_costs
from fxpipe.program import Edges, Placement, Program, StageCosts, Timeline, lower, simulate
from fxpipe.program.generators import get_schedule
from fxpipe.text import bytes_text

__all__ = ["Option", "why_slower"]


@dataclass(frozen=True)
class Option:
    """A candidate, priced.

    `nodes[s]` names the graph's nodes of stage s and `modules[s]` the parts of the model
    that weigh something there. `bound` is a load that no cut can get the slowest rank below.
    `program` is None unless it differs from the one the schedule's name stands for.
    """

    candidate: Candidate
    prediction: Prediction
    stages: tuple[StageNumbers, ...]
    edge_bytes: EdgeBytes
    nodes: tuple[tuple[str, ...], ...]
    modules: tuple[tuple[str, ...], ...]
    bound: float
    program: Program | None = None

    @property
    def step_time(self) -> float:
        return self.prediction.step_time

    @property
    def peak(self) -> float:
        return self.prediction.peak

    def missing(self, limit: float) -> float:
        """Bytes that the fullest rank lacks."""
        return max(self.peak - limit, 0.0)

    @property
    def rank_loads(self) -> tuple[float, ...]:
        """Compute time of each rank per microbatch."""
        held = [self.placement.stages_of(rank) for rank in range(self.candidate.pipeline)]
        return tuple(math.fsum(self.stages[stage].time for stage in own) for own in held)

    def loads_with_transfers(self, hardware: Hardware) -> tuple[float, ...]:
        """Time of each rank per microbatch with all it sends and receives, as `bound` has it."""
        costs, loads = self.costs(hardware), list(self.rank_loads)
        rank_of = self.placement.stage_to_rank
        for (source, target), (there, back) in self.edge_bytes.items():
            ends = rank_of[source], rank_of[target]
            if ends[0] != ends[1]:
                time = costs.transfer(*ends, there) if there else 0.0
                time += costs.transfer(*ends[::-1], back) if back else 0.0
                for end in ends:
                    loads[end] += time
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """The slowest rank's compute over the mean; 1 is perfect."""
        loads = self.rank_loads
        mean = math.fsum(loads) / len(loads)
        return max(loads) / mean if mean else 1.0

    @property
    def placement(self) -> Placement:
        return self.candidate.info.placement(self.candidate.pipeline, self.candidate.num_stages)

    @property
    def edges(self) -> Edges:
        return edges_of(self.candidate.num_stages, self.edge_bytes)

    def make_program(self) -> Program:
        """The compute-only program."""
        c = self.candidate
        return self.program or c.info(c.pipeline, c.num_stages, c.num_microbatches)

    def costs(self, hardware: Hardware) -> StageCosts:
        """The stages' numbers as the simulator takes them."""
        return stage_costs(
            self.stages,
            self.edge_bytes,
            self.placement,
            hardware,
            self.candidate.layout,
        )

    def timeline(self, hardware: Hardware, *, transfers: bool = True) -> tuple[Program, Timeline]:
        """The program, with its transfers, and when everything in it happens."""
        program, offload = self.make_program(), self.candidate.offload or None
        if transfers or offload:
            program = lower(program, self.edges, offload=offload)
        return program, simulate(program, self.costs(hardware), self.edges)

    def rearranged(
        self,
        hardware: Hardware,
        memory_limit: float,
        objective: Objective = "step",
        *,
        budget: int = 2_000_000,
    ) -> Option:
        """The option with a better order of actions, or as it was if none is quicker and fits.

        A better order may hold as much more as the rank has free.
        """
        if self.candidate.offload:
            return self  # another order is another time for copies, which the search does not see
        costs = self.costs(hardware)
        program, timeline = self.timeline(hardware, transfers=False)
        free = [(memory_limit - m.total) / (1 + hardware.reserve) for m in self.prediction.memory]
        room = [
            held + max(more, 0.0) for held, more in zip(timeline.peak_memory, free, strict=True)
        ]
        found = improve(
            program, costs, room, edges=self.edges, objective=objective, budget=budget
        ).program
        layout = self.candidate.layout
        better = predict(found, self.stages, self.edge_bytes, hardware, layout, objective)
        if better.step_time >= self.step_time or better.peak > memory_limit:
            return self
        return replace(self, prediction=better, program=found)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the inverse of `from_dict`."""
        return {
            "candidate": asdict(self.candidate),
            "step_time": self.prediction.step_time,
            "makespan": self.prediction.makespan,
            "bubble": self.prediction.bubble,
            "memory": [asdict(memory) for memory in self.prediction.memory],
            "stages": [asdict(stage) for stage in self.stages],
            "edges": [[*pair, *sizes] for pair, sizes in self.edge_bytes.items()],
            "nodes": [list(names) for names in self.nodes],
            "modules": [list(names) for names in self.modules],
            "bound": self.bound,
            "program": None if self.program is None else self.program.to_json(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Option:
        candidate = Candidate(**data["candidate"])
        get_schedule(candidate.schedule)  # raises where this version does not know it
        return Option(
            candidate,
            Prediction(
                data["step_time"],
                data["makespan"],
                data["bubble"],
                tuple(Memory(**memory) for memory in data["memory"]),
            ),
            tuple(StageNumbers(**stage) for stage in data["stages"]),
            {(a, b): (there, back) for a, b, there, back in data["edges"]},
            tuple(tuple(names) for names in data["nodes"]),
            tuple(tuple(names) for names in data["modules"]),
            data["bound"],
            None if data["program"] is None else Program.from_json(data["program"]),
        )


def why_slower(option: Option, best: Option, limit: float) -> str:
    """Why an option lost against the best one, in a few words."""
    if option is best:
        return "chosen"
    if option.missing(limit) > 0:
        fullest = max(range(len(option.prediction.memory)), key=lambda r: _total(option, r))
        return f"rank {fullest} lacks {bytes_text(option.missing(limit))}"
    more = option.step_time / best.step_time - 1 if best.step_time else 0.0
    if more < 0.0005:
        return "as quick" if option.peak <= best.peak * 1.0005 else "as quick, but holds more"
    mine, its = _parts(option), _parts(best)
    growth = [a - b for a, b in zip(mine, its, strict=True)]
    words = (
        "more to compute"
        if option.candidate.checkpointing == "none"
        else "it computes forwards again",
        "its ranks are less even",
        "its ranks wait more",
        "gradients and optimizer take longer",
    )
    return f"{more:.1%} slower: {words[growth.index(max(growth))]}"


def _total(option: Option, rank: int) -> float:
    return option.prediction.memory[rank].total


def _parts(option: Option) -> tuple[float, float, float, float]:
    """Where a step's time goes: work, unevenness, waiting, what follows the last backward."""
    loads, count = option.rank_loads, option.candidate.num_microbatches
    mean = math.fsum(loads) / len(loads) * count
    slowest = max(loads) * count
    makespan = option.prediction.makespan
    return mean, slowest - mean, makespan - slowest, option.step_time - makespan
