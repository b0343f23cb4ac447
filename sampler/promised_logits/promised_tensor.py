"""The tensor that stands for promised logits. Each operation on it is recorded, or runs on the real logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from .promised_memory import Reference
from .promised_values import State

RecordOperation: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Records an operation with these arguments, and returns its result; NotImplemented if it cannot be recorded."""

RECORDED_OPERATIONS: dict[Callable[..., Any], RecordOperation] = {}
"""Operations that are recorded, see `recorded_operations`. An operation that is not here uses the values."""


def _shape(tensor: Any) -> Any:
    """Return the shape of a promised tensor, which is that of its real one once somebody used it."""
    state = tensor.promised_state
    return torch.Size(state.shape) if state.made is None else state.made.shape


class PromisedLogits(torch.Tensor):
    """Logits of a call, or values computed from them, that need not exist yet.

    It has a shape but no storage. PyTorch calls `__torch_function__` for all its operations.

    Attributes:
        promised_state: what it stands for.
        promised_reference: of its call.
    """

    __slots__ = ("promised_reference", "promised_state")

    promised_state: State
    promised_reference: Reference | None

    # Both without PyTorch's dispatch, which takes longer: processors often use them.
    shape: Any = property(_shape, vars(torch._C.TensorBase)["shape"].__set__)  # it raises

    def __len__(self) -> int:
        """Return the first dimension."""
        shape: torch.Size = self.shape
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record the operation if possible, else make it on the real logits."""
        kwargs = kwargs or {}
        record = RECORDED_OPERATIONS.get(func)
        if record is not None:
            outcome = record(args, kwargs)
            if outcome is not NotImplemented:
                return outcome
        elif func in _METADATA and args and has_known_layout(args[0]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return call_real(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Make an operation that did not go through `__torch_function__` on the real logits."""
        return call_real(func, args, kwargs or {})


PromisedLogits.__name__ = PromisedLogits.__qualname__ = "Tensor"  # which Python's errors name


def wrap(state: State) -> PromisedLogits:
    """Return a tensor that stands for a state."""
    tensor: PromisedLogits = torch.Tensor._make_wrapper_subclass(PromisedLogits, state.shape, dtype=torch.float32)
    tensor.promised_state = state
    tensor.promised_reference = state.memory.source.reference
    return tensor


def has_known_layout(tensor: Any) -> bool:
    """Return whether this is a promised tensor whose strides, and all else but its values, are those of its wrapper."""
    return type(tensor) is PromisedLogits and tensor.promised_state.made is None and tensor.promised_state.is_contiguous


def call_real(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with the real tensors. If it returns one of these, return the promised tensor instead."""
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    named = {name: _with_real(value, replaced) for name, value in kwargs.items()}
    result = func(*_with_real(args, replaced), **named)
    if id(result) in replaced:
        return replaced[id(result)][1]
    return result


# Not a function inside `call_real`: that would refer to itself, and the cycle keeps the tensors beyond their call.
def _with_real(value: Any, replaced: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Replace promised tensors in a value by the real ones, and record the replacements by id."""
    kind = type(value)
    if kind is PromisedLogits:
        tensor = value.promised_state.real
        replaced[id(tensor)] = tensor, value
        return tensor
    if kind is tuple or kind is list:
        return kind(_with_real(each, replaced) for each in value)
    if kind is dict:
        return {key: _with_real(each, replaced) for key, each in value.items()}
    if kind is slice:
        return slice(*(_with_real(each, replaced) for each in (value.start, value.stop, value.step)))
    return value


_METADATA = {
    torch.Tensor.__len__,
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
    torch.numel,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    torch.Tensor.get_device,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
}
"""Operations that need no values: the wrapper has the shape, the strides, the dtype and the device of the logits."""
