"""Imports go downwards only, `program` needs no torch, and nobody imports torch's pipelining.

The packages and their order are those of docs/architecture.md:

    {errors, logs, text, torch_inside} <- {graph, program, microbatch} <- {planner, viz, runtime}
        <- {stage, schedules} <- training <- cli

Names in braces do not know each other, apart from `schedules`, which uses `stage`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fxpipe"

BASE = {"errors", "logs", "text", "torch_inside"}
MATTER = BASE | {"graph", "program", "microbatch"}
ALLOWED = {
    "errors": set(),
    "logs": {"errors"},
    "text": set(),
    "torch_inside": {"torch_names"},
    "torch_names": set(),
    "example_models": set(),
    "graph": BASE,
    "program": {"errors", "text"},
    "chunking": BASE,
    "microbatch": BASE | {"chunking"},
    "planner": MATTER,
    "viz": MATTER,
    "runtime": MATTER,
    "stage": MATTER | {"planner", "viz", "runtime"},
    "schedules": MATTER | {"planner", "viz", "runtime", "stage", "liveness"},
    "liveness": MATTER,
    "compat": MATTER | {"runtime", "stage", "schedules"},
    "training": MATTER | {"runtime", "stage", "schedules"},
    "cli": MATTER
    | {"example_models", "planner", "viz", "runtime", "stage", "schedules", "training"},
    "__main__": {"cli"},
}
# A stage is built from a pipe, and users expect to find that as a method of the pipe; so
# they do with pictures of a pipe, a program and a timeline; a plan is built and reported.
EXCEPTIONS = {
    ("graph/pipe.py", "stage"),
    ("graph/pipe.py", "viz"),
    ("graph/pipe.py", "planner"),
    ("program/program.py", "viz"),
    ("program/timeline.py", "viz"),
    ("planner/build.py", "runtime"),
    ("planner/build.py", "stage"),
    ("planner/build.py", "schedules"),
    ("planner/plan_report.py", "viz"),
}

# The rooms of a package, lowest first: a room imports from those before it. Files of the
# package itself are named one by one; the result of all rooms comes last.
ROOMS = {
    "graph": (
        {"interface", "dims", "inputs", "markers", "nested", "source_line", "facts"},
        {"sizes"},
        {"sandbox"},
        {"guard"},
        {"calls"},
        {"record"},
        {"capture"},
        {"cut"},
        {"pipe", "info", "pipe_text", "flops", "check"},
    ),
}

MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file names in an import, at any depth, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_part_of_the_package_has_its_place():
    assert {part_of(path) for path in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_downwards(path):
    here = part_of(path)

    for line, name in imports_of(path):
        package, _, rest = name.partition(".")
        there = rest.split(".")[0]
        if package != "fxpipe" or not rest:
            continue
        is_part = (ROOT / there).is_dir() or (ROOT / f"{there}.py").is_file()
        assert is_part, f"{path}:{line}: take {name} from the module that defines it"
        known = there == here or there in ALLOWED[here]
        excused = (path.relative_to(ROOT).as_posix(), there) in EXCEPTIONS
        assert known or excused, f"{path}:{line}: {here} must not know {there}"


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_downwards(package):
    level = {room: height for height, rooms in enumerate(ROOMS[package]) for room in rooms}
    faults = []
    for path in sorted((ROOT / package).rglob("*.py")):
        here = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for line, name in imports_of(path):
            words = name.split(".")
            if words[:2] == ["fxpipe", package] and len(words) > 2:
                there = words[2]
                if there in level and level[there] > level[here]:
                    faults.append(f"{path}:{line}: {here} must not know {there}")

    assert faults == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_imports_the_pipelining_of_torch(path):
    for line, name in imports_of(path):
        assert not name.startswith("torch.distributed.pipelining"), f"{path}:{line}"


def test_program_needs_the_standard_library_only():
    # With everything that it imports in turn, which is `errors` and `text`.
    for path in [*(ROOT / "program").rglob("*.py"), ROOT / "errors.py", ROOT / "text.py"]:
        for line, name in imports_of(path):
            package, _, rest = name.partition(".")
            inside = package == "fxpipe" and rest.split(".")[0] in ("program", "errors", "text")
            inside |= (path.relative_to(ROOT).as_posix(), rest.split(".")[0]) in EXCEPTIONS
            assert inside or package in sys.stdlib_module_names, f"{path}:{line}: {name}"


def test_graph_knows_nothing_distributed():
    for path in (ROOT / "graph").rglob("*.py"):
        for line, name in imports_of(path):
            assert not name.startswith("torch.distributed"), f"{path}:{line}: {name}"


def test_the_check_sees_imports_inside_functions(tmp_path):
    # The check is worth nothing if an import can hide from it.
    path = tmp_path / "module.py"
    path.write_text(
        "def f():\n    from torch.distributed import pipelining\n    import fxpipe.cli.train\n"
        "importlib.import_module('torch')\n"
    )

    assert {name for _, name in imports_of(path)} == {
        "torch.distributed",
        "torch.distributed.pipelining",
        "fxpipe.cli.train",
        "torch",
    }


def test_nothing_needs_numpy() -> None:
    # torch comes without it; `fxpipe demo` in a fresh environment once ended at `.numpy()`.
    for path in MODULES:
        text = path.read_text()
        assert ".numpy()" not in text, path
        assert not any(name.split(".")[0] == "numpy" for _, name in imports_of(path)), path
