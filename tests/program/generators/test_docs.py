"""The tables in docs/schedules.md are what the code gives.

To renew them after a change: `python -m tests.program.generators.test_docs`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpipe.program.costs import StageCosts
from fxpipe.program.generators import SCHEDULES, ScheduleInfo
from fxpipe.program.simulate import simulate

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
SIZES = ((4, 8), (8, 32))


def overview() -> str:
    rows = [
        "| name | also | placement | stages per rank | backward | what | when |",
        "|---" * 7 + "|",
    ]
    for info in SCHEDULES.values():
        least, most = info.stages_per_rank
        count = str(least) if least == most else f"{least} or more"
        backward = "split" if info.splits_backward else "whole"
        if info.name == "ForwardOnly":
            backward = "none"
        cells = (
            f"`{info.name}`",
            ", ".join(f"`{alias}`" for alias in info.aliases),
            info.placement_style,
            count,
            backward,
            info.description,
            info.when_to_use,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def figures() -> str:
    head = ["schedule", "v"]
    for p, m in SIZES:
        head += [f"p={p} m={m}: idle", "own span", "uneven", "memory"]
    rows = [f"| {' | '.join(head)} |", "|---|--:" + "|--:" * 4 * len(SIZES) + "|"]
    for info in SCHEDULES.values():
        for per_rank in documented_stages_per_rank(info):
            cells = [f"`{info.name}`", str(per_rank)]
            for p, m in SIZES:
                program = info(p, p * per_rank, m)
                even = simulate(program)
                costs = StageCosts.uniform(
                    program.placement, backward_input=1.4, backward_weight=0.6
                )
                uneven = simulate(program, costs)
                cells += [f"{100 * even.idle:.1f} %", f"{100 * even.idle_in_span:.1f} %"]
                cells += [f"{100 * uneven.idle:.1f} %", f"{max(even.peak_memory):g}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def documented_stages_per_rank(info: ScheduleInfo) -> tuple[int, ...]:
    least, most = info.stages_per_rank
    return (least,) if least == most else (2, 4)


TABLES = {"overview": overview, "figures": figures}


def split_page(page: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    before, rest = page.split(begin)
    table, after = rest.split(end)
    return before + begin, table, end + after


@pytest.mark.parametrize("name", TABLES)
def test_table_is_up_to_date(name):
    _, table, _ = split_page(PAGE.read_text(encoding="utf-8"), name)

    assert table == TABLES[name]()


def renew() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        before, _, after = split_page(page, name)
        page = before + make() + after
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    renew()
