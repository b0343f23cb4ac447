"""Runs shipped processors in this process: no isolation at all.

What is caught here is what a careless author does. Code that means harm has the whole process in its hands.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType
from typing import Any, TypeVar

import torch

from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.loading import explain_name_error, instantiate, load_class
from logitship.client.processor_string import PickledProcessor, ProcessorString, SourceProcessor

from .processor_host import LoadedProcessor

T = TypeVar("T")

_LONGEST_TEXT = 4096
"""Characters of an exception's message, or of its traceback, that are kept."""


class InProcessHost:
    """Loads and calls processors right here. Only for code that the operator would run anyway.

    Args:
        names: what shipped classes may refer to by name, `(module, qualified name)` to object: SGLang's built-ins.
    """

    def __init__(self, names: Mapping[tuple[str, str], Any]) -> None:
        self._names = names

    def load(self, string: ProcessorString) -> LoadedProcessor:
        """See `ProcessorHost.load`."""
        if not isinstance(string, PickledProcessor | SourceProcessor):
            raise ProcessorLoadError(f"{type(string).__name__} ships no code")
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        try:
            cls = _call(load_class, runnable, self._names)
            instance = _call(instantiate, cls)
        except ProcessorLoadError as error:
            raise ProcessorLoadError(_message(error)) from None
        # `load_class` lets KeyboardInterrupt and its like pass. Raised by the author's code, they must not end us.
        except BaseException as error:  # noqa: BLE001
            raise ProcessorLoadError(f"the processor could not be loaded: {_error_text(error)}") from None
        return LoadedProcessor(runnable.digest, _class_name(cls), _size(runnable), self, instance)

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """See `ProcessorHost.run`."""
        # Another tensor on the same memory: whatever becomes of its shape, type or gradient, `logits` stays as it is.
        given = logits.detach()
        try:
            result = _call(processor.instance, given, list(param_list))
            # In here too: what it returned may be a subclass of Tensor, whose methods are the author's code.
            _take_over(result, logits)
        except _BadResult as bad:
            message = f"processor {processor.name} returned {bad}"
            fault = ProcessorFault(message, digest=processor.digest, name=processor.name, kind="bad_result")
        # Whatever it raises, `SystemExit` included, must not end the engine's thread.
        except BaseException as error:  # noqa: BLE001
            fault = _exception_fault(processor, error)
        else:
            return logits
        # Out here, so that the fault does not keep the author's exception, and with it the tensors in its frames.
        raise fault


def _call(function: Callable[..., T], *arguments: Any) -> T:
    """Run an author's code, and undo what it may have set for all that runs after it without meaning to."""
    grad, dtype, modes = torch.is_grad_enabled(), torch.get_default_dtype(), torch._C._len_torch_function_stack()
    try:
        return function(*arguments)
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        # The default device is such a mode. Counting them is far cheaper than asking for it.
        if torch._C._len_torch_function_stack() != modes:
            torch.set_default_device(None)


def _size(string: PickledProcessor | SourceProcessor) -> int:
    if isinstance(string, PickledProcessor):
        return len(string.payload)
    return len(string.source.encode()) + len(string.captured)


def _exception_fault(processor: LoadedProcessor, error: BaseException) -> ProcessorFault:
    message = f"processor {processor.name} raised {_error_text(error)}"
    hint = _hint(processor, error)
    return ProcessorFault(
        f"{message} ({hint})" if hint else message,
        digest=processor.digest,
        name=processor.name,
        kind="exception",
        traceback=_authors_traceback(error),
    )


def _class_name(cls: type) -> str:
    """The name that the class was made with. `cls.__name__` asks its metaclass, which may be the author's code."""
    name: str = type.__dict__["__name__"].__get__(cls)
    return name


def _error_text(error: BaseException) -> str:
    """The exception's type and message."""
    name, message = _class_name(type(error)), _message(error)
    return f"{name}: {message}" if message else name


def _message(error: BaseException) -> str:
    """The exception's message. It is the author's code, which may fail or be endless."""
    try:
        text = _as_utf8(str(error))
    except BaseException as second:  # noqa: BLE001
        return f"(its message cannot be shown: str() raised {_class_name(type(second))})"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}… ({len(text)} characters)"


def _hint(processor: LoadedProcessor, error: BaseException) -> str | None:
    """What more there is to tell the author."""
    if type(error) is not NameError:
        return None
    try:
        return explain_name_error(error, type(processor.instance))
    # It reads attributes of the exception and of the class.
    except BaseException:  # noqa: BLE001
        return None


def _authors_traceback(error: BaseException) -> str:
    """The traceback without the frames of this module: the author's own code, and what that called."""
    try:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        text = _as_utf8("".join(traceback.format_exception(type(error), error, frames, limit=-20)))
    # It reads attributes of the exception, which are the author's code too.
    except BaseException as second:  # noqa: BLE001
        return f"(the traceback cannot be shown: {_class_name(type(second))})"
    return text if len(text) <= _LONGEST_TEXT else f"…{text[-_LONGEST_TEXT:]}"  # its end says most


def _as_utf8(text: str) -> str:
    """The text with lone surrogates written as escapes: no answer could carry them. A subclass of str becomes one."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


class _BadResult(Exception):
    """What a processor returned is not what it must return; the message says what it is."""


def _take_over(result: object, logits: torch.Tensor) -> None:
    """Write what a processor returned into `logits`; it must be a dense float tensor of their shape and device.

    Raises:
        _BadResult: it is not.
    """
    if result is None:
        raise _BadResult("NoneType, not a tensor (a processor that edits in place must return the logits too)")
    if type(result) is CoroutineType:
        result.close()  # else Python warns that nobody awaited it
        raise _BadResult("a coroutine, not a tensor: __call__ must not be async")
    # Not isinstance(), which believes what an object says of its class.
    if not issubclass(type(result), torch.Tensor):
        raise _BadResult(f"{_class_name(type(result))}, not a tensor")
    with torch._C.DisableTorchFunctionSubclass():
        plain = result if type(result) is torch.Tensor else torch.Tensor.as_subclass(result, torch.Tensor)  # type: ignore[arg-type]
    if plain.layout is not torch.strided:
        raise _BadResult(f"a tensor of layout {plain.layout}, expected a dense one")
    if plain.shape != logits.shape:
        raise _BadResult(f"shape {list(plain.shape)}, expected {list(logits.shape)}")
    if plain.device != logits.device:
        raise _BadResult(f"a tensor on {plain.device}, expected {logits.device}")
    if not plain.is_floating_point():
        raise _BadResult(f"dtype {plain.dtype}, expected a floating-point type")
    plain = plain.detach()
    if plain.dtype is logits.dtype and plain.is_set_to(logits):
        return
    # What shares memory with `logits` may overlap the place that it is written to.
    shared = plain.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    logits.copy_(plain.clone() if shared else plain)
