"""Runs an author's code on logits: whatever it does wrong becomes a `ProcessorFault`.

What is caught here is what a careless author does. Code that means harm has the whole process in its hands.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from types import CoroutineType
from typing import Any, TypeVar

import torch
from torch import get_default_dtype, is_grad_enabled
from torch._C import _len_torch_function_stack

from logitship.client.author_errors import author_traceback, class_name, error_text
from logitship.client.errors import ProcessorFault
from logitship.client.serialization.loading import explain_name_error

T = TypeVar("T")


class BadResult(TypeError):
    """What a processor returned is not what it must return; the message says what it is."""


def edit(
    function: Callable[..., object],
    logits: torch.Tensor,
    *arguments: object,
    name: str,
    digest: str = "",
    shipped_class: type | None = None,
) -> None:
    """Call an author's function on logits, and write what it returns into them.

    Args:
        function: gets the logits; may edit them in place, and must return them or a new tensor.
        logits: of any shape.
        arguments: what else the function gets.
        name: of the processor, for people.
        digest: its identity, if it has one.
        shipped_class: the class, if it came with a request: explains names that did not travel with it.

    Raises:
        ProcessorFault: it raised, or returned something other than a float tensor of that shape on that device.
    """
    # Another tensor on the same memory: whatever becomes of its shape, type or gradient, `logits` stays as it is.
    given = logits.detach()
    try:
        result = call(function, given, *arguments)
        # In here too: what it returned may be a subclass of Tensor, whose methods are the author's code.
        if result is not given or given.dtype is not logits.dtype or not given.is_set_to(logits):
            _take_over(result, logits)
    except BadResult as bad:
        fault = ProcessorFault(f"processor {name} returned {bad}", digest=digest, name=name, kind="bad_result")
    # Whatever it raises, `SystemExit` included, must not end the engine's thread.
    except BaseException as error:  # noqa: BLE001
        fault = exception_fault(error, name=name, digest=digest, shipped_class=shipped_class)
    else:
        return
    # Out here, so that the fault does not keep the author's exception, and with it the tensors in its frames.
    raise fault


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Run an author's code, and undo what it may have set for all that runs after it without meaning to."""
    grad, dtype, modes = is_grad_enabled(), get_default_dtype(), _len_torch_function_stack()
    try:
        return function(*arguments)
    finally:
        if is_grad_enabled() is not grad:
            torch.set_grad_enabled(grad)
        if get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        # The default device is such a mode. Counting them is far cheaper than asking for it.
        if _len_torch_function_stack() != modes:
            torch.set_default_device(None)


def duplicate(value: T, shared: Iterable[object], *, name: str, digest: str = "") -> T:
    """Copy what a processor keeps of a sequence, for another sequence that goes on from the same history.

    A deep copy: objects that stand in several places of `value` do so in the copy.

    Args:
        shared: objects that are not copied, wherever they stand.
        name: of the processor, for people.
        digest: its identity, if it has one.

    Raises:
        ProcessorFault: something in it cannot be copied.
    """
    try:
        # deepcopy() takes what its memo holds under an object's id to be the copy of it.
        copied: T = call(copy.deepcopy, value, {id(each): each for each in shared})
    # A `__deepcopy__` is the author's code too.
    except BaseException as error:  # noqa: BLE001
        fault = ProcessorFault(
            f"processor {name} keeps something of a sequence that cannot be copied, as beam search needs it: "
            f"{error_text(error)}. Keep plain values in __req__.state, or give it a __deepcopy__",
            digest=digest,
            name=name,
            kind="uncopyable",
            traceback=author_traceback(error),
        )
    else:
        return copied
    raise fault


def checked(result: object, logits: torch.Tensor) -> torch.Tensor:
    """What a processor returned for `logits`: a dense float tensor of their shape and device, in their dtype.

    Raises:
        BadResult: it is something else.
    """
    if result is None:
        raise BadResult("NoneType, not a tensor (a processor that edits in place must return the logits too)")
    if type(result) is CoroutineType:
        result.close()  # else Python warns that nobody awaited it
        raise BadResult("a coroutine, not a tensor: __call__ must not be async")
    # Not isinstance(), which believes what an object says of its class.
    if not issubclass(type(result), torch.Tensor):
        raise BadResult(f"{class_name(type(result))}, not a tensor")
    with torch._C.DisableTorchFunctionSubclass():
        plain = result if type(result) is torch.Tensor else torch.Tensor.as_subclass(result, torch.Tensor)  # type: ignore[arg-type]
    if plain.layout is not torch.strided:
        raise BadResult(f"a tensor of layout {plain.layout}, expected a dense one")
    if plain.shape != logits.shape:
        raise BadResult(f"shape {list(plain.shape)}, expected {list(logits.shape)}")
    if plain.device != logits.device:
        raise BadResult(f"a tensor on {plain.device}, expected {logits.device}")
    if not plain.is_floating_point():
        raise BadResult(f"dtype {plain.dtype}, expected a floating-point type")
    return plain.detach().to(logits.dtype)


def _take_over(result: object, logits: torch.Tensor) -> None:
    """Write what a processor returned into `logits`."""
    plain = checked(result, logits)
    if plain.is_set_to(logits):
        return
    # What shares memory with `logits` may overlap the place that it is written to.
    shared = plain.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    logits.copy_(plain.clone() if shared else plain)


def exception_fault(
    error: BaseException, *, name: str, digest: str = "", shipped_class: type | None = None
) -> ProcessorFault:
    """The fault of a processor that raised, see `edit`. Holds text only, and nothing of the author's alive."""
    message = f"processor {name} raised {error_text(error)}"
    hint = _hint(error, shipped_class)
    return ProcessorFault(
        f"{message} ({hint})" if hint else message,
        digest=digest,
        name=name,
        kind="exception",
        traceback=author_traceback(error),
    )


def non_finite_fault(row: torch.Tensor, *, name: str, digest: str = "", before: Sequence[str] = ()) -> ProcessorFault:
    """The fault of a processor that left a row [vocab] with NaN, with +inf, or with -inf alone.

    Args:
        before: names of what may have forbidden tokens before it.
    """
    if row.isnan().any():
        found = "returned NaN"
    elif row.isposinf().any():
        found = "returned +inf (to force a token, forbid all others)"
    else:
        left = f" of those that {', '.join(before)} had left" if before else ""
        found = f"left no token{left}: every logit of the row is -inf"
    return ProcessorFault(f"processor {name} {found}", digest=digest, name=name, kind="non_finite")


def _hint(error: BaseException, shipped_class: type | None) -> str | None:
    """What more there is to tell the author."""
    if type(error) is not NameError or shipped_class is None:
        return None
    try:
        return explain_name_error(error, shipped_class)
    # It reads attributes of the exception and of the class.
    except BaseException:  # noqa: BLE001
        return None
