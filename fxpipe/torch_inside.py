"""Every use of a private name of torch is here; `torch_names.py` says what each is for.

The rest of the package takes what it needs from this module; a test reads its source and finds
no private name elsewhere. A torch that lacks one of them is refused when this module is
imported, by name, instead of failing in the middle of a trace or a step. What takes long to
import (the compiler, the sharding library) is imported at its first use.

Getters are `attrgetter`s where a step calls them often: they cost no Python frame.
"""

from __future__ import annotations

import copy
import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn

from fxpipe.torch_names import LATE, PRIVATE, check_names, lacks, warn_of_version

try:
    from torch._functorch import apis
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        unset_fake_temporarily,
    )
    from torch.autograd.graph import _engine_run_backward as run_engine
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise ImportError(lacks(str(error))) from error

if TYPE_CHECKING:
    import sympy
    import torch.distributed as dist
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "BUFFERS", "CHECKPOINT_ENTRY", "CHECK_ENTRIES", "CPU_ATTENTION", "CPU_ATTENTION_BACKWARD",
    "HOOKS", "MODULES", "PARAMETERS", "VERSION_COUNTER", "VMAP_ENTRY", "WRAPPED",
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode",
    "IncompatibleKeys", "NormBase", "TorchDispatchMode", "apply_of", "autocast_settings",
    "backend_object", "backward_hooks", "backward_pre_hooks", "base_of", "buffers_of",
    "children_of", "compiled_from", "conditions_of", "constant_source", "default_store",
    "finish_sharded_backward", "floor_div", "following_sizes", "forward_ad_level", "forward_hooks",
    "forward_pre_hooks", "function_base", "function_modes", "functorch_is_active",
    "has_global_hooks", "held_functions", "hook_takes_kwargs", "is_compiled", "is_view",
    "joins_uneven_inputs", "known_sizes", "leave_sharded_pass", "local_tensor", "memory_of",
    "named_group", "overload_packet", "own_attributes",
    "parameters_of", "post_accumulate_hooks", "pre_hook_takes_kwargs", "prepare_sharded",
    "profiler_is_on", "put_gathered_gradient", "pytree", "pytree_kind", "reduction_hooks",
    "run_engine", "schema_of",
    "shard_groups", "shard_precision", "split_group", "take_back", "take_gathered_gradient",
    "transient_buffers", "unset_fake_temporarily", "version_of", "was_dtensor",
    "watch_replacements", "without_torch_function",
]  # fmt: skip

# Tensors

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
base_of: Callable[[torch.Tensor], Any] = attrgetter("_base")
VERSION_COUNTER = "_version"
"""What a function is called that reads a tensor's version."""


