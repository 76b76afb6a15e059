"""Refuse what would change a schedule of torch's and would have no effect on one of ours."""

from __future__ import annotations

from fxpipe.errors import ScheduleError

__all__ = ["FIXED", "check_overrides"]

# Attributes that torch reads anew in each step.
FIXED = frozenset(["_has_backward", "_loss_fn", "_n_microbatches", "n_microbatches", "scale_grads"])
# Methods that torch's engine calls, and ours does not; what to use instead.
_NEVER_CALLED = {
    "_compute_loss": "give the schedule a loss_fn",
    "_maybe_compute_loss": "give the schedule a loss_fn",
    "_step_microbatches": "set pipeline_order, or use before() and after()",
    "_split_inputs": "use args_chunk_spec and kwargs_chunk_spec",
    "_merge_outputs": "use output_merge_spec",
    "forward_one_chunk": "use register_custom_function",
    "backward_one_chunk": "use register_custom_function",
    "backward_weight_one_chunk": "use register_custom_function",
}


def check_overrides(kind: type) -> None:
    """Raise ScheduleError if a class of the user's overrides a method that is never called."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] == "fxpipe":
            continue
        for name, instead in _NEVER_CALLED.items():
            if name in vars(one):
                raise ScheduleError(
                    f"{one.__qualname__} overrides {name}, a part of torch's own engine that is "
                    f"never called here: {instead}"
                )
