"""Every exception that fxpipe raises on purpose.

All of them are children of `FxpipeError`. Some are also children of the builtin
exception that users of other packages already catch (`ValueError`,
`RuntimeError`, `AssertionError`), so that changing an import does not change an `except`.
"""

__all__ = [
    "FxpipeError",
    "InputError",
    "InputTypeError",
    "PipeliningShapeError",
    "PlanError",
    "RemoteStageError",
    "ScheduleError",
    "SplitError",
    "TraceError",
    "UnknownModuleError",
]


class FxpipeError(Exception):
    """Something fxpipe was asked to do cannot be done; the message says why."""


class ScheduleError(FxpipeError, ValueError, RuntimeError, AssertionError):
    """A schedule is unknown, malformed, or not defined for the numbers given."""


class TraceError(FxpipeError, RuntimeError):
    """The model cannot be captured as a graph where a graph is needed."""


class SplitError(FxpipeError, ValueError):
    """The requested split does not fit the model."""


class UnknownModuleError(SplitError, AttributeError):
    """A split is asked for at a module that the model does not have."""


class PipeliningShapeError(FxpipeError, RuntimeError):
    """Tensors that meet at a stage boundary do not fit together."""


class InputError(FxpipeError, ValueError, RuntimeError):
    """The inputs of a step cannot be used: missing, misnamed, or not splittable."""


class InputTypeError(InputError, TypeError):
    """An input has the wrong type of container."""


class PlanError(FxpipeError, ValueError):
    """No plan satisfies the request, for example because memory is short."""


class RemoteStageError(FxpipeError, RuntimeError):
    """Another rank failed; says where, and carries the original message."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
