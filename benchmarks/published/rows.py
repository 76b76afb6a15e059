"""Published rows as data, and the planner's prediction of one.

In:  `rows.csv`.
Out: `Row`s; `Predictor.predict(row, hardware)` gives seconds of a step and bytes of a rank.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.presets import HARDWARE
from fxpipe.planner.cost.training import Training
from fxpipe.planner.known_models import KNOWN, gpt, known_model
from fxpipe.planner.search.candidates import Candidate
from fxpipe.planner.search.estimate import Memory
from fxpipe.planner.search.option import Option
from fxpipe.planner.search.search import Pricing, Search
from fxpipe.planner.search.subject import Subject, subject_of

__all__ = ["DEVICES", "Predictor", "Row", "read_rows"]

# The part of the torchtitan benchmarks: more and slower memory, and a lower power limit, which
# lowers the clock under load.
_SLOWER = 0.8
DEVICES: Mapping[str, Hardware] = {
    **HARDWARE,
    "H100-500W": replace(
        HARDWARE["H100"],
        name="H100-500W",
        flops={key: _SLOWER * value for key, value in HARDWARE["H100"].flops.items()},
        memory_bandwidth=2.4e12,
        memory=96e9,
    ),
}


@dataclass(frozen=True)
class Row:
    """One published run; None where nothing was published."""

    source: str
    is_test: bool
    device: str
    model: str
    sequence: int
    batch: int
    candidate: Candidate
    microbatch: int | None
    per_rank: int | None
    checkpointing: str | None
    kernels: str
    float8: bool
    sequence_parallel: bool
    ends: int | None
    tokens: float
    memory: float | None

    @property
    def has_experts(self) -> bool:
        known = KNOWN.get(self.model.partition("+")[0])
        return known is not None and known.experts > 0

    @property
    def is_searched(self) -> bool:
        """Whether the paper's own search made the order, ZB-1p or ZB-2p."""
        return self.source == "zero-bubble" and self.candidate.info.splits_backward

    @property
    def gpus(self) -> int:
        return self.candidate.num_ranks

    @property
    def seconds(self) -> float:
        """The published time of a step."""
        return self.batch * self.sequence / self.tokens / self.gpus

    @property
    def title(self) -> str:
        c = self.candidate
        groups = [
            f"{name}{count}"
            for name, count in (
                ("TP", c.tensor_parallel), ("CP", c.context_parallel), ("EP", c.expert_parallel),
                ("PP", c.pipeline), ("DP", c.data_parallel), ("ZeRO", c.sharding),
            )
            if count > (0 if name == "ZeRO" else 1)
        ]  # fmt: skip
        kind = " FP8" if self.float8 else ""
        length = f" {self.sequence // 1024}k" if self.sequence > 8192 else ""
        batch = self.batch // c.data_parallel // (self.microbatch or 1)
        more = f" m{batch}" if self.source == "zero-bubble" else ""
        return f"{self.model}{length} {' '.join(groups)} {c.schedule}{more} {self.kernels}{kind}"


def read_rows(path: Path | None = None) -> list[Row]:
    """All rows of the file."""
    text = (path or Path(__file__).with_name("rows.csv")).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [_row(data) for data in csv.DictReader(lines)]


def _row(data: Mapping[str, str]) -> Row:
    def number(name: str) -> int | None:
        return int(data[name]) if data[name] else None

    def given(name: str) -> int:
        return int(data[name])

    ranks = given("tensor") * given("context") * given("pipeline")
    width = given("gpus") // ranks
    size, per_rank = number("microbatch"), number("per_rank")
    candidate = Candidate(
        width,
        given("pipeline"),
        per_rank or 1,
        size or 1,
        given("batch") // width // (size or 1),
        data["schedule"],
        data["checkpointing"] or "none",  # type: ignore[arg-type]
        given("tensor"),
        given("context"),
        given("expert"),
        given("sharding") if width * given("context") > 1 else 0,
    )
    return Row(
        data["source"],
        data["set"] == "test",
        data["device"],
        data["model"],
        given("sequence"),
        given("batch"),
        candidate,
        size,
        per_rank,
        data["checkpointing"] or None,
        data["kernels"],
        data["float8"] == "1",
        data["sequence_parallel"] == "1",
        number("ends"),
        float(data["tokens_per_s_gpu"]),
        float(data["memory_gib"]) * 2**30 if data["memory_gib"] else None,
    )


