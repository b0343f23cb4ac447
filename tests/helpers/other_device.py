"""Another device than the CPU: a GPU, or a stand-in for one on a machine without.

Both record the operations that wait for the device: each costs a step of an engine the time in which the CPU could have
prepared what comes next. The tensors of the stand-in are on a device of their own, and compute on the CPU. Like a GPU,
it refuses operations on tensors of two devices.
"""

from __future__ import annotations

import os
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten: Any = torch.ops.aten

DEVICE = torch.device(os.environ.get("LOGITSHIP_TEST_DEVICE", "meta"))
"""The device that the tensors name: "cuda" for a GPU. The stand-in is "meta": all builds of torch know it."""

_WAITS = (
    "local_scalar_dense",  # item(), bool(), int(), float()
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "repeat_interleave",
    "bincount",
)
"""Beginnings of the names of operations whose result, or the shape of it, the CPU needs to know."""
_COPIES = {aten._to_copy.default, aten.copy_.default}
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class DeviceTensor(torch.Tensor):
    """A tensor on the device.

    Attributes:
        host: its values.
        stand_in: the device.
    """

    host: torch.Tensor
    stand_in: StandIn

    @staticmethod
    def __new__(cls: type[DeviceTensor], host: torch.Tensor, stand_in: StandIn) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, host.stride(), host.storage_offset(), dtype=host.dtype, device=DEVICE
        )
        made.host, made.stand_in = host, stand_in
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the stand-in")

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a part of the tensor."""
        return super().__getitem__(self._on_device(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write a part of the tensor."""
        super().__setitem__(self._on_device(index), value)

    def _on_device(self, index: Any) -> Any:
        """Copy lists in an index to the device, as torch does."""
        if isinstance(index, tuple):
            return tuple(map(self._on_device, index))
        if not isinstance(index, list):
            return index
        self.stand_in.wait("a list as an index")
        return self.stand_in.put(torch.tensor(index))

    def tolist(self) -> Any:
        """Return the values, as a GPU does: after its queue."""
        self.stand_in.wait("tolist")
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise, as a tensor on a GPU does."""
        raise TypeError("can't convert a tensor on the device to numpy: use Tensor.cpu()")


class OtherDevice(ABC):
    """The device. While it is entered, tensors may be made on `DEVICE`.

    Attributes:
        waits: the operations so far that wait for the device: where they were called, and which.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def wait(self, operation: str) -> None:
        """Record that an operation waits."""
        frames = traceback.extract_stack()
        caller = next((each for each in reversed(frames) if "/logitship/" in each.filename), frames[0])
        self.waits.append(f"{Path(caller.filename).name}:{caller.name} ({operation})")

    @abstractmethod
    def put(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device."""

    @abstractmethod
    def __enter__(self) -> OtherDevice: ...

    @abstractmethod
    def __exit__(self, *error: Any) -> None: ...


def other_device() -> OtherDevice:
    """Return a GPU if `LOGITSHIP_TEST_DEVICE` asks for one, and a stand-in otherwise."""
    return Gpu() if DEVICE.type == "cuda" else StandIn()


class Gpu(OtherDevice):
    """A GPU, which PyTorch lets warn of waits."""

    def put(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device."""
        waits = self.waits.copy()
        copy = host.to(DEVICE)
        self.waits[:] = waits
        return copy

    def __enter__(self) -> Gpu:
        """Enter the device."""
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: self.wait(str(message))
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave it."""
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(*error)


class StandIn(OtherDevice, TorchDispatchMode):
    """A device that computes on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._data = _Data(self)

    def __enter__(self) -> StandIn:
        """Enter the device."""
        TorchDispatchMode.__enter__(self)
        self._data.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave it."""
        self._data.__exit__(*error)
        TorchDispatchMode.__exit__(self, *error)

    def put(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device."""
        return DeviceTensor(host.clone(), self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation of torch."""
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = {id(each.host): each for each in tensors if isinstance(each, DeviceTensor)}
        is_copy, is_index = func in _COPIES, func in _INDEXING
        target = kwargs.get("device") or (args[0].device if is_copy else None)
        is_here = bool(on_device) if target is None else torch.device(target) == DEVICE
        elsewhere = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim() > 0]
        assert not any(each.device == DEVICE for each in tensors if not isinstance(each, DeviceTensor)), "has no values"
        if is_copy:
            is_asynchronous = kwargs.get("non_blocking") or args[2:3] == (True,)
            waits = not is_asynchronous and (bool(on_device) != is_here or bool(on_device and elsewhere))
        else:
            if on_device and elsewhere and not is_index:
                raise RuntimeError(f"{func}: expected all tensors to be on the same device")
            # Indices on the CPU are copied.
            waits = bool(on_device) and (
                _name(func).startswith(_WAITS) or (is_index and (bool(elsewhere) or _has_mask(args[1])))
            )
        if waits:
            self.wait(str(func))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if not is_here:
            return result

        def wrapped(value: Any) -> Any:
            return on_device.get(id(value), DeviceTensor(value, self)) if isinstance(value, torch.Tensor) else value

        return tree_map(wrapped, result)


class _Data(TorchFunctionMode):
    """Puts values of Python on the device: torch itself would drop them."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        if func not in (torch.tensor, torch.as_tensor) or torch.device(kwargs.get("device") or "cpu") != DEVICE:
            return func(*args, **kwargs)
        self._stand_in.wait(f"torch.{func.__name__}")
        return self._stand_in.put(func(*args, **kwargs | {"device": "cpu"}))


def _name(func: Any) -> str:
    name: str = func.name().partition("::")[2]
    return name.lstrip("_")


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value
