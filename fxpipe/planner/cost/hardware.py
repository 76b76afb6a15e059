"""What a machine can do: arithmetic, memory and links, as data.

In:  a preset name ("H100"), a JSON or TOML text, or plain numbers.
Out: a `Hardware`, which prices an operation (`time`) and a transfer (`link`).

An operation takes the longer of its arithmetic and its memory traffic (the
roofline), each at a share of the peak that its class reaches, plus a fixed
overhead. Products of few FLOPs per byte reach less: half of the share at
`half_intensity`. Figures are per rank, in FLOP/s, bytes, bytes/s and seconds.
The presets are in `presets`; to predict a machine at hand, measure it
(`fxpipe.planner.search.profile`).
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from fxpipe.errors import PlanError
from fxpipe.program import Link

__all__ = [
    "OP_CLASSES",
    "Hardware",
    "OpClass",
    "get_hardware",
    "get_link",
    "load_hardware",
]

T = TypeVar("T")

OpClass = Literal["matmul", "attention", "convolution", "memory"]
OP_CLASSES: tuple[OpClass, ...] = ("matmul", "attention", "convolution", "memory")

# Shares of the peak that large operations commonly reach; "memory" is a share of the
# bandwidth and covers every operation that moves more than it computes.
_NOT_NEGATIVE = (
    "overhead", "launch", "half_intensity", "jitter", "context", "channels", "reserve",
    "holes", "error",
)  # fmt: skip
_USUAL = MappingProxyType({"matmul": 0.7, "attention": 0.5, "convolution": 0.5, "memory": 0.8})


@dataclass(frozen=True)
class Hardware:
    """One rank's device, and how ranks are linked.

    `flops` holds peak FLOP/s by dtype name; a dtype that is not listed runs at the rate of
    the next wider one that is. Ranks `0 .. ranks_per_node - 1` share the first node, and so
    on: ranks of a node use `intra`, others `inter`. `overhead` is the time that any
    operation takes at least, `launch` the time in which the host starts one kernel of many that
    follow each other; it shows where kernels are shorter.

    Collectives reach `intra_share` and `inter_share` of a link. `jitter` is the share of a
    step that nothing here explains (launches, stragglers, the data loader). `context` is
    what driver and libraries hold, `channels` what the buffers of one group of ranks take,
    `reserve` the share of everything held that fragmentation wastes, `holes` what it wastes
    besides for each byte of gradients that are made anew in each step. `host` is the way to host
    memory at the rate that copies reach, None if there is none to offload to. `error` is the median
    error of predicted steps on published rows that nothing was fitted to, 0 if unknown.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: float
    intra: Link
    inter: Link
    ranks_per_node: int = 8
    efficiency: Mapping[str, float] = field(default_factory=lambda: dict(_USUAL))
    overhead: float = 0.0
    launch: float = 0.0
    overlaps_transfers: bool = True
    half_intensity: float = 0.0
    intra_share: float = 1.0
    inter_share: float = 1.0
    jitter: float = 0.0
    context: float = 0.0
    channels: float = 0.0
    reserve: float = 0.0
    holes: float = 0.0
    fuses_attention: bool = True
    error: float = 0.0
    host: Link | None = None

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value!r}; it must be a number above 0"
            for name, value in (
                ("memory_bandwidth", self.memory_bandwidth),
                ("memory", self.memory),
                *((f"flops[{key!r}]", value) for key, value in self.flops.items()),
            )
            if not _is_number(value) or not value > 0
        ]
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                faults.append(f"{name} is {value!r}; it must be at least 0")
        if type(self.ranks_per_node) is not int or self.ranks_per_node < 1:
            faults.append(f"ranks_per_node is {self.ranks_per_node!r}; it must be a whole number")
        faults += [
            f"{name} is {getattr(self, name)!r}; it must be true or false"
            for name in ("overlaps_transfers", "fuses_attention")
            if not isinstance(getattr(self, name), bool)
        ]
        for name in ("intra_share", "inter_share"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= 1:
                faults.append(f"{name} is {value!r}; it is a share of the link")
        if not self.flops:
            faults.append("flops is empty; it needs at least one dtype, such as 'float32'")
        faults += [
            f"flops has {key!r}; known dtypes are {', '.join(_WIDER)}"
            for key in self.flops
            if key not in _WIDER
        ]
        for key, value in self.efficiency.items():
            if key not in OP_CLASSES:
                faults.append(f"efficiency has {key!r}; the classes are {', '.join(OP_CLASSES)}")
            elif not _is_number(value) or not 0 < value <= 1:
                faults.append(f"efficiency[{key!r}] is {value!r}; it is a share of the peak")
        if faults:
            raise PlanError(f"hardware {self.name!r} makes no sense: " + "; ".join(faults))
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        filled = {**_USUAL, **self.efficiency}
        object.__setattr__(self, "efficiency", MappingProxyType(filled))

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype name such as "bfloat16"."""
        name: str | None = dtype if dtype in _WIDER else "float32"
        while name is not None and name not in self.flops:
            name = _WIDER[name]
        return min(self.flops.values()) if name is None else self.flops[name]

    def time(self, op_class: OpClass, dtype: str, flops: float, num_bytes: float) -> float:
        """The time of one operation, by the roofline."""
        compute = 0.0
        if flops and op_class != "memory":
            compute = flops / (self.peak(dtype) * self.efficiency[op_class])
            if op_class == "matmul":
                compute *= 1 + self.half_intensity * num_bytes / flops
        traffic = num_bytes / (self.memory_bandwidth * self.efficiency["memory"])
        return max(compute, traffic) + self.overhead

    def link(self, source_rank: int, target_rank: int) -> Link:
        """The link between two ranks."""
        same = source_rank // self.ranks_per_node == target_rank // self.ranks_per_node
        return self.intra if same else self.inter

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts; the inverse of `from_dict`."""
        data: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Link):
                value = {"latency": value.latency, "bandwidth": value.bytes_per_time}
            elif isinstance(value, Mapping):
                value = dict(value)
            data[item.name] = value
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Hardware:
        """Read a description; `base = "H100"` takes all that is not given from a preset.

        A link is a preset name ("NVLink4") or a table with latency and bandwidth.

        Raises:
            PlanError: lists every key that is unknown, missing or not usable.
        """
        given = dict(data)
        base = given.pop("base", None)
        known = [item.name for item in fields(Hardware)]
        faults = [_unknown("field", key, known) for key in given if key not in known]
        start = get_hardware(base).to_dict() if base is not None else {}
        for key in ("flops", "efficiency"):
            if isinstance(given.get(key), Mapping):
                given[key] = {**start.get(key, {}), **given[key]}
            elif key in given:
                faults.append(f"{key} is {given[key]!r}; it must be a table of numbers")
        merged = {"name": base, **start, **given} if base is not None else given
        needed = [item.name for item in fields(Hardware)][:6]
        missing = [key for key in needed if key not in merged]
        if missing:
            faults.append(f"missing: {', '.join(missing)} (or name a preset as base)")
        if faults:
            raise PlanError("this is not a hardware description: " + "; ".join(faults))
        merged["intra"] = _read_link(merged["intra"])
        merged["inter"] = _read_link(merged["inter"])
        if merged.get("host") is not None:
            merged["host"] = _read_link(merged["host"])
        return Hardware(**merged)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_json(text: str) -> Hardware:
        """Read a JSON text; see `from_dict`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the hardware description is not JSON: {error}") from error
        return Hardware.from_dict(_as_table(data))

    @staticmethod
    def from_toml(text: str) -> Hardware:
        """Read a TOML text; see `from_dict`."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the hardware description is not TOML: {error}") from error
        return Hardware.from_dict(data)

    def __str__(self) -> str:
        rates = ", ".join(f"{key} {value / 1e12:.4g}" for key, value in self.flops.items())
        return (
            f"{self.name}: {rates} TFLOP/s; {self.memory / 1e9:.4g} GB at "
            f"{self.memory_bandwidth / 1e9:.4g} GB/s; links {_link_text(self.intra)} in a node of "
            f"{self.ranks_per_node}, {_link_text(self.inter)} between nodes"
        )


