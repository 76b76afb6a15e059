"""Private names of torch are in one module, each with its purpose, and are looked for on import."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxpipe import torch_names

ROOT = Path(__file__).parent.parent / "fxpipe"
HOME = ROOT / "torch_inside.py"
# Private names that are documented, of Python itself.
OF_PYTHON = {"_fields", "_getframe", "_make", "_replace", "_value_"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_made_in(tree: ast.Module) -> set[str]:
    """The attributes, methods and variables that a module defines itself."""
    made: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            made.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            made |= {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
    return made


def known_words() -> set[str]:
    """The private words of `PRIVATE`'s paths."""
    words = {word for path in torch_names.PRIVATE for word in re.split(r"[.:|]", path)}
    return {word.removesuffix("()") for word in words if is_private(word)}


@functools.cache
def names_of_ours() -> frozenset[str]:
    """The private names that some module of the package defines, and torch does not."""
    made = (names_made_in(ast.parse(path.read_text())) for path in ROOT.rglob("*.py"))
    return frozenset().union(*made) - known_words()


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """The private names of other packages that a source uses, with their lines."""
    tree = ast.parse(source)
    made = names_made_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in made | names_of_ours() | OF_PYTHON and ast.unparse(
                node.value
            ) not in ("self", "cls"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in modules if "._" in name)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fxpipe"):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if "._" in path and not path.startswith("__future__"):
                    yield node.lineno, path
        elif isinstance(node, ast.Constant) and node.value in known_words() - made:
            yield node.lineno, str(node.value)


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for path in ROOT.rglob("*.py")
        if path.name not in ("torch_inside.py", "torch_names.py")
    ),
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_no_other_module_uses_private_names_of_torch(path):
    found = [f"{path}:{line}: {name}" for line, name in private_uses(path.read_text())]

    assert found == [], "take these from fxpipe/torch_inside.py"


@pytest.mark.parametrize(
    "source",
    [
        "import torch.utils._pytree as pytree",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils import _pytree",
        "torch._C._autograd",
        "version = tensor._version",
        "held = vars(module)['_buffers']",
        "getattr(module, '_orig_mod', None)",
    ],
)
def test_the_search_finds_each_way_to_use_one(source):
    assert list(private_uses(source))


def test_every_private_name_has_a_purpose():
    source = HOME.read_text()

    used = {word for _, name in private_uses(source) for word in name.split(".")}
    named = {re.split(r"[.:|]", path)[-1] for path in torch_names.PRIVATE}

    assert {word for word in used if is_private(word)} <= known_words()
    assert [word for word in named if word not in source] == []
    assert all(torch_names.PRIVATE.values())


def test_this_torch_has_every_name():
    torch_names.check_names(torch_names.PRIVATE)


def test_torch_without_a_name_is_refused_in_a_sentence(monkeypatch):
    purposes = {"torch.Tensor._gone": "to see it go", "torch._nowhere.thing": "not there either"}
    monkeypatch.setattr(torch_names, "PRIVATE", purposes)

    with pytest.raises(ImportError, match=r"_gone \(to see it go\), torch\._nowhere") as e:
        torch_names.check_names(purposes)

    assert "\n" not in str(e.value)
    assert f"torch {torch.__version__}" in str(e.value)
    assert "2.10 to 2.15" in str(e.value)


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0a0+git1234", "3.0.0"])
def test_other_versions_of_torch_are_told_of(version):
    with pytest.warns(UserWarning, match=f"2.10 to 2.15, and this is torch {version[:3]}"):
        torch_names.warn_of_version(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.15.1"])
def test_supported_versions_are_not(version):
    torch_names.warn_of_version(version)


def test_pyproject_names_the_same_versions():
    text = (ROOT.parent / "pyproject.toml").read_text()

    (major, oldest), (_, newest) = torch_names.SUPPORTED
    assert f'"torch>={major}.{oldest},<{major}.{newest + 1}"' in text
