"""The wheel holds what its commands and pages name."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_has_every_module_page_and_example_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "fxpipe", "models"):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), "."]

    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr[-3000:]
    with zipfile.ZipFile(next(tmp_path.glob("fxpipe-*.whl"))) as wheel:
        found = set(wheel.namelist())
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fxpipe").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {f"fxpipe/example_models/{path.name}" for path in ROOT.glob("models/[!_]*.py")}
    assert wanted - found == set()
    assert not [name for name in found if name.startswith(("tests/", "models/", "docs/"))]
