"""The private names of torch that fxpipe uses, each with what it is for, and a check of them.

`torch_inside.py` is the only module that uses them.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["LATE", "PRIVATE", "SUPPORTED", "check_names", "lacks", "warn_of_version"]

SUPPORTED = ((2, 10), (2, 15))
"""The oldest and the newest version of torch that the tests have seen."""

_RANGE = " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED)

PRIVATE: dict[str, str] = {
    "torch._subclasses.fake_tensor.FakeTensor": "a tensor without data: models are traced on it",
    "torch._subclasses.fake_tensor.FakeTensorMode": "makes every new tensor a fake one",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "a leaf asked for a value",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "a size depends on values",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "compute for real during a trace",
    "torch._functorch.apis.vmap_impl": "patched in a trace: what vmap runs is not looked into",
    "torch._check_with": "patched in a trace: a model's own checks become checks of its stages",
    "torch._check_tensor_all_with": "as _check_with",
    "torch._C._are_functorch_transforms_active": "a backward is not split inside torch.func",
    "torch._C.DisableTorchFunction": "computes gradients unseen by the mode that watches",
    "torch._C._autograd._profiler_enabled": "actions get labels while a profiler runs",
    "torch._dynamo.source.ConstantSource": "where a size comes from, as ShapeEnv wants to know",
    "torch._dynamo.eval_frame.OptimizedModule": "a compiled module is one block",
    "torch.autograd.forward_ad._current_level": "a backward is not split in forward mode",
    "torch.autograd.graph._engine_run_backward": "a backward without the questions around it",
    "torch.nn.modules.batchnorm._NormBase": "modules that change their buffers in a forward",
    "torch.nn.modules.module._IncompatibleKeys": "what load_state_dict returns",
    "torch.nn.modules.module._has_any_global_hook": "hooks on all modules are warned of",
    "torch.nn.Module._compiled_call_impl": "set by Module.compile(): such a module is one block",
    "torch.nn.Module()._parameters": "a module's own parameters, without those of its children",
    "torch.nn.Module()._buffers": "a module's own buffers; they can be replaced there",
    "torch.nn.Module()._modules": "a module's children, None among them",
    "torch.nn.Module()._non_persistent_buffers_set": "buffers that a state_dict leaves out",
    "torch.nn.Module()._forward_hooks": "a trace runs those of libraries, a guard compares them",
    "torch.nn.Module()._forward_hooks_with_kwargs": "how a forward hook wants to be called",
    "torch.nn.Module()._forward_pre_hooks": "as _forward_hooks",
    "torch.nn.Module()._forward_pre_hooks_with_kwargs": "as _forward_hooks_with_kwargs",
    "torch.nn.Module()._backward_hooks": "counted and compared, never run by us",
    "torch.nn.Module()._backward_pre_hooks": "as _backward_hooks",
    "torch.Tensor._version": "grows with each change in place",
    "torch.Tensor._base": "the tensor that this one is a view of",
    "torch.Tensor._is_view": "a view cannot leave an autograd function",
    "torch.Tensor._backward_hooks": "a parameter's hooks wait for its weight gradient",
    "torch.Tensor._post_accumulate_grad_hooks": "as Tensor._backward_hooks",
    "torch.UntypedStorage._cdata": "the number of a storage: tensors with one share memory",
    "torch.overrides._get_current_function_mode_stack": "modes around a vmap run again with it",
    "torch.utils._pytree.SUPPORTED_NODES": "classes that are registered as containers",
    "torch.utils._pytree._get_node_type": "the entry of a value in SUPPORTED_NODES",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees the operators that code runs",
    "torch.utils._sympy.functions.FloorDiv": "a quotient of sizes that ShapeEnv can simplify",
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl|"
    "_checkpoint_without_reentrant_generator": "patched in a trace: marks what is computed again",
    "torch._dispatch.python.enable_python_dispatcher": "sizes stay symbolic in paddings",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._set_replacement": "where a size was fixed",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv()._version_counter": "grows when conditions "
    "are taken back, so that nothing cached outlives them",
    "torch.ops.aten.add.Tensor._schema": "tells whether an operator writes to an argument",
    "torch.ops.aten.add.Tensor._overloadpacket": "an operator without its overload",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "counted as attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "as the forward",
    "torch.amp.autocast_mode.autocast()._enabled": "a traced autocast region is entered again",
    "torch.amp.autocast_mode.autocast()._cache_enabled": "as autocast._enabled",
    "torch.distributed.distributed_c10d._get_default_store": "where ranks meet",
    "torch.distributed.distributed_c10d._new_process_group_helper": "a group by a name all know",
    "torch.distributed.distributed_c10d._world": "where the groups of a process are kept",
    "torch.distributed.ProcessGroup._get_backend": "which backend carries a device's tensors",
    "torch.nn.parallel.distributed:_comm_hooks": "hooks that would not be called",
    "torch.distributed.tensor.parallel.ddp:_st_info": "marks a parameter that was a DTensor",
    "torch.nn.parallel.distributed:_join_config": "replicas that run out of data",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "what is known of a sharded module",
    "torch.distributed.fsdp._fully_shard._fsdp_state:_fsdp_param_groups|_fsdp_param_group": "what "
    "is gathered together",
    "torch.distributed.fsdp._fully_shard._fsdp_state:_mp_policy": "dtypes of a sharded module",
    "torch.distributed.fsdp._fully_shard._fsdp_state:_lazy_init": "makes a module a root",
    "torch.distributed.fsdp._fully_shard._fsdp_state:_root_post_backward_final_callback": "waits "
    "for the reduced gradients",
    "torch.distributed.fsdp._fully_shard._fsdp_state:_state_ctx": "whether a backward has begun",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:_training_state": "what a forward that "
    "has failed leaves sharded parameters in",
    "torch.distributed.fsdp._fully_shard._fsdp_param:_unsharded_param": "holds a gradient that "
    "a failed step has left",
    "torch.distributed.fsdp._fully_shard._fsdp_param:unsharded_grad_dtype|"
    "unsharded_accumulated_grad": "sums of gradients that are wider than the parameter",
    "torch.distributed.tensor._api:_local_tensor": "this rank's part of a sharded tensor",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:_checkpoint_wrapped_module": "a "
    "word in parameter names that the wrapper adds",
    "torch._dynamo.eval_frame:_orig_mod": "the module inside a compiled one",
}
"""What each private name is for.

