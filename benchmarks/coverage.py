"""Measure which models of a collection split, and with the right gradients.

In:  a `Collection`: names of models and how to build each with example inputs.
Out: a printed report, a log of JSON lines, and a section of a Markdown page.

Work runs in child processes, a chunk of models each, so that a crash or a hang costs
one model and not the run. With `--log` each result is written down as it comes, and a run
that was interrupted goes on where it stopped, if the commit is still the same. Counted: how
many of those that run eagerly pass everything, only at the traced sizes, or fail; and the
reason for each that falls short.
"""

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Collection", "classified", "measure", "put_table"]

WHOLE = "pass everything"
UNCUT = "have no blocks to cut between (--split auto cuts them)"
SIZES = "pass, and refuse sizes or values other than those traced"
FAIL = "fail"
REFUSALS = ("PipeliningShapeError", "InputError")
CHECKS = ("eager", "trace", "state", "eval", "train", "values", "batch", "row", "length")
SIZE_CHECKS = {"values", "batch", "row", "length"}


@dataclass(frozen=True, slots=True)
class Collection:
    """Models to measure: `module` is the benchmark's own name, `case` builds one by name."""

    module: str
    names: Callable[[], Sequence[str]]
    case: Callable[[str, str], Any]
    packages: tuple[str, ...]


def measure(collection: Collection, description: str) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("types", nargs="*", help="models; default: all")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--split", choices=("blocks", "auto"), default="blocks")
    parser.add_argument("--variant", default="", help="labels, bare, cache or base")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per architecture")
    parser.add_argument("--log", type=Path, help="write each result here; go on from it")
    parser.add_argument("--page", type=Path, help="put the table into this Markdown page")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(collection, options)
        return
    rows = _measure(collection, options)
    _print(rows, options.stages)
    if options.page is not None:
        put_table(options.page, collection, rows, options.stages)


