"""Keep what autograd saved in a forward on the host until its backward comes.

In:  a forward that runs inside `SavedTensors`.
Out: the same gradients; between `offload` and `reload` the saved tensors are in host memory.

Parameters stay where they are. A tensor that several operations save is moved once. On an
accelerator the copies run on a stream of their own, from and to pinned memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.errors import InputError
from fxpipe.torch_inside import base_of, version_of

__all__ = ["SavedTensors"]


class _Saved:
    """One tensor that autograd saved: `tensor` is on the device, else `host` has its numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.host: torch.Tensor | None = None
        self.version = version_of(tensor)
        self.device = tensor.device

    def check(self) -> None:
        if self.tensor is not None and self.host is None and version_of(self.tensor) > self.version:
            raise InputError(
                f"a tensor of shape {list(self.tensor.shape)} that a backward needs was changed in "
                "place after its operation; clone it before the change"
            )


class SavedTensors(saved_tensors_hooks):
    """What autograd saves while this context is open."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._pack, self._unpack)
        self._known: weakref.WeakValueDictionary[Any, _Saved] = weakref.WeakValueDictionary()
        self._stream = None if device.type in ("cpu", "meta") else torch.Stream(device)

    def offload(self) -> None:
        """Move everything to the host."""
        with self._beside():
            for saved in list(self._known.values()):
                saved.check()
                if saved.tensor is None:
                    continue
                on_accelerator = saved.device.type != "cpu"
                saved.host = torch.empty_like(saved.tensor, device="cpu", pin_memory=on_accelerator)
                saved.host.copy_(saved.tensor, non_blocking=on_accelerator)
                if self._stream is not None and on_accelerator:
                    saved.tensor.record_stream(self._stream)
                saved.tensor = None

    def reload(self) -> None:
        """Begin to move everything back."""
        with self._beside():
            for saved in list(self._known.values()):
                self._bring_back(saved)

    @staticmethod
    def _bring_back(saved: _Saved) -> None:
        if saved.tensor is None:
            assert saved.host is not None
            # What is on the host already is copied too: the host's memory is given back.
            saved.tensor = saved.host.to(saved.device, non_blocking=True, copy=True)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream for copies, behind what was computed so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        base = base_of(tensor)
        if isinstance(tensor if base is None else base, nn.Parameter) or not _is_plain(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor))
        saved = self._known.get(key)
        if saved is None:
            saved = self._known[key] = _Saved(tensor)
        return saved

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Saved):
            tensor: torch.Tensor = packed
            return tensor
        packed.check()
        self._bring_back(packed)
        assert packed.tensor is not None
        if self._stream is not None and packed.host is not None:
            current = torch.accelerator.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            packed.tensor.record_stream(current)
        return packed.tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0
