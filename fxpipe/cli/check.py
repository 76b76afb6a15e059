"""`fxpipe check`: run a split model beside the plain one, at length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fxpipe.cli.options import AsJson, RunnableModel, split_names, takes_model
from fxpipe.cli.output import err, examples, make_table, out, print_error, print_json, working
from fxpipe.errors import TraceError

if TYPE_CHECKING:
    from fxpipe.graph.check.report import CheckReport

__all__ = ["check", "check_examples"]

check_examples = examples(
    "fxpipe check gpt --stages 4",
    "fxpipe check 'hf:llama?num_hidden_layers=4&hidden_size=64' --stages 2 --seq 16",
    "fxpipe check unet --stages 2 --quick",
)


@takes_model
def check(
    model: RunnableModel,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the runs that pipeline() makes itself.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the stages with the plain model: values, sizes, modes, gradients, state.

    Exit code 0: equal, or refused with a clear error; 1: a difference.
    """
    from fxpipe.cli.named.models import resolve
    from fxpipe.cli.named.pipes import split_pipe
    from fxpipe.graph.check.report import Budget, CheckReport
    from fxpipe.graph.pipe import check_pipe

    named = resolve(model.request())
    args, kwargs = named.inputs(model.batch)
    module = named.build(meta=False)
    split = split_names(model.split)
    with working(f"splitting {model.model}"):
        pipe = split_pipe(module, (args, kwargs), num_stages=model.stages, split=split, check=False)
    done: list[str] = []
    fault: TraceError | None = None
    report = CheckReport()
    with err().status("") as status:

        def show(name: str) -> None:
            done.append(name)
            status.update(f"run {len(done)}: {name}")

        try:
            report = check_pipe(
                pipe, module, tuple(args), dict(kwargs),
                budget=Budget(float("inf"), float("inf")), at_length=not quick, progress=show,
            )  # fmt: skip
        except TraceError as error:
            fault = error
    rows = _rows(report, done, fault)
    if as_json:
        print_json(
            {
                "model": model.model,
                "equal": fault is None,
                "runs": [{"run": run, "result": result} for run, result in rows],
                "error": str(fault) if fault else None,
            }
        )
    else:
        title = f"{named.title}, {pipe.num_stages} stages, beside the plain model"
        out().print(make_table(title, ("run", "result"), rows))
    if fault is not None:
        print_error(fault)
        raise typer.Exit(1)


def _rows(report: CheckReport, done: list[str], fault: TraceError | None) -> list[tuple[str, str]]:
    if fault is not None:
        return [*((name, "done") for name in done[:-1]), (done[-1], "DIFFERS")]
    rows = [(name, "equal") for name in report.equal]
    for text in report.refused:
        name, _, reason = text.partition(": ")
        rows.append((name, f"refused: {reason}"))
    return rows + [(text.partition(" (")[0], f"not compared: {text}") for text in report.left_out]
