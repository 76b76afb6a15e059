"""What was measured of a model: plain numbers that can be saved, and put into a plan.

A workload takes measured times and bytes in the place of its own. Batch sizes between and
beyond the measured ones follow straight lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import PlanError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.planner.cost.hardware import Hardware, load_hardware
from fxpipe.program import Link

__all__ = ["Measured", "Profile", "fingerprint_of"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one part for one microbatch, then bytes.

    `kept` is made inside and held until the backward; None if it was not measured.
    """

    forward: float
    backward_input: float
    backward_weight: float
    kept: float | None = None

    @property
    def times(self) -> tuple[float, float, float]:
        return self.forward, self.backward_input, self.backward_weight


@dataclass(frozen=True)
class Profile:
    """Times and memory of the parts of a model on one device.

    `parts[node][batch]` has what was measured; `opened` says how the model was captured.
    """

    fingerprint: str
    device: str
    opened: tuple[str, ...]
    parts: Mapping[str, Mapping[int, Measured]]
    link: Link | None = None

    def times(self, node: str, batch: int) -> Measured | None:
        """What a node takes at a batch size; None if it was not measured."""
        found = self.parts.get(node)
        if not found:
            return None
        if batch in found or 0 in found:
            return found.get(batch) or found[0]
        known = sorted(found)
        if len(known) == 1:
            return _between(Measured(0.0, 0.0, 0.0, 0.0), found[known[0]], batch / known[0])
        low = max((size for size in known[:-1] if size <= batch), default=known[0])
        high = known[known.index(low) + 1]
        return _between(found[low], found[high], (batch - low) / (high - low))

    def check(self, nodes: Iterable[str]) -> None:
        """Refuse a model of which nothing was measured.

        Raises:
            PlanError: none of its nodes was.
        """
        if self.parts.keys().isdisjoint(nodes):
            raise PlanError("the profile is of another model: none of its parts occur in this one")

    def with_link(self, link: Link | None) -> Profile:
        return self if link is None else replace(self, link=link)

    def hardware(self, base: str | os.PathLike[str] | Hardware) -> Hardware:
        """Hardware whose links are the measured one; the rest is that of `base`."""
        found = load_hardware(base)
        if self.link is None:
            return found
        return replace(found, name=f"{found.name}, measured", intra=self.link, inter=self.link)

    def to_json(self) -> str:
        data = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "device": self.device,
            "opened": list(self.opened),
            "link": None if self.link is None else [self.link.latency, self.link.bytes_per_time],
            "parts": {
                node: {str(batch): [*found.times, found.kept] for batch, found in sizes.items()}
                for node, sizes in self.parts.items()
            },
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read a profile.

        Raises:
            PlanError: the text is not one.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise PlanError(f"the profile has format {data['format']}; this version reads 1")
            return Profile(
                data["fingerprint"],
                data["device"],
                tuple(data["opened"]),
                {
                    node: {int(batch): Measured(*times) for batch, times in sizes.items()}
                    for node, sizes in data["parts"].items()
                },
                None if data["link"] is None else Link(*data["link"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"this is not a saved profile: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile to a JSON file."""
        target = Path(path)
        target.write_text(self.to_json() + "\n", encoding="utf-8")
        return target

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a profile that `save` wrote."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the profile {os.fspath(path)!r}: {error}") from error
        return Profile.from_json(text)


def fingerprint_of(
    traced: TracedGraph, batch_sizes: Sequence[int], device: torch.device, runs: str
) -> str:
    """Equal where a measurement can be taken over: same parts, shapes, device and torch."""
    lines: list[Any] = [torch.__version__, torch.get_num_threads(), _device_name(device), runs]
    lines += [sorted(traced.opened), dict(traced.hints), list(batch_sizes)]
    lines += [
        (name, type(part).__qualname__, part.training)
        for name, part in traced.module.named_modules()
    ]
    lines += [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in traced.module.named_parameters()
    ]
    lines += [(n.name, n.op, str(n.target), str(traced.facts[n].spec)) for n in traced.graph.nodes]
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:20]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {platform.processor()}"


def _between(first: Measured, second: Measured, share: float) -> Measured:
    """A point of the line through two measurements."""

    def point(a: float, b: float) -> float:
        return max(a + share * (b - a), 0.0)

    kept = None
    if first.kept is not None and second.kept is not None:
        kept = point(first.kept, second.kept)
    forward, backward_input, backward_weight = map(point, first.times, second.times)
    return Measured(forward, backward_input, backward_weight, kept)
