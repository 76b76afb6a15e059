"""The notebooks run from top to bottom, and are committed without output."""

from __future__ import annotations

import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    book = nbformat.read(FOLDER / name, as_version=4)
    client = NotebookClient(
        book,
        timeout=180,
        startup_timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own machinery
        client.execute()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_committed_without_output(name: str) -> None:
    book = nbformat.read(FOLDER / name, as_version=4)

    cells = [cell for cell in book.cells if cell.cell_type == "code"]

    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


def test_there_are_five() -> None:
    assert [name[0] for name in NOTEBOOKS] == ["1", "2", "3", "4", "5"]
