"""Records operations on promised logits: which arguments make one an edit, and which use the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .promised_index import Cells, cells_in_rows
from .promised_operands import constant_of, is_plain, scalar_of
from .promised_tensor import (
    RECORDED_OPERATIONS,
    PromisedLogits,
    RecordOperation,
    call_real,
    has_known_layout,
    unwrapped,
    wrap,
)
from .promised_values import LogitsView, State, Values, calculate_cells, cells_of, put_cells


def _in_place(change: Callable[[State, tuple[Any, ...]], bool], *names: str) -> RecordOperation:
    """Return the recorder of an operation that edits its first argument.

    Args:
        change: does it, given the other arguments. Returns False if it cannot be recorded.
        *names: names of the other arguments, see `_positional`.
    """

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs:
            args = _positional(args, kwargs, names)
        if not args or type(args[0]) is not PromisedLogits:
            return NotImplemented
        state = args[0].promised_state
        return args[0] if change(state, tuple(map(unwrapped, args[1:]))) else NotImplemented

    return record


def _out_of_place(change: Callable[[State, tuple[Any, ...]], bool], *names: str) -> RecordOperation:
    """Return the recorder of the same operation on a copy of its first argument."""

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs:
            args = _positional(args, kwargs, names)
        if not args or type(args[0]) is not PromisedLogits:
            return NotImplemented
        copy = args[0].promised_state.copy()
        if copy is None or not change(copy, tuple(map(unwrapped, args[1:]))):
            return NotImplemented
        return wrap(copy)

    return record


def _positional(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the arguments in order; () if one is missing or not known.

    Args:
        args: the first of them.
        kwargs: the others.
        names: names of all but the first. A number may be the `value` where a tensor is the `src`.
    """
    if "src" in kwargs and not isinstance(kwargs["src"], torch.Tensor):
        return ()
    expected = names[len(args) - 1 :]
    if "value" in kwargs and expected[-1:] == ("src",) and not isinstance(kwargs["value"], torch.Tensor):
        expected = (*expected[:-1], "value")
    if kwargs.keys() != set(expected):
        return ()
    return (*args, *(kwargs[name] for name in expected))


def _calculate(operator: str) -> Callable[[State, tuple[Any, ...]], bool]:
    return lambda state, args: len(args) == 1 and state.calculate(operator, args[0])


def _calculate_in_place(operator: str) -> RecordOperation:
    """Return the recorder of an operator that edits its first argument."""

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs or len(args) != 2 or type(args[0]) is not PromisedLogits:
            return NotImplemented
        tensor, operand = args
        return tensor if tensor.promised_state.calculate(operator, operand) else NotImplemented

    return record


def _binary(operator: str, reverse: str | None) -> RecordOperation:
    """Return the recorder of an operator whose promised operand may be on either side.

    Args:
        operator: the operator.
        reverse: the operator if the promised operand is the second one.
    """
    forward = _out_of_place(_calculate(operator))
    backward = None if reverse is None else _out_of_place(_calculate(reverse))

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if len(args) == 2 and type(args[0]) is not PromisedLogits:
            return NotImplemented if backward is None else backward((args[1], args[0]), kwargs)
        return forward(args, kwargs)

    return record


