"""Guarded calls of an author's code on logits: its errors become `ProcessorFault`s.

This catches careless code, not malicious code, which controls the whole process.
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
from logitship.client.author_hints import sandbox_hint
from logitship.client.errors import ProcessorFault
from logitship.client.serialization.loading import explain_name_error

T = TypeVar("T")

_NO_MODULE = (
    "the server does not have this package: copy what you need of it into your own module, which is serialized with "
    "the class"
)


class BadResult(TypeError):
    """A processor returned an invalid result; the message describes it."""


def edit(
    function: Callable[..., object],
    logits: torch.Tensor,
    *arguments: object,
    name: str,
    digest: str = "",
    shipped_class: type | None = None,
    in_sandbox: bool = False,
) -> None:
    """Call an author's function on logits, and write its result into them.

    Args:
        function: takes the logits; may edit them in place, and must return them or a new tensor.
        logits: logits of any shape; edited in place.
        *arguments: further arguments of the function.
        name: name of the processor, for people.
        digest: digest of the processor, if it has one.
        shipped_class: the class, if it came with a request. Used to explain names that were not serialized with it.
        in_sandbox: whether this process is a sandbox. Used to explain what it refuses.

    Raises:
        ProcessorFault: the function raised, or did not return a float tensor of that shape on that device.
    """
    # Another tensor on the same memory: changes of its shape, dtype or gradient do not affect `logits`.
    given = logits.detach()
    try:
        result = call(function, given, *arguments)
        # Inside: the result may be a subclass of Tensor, whose methods are the author's code.
        if result is not given or given.dtype is not logits.dtype or not given.is_set_to(logits):
            take_over(result, logits)
    # No exception, not even `SystemExit`, must end the engine's thread.
    except BaseException as error:  # noqa: BLE001  # boundary: author code
        fault = exception_fault(error, name=name, digest=digest, shipped_class=shipped_class, in_sandbox=in_sandbox)
    else:
        return
    # Outside the except block, so that the fault does not reference the author's exception and the tensors in its
    # frames.
    raise fault


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Run an author's code, then restore PyTorch's global settings that it may have changed by accident."""
    grad, dtype, modes = is_grad_enabled(), get_default_dtype(), _len_torch_function_stack()
    try:
        return function(*arguments)
    finally:
        if is_grad_enabled() is not grad:
            torch.set_grad_enabled(grad)
        if get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        # The default device is such a mode. Counting the modes is far cheaper than reading it.
        if _len_torch_function_stack() != modes:
            torch.set_default_device(None)


def duplicate(value: T, shared: Iterable[object], *, name: str, digest: str = "") -> T:
    """Deep-copy a processor's state of a sequence, for another sequence that continues from the same history.

    Args:
        value: the state.
        shared: objects that are not copied, wherever they occur in `value`.
        name: name of the processor, for people.
        digest: digest of the processor, if it has one.

    Raises:
        ProcessorFault: part of the state cannot be copied.
    """
    try:
        # deepcopy() uses the memo's entry for an object's id as its copy.
        copied: T = call(copy.deepcopy, value, {id(each): each for each in shared})
    # A `__deepcopy__` is the author's code too.
    except BaseException as error:  # noqa: BLE001  # boundary: author code
        fault = ProcessorFault(
            f"processor {name} keeps state of a sequence that cannot be copied, which beam search requires: "
            f"{error_text(error)}. Keep plain values in __req__.state, or define __deepcopy__",
            digest=digest,
            name=name,
            kind="uncopyable",
            traceback=author_traceback(error),
        )
    else:
        return copied
    raise fault


def checked(result: object, logits: torch.Tensor) -> torch.Tensor:
    """Convert a processor's result, a dense float tensor of the shape and device of `logits`, to their dtype.

    Raises:
        BadResult: the result is anything else.
    """
    if result is None:
        raise BadResult("NoneType, not a tensor (a processor that edits in place must return the logits too)")
    if type(result) is CoroutineType:
        result.close()  # otherwise Python warns that it was never awaited
        raise BadResult("a coroutine, not a tensor: __call__ must not be async")
    # Not isinstance(), which trusts the object's `__class__`.
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


def take_over(result: object, logits: torch.Tensor) -> None:
    """Write a processor's result into `logits`.

    Raises:
        BadResult: the result is not a float tensor of that shape on that device.
    """
    plain = checked(result, logits)
    if plain.is_set_to(logits):
        return
    # A result that shares memory with `logits` may overlap its destination.
    shared = plain.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    logits.copy_(plain.clone() if shared else plain)


def exception_fault(
    error: BaseException,
    *,
    name: str,
    digest: str = "",
    shipped_class: type | None = None,
    in_sandbox: bool = False,
) -> ProcessorFault:
    """Return the fault of a processor that raised, or whose result is invalid, see `edit`.

    It has only text and references no author's object.
    """
    if issubclass(type(error), BadResult):  # isinstance() trusts the object's `__class__`
        return ProcessorFault(f"processor {name} returned {error}", digest=digest, name=name, kind="bad_result")
    message = f"processor {name} raised {error_text(error)}"
    hint = _hint(error, shipped_class, in_sandbox=in_sandbox)
    return ProcessorFault(
        f"{message} ({hint})" if hint else message,
        digest=digest,
        name=name,
        kind="exception",
        traceback=author_traceback(error, with_causes=not hint),
    )


def non_finite_fault(row: torch.Tensor, *, name: str, digest: str = "", before: Sequence[str] = ()) -> ProcessorFault:
    """Return the fault of a processor that left a row with NaN, with +inf, or with -inf only.

    Args:
        row: logits [vocab].
        name: name of the processor, for people.
        digest: digest of the processor, if it has one.
        before: names of fields and processors that may have forbidden tokens before it.
    """
    if row.isnan().any():
        found = "returned NaN"
    elif row.isposinf().any():
        found = "returned +inf (to force a token, forbid all others)"
    else:
        left = f" of those that {', '.join(before)} had left" if before else ""
        found = f"left no token{left}: every logit of the row is -inf"
    return ProcessorFault(f"processor {name} {found}", digest=digest, name=name, kind="non_finite")


def _hint(error: BaseException, shipped_class: type | None, *, in_sandbox: bool) -> str | None:
    """Return advice for the author; None if there is none."""
    try:
        if type(error) is NameError and shipped_class is not None:
            return explain_name_error(error, shipped_class)
        if type(error) is ModuleNotFoundError and shipped_class is not None:
            return _NO_MODULE
        return sandbox_hint(error) if in_sandbox else None
    # Reading attributes of the exception and the class may run the author's code.
    except BaseException:  # noqa: BLE001  # boundary: author code
        return None
