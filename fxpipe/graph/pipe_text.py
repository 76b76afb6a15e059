"""Write a split model as text: a table of its stages, and their code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn

from fxpipe.graph.info import PipeInfo
from fxpipe.graph.interface import StageInterface
from fxpipe.text import aligned, bytes_text

__all__ = ["readable", "table"]

_WIDEST = 44  # characters of the column of modules


def table(name: str, modules: Sequence[fx.GraphModule], info: PipeInfo) -> str:
    """One row per stage, then what does not fit into rows."""
    counts = [_parameters(module) for module in modules]
    total = sum(count for count, _ in counts) or 1
    rows: list[tuple[str, ...]] = [("stage", "modules", "parameters", "share", "receives", "sends")]
    for index, (module, (count, size)) in enumerate(zip(modules, counts, strict=True)):
        rows += _stage_rows(index, module, count, f"{count / total:.0%}", size, info)
    number = len({id(p) for module in modules for p in module.parameters()})
    every = sum(p.numel() for p in _once(modules))
    stages = "1 stage" if len(modules) == 1 else f"{len(modules)} stages"
    head = f"{name}: {stages}, {every:,} parameters in {number} tensors"
    return "\n".join([head, "", *aligned(rows, left=(1, 4, 5), rule=True), *_notes(info)])


def _stage_rows(
    index: int, module: fx.GraphModule, count: int, share: str, size: int, info: PipeInfo
) -> list[tuple[str, ...]]:
    interface = info.interfaces[index]
    receives = [f"{name} (input)" for name in interface.model_inputs]
    receives += [f"{r.port} from {r.source_stage}" for r in interface.received]
    sends = [f"{s.port} to {', '.join(map(str, s.target_stages))}" for s in interface.sent]
    if index == info.num_stages - 1:
        sends.append("the model's output")
    names = _wrapped(_called(module)) or ["-"]
    held = [f"{count:,}", f"({bytes_text(size)})"] if count else ["-"]
    depth = max(len(receives), len(sends), len(names), len(held), 1)
    columns = [
        [str(index)], names, held, [share], receives or ["-"], sends or ["-"],
    ]  # fmt: skip
    return [tuple(c[line] if line < len(c) else "" for c in columns) for line in range(depth)]


def _parameters(module: nn.Module) -> tuple[int, int]:
    found = list(module.parameters())
    return sum(p.numel() for p in found), sum(p.numel() * p.element_size() for p in found)


def _once(modules: Sequence[nn.Module]) -> Iterable[torch.Tensor]:
    return {id(p): p for module in modules for p in module.parameters()}.values()


def _called(module: fx.GraphModule) -> list[str]:
    """The modules a stage calls, in order; `layers.0`, `layers.1` ... as `layers.0-3`."""
    found = [str(node.target) for node in module.graph.nodes if node.op == "call_module"]
    names = list(dict.fromkeys(found))
    result: list[str] = []
    run: tuple[str, int, int, str] | None = None
    for name in [*names, ""]:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        if match is None:
            here = None
        else:
            before, number, after = match[1], int(match[2]), match[3]
            if run is not None and (before, after) == (run[0], run[3]) and number == run[2] + 1:
                run = (before, run[1], number, after)
                continue
            here = (before, number, number, after)
        if run is not None:
            result.append(_range(*run))
        if match is None and name:
            result.append(name)
        run = here
    return result


def _range(before: str, first: int, last: int, after: str) -> str:
    return f"{before}{first}{after}" if first == last else f"{before}{first}-{last}{after}"


def _wrapped(names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for name in names:
        if lines and len(lines[-1]) + len(name) + 2 <= _WIDEST:
            lines[-1] += f", {name}"
        else:
            lines.append(name)
    if len(lines) > 4:
        hidden = len(names) - sum(line.count(",") + 1 for line in (*lines[:2], lines[-1]))
        lines = [*lines[:2], f"... {hidden} more ...", lines[-1]]
    return lines


def _notes(info: PipeInfo) -> list[str]:
    lines = [""]
    for tie in info.tied:
        places = ", ".join(f"{name} in stage {stage}" for stage, name in tie.locations)
        lines.append(f"tied: {places}")
    for stage, names in enumerate(info.repeated):
        if names:
            lines.append(f"computed again in stage {stage}, not sent: {', '.join(names)}")
    dynamic = [size for size in info.input_sizes if size.is_dynamic]
    if dynamic:
        lines.append(
            "dynamic: " + ", ".join(f"{s.input} dimension {s.dim} ({s.size})" for s in dynamic)
        )
    static = [size for size in info.input_sizes if not size.is_dynamic]
    if static:
        lines.append(
            "static: " + ", ".join(f"{s.input} dimension {s.dim} = {s.size}" for s in static)
        )
    lines += info.check.lines()
    return lines if len(lines) > 1 else []


def readable(stages: Sequence[tuple[fx.GraphModule, StageInterface]]) -> str:
    """The interface and the code of every stage."""
    parts = []
    for module, interface in stages:
        parts.append(f"{interface}\n{module.code.strip()}\n")
    return "\n".join(parts)
