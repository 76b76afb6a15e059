"""See every module call of this thread, for the time of a trace.

`intercepted(module, seer)` patches `nn.Module.__call__` (and the overrides of it
among the model's classes) and a few other entry points, and undoes all of it on
exit. The seer decides what a call does; `run_forward` is what an ordinary call
becomes while it is watched: the forward, with the user's hooks as the seer wants
them. Hooks that belong to a library's own machinery (weight norm, Hugging Face output
capturing) are part of what the forward means and do run.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from fxpipe.graph.nested import Args, Kwargs, Symbolic
from fxpipe.graph.source_line import is_message, is_users
from fxpipe.torch_inside import (
    CHECK_ENTRIES,
    CHECKPOINT_ENTRY,
    VMAP_ENTRY,
    FakeTensor,
    compiled_from,
    forward_hooks,
    forward_pre_hooks,
    function_base,
    held_functions,
    hook_takes_kwargs,
    pre_hook_takes_kwargs,
)

__all__ = [
    "Seer",
    "collector",
    "intercepted",
    "observe",
    "patched",
    "run_forward",
    "unobserved",
]

Call = Callable[..., object]


class Seer:
    """Is told of each call that `intercepted` sees, and decides what the call does.

    This one lets everything happen, without the hooks of users.
    """

    def on_module(self, module: nn.Module, call: Call, args: Args, kwargs: Kwargs) -> object:
        return call(*args, **kwargs)

    def on_function(self, function: type, call: Call, args: Args, kwargs: Kwargs) -> object:
        return call(*args, **kwargs)

    def on_vmap(self, call: Call, args: Args, kwargs: Kwargs) -> object:
        return call(*args, **kwargs)

    def on_script(self, function: Call, args: Args, kwargs: Kwargs) -> object:
        return function(*args, **kwargs)

    def on_decision(self, value: Symbolic) -> None: ...

    def on_check(self, condition: object) -> bool:
        """Say that a check of the user's is taken care of."""
        return False

    def on_training(self, module: nn.Module) -> None: ...

    def on_checkpoint(self, entering: bool, options: dict[str, object]) -> None: ...

    def on_autocast(self, region: object, entering: bool) -> None: ...

    def on_kept(self, module: nn.Module) -> None: ...

    def on_hook(self, hook: Call, module: nn.Module, values: tuple[object, ...]) -> object: ...


@contextmanager
def intercepted(module: nn.Module, seer: Seer) -> Iterator[None]:
    """Report the calls of this thread to `seer` until exit."""
    thread = threading.get_ident()

    def here() -> bool:
        return threading.get_ident() == thread

    with ExitStack() as stack:
        for kind in _callable_classes(module):
            original = kind.__dict__["__call__"]
            stack.enter_context(patched(kind, "__call__", _watched_call(original, seer, here)))
        function = function_base()
        stack.enter_context(patched(function, "apply", _watched_apply(function, seer, here)))
        for scope in _scopes(module):
            for name, owner in held_functions(vars(scope)).items():
                stack.enter_context(patched(scope, name, _looked_up(owner)))
            for name, builtin in (("len", _length(here)), ("range", _range(here))):
                if name not in vars(scope):
                    stack.enter_context(patched(scope, name, builtin))
            for name, value in list(vars(scope).items()):
                if isinstance(value, torch.jit.ScriptFunction):
                    stack.enter_context(patched(scope, name, _watched(value, seer.on_script, here)))
        for kind, names in (
            (torch.SymBool, ("__bool__",)),
            (torch.SymInt, ("__bool__", "__int__", "__index__")),
            (torch.SymFloat, ("__bool__", "__int__", "__float__")),
        ):
            for name in names:
                if name in kind.__dict__:
                    watched = _watched_decision(kind.__dict__[name], seer, here)
                    stack.enter_context(patched(kind, name, watched))
        for name in ("__str__", "__format__"):
            text = _number_text(getattr(torch.SymInt, name), here)
            stack.enter_context(patched(torch.SymInt, name, text))
        stack.enter_context(patched(nn.Module, "training", _training(seer, here)))
        vmap = _watched(getattr(*VMAP_ENTRY), seer.on_vmap, here)
        stack.enter_context(patched(*VMAP_ENTRY, vmap))
        checkpoint = _watched_checkpoint(getattr(*CHECKPOINT_ENTRY), seer, here)
        stack.enter_context(patched(*CHECKPOINT_ENTRY, checkpoint))
        for name in CHECK_ENTRIES:
            watched = _watched_check(getattr(torch, name), seer, here)
            stack.enter_context(patched(torch, name, watched))
        autocast = torch.amp.autocast_mode.autocast
        for name, entering in (("__enter__", True), ("__exit__", False)):
            watched = _watched_autocast(autocast.__dict__[name], seer, here, entering)
            stack.enter_context(patched(autocast, name, watched))
        yield


