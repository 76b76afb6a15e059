"""Measure the package as something to read: `python -m benchmarks.house`.

Size, folders, untyped lines, private names, and how many files a reader passes who
follows `pipeline()`, a first and a second `step()` on two ranks, or `plan()`.
"""

import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from benchmarks.ports import free_port, join

ROOT = Path(__file__).parents[1] / "fxpipe"


class Walk:
    """Files of fxpipe that a call enters, and how deep its own frames stack up."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.deepest = 0
        self._depth = 0

    def follow(self, call: Callable[[], Any]) -> Any:
        sys.setprofile(self._event)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def _event(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(str(ROOT)):
            return
        if event == "call":
            self.files.add(file)
            self._depth += 1
            self.deepest = max(self.deepest, self._depth)
        elif event == "return":
            self._depth -= 1

    def __str__(self) -> str:
        return f"{len(self.files)} files, {self.deepest} deep"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from fxpipe import pipe_split

        x = self.a(x)
        pipe_split()
        return self.b(x)


def walk_pipeline() -> str:
    from fxpipe import pipeline

    pipeline(Net(), (torch.randn(2, 4),))  # what is made once per process
    walk = Walk()
    walk.follow(lambda: pipeline(Net(), (torch.randn(2, 4),)))
    return str(walk)


def _steps(rank: int, port: int) -> None:
    from fxpipe import Schedule1F1B, pipeline

    join(rank, port)
    pipe = pipeline(Net(), (torch.randn(2, 4),))
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, 4)
    given = {"args": (x,), "kwargs": {}} if rank == 0 else {"args": (), "kwargs": {"target": x}}
    for name in ("first step()", "second step()"):
        walk = Walk()
        walk.follow(lambda: schedule.step(*given["args"], **given["kwargs"]))  # type: ignore[misc]
        if rank == 0:
            print(f"{name:<44}{walk}")
    dist.destroy_process_group()


def walk_plan() -> str:
    from fxpipe import plan
    from models.gpt import GPT, Sizes

    walk = Walk()
    ids = torch.randint(16, (2, 8))
    walk.follow(lambda: plan(GPT(Sizes()), (ids,), "A100", 2, 8))
    return str(walk)


def untyped_lines(folder: Path) -> int:
    return sum(
        "Any" in line and not line.lstrip().startswith(("from ", "#"))
        for path in folder.rglob("*.py")
        for line in path.read_text().splitlines()
    )


def meta_keys() -> set[str]:
    """String keys that fxpipe uses in the `meta` of graph nodes."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            key: ast.AST | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".meta"):
                key = node.slice
            elif isinstance(node, ast.Call) and ".meta." in ast.unparse(node.func) and node.args:
                key = node.args[0]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.add(key.value)
    return found


def main() -> None:
    sources = {path: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    folders = Counter(path.parent for path in sources)
    largest, count = folders.most_common(1)[0]
    print(f"{'lines of fxpipe/':<44}{sum(sources.values()):,} in {len(sources)} files")
    for name in sorted({path.relative_to(ROOT).parts[0] for path in sources}):
        if (ROOT / name).is_dir():
            print(f"  {name:<42}{sum(n for p, n in sources.items() if ROOT / name in p.parents):,}")
    print(f"{'largest folder':<44}{largest.relative_to(ROOT.parent)}: {count} files")
    print(f"{'lines with Any in graph/':<44}{untyped_lines(ROOT / 'graph')}")
    print(f"{'string keys in node.meta':<44}{len(meta_keys())} {sorted(meta_keys())}")
    print(f"{'pipeline()':<44}{walk_pipeline()}", flush=True)
    torch.multiprocessing.spawn(_steps, args=(free_port(),), nprocs=2)
    print(f"{'plan()':<44}{walk_plan()}")


if __name__ == "__main__":
    main()
