"""Run the cases: python -m benchmarks.trust [--package fxpipe|torch] [--only WORDS] [--limit S]"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.trust.cases import CASES, Case, WrongResultError, package
from fxpipe.text import aligned

OUTCOMES = {
    "passed": "passed",
    "wrong": "wrong results, no error",
    "refused": "an error where results were due",
    "silent": "no error where one was due",
    "hung": "did not end within the limit",
    "crashed": "a process died",
}


def run_rank(name: str, case: Case, rank: int, folder: str) -> None:
    """One process: writes its outcome into the folder."""
    torch.set_num_threads(1)

    def note(text: str) -> None:
        part = Path(folder, f"part-{rank}")
        part.write_text(text)
        part.rename(Path(folder, f"rank-{rank}"))

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        os.dup2(nowhere.fileno(), 2)
        store = dist.FileStore(f"{folder}/store", case.num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.num_ranks)
        try:
            case.run(package(name))
            note("done")
        except WrongResultError as error:
            note(f"wrong {error}")
        except BaseException as error:
            lines = traceback.format_exception_only(error)
            note(f"raised {lines[-1].strip()[:300]}")
            os._exit(0)  # as a script would end
        time.sleep(3600)  # others may still read from it; the parent ends it


def outcome_of(name: str, case: Case, limit: float) -> tuple[str, str]:
    """How the case ended, and the first message."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks: Sequence[Any] = [
            context.Process(target=run_rank, args=(name, case, rank, folder))
            for rank in range(case.num_ranks)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + limit
        hung = list(ranks)
        while hung and time.monotonic() < end:
            time.sleep(0.02)
            hung = [
                process
                for rank, process in enumerate(ranks)
                if process.is_alive() and not Path(folder, f"rank-{rank}").exists()
            ]
        for process in ranks:
            process.kill()
            process.join()
        notes = {path.name: path.read_text() for path in Path(folder).glob("rank-*")}
    texts = sorted(notes.values())
    first = next((text for text in texts if text != "done"), "")
    killed = case.name.startswith("a rank is killed")
    if hung:
        return "hung", first
    if len(notes) < case.num_ranks - killed:
        return "crashed", first
    if case.must_raise:
        is_right = all(text.startswith("raised") for text in texts)
        return ("passed" if is_right else "silent"), first
    if any(text.startswith("raised") for text in texts):
        return "refused", next(text for text in texts if text.startswith("raised"))
    return ("wrong" if first else "passed"), first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=("fxpipe", "torch"), action="append")
    parser.add_argument("--only", default="", help="cases whose name has these words")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a case")
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    packages = given.package or ["fxpipe", "torch"]
    for name in packages:
        package(name)  # imported once, before processes are forked
    cases = [case for case in CASES if given.only in case.name]
    table = [["case", *packages]]
    counts: dict[str, Counter[str]] = {name: Counter() for name in packages}
    for case in cases:
        row = [case.name]
        for name in packages:
            outcome, message = outcome_of(name, case, given.limit)
            counts[name][outcome] += 1
            row.append(outcome)
            if outcome != "passed":
                print(f"{name}, {case.name}: {outcome}: {message}", file=sys.stderr, flush=True)
        table.append(row)
    print("\n".join(aligned(table, left=(0, 1, 2), rule=True)))
    print()
    summary = [[f"of {len(cases)} cases", *packages]]
    for key, words in OUTCOMES.items():
        summary.append([words, *(str(counts[name][key]) for name in packages)])
    print("\n".join(aligned(summary, rule=True)))
    return int("fxpipe" in counts and counts["fxpipe"]["passed"] < len(cases))


if __name__ == "__main__":
    sys.exit(main())
