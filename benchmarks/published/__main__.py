"""Predicted against published: every row, worst first.

    python -m benchmarks.published [--docs] [--fit DEVICE] [--source NAME] [--model NAME]

Prints, for rows that constants were fitted to and for those they were not, the error of the step
time and of the memory, the median, how many are within 15 %, and how often the quicker of two
options of one model and machine is told right where they differ by more than 5 %. `--docs` puts
the same text into docs/planner.md. A preset's `error` is the median of its kind of device's rows
that are held out and have no experts; a test compares it with the docs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.rows import DEVICES, Predictor, Row, read_rows
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.search.option import Option

__all__ = ["main"]


@dataclass(frozen=True)
class Result:
    row: Row
    option: Option | None

    @property
    def error(self) -> float:
        """Predicted over published time of a step, less one."""
        return math.inf if self.option is None else self.option.step_time / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        if self.row.memory is None or self.option is None:
            return None
        # Published figures are what the allocator gave out, without driver and channels.
        allocated = max(m.total - m.system for m in self.option.prediction.memory)
        return allocated / self.row.memory - 1


def predict_all(rows: Sequence[Row], predictor: Predictor) -> list[Result]:
    found = []
    for done, row in enumerate(rows):
        found.append(Result(row, predictor.predict(row, DEVICES[row.device])))
        if sys.stderr.isatty():
            print(f"\r{done + 1}/{len(rows)}", end="", file=sys.stderr)
    return found


def table(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in sorted(results, key=lambda r: -abs(r.error)):
        row, memory = result.row, result.memory_error
        step = "-" if result.option is None else f"{result.option.step_time:.3g} s"
        lines.append(
            f"{row.source} {row.device:10} {row.title:62} {'test' if row.is_test else 'fit':4} "
            f"{row.seconds:>6.3g} s {step:>8} {result.error:>+7.1%} "
            f"{'' if memory is None else format(memory, '+.0%'):>5}"
        )
    return [line.rstrip() for line in lines]


def report(results: Sequence[Result]) -> list[str]:
    """Every row, worst first, then what it comes to."""
    lines = [*table(results), ""]
    parts = [("fitted", [r for r in results if not r.row.is_test])]
    parts.append(("held out", [r for r in results if r.row.is_test]))
    for name, has_experts in (("dense", False), ("with experts", True)):
        held = [r for r in results if r.row.is_test and r.row.has_experts is has_experts]
        parts.append((f"held out, {name}", held))
    for kind in dict.fromkeys(_kind(r.row) for r in results):
        held = [r for r in results if r.row.is_test and _kind(r.row) == kind]
        parts.append((f"held out, {kind}", held))
    return lines + [f"{name}: {summary(part)}" for name, part in parts if part]


def _kind(row: Row) -> str:
    """The presets that share their constants."""
    return {"A100": "A100", "H100-500W": "Hopper", "H100": "Hopper", "H200": "Hopper"}.get(
        row.device, "Blackwell"
    )


def write_docs(lines: Sequence[str], path: Path) -> None:
    """Put the lines between the marks in a page."""
    text = path.read_text(encoding="utf-8")
    start, end = "<!-- published: begin -->", "<!-- published: end -->"
    before, rest = text.split(start)
    _, after = rest.split(end)
    block = "\n".join(["", "```text", *lines, "```", ""])
    path.write_text(before + start + block + end + after, encoding="utf-8")


def summary(results: Sequence[Result]) -> str:
    errors = [abs(r.error) for r in results]
    text = f"{len(errors)} rows: median {statistics.median(errors):.1%}, "
    text += f"{sum(e <= 0.15 for e in errors) / len(errors):.0%} within 15%"
    right, pairs = ranking(results)
    if pairs:
        text += f"; ranking right in {right} of {pairs} pairs"
    memory = [r.memory_error for r in results if r.memory_error is not None]
    if memory:
        low = min(memory)
        text += f"; memory median {statistics.median(map(abs, memory)):.1%} off, lowest {low:+.1%}"
    return text


def ranking(results: Sequence[Result]) -> tuple[int, int]:
    """Pairs of one source, model, machine and batch that are told apart rightly."""
    right = pairs = 0
    for a, b in itertools.combinations(results, 2):
        keys = [
            (r.row.source, r.row.model, r.row.gpus, r.row.batch, r.row.sequence) for r in (a, b)
        ]
        if keys[0] != keys[1] or a.option is None or b.option is None:
            continue
        if abs(math.log(a.row.seconds / b.row.seconds)) < math.log(1.05):
            continue
        pairs += 1
        is_quicker = a.option.step_time < b.option.step_time
        right += is_quicker == (a.row.seconds < b.row.seconds)
    return right, pairs


_GRIDS = {
    "matmul": (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    "attention": (0.3, 0.4, 0.5, 0.6, 0.7),
    "memory": (0.6, 0.7, 0.8, 0.9),
    "half_intensity": (0.0, 20.0, 40.0, 80.0),
    "intra_share": (0.4, 0.55, 0.7, 0.85),
    "inter_share": (0.4, 0.6, 0.8),
    "jitter": (0.0, 0.03, 0.06),
}


def fit(rows: Sequence[Row], predictor: Predictor, start: Hardware, seconds: float) -> Hardware:
    """Change one constant at a time while the mean of squared log errors falls."""
    deadline = time.monotonic() + seconds

    def loss(hardware: Hardware) -> float:
        found = [predictor.predict(row, hardware) for row in rows]
        return statistics.fmean(
            math.log(option.step_time / row.seconds) ** 2
            for option, row in zip(found, rows, strict=True)
            if option is not None
        )

    best, least = start, loss(start)
    for name, values in itertools.chain(_GRIDS.items(), _GRIDS.items()):
        for value in values:
            if time.monotonic() > deadline:
                return best
            if name in best.efficiency:
                tried = replace(best, efficiency={**best.efficiency, name: value})
            else:
                tried = replace(best, **{name: value})
            found = loss(tried)
            if found < least * 0.999:
                best, least = tried, found
                print(f"{name} = {value}: {math.sqrt(least):.2%}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", help="fit the constants of a device to its fit rows")
    parser.add_argument("--seconds", type=float, default=600, help="how long to fit")
    parser.add_argument("--source", help="only rows whose source starts so")
    parser.add_argument("--model", help="only rows whose model starts so")
    parser.add_argument("--device", help="only rows of this device")
    parser.add_argument("--docs", action="store_true", help="write docs/planner.md")
    options = parser.parse_args()
    rows = [row for row in read_rows() if row.source.startswith(options.source or "")]
    rows = [row for row in rows if row.model.startswith(options.model or "")]
    if options.device:
        rows = [row for row in rows if row.device == options.device]
    predictor = Predictor()
    if options.fit:
        own = [row for row in rows if row.device == options.fit and not row.is_test]
        print(fit(own, predictor, DEVICES[options.fit], options.seconds).to_json())
        return
    lines = report(predict_all(rows, predictor))
    print("\n".join(lines))
    if options.docs:
        write_docs(lines, Path(__file__).parents[2] / "docs" / "planner.md")


if __name__ == "__main__":
    main()
