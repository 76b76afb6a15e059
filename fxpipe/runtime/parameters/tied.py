"""Keep the copies of a shared parameter equal, and give each the whole gradient.

A parameter that several stages use lives once on every rank that holds such a
stage. The rank of its first stage owns it: the owner's values are sent to the
others at the start, and after each step the owner adds up everybody's gradient
of that step, in rank order, and sends the sum back. All copies get the same bits,
so equal optimizers keep them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.wire.transport import Transport
from fxpipe.torch_inside import WRAPPED

__all__ = [
    "GradStash",
    "Scale",
    "TiedGroup",
    "TiedLocations",
    "add_up",
    "broadcast",
    "find_tied",
    "local",
    "on_device",
    "plain_name",
]


Scale = float | torch.Tensor | None
"""What a step's own gradients are multiplied by; a tensor where the host does not know it."""


class TiedLocations(Protocol):
    """Stages and names of one shared parameter."""

    @property
    def locations(self) -> Sequence[tuple[int, str]]: ...


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """One shared parameter as one process sees it."""

    name: str
    ranks: tuple[int, ...]
    parameters: Mapping[int, tuple[nn.Parameter, ...]]

    @property
    def owner(self) -> int:
        return self.ranks[0]

    @property
    def messages(self) -> list[tuple[int, int]]:
        """Who sends to whom after a step, in the one order that all ranks keep.

        The copies' ranks send, the owner adds up and sends back. Of several groups one is done
        before the next: ranks that sent for all of them first could wait for each other, since
        two ranks may own a group each and a send need not return before it is received.
        """
        if not any(p.requires_grad for some in self.parameters.values() for p in some):
            return []
        others = self.ranks[1:]
        return [*((peer, self.owner) for peer in others), *((self.owner, peer) for peer in others)]


def find_tied(
    tied: Sequence[TiedLocations],
    modules: Mapping[int, nn.Module],
    stage_to_rank: Sequence[int],
) -> list[TiedGroup]:
    """The shared parameters, with the copies that live in this process, by rank.

    `modules` holds the stages of this process. A copy that is one object on several
    ranks of one process is kept only once: autograd already adds into it.
    """
    groups = []
    for shared in tied:
        seen: set[int] = set()
        held: dict[int, list[nn.Parameter]] = {}
        ranks = {stage_to_rank[stage]: None for stage, _ in sorted(shared.locations)}
        for stage, name in sorted(shared.locations):
            if stage in modules:
                parameter = _parameter(modules[stage], name, stage)
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    held.setdefault(stage_to_rank[stage], []).append(parameter)
        name = shared.locations[0][1]
        if len(modules) == len(stage_to_rank):  # all ranks live here
            ranks = {rank: None for rank in ranks if rank in held}
        groups.append(TiedGroup(name, tuple(ranks), {r: tuple(p) for r, p in held.items()}))
    if len(modules) < len(stage_to_rank):
        return groups  # the same on every rank, also where none of the copies is
    return [g for g in groups if len(g.ranks) > 1 or sum(map(len, g.parameters.values())) > 1]


def broadcast(groups: Sequence[TiedGroup], rank: int, transport: Transport) -> None:
    """Give every copy the owner's values. Call on all ranks, senders first."""
    with torch.no_grad():
        for group in groups:
            mine = group.parameters.get(rank, ())
            if not mine or mine[0].is_meta:
                continue
            if rank == group.owner:
                for peer in group.ranks[1:]:
                    transport.send(peer, [local(mine[0])])
            else:
                value = local(mine[0])
                shapes = [(tuple(value.shape), value.dtype)]
                value.copy_(transport.recv(group.owner, shapes, value.device).wait()[0])
            for copy in mine[1:]:
                local(copy).copy_(local(mine[0]))


def add_up(groups: Sequence[TiedGroup], posts: Mapping[int, Callable[..., Any]]) -> None:
    """Give every copy of each shared parameter the sum of all copies' gradients.

    `posts` say for each rank of this process how it posts the next of the groups' messages:
    `post([tensor])` sends, `post()` receives.
    """
    for group in groups:
        held = {rank: group.parameters[rank] for rank in posts if group.parameters.get(rank)}
        if not any(p.requires_grad for copies in held.values() for p in copies):
            continue
        totals = {rank: _sum(copies) for rank, copies in held.items()}
        for source, target in group.messages:
            if source in totals:
                posts[source]([totals[source]])
            if target in totals:
                (arrived,) = posts[target]().wait()
                totals[target] = arrived + totals[target] if target == group.owner else arrived
        for rank, copies in held.items():
            _give(copies, totals[rank])


class GradStash:
    """Put existing gradients aside for a step, so that what it adds can be told apart.

    `earlier` holds them. Who averages them puts the average there, as a new tensor.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list({id(p): p for p in parameters}.values())
        self._before = [p.grad for p in self._parameters]
        pairs = zip(self._parameters, self._before, strict=True)
        self.earlier = {p: before for p, before in pairs if before is not None}
        for p, before in self.earlier.items():
            p.grad = before  # what does not fit could not be put back: it fails here
        for p in self._parameters:
            p.grad = None

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        return self._parameters

    def undo(self) -> None:
        """Forget the step's own gradients: what was there before is there again."""
        for p, before in zip(self._parameters, self._before, strict=True):
            p.grad = before

    def restore(self, scale: Scale = None) -> None:
        """Add the step's own gradients, times `scale`, to what was there before."""
        for p, before in zip(self._parameters, self._before, strict=True):
            fresh = p.grad
            if fresh is not None and scale is not None:
                local(fresh).mul_(on_device(scale, fresh))
            earlier = self.earlier.get(p)
            if before is not None and earlier is not None and earlier is not before:
                before.copy_(earlier)
                earlier = before
            if earlier is not None:
                if fresh is not None:
                    earlier.add_(fresh)
                p.grad = earlier
        self._before = []
        self._parameters = []
        self.earlier = {}


def on_device(scale: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    return scale.to(like.device) if isinstance(scale, torch.Tensor) else scale


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _sum(copies: Sequence[nn.Parameter]) -> torch.Tensor:
    total = torch.zeros_like(local(copies[0]))
    for p in copies:
        if p.grad is not None:
            total += local(p.grad)
    return total


def _give(copies: Sequence[nn.Parameter], total: torch.Tensor) -> None:
    for p in copies:
        if not p.requires_grad:
            continue
        if p.grad is None or p.grad.is_sparse:  # a sum with dense ones is dense
            p.grad = torch.zeros_like(p)
        local(p.grad).copy_(total)


def _parameter(module: nn.Module, name: str, stage: int) -> nn.Parameter:
    for found, parameter in module.named_parameters(remove_duplicate=False):
        if plain_name(found) == name:
            return parameter
    raise InputError(f"stage {stage} has no parameter {name!r}, which is tied to another stage's")


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    wrappers = ("module", *WRAPPED)
    return ".".join(part for part in name.split(".") if part not in wrappers)
