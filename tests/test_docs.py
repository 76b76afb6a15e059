"""Everything the documentation shows is run: Python, torchrun scripts, commands, links.

Python blocks of a page run in order and share their names. A ```text block right after
one is what it must print. `<!-- torchrun: N -->` before a block makes it a script that
torchrun runs on N processes. The section on each schedule is made from the registry; to
renew it after a change: `python -m tests.test_docs`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fxpipe.program import simulate
from fxpipe.program.generators import SCHEDULES
from fxpipe.schedules import Schedule, get_schedule_class
from fxpipe.viz import timeline_text
from tests.torchrun import on_ranks, torchrun

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md"))))
STARTS_PROCESSES = {"demo", "train", "doctor"}
_BLOCK = re.compile(
    r"(?:^<!-- torchrun: (?P<ranks>\d+) -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    ranks: int | None
    prints: str | None


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    blocks = []
    for match, after in zip(found, (*found, None)[1:], strict=True):
        is_output = (
            after is not None
            and after["language"] == "text"
            and not text[match.end() : after.start()].strip()
        )
        blocks.append(
            Block(
                page,
                text.count("\n", 0, match.start("text")) + 1,
                match["language"],
                match["text"],
                int(match["ranks"]) if match["ranks"] else None,
                after["text"] if after is not None and is_output else None,
            )
        )
    return blocks


EVERY = [block for page in PAGES for block in blocks_of(page)]
PYTHON_PAGES = [
    page
    for page in PAGES
    if any(b.page == page and b.language == "python" and not b.ranks for b in EVERY)
]
SCRIPTS = [block for block in EVERY if block.ranks]
COMMANDS = [
    (block.page, line)
    for block in EVERY
    if block.language == "bash"
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith("fxpipe ")
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, as that of a reader who has installed fxpipe."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ".")])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def module_for(page: str) -> Iterator[dict[str, object]]:
    name = "page_" + re.sub(r"\W", "_", page)
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield module.__dict__
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_blocks_run_and_print_what_they_show(page: str, folder: Path) -> None:
    with module_for(page) as names:
        for block in EVERY:
            if block.page != page or block.language != "python" or block.ranks:
                continue
            code = compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec")
            printed = io.StringIO()

            with contextlib.redirect_stdout(printed):
                exec(code, names)

            if block.prints is not None:
                assert printed.getvalue().rstrip() == block.prints.rstrip(), f"{page}:{block.line}"


@pytest.mark.timeout(500)
@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"{block.page}:{block.line}")
def test_scripts_run_under_torchrun(block: Block, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(block.text, encoding="utf-8")

    run = torchrun if block.page == "README.md" else on_ranks
    said = run(folder, block.ranks or 1, script)

    if block.prints is not None:
        assert said.rstrip() == block.prints.rstrip()


def run_command(line: str) -> None:
    from tests.cli.run import fxpipe

    fxpipe(*shlex.split(line, comments=True)[1:])


def starts_processes(line: str) -> bool:
    return shlex.split(line)[1] in STARTS_PROCESSES


@pytest.mark.parametrize(
    ("page", "line"), [command for command in COMMANDS if not starts_processes(command[1])]
)
def test_commands_succeed(page: str, line: str, folder: Path) -> None:
    program = folder / "mine.csv"  # what the pages call their reader's own schedule
    program.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")

    run_command(line)


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "line"), [command for command in COMMANDS if starts_processes(command[1])]
)
def test_commands_that_start_processes_succeed(page: str, line: str, folder: Path) -> None:
    run_command(line)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.S | re.M)
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'src="([^"]+)"', text)]
    files = [target.split("#")[0] for target in targets if "://" not in target]

    missing = [name for name in files if name and not (ROOT / page).parent.joinpath(name).exists()]

    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

    missing = [page for page in PAGES[1:] if page.removeprefix("docs/") not in listed]

    assert missing == []


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    reference = (tmp_path / "site" / "api" / "train" / "index.html").read_text(encoding="utf-8")
    assert "fxpipe.schedules.ScheduleZBVZeroBubble" in reference


SCHEDULE_PAGE = ROOT / "docs" / "schedules.md"
EACH = re.compile(r"(?<=<!-- each: begin -->\n).*?(?=<!-- each: end -->)", re.DOTALL)


def each_schedule() -> str:
    """A section per schedule: what and when, the formulas of the page, a timeline."""
    page = SCHEDULE_PAGE.read_text(encoding="utf-8")
    sections = []
    for info in SCHEDULES.values():
        per_rank = 1 if info.stages_per_rank[1] == 1 else 2
        timeline = timeline_text(simulate(info(3, 3 * per_rank, 6))).rstrip()
        row = re.search(rf"^\| `{info.name}`[^|]* \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
        formulas = f"Idle share {row[1]}; memory {row[2]}.\n\n" if row else ""
        picture = f"pictures/schedule-{info.name.lower()}.svg"
        assert (SCHEDULE_PAGE.parent / picture).is_file()
        sections.append(
            f"### {info.name}\n\n{class_text(info.name)} {info.description} "
            f"**When:** {info.when_to_use}\n\n{formulas}"
            f"![{info.name} on four ranks, eight microbatches]({picture})\n\n"
            f"```text\n{timeline}\n```\n"
        )
    return "\n".join(sections)


def class_text(name: str) -> str:
    if name == "ForwardOnly":  # has no class: every schedule's `eval` runs it
        return f"`{Schedule.__name__}.eval`."
    return f"`{get_schedule_class(name).__name__}`."


def test_section_on_each_schedule_is_up_to_date() -> None:
    found = EACH.search(SCHEDULE_PAGE.read_text(encoding="utf-8"))

    assert found is not None
    assert found[0] == each_schedule()


def renew() -> None:
    made = each_schedule()
    page = SCHEDULE_PAGE.read_text(encoding="utf-8")
    SCHEDULE_PAGE.write_text(EACH.sub(lambda _: made, page), encoding="utf-8")


if __name__ == "__main__":
    renew()