`Module()` is an instance: `__init__` sets the name. After a colon stands a name that only
objects of a library have which are made elsewhere; `|` is between old and new names.
"""


def _value(path: str) -> Any:
    """The object behind a path of `PRIVATE`; AttributeError or ImportError if there is none."""
    path, _, used = path.partition(":")
    if used:
        source = inspect.getsource(importlib.import_module(path))
        if not any(name in source for name in used.split("|")):
            raise AttributeError(used)
        return source
    words = path.split(".")
    found: Any = torch
    for position, word in enumerate(words[1:], 1):
        name = word.removesuffix("()")
        if not hasattr(found, name) and isinstance(found, type(torch)):
            importlib.import_module(".".join(words[: position + 1]))
        found = getattr(found, name)
        if word.endswith("()"):
            found = found("cpu") if name == "autocast" else found()
    return found


LATE = (
    "torch._dynamo",
    "torch._dispatch",
    "torch.fx.experimental",
    "torch.utils._sympy",
    "torch.distributed",
)
"""What most programs never use: not looked for when fxpipe is imported."""


def check_names(paths: Iterable[str]) -> None:
    """Say which private names this torch lacks.

    Raises:
        ImportError: it lacks one or more of them.
    """
    missing = []
    for path in paths:
        try:
            _value(path)
        except (AttributeError, ImportError):
            missing.append(f"{path} ({PRIVATE[path]})")
    if missing:
        raise ImportError(lacks(", ".join(missing)))


def lacks(names: str) -> str:
    """Say that this torch has no such names, and which one would."""
    return f"torch {torch.__version__} lacks what fxpipe needs of it: {names}; use torch {_RANGE}"


def warn_of_version(version: str) -> None:
    """Warn once, in a sentence, of a torch that no test has seen."""
    major, minor = (int(word) for word in version.split(".")[:2])
    if not SUPPORTED[0] <= (major, minor) <= SUPPORTED[1]:
        warnings.warn(
            f"fxpipe is tested with torch {_RANGE}, and this is torch {version}",
            stacklevel=2,
        )
