"""Write values as JSON and read them again: nothing that a peer sends is ever executed.

Known are None, bools, numbers, strings, bytes, lists, tuples, dicts, sets, dtypes, devices,
sizes, small tensors, members of enumerations, and containers that torch's pytree knows (named
tuples and registered classes). A class is looked up among those that this process has imported
already, and only built if it is one of these kinds.
"""

from __future__ import annotations

import base64
import enum
import json
import sys
from typing import Any

import torch

from fxpipe.errors import InputError
from fxpipe.torch_inside import pytree, pytree_kind

__all__ = ["dumps", "loads"]


def dumps(value: Any) -> bytes:
    """The value as JSON.

    Raises:
        InputError: something in it is not plain data; says what.
    """
    return json.dumps(_encode(value), separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """The value that `dumps` wrote."""
    return _decode(json.loads(data))


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["f", value.hex() if value == value and abs(value) != float("inf") else str(value)]
    if kind in _MANY:
        return [_MANY[kind], *map(_encode, value)]
    if kind is dict:
        return ["d", *[[_encode(k), _encode(v)] for k, v in value.items()]]
    if kind in (torch.dtype, torch.device):
        return ["t" if kind is torch.dtype else "v", str(value).removeprefix("torch.")]
    if kind is complex:
        return ["j", _encode(value.real), _encode(value.imag)]
    if kind is bytes:
        return ["b", base64.b64encode(value).decode()]
    if value is ...:
        return ["h"]
    if kind is type and value in _BUILTINS.values():
        return ["k", value.__name__]
    if isinstance(value, enum.Enum):
        return ["e", _name(kind), value.name]
    if kind is torch.Tensor:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return ["n", _encode(value.dtype), list(value.shape), _encode(bytes(flat.tolist()))]
    node = pytree_kind(value)
    if node in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[node].flatten_fn(value)
        if isinstance(value, tuple):
            return ["u", _name(kind), *map(_encode, children)]
        context = context if not isinstance(context, type) else None
        return ["p", _name(kind), _encode(context), *map(_encode, children)]
    raise InputError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be told to another rank; "
        "between ranks go tensors, None, numbers, strings and containers of these"
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    mark, *rest = value
    if mark in _MADE:
        return _MADE[mark](_decode(item) for item in rest)
    if mark == "d":
        return {_decode(k): _decode(v) for k, v in rest}
    if mark == "f":
        return float.fromhex(rest[0]) if rest[0] not in ("nan", "inf", "-inf") else float(rest[0])
    if mark == "t":
        found = getattr(torch, rest[0])
        assert isinstance(found, torch.dtype)
        return found
    if mark == "v":
        return torch.device(rest[0])
    if mark == "j":
        return complex(*map(_decode, rest))
    if mark == "b":
        return base64.b64decode(rest[0])
    if mark == "n":
        flat = torch.frombuffer(bytearray(_decode(rest[2])) or bytearray(1), dtype=torch.uint8)
        dtype = _decode(rest[0])
        return (
            flat.view(dtype).reshape(rest[1]) if rest[2][1] else torch.empty(rest[1], dtype=dtype)
        )
    if mark == "h":
        return ...
    if mark == "k":
        return _BUILTINS[rest[0]]
    found = _class(rest[0])
    if mark == "e" and issubclass(found, enum.Enum):
        return found[rest[1]]
    if mark == "u" and issubclass(found, tuple) and hasattr(found, "_make"):
        return found._make(_decode(item) for item in rest[1:])
    if mark == "p" and found in pytree.SUPPORTED_NODES:
        children = [_decode(item) for item in rest[2:]]
        return pytree.SUPPORTED_NODES[found].unflatten_fn(children, _decode(rest[1]))
    raise InputError(f"a rank sent a value of the class {rest[0]}, which is no container here")


_MANY: dict[type, str] = {list: "l", tuple: "c", set: "s", frozenset: "z", torch.Size: "i"}
_MADE: dict[str, Any] = {mark: kind for kind, mark in _MANY.items()}


_BUILTINS = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise InputError(f"a rank sent a value of the class {name}, which is not known here")
    return found
