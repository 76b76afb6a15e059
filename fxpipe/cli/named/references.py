"""Find Python objects by the names that people type.

    mine/model.py:build                a file
    package.module:factory             a module
    gpt                                an example model that comes with fxpipe
    mine/model.py:build?layers=8       with options, passed as keyword arguments

A file inside a package is imported as a module of it; any other file is run as by
`python file.py`, with its own folder first among the places to import from.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from urllib.parse import parse_qsl

import fxpipe.example_models
from fxpipe.errors import InputError

__all__ = [
    "Reference",
    "example_models",
    "find_attribute",
    "load_module",
    "load_object",
    "parse_options",
    "parse_reference",
]

_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class Reference:
    """`place:attribute?options`; `attribute` is empty if none was given."""

    place: str
    attribute: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.place}:{self.attribute}" if self.attribute else self.place


def parse_reference(text: str) -> Reference:
    """Take a name apart.

    Raises:
        InputError: there is no place, or the options cannot be read.
    """
    path, question, query = text.partition("?")
    place, colon, attribute = path.rpartition(":")
    # A file of the wrong drive is better than a name cut at the colon of C:\models\gpt.py.
    if not colon or "/" in attribute or "\\" in attribute:
        place, attribute = path, ""
    if not place or (colon and not attribute and place != path):
        raise InputError(
            f"{text!r} names no Python object; write file.py:name or package.module:name"
        )
    return Reference(place, attribute, parse_options(query, text) if question else _NONE)


_NONE: Mapping[str, Any] = MappingProxyType({})


def parse_options(query: str, text: str) -> Mapping[str, Any]:
    """The options of `name=value&name=value`; numbers, true, false, null, lists, or words.

    Raises:
        InputError: the query is malformed or names an option twice.
    """
    options: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise InputError(
            f"cannot read the options of {text!r}: {error}; write ?name=value&name=value"
        ) from None
    for name, value in pairs:
        if name in options:
            raise InputError(f"{text!r} gives the option {name!r} twice")
        options[name] = _value(value)
    return MappingProxyType(options)


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def load_object(text: str, *, what: str) -> Any:
    """The object of a name such as `data.py:batches`; `what` says in errors what it is for.

    Raises:
        InputError: the name, the module or the attribute is not there.
    """
    reference = parse_reference(text)
    if not reference.attribute:
        raise InputError(f"{what} {text!r} names a module; write {text}:name")
    return find_attribute(load_module(reference.place), reference)


def find_attribute(module: ModuleType, reference: Reference) -> Any:
    """The attribute that a reference names, dots allowed."""
    found: Any = module
    for part in reference.attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")]
            close = difflib.get_close_matches(part, names, n=3, cutoff=0.5)
            callables = [name for name in names if callable(getattr(found, name))]
            hint = ", ".join(close or callables[:8]) or "nothing public"
            raise InputError(f"{reference.place} has no {part!r}; it has {hint}")
        found = getattr(found, part)
    return found


def load_module(place: str) -> ModuleType:
    """Import a file or a module.

    Raises:
        InputError: it is not there, needs something that is not installed, or is not Python.
    """
    try:
        if place.endswith(".py") or "/" in place or "\\" in place:
            return _load_file(Path(place))
        return _load_dotted(place)
    except SyntaxError as error:
        raise InputError(
            f"{place} is not valid Python: {error.msg} ({error.filename}, line {error.lineno})"
        ) from error


def example_models() -> list[str]:
    """The example models that come with fxpipe."""
    return sorted(found.name for found in pkgutil.iter_modules(fxpipe.example_models.__path__))


def _load_dotted(place: str) -> ModuleType:
    _import_first(Path.cwd())
    examples = example_models()
    # A module of the user's own goes before an example of the same name.
    if place in examples and importlib.util.find_spec(place) is None:
        return importlib.import_module(f"fxpipe.example_models.{place}")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place == missing or place.startswith(f"{missing}."):
            from fxpipe.planner.known_models import KNOWN

            close = difflib.get_close_matches(place.lower(), [*KNOWN, *examples], cutoff=0.6)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise InputError(
                f"there is no module {place!r} in this folder or among the installed packages; "
                f"{hint}for a file write its path with .py; example models: {', '.join(examples)}"
            ) from None
        raise _needs(place, missing) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}{_closest_file(path)}")
    path = path.resolve()
    folder, names = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    _import_first(folder)
    dotted = ".".join(names if path.stem != "__init__" else names[:-1])
    try:
        if len(names) > 1:
            module = importlib.import_module(dotted)
            if _file_of(module) != path:
                raise InputError(
                    f"{path} is the module {dotted}, but that name belongs to {_file_of(module)}; "
                    "rename the package or give its dotted name"
                )
            return module
        return _run_file(path)
    except ModuleNotFoundError as error:
        raise _needs(path.name, error.name or "") from error


def _run_file(path: Path) -> ModuleType:
    """Import a file that belongs to no package, under a name that nobody else has."""
    name = f"_fxpipe_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


def _needs(place: str, missing: str) -> InputError:
    return InputError(f"{place} imports {missing!r}, which is not installed here")


def _closest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    names = [found.name for found in path.parent.iterdir() if found.suffix == path.suffix]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; in {path.parent} there is {', '.join(close)}" if close else ""