def _commit() -> str:
    """The commit of the code that is measured; a tree with changes is no commit."""
    root = Path(__file__).parent
    command = ["git", "describe", "--always", "--exclude=*", "--dirty"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def _logged(options: argparse.Namespace) -> "Rows":
    """Results of this commit that an interrupted run has left in the log."""
    if options.log is None or not options.log.exists():
        return {}
    lines = map(json.loads, options.log.read_text().splitlines())
    wanted = {str(count) for count in options.stages}
    return {
        line["model"]: line["results"]
        for line in lines
        if line["commit"] == _commit() and wanted <= line["results"].keys()
    }


def _log(options: argparse.Namespace, model: str, results: dict[str, dict[str, str]]) -> None:
    line = json.dumps({"model": model, "commit": _commit(), "results": results})
    print(line, file=sys.stderr, flush=True)
    if options.log is not None:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        with options.log.open("a") as log:
            log.write(line + "\n")


def _work(collection: Collection, options: argparse.Namespace) -> None:
    """In a child process: one JSON line before and one after each architecture."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from tests.graph.hf.check import check

    torch.set_num_threads(1)
    for model_type in options.types:
        print(json.dumps({"start": model_type}), flush=True)
        results = {}
        for count in options.stages:
            try:
                one = collection.case(model_type, options.variant)
            except KeyError as error:
                results[str(count)] = {"eager": f"no such class: {error}"}
                continue
            results[str(count)] = check(one, count, split=options.split).results
        print(json.dumps({"done": model_type, "results": results}), flush=True)


Rows = dict[str, dict[str, dict[str, str]]]


def _measure(collection: Collection, options: argparse.Namespace) -> Rows:
    types = options.types or list(collection.names())
    rows = _logged(options)
    left = [name for name in types if name not in rows]
    chunks: queue.Queue[list[str]] = queue.Queue()
    for start in range(0, len(left), options.chunk):
        chunks.put(left[start : start + options.chunk])

    def drain() -> None:
        while True:
            try:
                chunk = chunks.get_nowait()
            except queue.Empty:
                return
            while chunk:
                chunk = _run_chunk(collection.module, chunk, options, rows)
            print(f"{len(rows)} of {len(types)}", file=sys.stderr)

    threads = [threading.Thread(target=drain) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: rows[name] for name in types if name in rows}


def _run_chunk(module: str, chunk: list[str], options: argparse.Namespace, rows: Rows) -> list[str]:
    """Run one child; return what it did not get to."""
    command = [sys.executable, "-m", module, "--worker", "--split"]
    command += [options.split, f"--variant={options.variant}", *chunk]
    command += ["--stages", *map(str, options.stages)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    assert child.stdout is not None and child.stderr is not None
    readers = (
        threading.Thread(target=_feed, args=(child.stdout, lines), daemon=True),
        threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True),
    )
    for reader in readers:
        reader.start()
    left, current = list(chunk), chunk[0]
    reason = ""
    while True:
        try:
            line = lines.get(timeout=options.timeout)
        except queue.Empty:
            reason = f"no result after {options.timeout:.0f} s"
            child.kill()
            break
        if line is None:
            break
        if not line.startswith("{"):
            continue
        message = json.loads(line)
        current = message.get("start", current)
        if "done" in message:
            rows[message["done"]] = message["results"]
            left.remove(message["done"])
            _log(options, message["done"], message["results"])
    child.wait()
    if left and (reason or child.returncode):
        last = " | ".join(line.strip() for line in errors[-3:])
        fault = reason or f"the process ended with {child.returncode}: {last[:300]}"
        rows[current] = {str(count): {"eager": fault} for count in options.stages}
        _log(options, current, rows[current])
        left.remove(current)
    return left if reason or child.returncode else []


def _feed(stream: Any, lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def classified(runs: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Sort architectures that run eagerly by how far they get."""
    found: dict[str, list[str]] = {WHOLE: [], UNCUT: [], SIZES: [], FAIL: []}
    for name, row in runs.items():
        failed = {check: result for check, result in row.items() if _is_failure(result)}
        refused = all(result.startswith(REFUSALS) for result in failed.values())
        if row.get("trace", "").startswith("skip"):
            found[UNCUT].append(name)
        elif not failed:
            found[WHOLE].append(name)
        elif refused and failed.keys() <= SIZE_CHECKS:
            found[SIZES].append(name)
        else:
            found[FAIL].append(name)
    return found


def _is_failure(result: str) -> bool:
    return result != "ok" and not result.startswith("skip")


def _print(rows: Rows, stages: list[int]) -> None:
    for count in map(str, stages):
        print(f"\n{count} stages")
        table = {name: row[count] for name, row in rows.items()}
        runs = {name: row for name, row in table.items() if row.get("eager") == "ok"}
        print(f"  {len(runs)} of {len(table)} run eagerly")
        for title, names in classified(runs).items():
            shown = "" if title == WHOLE else ": " + ", ".join(names)
            print(f"  {len(names):4} {title}{shown if names else ''}")
        for name in CHECKS[1:]:
            results = [row[name] for row in runs.values() if name in row]
            applicable = [result for result in results if not result.startswith("skip")]
            print(f"  {name:8} {sum(r == 'ok' for r in applicable):4} of {len(applicable)}")
        print("  failures")
        for name, row in runs.items():
            for label, result in row.items():
                if _is_failure(result):
                    print(f"    {name:28} {label:7} {result[:220]}")
        print("  not run eagerly")
        for name, row in table.items():
            if row.get("eager") != "ok":
                print(f"    {name:28} {row.get('eager', '')[:160]}")


def put_table(page: Path, collection: Collection, rows: Rows, stages: list[int]) -> None:
    """Write the figures between the marks that bear the collection's name."""
    start, end = f"<!-- {collection.module} -->", "<!-- end -->"
    text = page.read_text()
    if start not in text:
        raise SystemExit(f"{page} has no mark {start}")
    table = "\n".join(_table(collection, rows, stages))
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    page.write_text(pattern.sub(lambda _: f"{start}\n{table}\n{end}", text, count=1))


def _table(collection: Collection, rows: Rows, stages: list[int]) -> list[str]:
    from importlib.metadata import version

    used = ", ".join(f"{name} {version(name)}" for name in ("torch", *collection.packages))
    found = {}
    for count in stages:
        of_count = {name: row[str(count)] for name, row in rows.items() if str(count) in row}
        runs = {name: row for name, row in of_count.items() if row.get("eager") == "ok"}
        found[count] = (len(of_count), len(runs), classified(runs), runs)
    lines = [
        f"One run of `python -m {collection.module}` at commit {_commit()}: {used}.",
        "",
        "| | " + " | ".join(f"{count} stages" for count in stages) + " |",
        "|---|" + "---|" * len(stages),
        "| models | " + " | ".join(str(found[count][0]) for count in stages) + " |",
        "| the plain model runs | " + " | ".join(str(found[count][1]) for count in stages) + " |",
    ]
    for title in (WHOLE, SIZES, UNCUT, FAIL):
        counts = " | ".join(str(len(found[count][2][title])) for count in stages)
        lines.append(f"| {title} | {counts} |")
    lines += ["", "| falls short | stages | check | reason |", "|---|---|---|---|"]
    for count in stages:
        for name, row in found[count][3].items():
            for label, result in row.items():
                if _is_failure(result):
                    reason = result.partition(": ")[2][:110].replace("|", "/")
                    lines.append(f"| {name} | {count} | {label} | {_without_paths(reason)} |")
    return lines


def _without_paths(reason: str) -> str:
    return re.sub(r"/\S*/site-packages/", "", reason)