def run_forward(module: nn.Module, args: Args, kwargs: Kwargs, seer: Seer | None = None) -> Any:
    """Run a module's forward with the hooks of libraries, and of users if the seer wants that."""
    original = compiled_from(module)
    if original is not None:
        return original(*args, **kwargs)

    def run(hook: Call, *values: object) -> Any:
        if _is_library_hook(hook):
            return hook(module, *values)
        return seer.on_hook(hook, module, values) if seer is not None else None

    for key, hook in list(forward_pre_hooks(module).items()):
        if pre_hook_takes_kwargs(module, key):
            changed = run(hook, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = run(hook, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = module.forward(*args, **kwargs)
    is_unobserved = any(module is other for other in _unobserved)
    for key, hook in list(forward_hooks(module).items()):
        if _is_observer(hook):
            if not is_unobserved and seer is not None and _keeps(hook, module, args, result):
                seer.on_kept(module)
            continue
        with_kwargs = hook_takes_kwargs(module, key)
        changed = run(hook, args, kwargs, result) if with_kwargs else run(hook, args, result)
        if changed is not None:
            result = changed
    return result


_unobserved: list[nn.Module] = []


@contextmanager
def unobserved(module: nn.Module) -> Iterator[None]:
    """Hold back the hooks that only take note of what a module returns; see `observe`."""
    _unobserved.append(module)
    try:
        yield
    finally:
        _unobserved.pop()


def observe(module: nn.Module, args: Args, result: object) -> None:
    """Run the hooks that only take note of what a module returned."""
    for hook in list(forward_hooks(module).values()):
        if _is_observer(hook):
            hook(module, args, result)


def _keeps(hook: Call, module: nn.Module, args: object, result: object) -> bool:
    """Run a hook and say whether it kept a tensor of the result."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    del parts
    before = [sys.getrefcount(tensor) for tensor in tensors]
    hook(module, args, result)
    return any(sys.getrefcount(t) > count for t, count in zip(tensors, before, strict=True))


def collector() -> object:
    """Return what the hooks that keep outputs put them into now, if anything."""
    home: Any = sys.modules.get("transformers.utils.output_capturing")
    active = getattr(home, "_active_collector", None)
    return None if active is None else active.get()


def _is_observer(hook: object) -> bool:
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


_LIBRARIES = ("torch.nn.utils.", "transformers.", "fxpipe.")


def _is_library_hook(hook: object) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith(_LIBRARIES)


def _callable_classes(module: nn.Module) -> list[type]:
    kinds: dict[type, None] = {nn.Module: None}
    for kind in {type(part) for part in module.modules()}:
        for parent in kind.__mro__:
            if "__call__" in parent.__dict__ and issubclass(parent, nn.Module):
                kinds[parent] = None
    return list(kinds)


def _scopes(module: nn.Module) -> list[ModuleType]:
    """Return the Python modules whose names the model's code uses."""
    homes = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    homes = {home for home in homes if not home.startswith("torch.")}
    return [sys.modules[home] for home in homes if home in sys.modules]


def _looked_up(function: Any) -> Call:
    return lambda *args, **kwargs: function.apply(*args, **kwargs)


def _length(here: Callable[[], bool]) -> Call:
    """Return a `len` that leaves the first size of a tensor open, as `x.shape[0]` does."""

    def length(value: Any, /) -> object:
        if here() and isinstance(value, FakeTensor) and value.dim():
            return value.shape[0]
        return len(value)

    return length


def _range(here: Callable[[], bool]) -> type:
    """Return a `range` that asks in each turn whether there is another, as `while` does.

    A loop that goes over a size in steps then decides by the number of turns, not by the size.
    """

    class Ranges(type):
        def __call__(cls, *args: Any) -> Any:
            whole: Any = (0, *args, 1) if len(args) == 1 else (*args, 1)
            start, stop, step = whole[:3] if 1 <= len(args) <= 3 else (0, 0, 0)
            is_open = any(isinstance(value, torch.SymInt) for value in (start, stop))
            if not (here() and is_open and type(step) is int and step > 1):
                return range(*args)
            turns = []
            while start < stop:
                turns.append(start)
                start = start + step
            return tuple(turns)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, range)

    return Ranges("range", (), {})


@contextmanager
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    """Have an attribute another value until exit."""
    missing = object()
    before = owner.__dict__.get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _watched_call(original: Call, seer: Seer, here: Callable[[], bool]) -> Call:
    is_base = original is nn.Module.__dict__["__call__"]

    @functools.wraps(original)
    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        if not here():
            return original(self, *args, **kwargs)
        if is_base:
            return seer.on_module(self, lambda *a, **k: run_forward(self, a, k, seer), args, kwargs)
        return seer.on_module(self, functools.partial(original, self), args, kwargs)

    return call


def _watched_apply(owner: type, seer: Seer, here: Callable[[], bool]) -> object:
    def apply(cls: type, /, *args: object, **kwargs: object) -> object:
        parent: Any = super(owner, cls)
        call = parent.apply
        return seer.on_function(cls, call, args, kwargs) if here() else call(*args, **kwargs)

    return classmethod(apply)


def _watched(original: Call, on_call: Call, here: Callable[[], bool]) -> Call:
    def run(*args: object, **kwargs: object) -> object:
        return on_call(original, args, kwargs) if here() else original(*args, **kwargs)

    return run


def _watched_check(original: Call, seer: Seer, here: Callable[[], bool]) -> Call:
    @functools.wraps(original)
    def check(error_type: object, condition: object, *message: object) -> None:
        if not (here() and seer.on_check(condition)):
            original(error_type, condition, *message)

    return check


def _watched_decision(original: Call, seer: Seer, here: Callable[[], bool]) -> Call:
    @functools.wraps(original)
    def decide(self: Symbolic) -> object:
        if here():
            # `if size` only asks whether it is zero.
            is_number = original.__name__ == "__bool__" and not isinstance(self, torch.SymBool)
            asked = self != 0 if is_number else self
            if original.__name__ == "__int__" and isinstance(self, torch.SymFloat):
                whole: Any = torch.sym_int
                asked = whole(self)
            if not isinstance(asked, bool):
                seer.on_decision(asked)
        return original(self)

    return decide


def _number_text(original: Call, here: Callable[[], bool]) -> Call:
    """Have the user's code see a size as text the way it would be: as a number, once decided.

    A message decides nothing.
    """

    @functools.wraps(original)
    def text(self: torch.SymInt, *spec: str) -> object:
        caller = sys._getframe(1)
        if here() and is_users(caller.f_code.co_filename) and not is_message(caller):
            return format(int(self), *spec)
        return original(self, *spec)

    return text


def _training(seer: Seer, here: Callable[[], bool]) -> property:
    def get(self: nn.Module) -> object:
        if here():
            seer.on_training(self)
        try:
            return self.__dict__["training"]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute 'training'"
            ) from None

    def put(self: nn.Module, value: bool) -> None:
        self.__dict__["training"] = value

    return property(get, put)


def _watched_autocast(original: Call, seer: Seer, here: Callable[[], bool], entering: bool) -> Call:
    @functools.wraps(original)
    def step(self: object, *args: object) -> object:
        if here():
            seer.on_autocast(self, entering)
        return original(self, *args)

    return step


def _watched_checkpoint(
    original: Callable[..., Iterator[None]], seer: Seer, here: Callable[[], bool]
) -> Call:
    signature = inspect.signature(original)
    public = inspect.signature(torch.utils.checkpoint.checkpoint).parameters.values()
    names = {p.name for p in public if p.kind is p.KEYWORD_ONLY} - {"use_reentrant"}

    @functools.wraps(original)
    def generator(*args: object, **kwargs: object) -> Iterator[None]:
        if not here():
            yield from original(*args, **kwargs)
            return
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        options = {name: value for name, value in given.arguments.items() if name in names}
        seer.on_checkpoint(True, options)
        try:
            yield
        finally:
            seer.on_checkpoint(False, options)

    return generator
