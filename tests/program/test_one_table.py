"""Only the table's module knows which stage comes next, and one function how long values live.

Read from the source: everything else asks `reads`, `writes`, `Edges` or the numbering.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fxpipe"
TABLE = ROOT / "program" / "action.py"
# Cutting a chain of operations into stages counts stages; it plays no program.
CUTTING = ROOT / "planner" / "partition"
SOURCES = sorted(
    path
    for room in ("program", "planner")
    for path in (ROOT / room).rglob("*.py")
    if path != TABLE and CUTTING not in path.parents
)


def neighbours(source: str) -> list[str]:
    """Every `stage + 1` and `stage - 1`, whatever the stage is called by."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add | ast.Sub)
        and isinstance(node.right, ast.Constant)
        and node.right.value == 1
        and ast.unparse(node.left).split(".")[-1].split("_")[-1] in ("stage", "source", "target")
        and not ast.unparse(node.left).startswith("num_")
    ]


def test_the_search_finds_what_it_is_for():
    found = neighbours("a = ready[action.stage - 1]; b = stage + 1; c = num_stages - 1")

    assert sorted(found) == ["action.stage - 1", "stage + 1"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_else_knows_the_next_stage(path):
    assert neighbours(path.read_text()) == []


def test_kinds_are_told_apart_by_name():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.BinOp):
                text = ast.unparse(node)
                assert "kind <=" not in text and "kind >" not in text, f"{path}: {text}"
                assert "kind &" not in text, f"{path}: {text}"
