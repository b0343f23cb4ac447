"""The tensor that stands for promised logits. Each operation on it is recorded, or runs on the real logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from sys import getrefcount
from typing import Any, TypeAlias
from weakref import getweakrefcount

import torch

from .promised_memory import MIN_GIVEN, Memory, Source
from .promised_values import LogitsView, State

RecordOperation: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Records an operation with these arguments, and returns its result; NotImplemented if it cannot be recorded."""

RECORDED_OPERATIONS: dict[Callable[..., Any], RecordOperation] = {}
"""Operations that are recorded, see `recorded_operations`. An operation that is not here uses the values."""

_CPU = torch.device("cpu")
_make_wrapper = torch.Tensor._make_wrapper_subclass


def _known(name: str, value_of: Callable[[State], Any]) -> Any:
    """Return an attribute of tensors that is known before the logits are.

    Args:
        name: its name.
        value_of: returns its value for a state whose tensor was not used.
    """

    def get(tensor: Any) -> Any:
        state = tensor.promised_state
        return value_of(state) if state.made is None else getattr(state.made, name)

    def refuse(tensor: Any, value: Any) -> None:
        getattr(torch.Tensor, name).__set__(tensor, value)  # raises

    return property(get, refuse)


class PromisedLogits(torch.Tensor):
    """Logits of a call, or values computed from them, that need not exist yet.

    It has a shape but no storage. PyTorch calls `__torch_function__` for all its operations, the methods here for the
    most frequent ones.
    """

    __slots__ = ("promised_state",)

    promised_state: State

    def __setitem__(self, index: Any, value: Any) -> None:
        """See `torch.Tensor.__setitem__`."""
        if not self.promised_state.put(index, value.promised_state if type(value) is PromisedLogits else value):
            call_real(torch.Tensor.__setitem__, (self, index, value), {})

    def __iter__(self) -> Iterator[Any]:
        """See `torch.Tensor.__iter__`."""
        states = self.promised_state.split()
        if states is None:
            real: torch.Tensor = self.promised_state.real
            return iter(real)
        return iter([wrap(state) for state in states])

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]  # some compare it
        """The class of ordinary tensors."""
        return torch.Tensor

    shape = _known("shape", lambda state: torch.Size(state.shape))
    dtype = _known("dtype", lambda state: torch.float32)
    device = _known("device", lambda state: _CPU)

    def __getattr__(self, name: str) -> Any:
        """Raise the exception of an ordinary tensor."""
        raise AttributeError(f"'Tensor' object has no attribute '{name}'", name=name, obj=self)

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


_MAX_UNUSED = 64
"""Maximum number of kept tensors of a shape, and of shapes."""
_LISTED = next(map(getrefcount, [object()]))
"""Result of `getrefcount` for an element of a list to which nothing else refers."""


def _nothing() -> State:
    """Return the state of an unused tensor."""
    nothing = LogitsView(Memory(Source(0, 0, lambda: torch.empty(0, 0))), range(0), is_one=False)
    nothing.made = nothing.memory.read()
    return nothing


_NOTHING = _nothing()


def wrap(state: State) -> PromisedLogits:
    """Return a tensor that stands for a state."""
    source = state.memory.source
    if len(source.tensors) >= source.most_tensors:
        take_back(source)
    tensor: PromisedLogits
    try:
        tensor = source.recent.tensors[state.shape].pop()
    except LookupError:  # there is none
        tensor = _make_wrapper(PromisedLogits, state.shape, dtype=torch.float32)
    tensor.promised_state = state
    source.tensors.append(tensor)
    return tensor


def take_back(source: Source) -> bool:
    """Keep tensors that the author's code no longer refers to for reuse. Return False if it still refers to others.

    Creating and freeing a tensor takes longer than recording an edit.
    """
    # Threads of the author's code may be given new tensors at the same time.
    tensors, source.tensors = source.tensors, []
    for place, count in enumerate([*map(getrefcount, tensors)]):
        if count > _LISTED:
            source.tensors.append(tensors[place])
        elif not source.was_read:
            _keep_unused(tensors[place], source.recent.tensors)
    source.most_tensors = 2 * len(source.tensors) + MIN_GIVEN
    return not source.tensors


def _keep_unused(tensor: Any, unused: dict[tuple[int, ...], list[Any]]) -> None:
    # An author's attribute, or a weak reference such as that of a weak dictionary, would come back with the tensor.
    if tensor.__dict__ or getweakrefcount(tensor):
        return
    shape = tensor.promised_state.shape
    of_shape = unused.get(shape)
    if of_shape is None:
        if len(unused) >= _MAX_UNUSED:
            unused.clear()
        of_shape = unused[shape] = []
    if len(of_shape) < _MAX_UNUSED:
        tensor.promised_state = _NOTHING
        of_shape.append(tensor)


def has_known_layout(tensor: Any) -> bool:
    """Return whether this is a promised tensor whose strides, and all else but its values, are those of its wrapper."""
    return type(tensor) is PromisedLogits and tensor.promised_state.made is None and tensor.promised_state.is_contiguous


def unwrapped(value: Any) -> Any:
    """Return the state of a promised tensor, and any other value as it is."""
    return value.promised_state if type(value) is PromisedLogits else value


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