class Predictor:
    """Predicts rows; each model is captured once."""

    def __init__(self) -> None:
        self._subjects: dict[tuple[str, int], Subject] = {}

    def predict(self, row: Row, hardware: Hardware) -> Option | None:
        """The quickest option that fits a row, else the leanest; None if it cannot be cut."""
        subject, known = self._subject(row, hardware), KNOWN.get(row.model.partition("+")[0])
        training = Training(
            kernels=row.kernels,
            float8=row.float8,
            has_loss=True,  # type: ignore[arg-type]
            expert_groups=known.expert_groups if known else None,
        )
        search = Search(
            Pricing(subject.costs, subject.sizes, hardware, training, math.inf,
                    sequence_parallel=row.sequence_parallel)
        )  # fmt: skip
        found = []
        for candidate in _choices(row, len(subject.blocks)):
            cut = _published_cut(row, candidate, search)
            try:
                made = search.price(candidate) if cut is None else search.option(candidate, cut)
            except PlanError:
                continue
            if row.source.startswith("torchtitan"):
                made = _with_arrivals(made, hardware)
            found.append(_searched(made, hardware) if row.is_searched else made)
        limit = hardware.memory
        return min(found, key=lambda o: (o.missing(limit), o.step_time), default=None)

    def _subject(self, row: Row, hardware: Hardware) -> Subject:
        key = (row.model, row.sequence)
        if key not in self._subjects:
            name, _, kind = row.model.partition("+")
            sizes: Any = KNOWN.get(name)
            if sizes is not None:
                # Predicting one more token takes one more layer (and another head, left out).
                sizes = replace(
                    sizes, repeats_keys=kind == "repeat", layers=sizes.layers + (kind == "mtp")
                )
            else:
                _, layers, width, heads, kind = row.model.split(":")
                sizes = gpt(int(layers), int(width), int(heads), fused=kind != "plain")
            model, ids = known_model(sizes, sequence=row.sequence)
            self._subjects[key] = subject_of(model, (ids,), None, sizes.layers, hardware, None)
        return self._subjects[key]


def _with_arrivals(option: Option, hardware: Hardware) -> Option:
    """With what torch's pipeline stages hold from the start, and fxpipe does not.

    Each has a buffer for the gradient of each microbatch (`PipelineStage.grad_recv_info`), and for
    each input, which is counted while it is in flight.
    """
    memory = []
    for rank, own in enumerate(option.prediction.memory):
        stages = option.placement.stages_of(rank)
        sizes = [back for (source, _), (_, back) in option.edge_bytes.items() if source in stages]
        more = option.candidate.num_microbatches * math.fsum(sizes)
        reserve = own.reserve + hardware.reserve * more
        memory.append(replace(own, buffers=own.buffers + more, reserve=reserve))
    return replace(option, prediction=replace(option.prediction, memory=tuple(memory)))


def _searched(option: Option, hardware: Hardware) -> Option:
    """The order that the paper's search makes: ZB-1p in place of ZBH1, ZB-2p of ZBH2.

    Each rank may hold the activations of p or 2p microbatches, and no rank waits for others
    between steps.
    """
    held = option.candidate.pipeline * (2 if option.candidate.schedule == "ZBH2" else 1)
    room = held * statistics.median(stage.kept for stage in option.stages)

    def filled(memory: Memory) -> Memory:
        full = replace(memory, activations=room - memory.buffers, system=0.0, reserve=0.0)
        return replace(full, system=memory.system, reserve=hardware.reserve * full.total)

    memory = tuple(filled(own) for own in option.prediction.memory)
    limit = max(own.total for own in memory)
    made = option.rearranged(hardware, limit, "period", budget=20_000)
    # Orders of one length may hold less; the paper's fill what they may.
    return replace(made, prediction=replace(made.prediction, memory=memory))


def _published_cut(row: Row, candidate: Candidate, search: Search) -> tuple[int, ...] | None:
    """The stage of each item if the layers are cut evenly, `row.ends` fewer at both ends."""
    if row.ends is None:
        return None
    nodes = search.load(candidate).nodes
    is_layer = [any("layers" in name for name in names) for names in nodes]
    each, rest = divmod(sum(is_layer) + 2 * row.ends, candidate.num_stages)
    assert not rest, (row.title, sum(is_layer))
    seen, cut = row.ends, []
    for item, layer in enumerate(is_layer):
        is_before = not any(is_layer[: item + 1])
        cut.append(0 if is_before else min(seen // each, candidate.num_stages - 1))
        seen += layer
    return tuple(cut)


def _choices(row: Row, blocks: int) -> list[Candidate]:
    """The candidates that a row may mean."""
    start = row.candidate
    per_rank = [row.per_rank] if row.per_rank else [
        n for n in range(2, 9) if blocks % (n * start.pipeline) == 0
    ] or [1]  # fmt: skip
    rows = row.batch // start.data_parallel
    sizes = [row.microbatch] if row.microbatch else [n for n in (1, 2, 4, 8) if rows % n == 0]
    modes: list[Any] = [row.checkpointing] if row.checkpointing else ["none", "selective", "full"]
    return [
        replace(
            start,
            stages_per_rank=count,
            schedule=start.schedule if count > 1 or start.schedule != "Interleaved1F1B" else "1F1B",
            microbatch_size=size,
            num_microbatches=rows // size,
            checkpointing=mode,
        )
        for count in per_rank
        for size in sizes
        for mode in modes
    ]