def is_view(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a view of another."""
    return tensor._is_view()


def memory_of(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's storage; tensors that share memory have the same."""
    return int(tensor.untyped_storage()._cdata)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor (comparing whole ones communicates)."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


# Modules

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""Where a module keeps its own, in its `__dict__`."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps the hooks that a call runs."""
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""What wrappers of torch call the module inside them."""

Hooks = dict[int, Callable[..., Any]]

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter(BUFFERS)
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(MODULES)
transient_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
forward_pre_hooks: Callable[[nn.Module], Hooks] = attrgetter("_forward_pre_hooks")
forward_hooks: Callable[[nn.Module], Hooks] = attrgetter("_forward_hooks")
backward_hooks: Callable[[nn.Module | torch.Tensor], Hooks | None] = attrgetter("_backward_hooks")
backward_pre_hooks: Callable[[nn.Module], Hooks] = attrgetter("_backward_pre_hooks")
post_accumulate_hooks: Callable[[torch.Tensor], Hooks | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)


def own_attributes() -> frozenset[str]:
    """Return the attributes that every module has, apart from `training`."""
    return frozenset(vars(nn.Module())) - {"training"}


def pre_hook_takes_kwargs(module: nn.Module, key: int) -> bool:
    """Say whether a forward pre-hook wants the keyword arguments."""
    return key in module._forward_pre_hooks_with_kwargs


def hook_takes_kwargs(module: nn.Module, key: int) -> bool:
    """Say whether a forward hook wants the keyword arguments."""
    return key in module._forward_hooks_with_kwargs


def has_global_hooks() -> bool:
    """Say whether hooks are registered for all modules."""
    machinery: Any = nn.modules.module
    return bool(machinery._has_any_global_hook())


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the module inside one that `torch.compile` made; None for others."""
    original = getattr(module, WRAPPED[0], None)
    is_compiled_module = type(module).__name__ == "OptimizedModule"
    return original if is_compiled_module and isinstance(original, nn.Module) else None


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module, or its `forward`, was compiled and runs as one block."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return True
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forward = getattr(module, "forward", None)
    return hasattr(forward, "_torchdynamo_inline")  # not where dynamo is kept out


# Entry points that a trace replaces: the owner and the name.

VMAP_ENTRY: tuple[Any, str] = (apis, "vmap_impl")
CHECK_ENTRIES: tuple[str, ...] = ("_check_with", "_check_tensor_all_with")
_CHECKPOINT: Any = sys.modules["torch.utils.checkpoint"]
CHECKPOINT_ENTRY: tuple[Any, str] = (
    _CHECKPOINT,
    "_checkpoint_without_reentrant_generator_impl"  # since 2.14
    if hasattr(_CHECKPOINT, "_checkpoint_without_reentrant_generator_impl")
    else "_checkpoint_without_reentrant_generator",
)


_APPLY_IS_NATIVE = not isinstance(vars(torch.autograd.Function).get("apply"), classmethod)


def function_base() -> type:
    """Return the class whose `apply` every call of an `autograd.Function` looks up.

    Code may hold `Function.apply` from before, as in `square = Square.apply`. Up to torch 2.14
    that is Python code, which looks up `apply` of the base; see `held_functions` for others.
    """
    function = torch.autograd.Function
    base: type = function if _APPLY_IS_NATIVE else function.__mro__[1]
    return base


def held_functions(scope: Mapping[str, object]) -> dict[str, type[torch.autograd.Function]]:
    """Return the names in a scope that hold the native `apply` of a function."""
    if not _APPLY_IS_NATIVE:
        return {}
    owners = {
        name: value.__self__
        for name, value in scope.items()
        if isinstance(value, BuiltinMethodType) and value.__name__ == "apply"
    }
    return {
        name: owner
        for name, owner in owners.items()
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    }


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """Return `apply` without what it does for functorch and the compiler.

    That takes a third of the time of a small layer.
    """
    parent: Any = super(torch.autograd.Function, function)
    return parent.apply


# Modes and regions

without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction
functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled


def forward_ad_level() -> int:
    """Return how many forward-mode derivatives are being taken, less one."""
    return torch.autograd.forward_ad._current_level


def function_modes() -> list[torch.overrides.TorchFunctionMode]:
    """Return the modes that see torch functions now, the outermost first."""
    stack: Any = torch.overrides._get_current_function_mode_stack
    return list(stack())


def autocast_settings(region: Any) -> tuple[str, torch.dtype, bool, bool]:
    """Return the arguments that make an autocast region once more."""
    return (region.device, region.fast_dtype, region._enabled, region._cache_enabled)


# Operators

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def overload_packet(operator: Any) -> Any:
    """Return an operator without its overload; anything else as it is."""
    return getattr(operator, "_overloadpacket", operator)


def schema_of(operator: Any) -> Any:
    """Return an operator's schema; None for what has none."""
    return getattr(operator, "_schema", None)


def pytree_kind(value: Any) -> Any:
    """Return what a value is looked up by in `pytree.SUPPORTED_NODES`."""
    return pytree._get_node_type(value)


# Sizes

_KNOWN_SIZES = ("backed_var_to_val", "var_to_val")  # since 2.12, and before


def known_sizes(env: ShapeEnv) -> dict[sympy.Symbol, sympy.Integer]:
    """Return the example's size of each symbol."""
    for name in _KNOWN_SIZES:
        if hasattr(env, name):
            found: dict[sympy.Symbol, sympy.Integer] = getattr(env, name)
            return found
    raise ImportError(lacks(f"ShapeEnv.{' or '.join(_KNOWN_SIZES)} (the example's sizes)"))


def watch_replacements(env: ShapeEnv, heard: Callable[[sympy.Symbol, sympy.Basic], None]) -> None:
    """Call `heard` whenever a symbol gets a new value: it has lost its freedom."""
    original = env._set_replacement

    def replace(a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        before = env.replacements.get(a)
        original(a, tgt, msg)
        after = env.replacements.get(a)
        if after is not None and after != before:
            heard(a, after)

    env._set_replacement = replace  # type: ignore[method-assign]


_CONDITIONS = ("guards", "replacements", "divisible", "axioms", "var_to_range", "settled")
_COUNTERS = ("_version_counter", "_replacements_version_counter")  # both since 2.12


def conditions_of(env: ShapeEnv) -> dict[str, Any]:
    """Return what a trace has learnt of its sizes so far, for `take_back`."""
    return {name: copy.copy(getattr(env, name)) for name in _CONDITIONS if hasattr(env, name)}


def take_back(env: ShapeEnv, before: dict[str, Any]) -> None:
    """Forget what sizes have met since `conditions_of`, as if that code had never run."""
    now = conditions_of(env)
    if now == before:
        return
    for name, value in before.items():
        # What bounds a symbol that was made since then is no condition.
        setattr(env, name, now[name] | value if name == "var_to_range" else copy.copy(value))
    for name in _COUNTERS:
        if hasattr(env, name):
            setattr(env, name, getattr(env, name) + 1)
    for name in dir(type(env)):  # one remembers that it has noted a condition
        getattr(getattr(type(env), name), "cache_clear", lambda: None)()


def following_sizes() -> AbstractContextManager[None]:
    """Have operators run in Python, where symbolic sizes stay so, if there is such code."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def constant_source(name: str) -> Any:
    """Return the source of a symbol that no input of a compiled function has."""
    # Importing it takes longer than importing torch, and only a trace needs it.
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def floor_div(dividend: sympy.Expr, divisor: sympy.Expr | int) -> sympy.Expr:
    """Return a quotient of sizes, rounded down, as ShapeEnv writes it."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(dividend, divisor)


# Process groups


def default_store() -> Any:
    """Return the store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def named_group(name: str, ranks: Sequence[int], backend: str, timeout: datetime.timedelta) -> Any:
    """Make a process group of ranks of the default one. Only they call this.

    `new_group` without the other ranks makes up a name from the number of groups that this
    process is in, and ranks that are in more or fewer would wait for each other for ever.
    """
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    place, kind = ranks.index(c10d.get_rank()), c10d.Backend(backend)
    store = default_store().clone()  # who waits in it for ever holds up nobody else
    made, _ = c10d._new_process_group_helper(
        len(ranks), place, ranks, kind, store, name, timeout=timeout
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def split_group(group: Any, device: torch.device, name: str, timeout: datetime.timedelta) -> Any:
    """Split a group of the same ranks in the same order from `group`. All of them call this.

    `dist.split_group` makes up a name as `new_group` does, and splits what carries the tensors of
    other devices, too: gloo waits there for ranks that know the child by another name.
    """
    from torch.distributed import distributed_c10d

    def split(**only: Any) -> Any:
        options = backend_object(group, device).options
        if hasattr(options, "__deepcopy__"):  # or the parent's own are changed
            only["opts"] = copy.deepcopy(options)
        ranks = list(range(group.size()))
        return group.split_group(ranks, timeout=timeout, group_name=name, **only)

    try:
        made = split(device_types=[device])
    except (TypeError, RuntimeError) as error:
        # Refused before a word is sent: torch 2.10 cannot leave out devices, newer ones not the
        # device of what they take for the group's main backend.
        if isinstance(error, RuntimeError) and "filter" not in str(error):
            raise
        made = split()
    world: Any = distributed_c10d._world
    world.pg_map[made] = world.pg_map[group]
    world.pg_names[made] = name
    world.pg_group_ranks[made] = dict(world.pg_group_ranks[group])
    return made


def gather_options(timeout: datetime.timedelta) -> Any:
    """Return the options of an all-gather that ends after a time.

    Who frees a gloo group waits for all its collectives, also for those that were given up.
    """
    from torch.distributed import distributed_c10d

    options = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.timeout = timeout
    return options


def backend_object(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that carries tensors of a device; RuntimeError if there is none."""
    return group._get_backend(device)


# Replicated modules


def reduction_hooks(module: Any) -> list[Any]:
    """Return the communication hooks of a DistributedDataParallel, each with its state."""
    return list(module._comm_hooks)


def joins_uneven_inputs(module: Any) -> bool:
    """Say whether a DistributedDataParallel is inside its `join()`."""
    return bool(module._join_config.enable)


def was_dtensor(parameter: torch.Tensor) -> bool:
    """Say whether DistributedDataParallel has put a local tensor in a DTensor's place."""
    return hasattr(parameter, "_st_info")


# Sharded modules: `state` below is what FSDP2 keeps of a module.


def shard_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that a sharded module gathers together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (state._fsdp_param_group,) if group is not None]  # torch 2.10


def shard_precision(module: nn.Module) -> Any:
    """Return the mixed-precision policy of a module wrapped by `fully_shard`, else None."""
    find = getattr(module, "_get_fsdp_state", None)
    return None if find is None else getattr(find(), "_mp_policy", None)


def prepare_sharded(root: Any) -> None:
    """Do what FSDP2 does before the first forward of a root module."""
    root._get_fsdp_state()._lazy_init()


def finish_sharded_backward(root: Any) -> None:
    """Do what FSDP2 does when the backward of a root module has ended."""
    state = root._get_fsdp_state()
    if getattr(state._state_ctx, _MANUAL, False) is None:
        setattr(state._state_ctx, _MANUAL, False)  # torch 2.15 asks for it; no backward has set it
    state._root_post_backward_final_callback()


_MANUAL = "manual_backward_finalization_active"


def forget_sharded_step(root: Any) -> None:
    """Leave sharded modules as they are between steps, whatever a failed one has left."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    root.set_is_last_backward(True)  # torch 2.10: what ends a backward, without a reduction
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(True)
    state = root._get_fsdp_state()
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None


def leave_sharded_pass(group: Any) -> None:
    """Let a group of parameters out of a forward or backward that has not come to its end.

    It stays in one that has failed, and is then neither freed nor gathered when asked.
    """
    state = group._training_state
    group._training_state = type(state).IDLE


def take_gathered_gradient(held: Any) -> torch.Tensor | None:
    """Take the gradient that a sharded parameter has not reduced; zero_grad() does not see it.

    One that is wider than the parameter stands beside `.grad`, and in torch 2.15 there, too.
    """
    gathered = getattr(held, "_unsharded_param", None)
    if gathered is None:
        return None
    fresh: torch.Tensor | None = gathered.grad
    gathered.grad = None
    dtype = _sum_dtype(held)
    if hasattr(held, "unsharded_grad_dtype") or held.unsharded_accumulated_grad is None:
        return fresh if fresh is None or dtype is None else fresh.to(dtype)
    total: torch.Tensor = held.unsharded_accumulated_grad
    held.unsharded_accumulated_grad = None
    return total if fresh is None else total.add_(fresh)


def put_gathered_gradient(held: Any, gradient: torch.Tensor | None) -> None:
    """Give a sharded parameter a gradient to reduce; zeros by default."""
    gathered, dtype = held._unsharded_param, _sum_dtype(held)
    if gradient is None:
        gradient = torch.zeros_like(gathered, dtype=dtype)
    if hasattr(held, "unsharded_grad_dtype"):
        gathered.grad_dtype = gradient.dtype  # else it must be the dtype of the latest backward
        gathered.grad = gradient
    elif dtype in (None, gathered.dtype):
        gathered.grad = gradient
    else:
        held.unsharded_accumulated_grad = gradient


def _sum_dtype(held: Any) -> torch.dtype | None:
    """Return the dtype in which microbatches' gradients are added up, if it is a given one."""
    found: torch.dtype | None = getattr(held, "unsharded_grad_dtype", held.reduce_dtype)
    return found


warn_of_version(torch.__version__)
check_names(path for path in PRIVATE if not path.startswith(LATE))