def get_hardware(name: str | Hardware) -> Hardware:
    """Return a preset by name; case, spaces, hyphens and underscores do not matter.

    Raises:
        PlanError: no preset has that name; the closest ones are listed.
    """
    from fxpipe.planner.cost.presets import HARDWARE

    if isinstance(name, Hardware):
        return name
    return _find("hardware preset", name, HARDWARE)


def get_link(name: str) -> Link:
    """Return a link preset by name.

    Raises:
        PlanError: no preset has that name; the closest ones are listed.
    """
    from fxpipe.planner.cost.presets import LINKS

    return _find("link preset", name, LINKS)


def load_hardware(source: str | os.PathLike[str] | Hardware) -> Hardware:
    """Return hardware from a preset name, or from a file that ends in .json or .toml.

    Raises:
        PlanError: the file cannot be read or the name is unknown.
    """
    if isinstance(source, Hardware):
        return source
    if not isinstance(source, str | os.PathLike):
        raise PlanError(
            "hardware is a preset's name, a .json or .toml file, or a Hardware (from_dict makes "
            f"one of a dict); got {source!r}"
        )
    path = os.fspath(source)
    readers = {".json": Hardware.from_json, ".toml": Hardware.from_toml}
    reader = readers.get(os.path.splitext(path)[1].lower())
    if reader is None:
        return get_hardware(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise PlanError(f"cannot read the hardware description {path!r}: {error}") from error
    return reader(text)


# Which dtype to take the rate of when one is not listed.
_WIDER: Mapping[str, str | None] = MappingProxyType(
    {
        "int8": "float8",
        "float8": "bfloat16",
        "bfloat16": "float16",
        "float16": "tf32",
        "tf32": "float32",
        "float32": "float64",
        "float64": None,
    }
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _find(what: str, name: str, table: Mapping[str, T]) -> T:
    keys = {_key(known): known for known in table}
    found = keys.get(_key(str(name)))
    if found is None:
        raise PlanError(_unknown(what, str(name), list(table)))
    return table[found]


def _unknown(what: str, name: str, known: list[str]) -> str:
    keys = {_key(k): k for k in known}
    close = difflib.get_close_matches(_key(name), keys, cutoff=0.5)
    hint = f"did you mean {' or '.join(keys[key] for key in close)}? " if close else ""
    return f"there is no {what} {name!r}; {hint}known: {', '.join(known)}"


def _as_table(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PlanError(f"a hardware description is a table, got {type(data).__name__}")
    return data


def _read_link(value: object) -> Link:
    if isinstance(value, Link):
        return value
    if isinstance(value, str):
        return get_link(value)
    if isinstance(value, Mapping) and set(value) <= {"latency", "bandwidth"}:
        latency, bandwidth = value.get("latency", 0.0), value.get("bandwidth", 0.0)
        if _is_number(latency) and _is_number(bandwidth) and latency >= 0 and bandwidth > 0:
            return Link(float(latency), float(bandwidth))
    raise PlanError(
        "a link is a preset name or a table with latency (seconds) and bandwidth (bytes per "
        f"second), got {value!r}"
    )


def _link_text(link: Link) -> str:
    return f"{link.bytes_per_time / 1e9:.4g} GB/s"
