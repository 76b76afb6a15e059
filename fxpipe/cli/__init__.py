"""The command `fxpipe`: look at a model, plan, simulate, draw and train.

`main` is what the console script runs, `app` the typer application behind it.
The command line needs typer and rich, which are extras of the package; all that it does
can be done without them from Python.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpipe.cli.commands import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line with the arguments of this process."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"error: the fxpipe command needs {' and '.join(missing)}: pip install 'fxpipe[cli]'\n"
        )
        raise SystemExit(1)
    from fxpipe.cli.commands import app
    from fxpipe.cli.launch import NO_NUMPY, arguments_of_rank

    warnings.filterwarnings("ignore", NO_NUMPY)
    app(arguments_of_rank(), prog_name="fxpipe")


def __getattr__(name: str) -> Any:
    if name == "app":
        from fxpipe.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
