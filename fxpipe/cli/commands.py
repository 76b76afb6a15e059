"""The application: all commands, and what happens to errors.

Exit codes: 0 all is well, 1 a mistake (one message on standard error), 2 wrong usage of
the command line. An error that fxpipe did not foresee keeps its traceback.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fxpipe import logs
from fxpipe.cli import schedule as schedule_commands
from fxpipe.cli.doctor import doctor, doctor_examples
from fxpipe.cli.launch import ARGUMENTS, record_failure
from fxpipe.cli.output import print_error
from fxpipe.cli.plan import plan, plan_examples
from fxpipe.cli.report import report, report_examples
from fxpipe.cli.simulate import simulate, simulate_examples
from fxpipe.cli.trace import check, check_examples, draw, draw_examples, trace, trace_examples
from fxpipe.cli.train import demo, demo_examples, train, train_examples
from fxpipe.errors import FxpipeError

__all__ = ["app"]


class _Commands(TyperGroup):
    """The commands; turns fxpipe's own errors into one message."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, _debug_first(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Wrong usage and a wanted exit are exceptions of typer, which shows them itself.
            if type(error).__module__.startswith(("typer", "click")):
                raise
            if record_failure(error):
                raise typer.Exit(1) from None
            if ctx.params.get("debug") or not isinstance(error, FxpipeError):
                raise
            print_error(error)
            raise typer.Exit(1) from None


def _debug_first(args: Sequence[str]) -> list[str]:
    """Let `--debug` stand anywhere, although it is an option of the whole command."""
    end = args.index("--") if "--" in args else len(args)
    if "--debug" not in args[:end]:
        return list(args)
    return ["--debug", *(arg for arg in args[:end] if arg != "--debug"), *args[end:]]


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        versions = (f"{name} {importlib.metadata.version(name)}" for name in ("fxpipe", "torch"))
        typer.echo(", ".join(versions))
        raise typer.Exit


@app.callback()
def _main(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="FXPIPE_DEBUG", help="Show the traceback of errors.")
    ] = False,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            envvar=logs.VARIABLE,
            help="Log to standard error: debug, info, warning, or part=level with commas.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Split any PyTorch model into pipeline stages and train it across processes.

    Start with `fxpipe demo`.
    """
    if log:
        logs.configure(log)
        # Processes that a command starts log in the same way.
        os.environ[logs.VARIABLE] = log


app.command(epilog=demo_examples)(demo)
app.command(epilog=trace_examples)(trace)
app.command(epilog=draw_examples)(draw)
app.command(epilog=check_examples)(check)
app.command(epilog=plan_examples)(plan)
app.command(epilog=simulate_examples)(simulate)
app.add_typer(schedule_commands.app, name="schedule")
app.command(epilog=train_examples)(train)
app.command(epilog=report_examples)(report)
app.command(epilog=doctor_examples)(doctor)