def _fill(state: State, args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and scalar_of(args[0]) is not None and state.put(Ellipsis, args[0])


def _copy(state: State, args: tuple[Any, ...]) -> bool:
    if len(args) == 1 and isinstance(args[0], LogitsView):
        return args[0].shape == state.shape and state.put(Ellipsis, args[0])
    if len(args) != 1 or not isinstance(args[0], torch.Tensor) or args[0].ndim > len(state.shape):
        return False
    return state.put(Ellipsis, args[0])


def _zero(state: State, args: tuple[Any, ...]) -> bool:
    return not args and state.put(Ellipsis, 0.0)


def _masked_fill(state: State, args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and state.fill_mask(*args)


def _index_fill(state: State, args: tuple[Any, ...]) -> bool:
    if len(args) != 3 or scalar_of(args[2]) is None:
        return False
    index = _index_along(state, args[0], args[1])
    return index is not None and not _has_negative(args[1]) and state.put(index, args[2])


def _index_copy(state: State, args: tuple[Any, ...]) -> bool:
    if len(args) != 3 or not is_plain(args[2], torch.float32):
        return False
    cells = _cells_along(state, args[0], args[1])
    if cells is None or args[2].shape != cells.shape:
        return False
    return put_cells(state.memory, cells, args[2])


def _index_add(state: State, args: tuple[Any, ...]) -> bool:
    if len(args) != 3 or not is_plain(args[2], torch.float32):
        return False
    return _add_at(state, _cells_along(state, args[0], args[1]), args[2])


def _index_along(state: State, dim: Any, numbers: Any) -> Any:
    """Return the index that selects numbers, int64 [n], along a dimension; None if it is not certain."""
    if not is_plain(numbers, torch.int64) or numbers.ndim != 1 or type(dim) is not int:
        return None
    dims = len(state.shape)
    if not -dims <= dim < dims:
        return None
    return numbers if dim % dims == 0 else (slice(None), numbers)


def _cells_along(state: State, dim: Any, numbers: Any) -> Cells | None:
    """Return the elements with these numbers, int64 [n], along a dimension; None if it is not certain."""
    index = _index_along(state, dim, numbers)
    cells = None if index is None else cells_of(state, index)
    if cells is None or (cells.may_be_negative and _has_negative(numbers)):
        return None
    cells.may_be_negative = False
    return cells


def _has_negative(numbers: torch.Tensor) -> bool:
    return bool((numbers.numpy() < 0).any())


def _scatter(state: State, args: tuple[Any, ...]) -> bool:
    if len(args) != 3:
        return False
    cells = _scattered(state, args[0], args[1])
    if cells is None:
        return False
    if isinstance(args[2], torch.Tensor):
        if not is_plain(args[2], torch.float32) or args[2].shape != cells.shape:
            return False
    elif scalar_of(args[2]) is None:
        return False
    return put_cells(state.memory, cells, args[2])


def _scatter_add(state: State, args: tuple[Any, ...]) -> bool:
    if len(args) != 3 or not is_plain(args[2], torch.float32):
        return False
    return _add_at(state, _scattered(state, args[0], args[1]), args[2])


def _add_at(state: State, cells: Cells | None, source: torch.Tensor) -> bool:
    if cells is None or not cells.is_unique or tuple(source.shape) != cells.shape:
        return False
    return calculate_cells(state.memory, cells, "+", source)


def _scattered(state: State, dim: Any, index: Any) -> Cells | None:
    """Return the elements that `scatter_` writes along the last dimension."""
    if not isinstance(state, LogitsView) or not state.memory.is_pending or not is_plain(index, torch.int64):
        return None
    dims = len(state.shape)
    if type(dim) is not int or dim not in (-1, dims - 1) or index.ndim != dims:
        return None
    if dims == 2 and len(index) != len(state.rows):
        return None
    return cells_in_rows(state.rows, state.memory.source.vocab_size, index)


def _index_put(state: State, args: tuple[Any, ...]) -> bool:
    if len(args) != 2 or type(args[0]) not in (tuple, list) or not all(type(each) is torch.Tensor for each in args[0]):
        return False
    # Unlike in an assignment, the values must not have more dimensions than their places.
    return isinstance(args[1], torch.Tensor) and args[1].ndim < 2 and state.put(tuple(args[0]), args[1])


def _gather(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs:
        args = _positional(args, kwargs, ("dim", "index"))
    if len(args) != 3 or type(args[0]) is not PromisedLogits:
        return NotImplemented
    cells = _scattered(args[0].promised_state, args[1], args[2])
    return wrap(Values.saved(args[0].promised_state.memory, cells)) if cells is not None else NotImplemented


def _index_select(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs:
        args = _positional(args, kwargs, ("dim", "index"))
    if len(args) != 3 or type(args[0]) is not PromisedLogits:
        return NotImplemented
    state = args[0].promised_state
    cells = _cells_along(state, args[1], args[2])
    return wrap(Values.saved(state.memory, cells)) if cells is not None else NotImplemented


def _where(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs or len(args) != 3:
        return NotImplemented
    mask, if_set, otherwise = args
    if not is_plain(mask, torch.bool):
        return NotImplemented
    promised, value = (otherwise, if_set) if type(otherwise) is PromisedLogits else (if_set, otherwise)
    if type(promised) is not PromisedLogits or type(value) is PromisedLogits:
        return NotImplemented
    copy = promised.promised_state.copy()
    number = None if copy is None else constant_of(value, copy.shape)
    if copy is None or number is None or not copy.fill_mask(mask if promised is otherwise else ~mask, number):
        return NotImplemented
    return wrap(copy)


def _tensor_where(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _where((args[1], args[0], args[2]), kwargs) if len(args) == 3 else NotImplemented


def _clone(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if len(args) != 1 or kwargs or type(args[0]) is not PromisedLogits:
        return NotImplemented
    copy = args[0].promised_state.copy()
    return NotImplemented if copy is None else wrap(copy)


def _same(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record an operation that returns its argument."""
    return args[0] if len(args) == 1 and not kwargs else NotImplemented


def _contiguous(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _same(args, kwargs) if args and has_known_layout(args[0]) else NotImplemented


def _converted(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record a conversion that changes nothing."""
    if len(args) == 2 and not kwargs and type(args[1]) is PromisedLogits and type(args[0]) is torch.Tensor:
        return args[0].to(torch.device("cpu"), torch.float32)
    wanted = (*args[1:], *kwargs.values())
    if (
        type(args[0]) is not PromisedLogits
        or len(wanted) not in (1, 2)
        or not kwargs.keys() <= {"dtype", "device"}
        or not all(map(_is_own, wanted))
    ):
        return NotImplemented
    return args[0]


def _is_own(wanted: Any) -> bool:
    """Return whether this is the dtype or the device of the logits."""
    if type(wanted) is str:
        return wanted == "cpu"
    return wanted is torch.float32 or (type(wanted) is torch.device and wanted == torch.device("cpu"))


def _alias(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record an operation that returns a view of everything."""
    if len(args) != 1 or kwargs or type(args[0]) is not PromisedLogits:
        return NotImplemented
    state = args[0].promised_state.alias()
    return NotImplemented if state is None else wrap(state)


def _reshape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Record a reshape to the same shape."""
    tensor, *shape = args
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    if kwargs or not isinstance(shape, Sequence) or any(type(size) is not int for size in shape):
        return NotImplemented
    wanted = list(tensor.promised_state.shape)
    if len(shape) != len(wanted) or any(size not in (-1, real) for size, real in zip(shape, wanted, strict=True)):
        return NotImplemented
    # Without elements, -1 raises where it may be any size.
    most_inferred = int(0 not in wanted)
    return _alias((tensor,), {}) if list(shape).count(-1) <= most_inferred else NotImplemented


def _unbind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs:
        args = _positional(args, kwargs, ("dim",))
    if len(args) not in (1, 2) or (len(args) == 2 and (type(args[1]) is not int or args[1] != 0)):
        return NotImplemented
    state = args[0].promised_state
    states = state.split() if state.memory.is_pending else None
    return NotImplemented if states is None else tuple(map(wrap, states))


def _get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor, index = args
    state = tensor.promised_state.get(index) if type(tensor) is PromisedLogits else None
    return NotImplemented if state is None else wrap(state)


def _select(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs or len(args) != 3 or args[1] != 0 or type(args[2]) is not int:
        return NotImplemented
    state = args[0].promised_state.get(args[2])
    return NotImplemented if state is None else wrap(state)


_ELEMENT = torch.empty(())
"""Has the dtype and the device of logits."""


def _shaped_like(function: Callable[..., Any]) -> RecordOperation:
    """Return the recorder of a function that only uses the shape and the dtype of its first argument."""

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not args or not has_known_layout(args[0]):
            return NotImplemented
        # It has no more memory, and what is made like an overlapping tensor is contiguous. Not kept for later calls:
        # in a transform such as `torch.func.grad`, it belongs to that.
        return function(_ELEMENT.expand(args[0].promised_state.shape), *args[1:], **kwargs)

    return record


def _of_same_type(function: Callable[..., Any]) -> RecordOperation:
    """Return the recorder of a function that only uses the dtype and the device of its first argument."""

    def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return function(_ELEMENT, *args[1:], **kwargs) if args and has_known_layout(args[0]) else NotImplemented

    return record


_T = torch.Tensor

_RECORDED: dict[Callable[..., Any], RecordOperation] = {
    **dict.fromkeys((_T.__iadd__, _T.add_), _calculate_in_place("+")),
    **dict.fromkeys((_T.__isub__, _T.sub_, _T.subtract_), _calculate_in_place("-")),
    **dict.fromkeys((_T.__imul__, _T.mul_, _T.multiply_), _calculate_in_place("*")),
    **dict.fromkeys((_T.__itruediv__, _T.div_, _T.divide_, _T.true_divide_), _calculate_in_place("/")),
    **dict.fromkeys((_T.__add__, _T.__radd__, _T.add, torch.add), _binary("+", "+")),
    **dict.fromkeys((_T.__sub__, _T.sub, torch.sub, _T.subtract, torch.subtract), _binary("-", "r-")),
    **dict.fromkeys((_T.__rsub__, torch.rsub), _out_of_place(_calculate("r-"))),
    **dict.fromkeys((_T.__mul__, _T.__rmul__, _T.mul, torch.mul, _T.multiply, torch.multiply), _binary("*", "*")),
    **dict.fromkeys(
        (_T.__truediv__, _T.div, torch.div, _T.divide, torch.divide, _T.true_divide, torch.true_divide),
        _binary("/", None),
    ),
    _T.fill_: _in_place(_fill, "value"),
    _T.zero_: _in_place(_zero),
    _T.copy_: _in_place(_copy, "src"),
    _T.masked_fill_: _in_place(_masked_fill, "mask", "value"),
    **dict.fromkeys((_T.masked_fill, torch.masked_fill), _out_of_place(_masked_fill, "mask", "value")),
    _T.index_fill_: _in_place(_index_fill, "dim", "index", "value"),
    **dict.fromkeys((_T.index_fill, torch.index_fill), _out_of_place(_index_fill, "dim", "index", "value")),
    _T.index_copy_: _in_place(_index_copy, "dim", "index", "source"),
    **dict.fromkeys((_T.index_copy, torch.index_copy), _out_of_place(_index_copy, "dim", "index", "source")),
    _T.index_add_: _in_place(_index_add, "dim", "index", "source"),
    **dict.fromkeys((_T.index_add, torch.index_add), _out_of_place(_index_add, "dim", "index", "source")),
    _T.scatter_: _in_place(_scatter, "dim", "index", "src"),
    **dict.fromkeys((_T.scatter, torch.scatter), _out_of_place(_scatter, "dim", "index", "src")),
    _T.scatter_add_: _in_place(_scatter_add, "dim", "index", "src"),
    **dict.fromkeys((_T.scatter_add, torch.scatter_add), _out_of_place(_scatter_add, "dim", "index", "src")),
    _T.index_put_: _in_place(_index_put),
    **dict.fromkeys((_T.index_put, torch.index_put), _out_of_place(_index_put)),
    **dict.fromkeys((_T.gather, torch.gather), _gather),
    **dict.fromkeys((_T.index_select, torch.index_select), _index_select),
    torch.where: _where,
    _T.where: _tensor_where,
    **dict.fromkeys((_T.clone, torch.clone), _clone),
    **dict.fromkeys((_T.detach, torch.detach, _T.data.__get__), _alias),  # type: ignore[attr-defined]
    _T.contiguous: _contiguous,
    **dict.fromkeys((_T.float, _T.cpu), _same),
    **dict.fromkeys((_T.to, _T.type_as), _converted),
    _T.view: _reshape,
    _T.reshape: _reshape,
    **dict.fromkeys((_T.unbind, torch.unbind), _unbind),
    **dict.fromkeys((_T.select, torch.select), _select),
    _T.__getitem__: _get,
    torch.zeros_like: _shaped_like(torch.zeros_like),
    torch.ones_like: _shaped_like(torch.ones_like),
    torch.empty_like: _shaped_like(torch.empty_like),
    torch.full_like: _shaped_like(torch.full_like),
    torch.rand_like: _shaped_like(torch.rand_like),
    torch.randn_like: _shaped_like(torch.randn_like),
    _T.new_zeros: _of_same_type(_T.new_zeros),
    _T.new_ones: _of_same_type(_T.new_ones),
    _T.new_empty: _of_same_type(_T.new_empty),
    _T.new_full: _of_same_type(_T.new_full),
    _T.new_tensor: _of_same_type(_T.new_tensor),
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
