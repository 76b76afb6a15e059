"""State that the forward of opened code changes: record it, or refuse.

A buffer that code changes in place is changed by the recorded operation. One that
code assigns anew (`self.count = self.count + 1`) gets a node that copies the new
value into the stage's buffer, and whoever read the old value gets a copy of it.

Other attributes are not followed. One that the code reads and then changes carries a
state to the next run: a tensor, a count, `None` that becomes a tensor. It is refused, unless the
run had set it before it read it, or a second run shows that it makes no difference
(`capture/second_run.py`).
Not so a cache: tensors in it depend on sizes and constants alone, and a stage computes
and stores them anew each time. What is only written is left there by a node as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from fxpipe.graph.calls.graph_calls import Kept
from fxpipe.graph.calls.late_lists import plain_lists
from fxpipe.graph.guard.reads import Reads
from fxpipe.graph.guard.world import MISSING, Read
from fxpipe.graph.nested import SYMBOLIC, contents, is_atom, snapshot, walk
from fxpipe.graph.record.tape import Tape
from fxpipe.graph.sandbox.fake import FakeState
from fxpipe.graph.source_line import Place
from fxpipe.torch_inside import HOOKS, buffers_of, parameters_of

__all__ = ["Carried", "StateWatch", "hook_count"]


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """An attribute that opened code read and changed, so that the next run may differ."""

    read: Read
    value: object  # that the next run begins with
    fault: str


class StateWatch:
    """Compares the modules that are opened after a trace with what they were before."""

    def __init__(self, module: nn.Module, opened: Collection[str], state: FakeState) -> None:
        self._modules = {
            name: part
            for name, part in module.named_modules(remove_duplicate=False)
            if name in opened
        }
        self._state = state
        self._all = list(module.modules())
        self._hooks = hook_count(self._all)
        self._names = _state_names(self._modules)
        self._lists = {
            (name, key): contents(value)
            for name, part in self._modules.items()
            for key, value in vars(part).items()
            if type(value) is list
        }
        self._named = list(module.named_modules(remove_duplicate=False))
        self._before = {name: dict(vars(part)) for name, part in self._named}

    def finish(self, reads: Reads, tape: Tape) -> tuple[list[str], list[Carried]]:
        """Write what opened code leaves behind; return what cannot be, as text and one by one."""
        faults = [*self._write(reads, tape), *_moved_settings(reads, tape)]
        carried = self._carried(reads, tape)
        for one in carried:
            if is_atom(one.value):
                left = Kept(one.read.holder, one.read.name)
                tape.write("call_function", left, (one.value,), {})
        return [*faults, *(one.fault for one in carried)], carried

    def _write(self, reads: Reads, tape: Tape) -> list[str]:
        """Write what the opened code assigned; return what cannot be written, as text."""
        puts_hooks = hook_count(self._all) != self._hooks
        for name, part in self._named:
            for key, value in list(vars(part).items()):
                is_written = (id(part), key) in reads.written
                is_ours = name in self._modules or is_written
                if not is_ours and not _has_known(value, tape):
                    continue  # a leaf sets its own when it runs
                is_new = is_written or self._before[name].get(key, MISSING) is not value
                is_other = (name, key) in self._lists and contents(value) != self._lists[name, key]
                if puts_hooks and type(value) is bool:
                    continue  # it remembers that the hooks are there
                if is_new or is_other:
                    value = plain_lists(value)
                if (is_new or is_other) and _may_be_left(value):
                    tape.keep(part, key, value, refills=not is_new)
        places = dict(self._places())
        made = sorted(_state_names(self._modules) - self._names)
        faults = [_made_fault(made)] if made else []
        for slot in self._state.reassigned():
            if id(slot.place) not in places:
                continue
            owner, is_buffer = places[id(slot.place)]
            name = f"{owner}.{slot.key}" if owner else slot.key
            new = slot.place.get(slot.key)
            if is_buffer and _is_alike(new, slot.fake):
                assert isinstance(new, torch.Tensor)
                tape.overwrite(name, owner, slot.fake, new)
            elif is_buffer or tape.knows(slot.fake):
                faults.append(_fault(name, is_buffer, slot.fake, new))
        return faults

    def _carried(self, reads: Reads, tape: Tape) -> list[Carried]:
        """Return the attributes that opened code read and changed.

        A flag may remember that this run put hooks on modules: the trace has seen them act.
        """
        puts_hooks = hook_count(self._all) != self._hooks
        found = []
        for read, now in reads.carried():
            if puts_hooks and type(now) is bool:
                continue
            inside = now if now is not read.value or not hasattr(now, "__dict__") else vars(now)
            if _is_cache(inside, tape):
                _keep_cache(reads, read, now, tape)
                continue
            owner = reads.names.get(id(read.holder), "")
            name = f"{owner}.{read.name}" if owner else read.name
            change = "changes what is in it" if now is read.value else f"makes it {_text(now)}"
            fault = _carried_fault(name, read.value, change, read.place)
            is_container = type(now) in (list, tuple, dict)
            found.append(Carried(read, snapshot(now) if is_container else now, fault))
        return found

    def _places(self) -> Iterator[tuple[int, tuple[str, bool]]]:
        for name, part in self._modules.items():
            yield id(buffers_of(part)), (name, True)
            yield id(part.__dict__), (name, False)


def hook_count(modules: Iterable[nn.Module]) -> int:
    """Return how many hooks some modules have."""
    return sum(len(vars(part).get(kind, ())) for part in modules for kind in HOOKS)


def _moved_settings(reads: Reads, tape: Tape) -> list[str]:
    """Return what opened code asked for outside of the model and has changed, as text."""
    faults = []
    for key, asked in list(reads.asked.items()):
        if asked.is_same():
            continue
        if _is_cache(asked.now(), tape):
            del reads.asked[key]
        else:
            faults.append(_carried_fault(asked.text, asked.value, "changes it", asked.place))
    return faults


def _is_cache(now: object, tape: Tape) -> bool:
    """Say whether a value holds tensors, none of which the inputs or the parameters decide."""
    tensors = [leaf for _, leaf in walk(now) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and not any(tape.depends_on_data(tensor) for tensor in tensors)


def _carried_fault(name: str, value: object, change: str, place: Place) -> str:
    return (
        f"code that is split reads {name!r} ({_text(value)}) and {change} for its next "
        f"run; a stage would start from the same value each time\n  {place}\n    "
        f"{place.source}\nregister it as a buffer that keeps its shape, or keep this code "
        "inside a submodule that is not split"
    )


def _keep_cache(reads: Reads, read: Read, now: object, tape: Tape) -> None:
    """Have stages fill a cache as the code does; what is in it decides nothing for them."""
    reads.forget(read)
    reads.caches.append(read)
    if isinstance(now, torch.Tensor) and not isinstance(read.holder, nn.Module):
        tape.keep(read.holder, read.name, now)
    elif isinstance(now, dict) and now is read.value:
        for key, value in now.items():
            if isinstance(value, torch.Tensor):
                tape.keep(now, key, value)


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def _has_known(value: object, tape: Tape) -> bool:
    if type(value) not in (list, tuple, dict) and not isinstance(value, torch.Tensor):
        return False
    return any(isinstance(leaf, torch.Tensor) and tape.knows(leaf) for _, leaf in walk(value))


def _may_be_left(value: object) -> bool:
    """Say whether a node can leave a value on a module: a tensor, a number, lists of them."""
    if isinstance(value, SYMBOLIC):
        return bool(value.node.has_hint())  # no number that comes from data
    if isinstance(value, (list, tuple, dict)) and type(value) in (list, tuple, dict):
        children = value.values() if isinstance(value, dict) else value
        return all(map(_may_be_left, children))
    return isinstance(value, torch.Tensor) or is_atom(value)


def _state_names(modules: Mapping[str, nn.Module]) -> set[str]:
    return {
        f"{name}.{key}" if name else key
        for name, part in modules.items()
        for place in (parameters_of(part), buffers_of(part))
        for key, value in place.items()
        if value is not None
    }


def _made_fault(names: Sequence[str]) -> str:
    return (
        f"the forward of code that is split makes {', '.join(names[:4])} when it first runs\n"
        "run the model once with these inputs, then call pipeline()"
    )


def _is_alike(new: object, old: torch.Tensor) -> bool:
    if not isinstance(new, torch.Tensor) or new.dtype != old.dtype:
        return False
    sizes = tuple(new.shape)
    return not any(isinstance(size, torch.SymInt) for size in sizes) and sizes == tuple(old.shape)


def _fault(name: str, is_buffer: bool, old: torch.Tensor, new: object) -> str:
    kind = "buffer" if is_buffer else "tensor"
    found = f"{new.dtype}{list(new.shape)}" if isinstance(new, torch.Tensor) else repr(new)
    wanted = f"{old.dtype}{list(old.shape)}"
    return (
        f"the forward of code that is split replaces the {kind} {name!r} ({wanted}) by {found}, "
        "and stages would keep the old one\n"
        "register it as a buffer and keep its shape and dtype, or keep this code inside a "
        "submodule that is not split"
    )
