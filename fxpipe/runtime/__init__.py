"""Run a pipeline: stages, ranks, steps.

`fxpipe.runtime.sockets` is `fxpipe.runtime.wire.sockets`, for scripts that know it by that name.
"""

from types import ModuleType

__all__: list[str] = []


def __getattr__(name: str) -> ModuleType:
    if name == "sockets":
        from fxpipe.runtime.wire import sockets

        return sockets
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
