"""Importing fxpipe, and asking the command line for help, loads no torch."""

import subprocess
import sys

import pytest


def run_code(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_import_loads_neither_torch_nor_the_rest_of_fxpipe():
    code = (
        "import fxpipe, sys\n"
        "print({'torch', 'sympy', 'typer', 'rich', 'importlib.metadata'} & set(sys.modules))\n"
        "print(sorted(name for name in sys.modules if name.startswith('fxpipe')))"
    )

    assert run_code(code) == "set()\n['fxpipe', 'fxpipe.errors', 'fxpipe.logs']\n"


def test_programs_and_their_timelines_need_no_torch():
    code = (
        "import sys\n"
        "from fxpipe.program import simulate\n"
        "from fxpipe.program.generators import get_schedule\n"
        "from fxpipe.viz import timeline_text\n"
        "timeline_text(simulate(get_schedule('1F1B')(2, 2, 4)))\n"
        "print('torch' in sys.modules)"
    )

    assert run_code(code) == "False\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["plan", "--help"], ["schedule", "list"]]
)
def test_help_loads_no_torch(arguments):
    code = (
        "import sys\n"
        "from fxpipe.cli import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    print('torch is loaded:', 'torch' in sys.modules)"
    )

    assert run_code(code).endswith("torch is loaded: False\n")


def test_unknown_name_is_an_attribute_error():
    import fxpipe

    with pytest.raises(AttributeError, match="module 'fxpipe' has no attribute 'pipelin'"):
        _ = fxpipe.pipelin
    assert "pipeline" in dir(fxpipe)
    assert fxpipe.program.Program.__name__ == "Program"
