"""Records operations on promised logits: which arguments make one an edit, and which use the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .promised_index import Cells
from .promised_operands import is_plain, scalar_of
from .promised_tensor import RECORDED_OPERATIONS, PromisedLogits, RecordOperation, call_real, has_known_layout, wrap
from .promised_values import LogitsView, State, calculate_cells

Change = Callable[..., bool]
"""Edits a state, given the other arguments. Returns False if it cannot be recorded."""


def _in_place(change: Change, num_args: int = 1) -> RecordOperation:
    """Return the recorder of an operation that edits its first argument.

    Args:
        change: does it.
        num_args: number of the other arguments, which have no names.
    """

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs or len(args) != 1 + num_args or type(args[0]) is not PromisedLogits:
            return NotImplemented
        return args[0] if change(args[0].promised_state, *args[1:]) else NotImplemented

    return record


def _out_of_place(change: Change, num_args: int = 1) -> RecordOperation:
    """Return the recorder of the same operation on a copy of its first argument."""

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs or len(args) != 1 + num_args or type(args[0]) is not PromisedLogits:
            return NotImplemented
        copy = args[0].promised_state.copy()
        return wrap(copy) if copy is not None and change(copy, *args[1:]) else NotImplemented

    return record


def _calculate(operator: str) -> Change:
    return lambda state, operand: state.calculate(operator, operand)


def _masked_fill(state: State, mask: Any, value: Any) -> bool:
    return isinstance(state, LogitsView) and state.fill_mask(mask, value)


def _fill(state: State, value: Any) -> bool:
    return isinstance(state, LogitsView) and scalar_of(value) is not None and state.put(Ellipsis, value)


def _index_add(state: State, dim: Any, index: Any, source: Any) -> bool:
    """Add to columns. Numbers of an index must not be negative here."""
    if not isinstance(state, LogitsView) or state.is_one or dim not in (1, -1) or type(dim) is not int:
        return False
    if not is_plain(index, torch.int64) or index.ndim != 1 or bool((index < 0).any()):
        return False
    cells = state.select((slice(None), index))
    if not isinstance(cells, Cells) or not is_plain(source, torch.float32) or source.shape != cells.shape:
        return False
    return cells.are_distinct and calculate_cells(state.memory, cells, "+", source)


def _where(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record `torch.where(mask, number, logits)`, or with both the other way round."""
    if kwargs or len(args) != 3 or not is_plain(args[0], torch.bool):
        return NotImplemented
    mask, value, promised = args
    if type(promised) is not PromisedLogits:
        mask, value, promised = ~mask, promised, value
    return _RECORDED[torch.masked_fill]((promised, mask, value), {})


def _clone(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    copy = None if len(args) != 1 or kwargs else args[0].promised_state.copy()
    return NotImplemented if copy is None else wrap(copy)


def _detach(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record an operation that returns a view of everything. A `torch.nn.Parameter` must get this class from it."""
    state = args[0].promised_state
    if len(args) != 1 or kwargs or not isinstance(state, LogitsView) or not state.memory.is_pending:
        return NotImplemented
    return wrap(LogitsView(state.memory, state.rows, state.is_one))


def _float(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if len(args) == 1 and not kwargs else NotImplemented


def _unbind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record the iteration over rows."""
    tensor, *dims = args
    if kwargs or (dims and (type(dims[0]) is not int or dims[0] != 0)):
        return NotImplemented
    state = tensor.promised_state
    states = state.split() if isinstance(state, LogitsView) else None
    return NotImplemented if states is None else tuple(map(wrap, states))


def _get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor, index = args
    found = None
    if type(tensor) is PromisedLogits and isinstance(tensor.promised_state, LogitsView):
        found = tensor.promised_state.get(index)
    return NotImplemented if found is None else wrap(found)


def _set(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor, index, value = args
    if type(tensor) is not PromisedLogits or not isinstance(tensor.promised_state, LogitsView):
        return NotImplemented
    own = value.promised_state if type(value) is PromisedLogits else value
    return None if tensor.promised_state.put(index, own) else NotImplemented


_ELEMENT = torch.empty(())
"""Has the dtype and the device of logits."""


def _shaped_like(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record a function that only uses the shape, the dtype and the device of its first argument."""
    if not args or not has_known_layout(args[0]):
        return NotImplemented
    # It has no more memory, and what is made like an overlapping tensor is contiguous. Not kept for later calls: in a
    # transform such as `torch.func.grad`, it belongs to that.
    return function(_ELEMENT.expand(args[0].promised_state.shape), *args[1:], **kwargs)


_T = torch.Tensor
_NEW_TENSORS = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, _T.new_zeros, _T.new_full)

_RECORDED: dict[Callable[..., Any], RecordOperation] = {
    _T.__getitem__: _get,
    _T.__setitem__: _set,
    **dict.fromkeys((_T.__iadd__, _T.add_), _in_place(_calculate("+"))),
    **dict.fromkeys((_T.__isub__, _T.sub_), _in_place(_calculate("-"))),
    **dict.fromkeys((_T.__imul__, _T.mul_), _in_place(_calculate("*"))),
    **dict.fromkeys((_T.__itruediv__, _T.div_), _in_place(_calculate("/"))),
    **dict.fromkeys((_T.__add__, _T.__radd__, _T.add, torch.add), _out_of_place(_calculate("+"))),
    **dict.fromkeys((_T.__sub__, _T.sub, torch.sub), _out_of_place(_calculate("-"))),
    **dict.fromkeys((_T.__mul__, _T.__rmul__, _T.mul, torch.mul), _out_of_place(_calculate("*"))),
    **dict.fromkeys((_T.__truediv__, _T.div, torch.div), _out_of_place(_calculate("/"))),
    _T.fill_: _in_place(_fill),
    _T.masked_fill_: _in_place(_masked_fill, 2),
    **dict.fromkeys((_T.masked_fill, torch.masked_fill), _out_of_place(_masked_fill, 2)),
    torch.where: _where,
    _T.index_add_: _in_place(_index_add, 3),
    **dict.fromkeys((_T.clone, torch.clone), _clone),
    **dict.fromkeys((_T.detach, _T.data.__get__), _detach),  # type: ignore[attr-defined]
    _T.float: _float,
    _T.unbind: _unbind,
    **{function: partial(_shaped_like, function) for function in _NEW_TENSORS},
}


def _method(function: Callable[..., Any], record: RecordOperation) -> Callable[..., Any]:
    """Return a method that records an operation without PyTorch's dispatch, which takes longer than recording."""

    def method(*args: Any, **kwargs: Any) -> Any:
        outcome = record(args, kwargs)
        return call_real(function, args, kwargs) if outcome is NotImplemented else outcome

    return method


def add_recorded_operations() -> None:
    """Let promised tensors record the operations of this module."""
    RECORDED_OPERATIONS.update(_RECORDED)
    for function, record in _RECORDED.items():
        name: str = getattr(function, "__name__", "")
        # With a method such as `__radd__`, Python would turn `tensor + logits` into `logits + tensor`. With
        # `__getitem__`, a number in a list of tensors would be a sequence to PyTorch.
        if getattr(torch.Tensor, name, None) is function and not name.startswith(("__r", "__getitem__")):
            setattr(PromisedLogits, name, _method(function, record))
