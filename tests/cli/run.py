"""Run a command in this process and look at what it printed."""

import json
from typing import Any

from typer.testing import CliRunner

from fxpipe.cli import app

__all__ = ["fails", "fxpipe", "fxpipe_json"]


def fxpipe(*arguments: str, code: int = 0, text: str | None = None) -> str:
    """What `fxpipe arguments` prints to standard output; it must end with that exit code."""
    result = CliRunner().invoke(app, arguments, input=text, env={"COLUMNS": "160"})

    assert result.exit_code == code, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    return result.stdout


def fxpipe_json(*arguments: str, code: int = 0) -> Any:
    """The JSON that `fxpipe arguments --json` prints, and nothing else."""
    return json.loads(fxpipe(*arguments, "--json", code=code))


def fails(*arguments: str, code: int = 1) -> str:
    """The one message on standard error of a command that must refuse; no traceback."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})

    assert result.exit_code == code, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    assert "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit)
    if code == 1:
        assert result.stderr.startswith("error: ")
        assert result.stdout == ""
    return result.stderr
