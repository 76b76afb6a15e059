"""FXPIPE_LOG: what is printed, how it looks, and what is refused."""

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fxpipe import logs
from fxpipe.errors import InputError


@pytest.fixture(autouse=True)
def _silence_again() -> Iterator[None]:
    yield
    logs.configure("")


def _printed(text: str) -> list[str]:
    stream = io.StringIO()
    logs.configure(text, stream=stream)
    logging.getLogger("fxpipe.runtime.session").debug("shapes %s", (2, 3))
    logging.getLogger("fxpipe.graph.capture").info("captured")
    logging.getLogger("fxpipe.graph.capture").warning("slow")
    return [re.sub(r"^\d\d:\d\d:\d\d\.\d{3} ", "", line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("debug", ["debug runtime.session", "info graph.capture", "warning graph.capture"]),
        ("INFO", ["info graph.capture", "warning graph.capture"]),
        ("error", []),
        ("off", []),
        ("runtime=debug", ["debug runtime.session", "warning graph.capture"]),
        ("off,fxpipe.graph=warning", ["warning graph.capture"]),
        ("info, graph.capture=error", []),
    ],
)
def test_levels_choose_what_is_printed(
    text: str, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)

    assert [line.split(":")[0] for line in _printed(text)] == printed


def test_lines_say_the_rank_and_indent_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    stream = io.StringIO()
    logs.configure("info", stream=stream)

    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("fxpipe.stage").exception("two\nlines")

    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} rank 3 error stage: two", lines[0])
    assert lines[1] == "    lines"
    assert lines[-1] == "    ValueError: why"


def test_the_latest_call_counts() -> None:
    first = io.StringIO()
    logs.configure("debug,runtime=debug", stream=first)

    lines = _printed("warning")

    assert first.getvalue() == ""
    assert lines == ["warning graph.capture: slow"]


def test_records_are_printed_once_beside_a_handler_of_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # caplog's handler is on the root logger, as one of basicConfig would be.
    lines = _printed("warning")

    assert len(lines) == 1
    assert caplog.records == []


def test_without_levels_records_go_where_the_program_sends_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logs.configure("")

    logging.getLogger("fxpipe.stage").warning("for the program")

    assert [record.message for record in caplog.records] == ["for the program"]


def test_every_word_that_is_no_level_is_named() -> None:
    with pytest.raises(
        InputError, match=r"'debgu' \(did you mean debug\?\), 'runtime=loud'; write"
    ):
        logs.configure("debgu,runtime=loud")


def test_a_bad_variable_is_a_warning_for_those_who_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "noisy")

    with pytest.warns(UserWarning, match="cannot read FXPIPE_LOG='noisy'"):
        logs.configure_from_environment()


def test_quiet_by_default_even_for_warnings() -> None:
    # Python prints warnings of loggers that have no handler at all. Without torch, for speed.
    code = (
        "import importlib.util, logging, sys, types\n"
        "places = importlib.util.find_spec('fxpipe').submodule_search_locations\n"
        "sys.modules['fxpipe'] = package = types.ModuleType('fxpipe')\n"
        "package.__path__ = places\n"
        "from fxpipe import logs\n"
        "logs.configure_from_environment()\n"
        "logging.getLogger('fxpipe.stage').warning('unheard')\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
