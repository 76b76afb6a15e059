"""Names of Python objects: what they find, and what is said when they find nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxpipe.cli.named.references import example_models, load_module, load_object, parse_reference
from fxpipe.errors import InputError


@pytest.fixture(autouse=True)
def _restore_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "place", "attribute", "options"),
    [
        ("models/gpt.py:build", "models/gpt.py", "build", {}),
        ("package.module:factory", "package.module", "factory", {}),
        ("models/gpt.py", "models/gpt.py", "", {}),
        ("C:/models/gpt.py", "C:/models/gpt.py", "", {}),
        (
            "a.py:f?layers=8&rate=0.5&on=true&off=False&none=null&word=relu&list=[1,2]",
            "a.py",
            "f",
            {
                "layers": 8,
                "rate": 0.5,
                "on": True,
                "off": False,
                "none": None,
                "word": "relu",
                "list": [1, 2],
            },
        ),
    ],
)
def test_parts_of_a_name(text: str, place: str, attribute: str, options: object) -> None:
    reference = parse_reference(text)

    assert (reference.place, reference.attribute) == (place, attribute)
    assert dict(reference.options) == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no Python object; write file.py:name"),
        (":build", "names no Python object"),
        ("models/gpt.py:", "names no Python object"),
        ("a.py:f?layers", "cannot read the options"),
        ("a.py:f?x=1&x=2", "gives the option 'x' twice"),
    ],
)
def test_malformed_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_reference(text)


def test_a_file_sees_the_files_beside_it(tmp_path: Path) -> None:
    _write(tmp_path, "beside.py", "VALUE = 5")
    path = _write(tmp_path, "mine.py", "import beside\ndef f(): return beside.VALUE")

    found = load_object(f"{path}:f", what="--data")

    assert found() == 5
    assert load_module(str(path)) is sys.modules[found.__module__]


def test_a_file_with_the_name_of_an_installed_module_is_itself(tmp_path: Path) -> None:
    path = _write(tmp_path, "json.py", "VALUE = 'mine'")

    assert load_object(f"{path}:VALUE", what="--data") == "mine"


def test_a_file_of_a_package_is_imported_as_a_part_of_it(tmp_path: Path) -> None:
    _write(tmp_path, "fxpipe_test_package/__init__.py", "")
    _write(tmp_path, "fxpipe_test_package/other.py", "VALUE = 7")
    path = _write(tmp_path, "fxpipe_test_package/one.py", "from .other import VALUE")

    assert load_object(f"{path}:VALUE", what="--data") == 7
    assert load_module("fxpipe_test_package.one").VALUE == 7


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.py", "def f(:", r"bad\.py is not valid Python: invalid syntax .*, line 1"),
        ("needs.py", "import no_such_package", "imports 'no_such_package', which is not installed"),
        ("mine.py", "def build(): ...", r"mine\.py has no 'buidl'; it has build"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = _write(tmp_path, name, text)

    with pytest.raises(InputError, match=message):
        load_object(f"{path}:buidl", what="--data")


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    _write(tmp_path, "model.py", "")

    with pytest.raises(InputError, match=r"there is no file .*modle\.py; in .* there is model\.py"):
        load_module(str(tmp_path / "modle.py"))
    with pytest.raises(InputError, match="there is no folder"):
        load_module(str(tmp_path / "nowhere" / "model.py"))
    with pytest.raises(InputError, match=r"there is no module 'no_such_package\.part'"):
        load_module("no_such_package.part")
    with pytest.raises(InputError, match="--data 'math' names a module; write math:name"):
        load_object("math", what="--data")


def test_an_error_of_the_file_itself_is_not_hidden(tmp_path: Path) -> None:
    path = _write(tmp_path, "fails.py", "raise ZeroDivisionError('mine')")

    with pytest.raises(ZeroDivisionError, match="mine"):
        load_module(str(path))


def test_example_models_are_found_by_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert {"gpt", "unet", "resnet"} <= set(example_models())
    assert hasattr(load_module("unet"), "build")


def test_a_module_of_ones_own_goes_before_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "vit.py", "build = 7")

    assert load_module("vit").build == 7
